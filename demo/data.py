"""Conversations to train and test the demo model, made up from skills, system prompts and lengths.

python -m demo.data --samples 20        # read some
python -m demo.data --speed             # how fast one process makes them
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo import grammar, markup, quire_facts, skills, stories, tools, unknown, world
from demo.chat import Chat, Persona, Turn
from demo.grammar import article, chance, made_up_word, pick, render
from demo.knowledge import draw_question
from demo.skills import SKILLS
from demo.sums import number
from demo.tables import load

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "demo"
LENGTHS = (128, 256, 512, 1024, 2048)  # rows of a batch have one of these lengths
LENGTH_WEIGHTS = (0.36, 0.27, 0.12, 0.03, 0.012)  # by number of conversations
TARGET = 0x8000  # the bit of a stored token that says: this one is to be predicted

PROMPTS = load("prompts")


def make_persona(chat: Chat) -> Persona:
    """A system prompt, or none, and what follows from it. May tell the model the user's name."""
    rng = chat.rng
    if chance(rng, 0.09):
        names = tools.draw_tools(rng)
        system = pick(rng, PROMPTS["general"]) if chance(rng, 0.2) else ""
        return Persona(system, tools=names, tool_prompt=tools.tool_prompt(rng, names))
    draw = rng.random()
    if draw < 0.55:
        return Persona()
    if draw < 0.75:
        return Persona(pick(rng, PROMPTS["general"]))
    general = pick(rng, ("", "", "You are a helpful assistant. "))
    if draw < 0.88:
        return styled(chat, general)
    if draw < 0.93:
        name = chat.name()
        return Persona(from_prompt(rng, "name", name), name=name)
    if draw < 0.97:
        name = chat.name()
        chat.known |= {"name": name, "name fact": f"your name is {name}"}
        return Persona(general + from_prompt(rng, "user", name))
    if chance(rng, 0.85):
        role = article(pick(rng, [*world.JOBS, *world.ROLES]))
    else:
        role = article(f"{pick(rng, world.ADJECTIVES)} {pick(rng, stories.ANIMAL_HEROES)}")
    return Persona(from_prompt(rng, "role", role), role=role)


def from_prompt(rng: random.Random, kind: str, value: str) -> str:
    return render(rng, PROMPTS["personas"][kind], {"x": value})


def styled(chat: Chat, general: str) -> Persona:
    """A persona with a style of speaking; `general` begins its system prompt."""
    rng = chat.rng
    style = pick(rng, ("brief", "brief", "brief", *PROMPTS["styles"], "pirate", "ending", "title"))
    if style not in ("ending", "title"):
        return Persona(general + render(rng, PROMPTS["styles"][style], {}), style)
    if style == "ending":
        phrase = pick(rng, PROMPTS["endings"])
    elif chance(rng, 0.8):
        phrase = pick(rng, PROMPTS["titles"])
    else:
        phrase = f"{pick(rng, ('King', 'Queen', 'Captain', 'Doctor', 'Sir'))} {chat.name()}"
    return Persona(general + from_prompt(rng, style, phrase), style, phrase=phrase)


ALL_SKILLS = SKILLS | {
    markup.show_table: (2.0, 2.5),
    markup.show_code: (2.5, 3.0),
    markup.ask_own: (1.5, 0.0),
    markup.tell_and_ask: (1.5, 2.0),
    markup.suggestion: (0.5, 1.5),
}
DRAWN = list(ALL_SKILLS)


class Weights:
    """Cumulative weights of the skills, later in a chat and as its first; `more`: skill → factor."""

    def __init__(self, more: Mapping[str, float] | None = None) -> None:
        more = more or {}
        factors = [more.get(skill.__name__, 1.0) for skill in ALL_SKILLS]
        self.later, self.first = (
            list(accumulate(weight * factor for weight, factor in zip(weights, factors, strict=True)))
            for weights in zip(*ALL_SKILLS.values(), strict=True)
        )


USUAL = Weights()
# Skills beside tools. None does the work of a tool.
BESIDE_TOOLS = (
    skills.greeting,
    skills.thanks,
    skills.about_me,
    skills.quire_topic,
    skills.quire_question,
    skills.knowledge,
    skills.tell_joke,
    skills.fun_fact,
    skills.tell_memory,
    skills.make_list,
    skills.write_poem,
    skills.tell_story,
    skills.reaction,
    skills.do_not_know,
    markup.show_table,
    markup.show_code,
)
NEEDS_TOOL = (
    "clock",
    "calendar",
    "weather",
    "sums with small numbers",
    "small numbers",
)  # in answers that a tool makes wrong


def make_chat(rng: random.Random, *, length: int, evaluating: bool = False, weights: Weights = USUAL) -> Chat:
    """A conversation of about `length` tokens; it may come out longer, never empty."""
    chat = Chat(rng, evaluating)
    chat.persona = make_persona(chat)
    room = 3.0 * length  # in characters
    used = len(chat.persona.system)
    if (chat.persona.name or chat.persona.role) and chance(rng, 0.6):
        skills.ask_about_name(chat)
    wanted = 1 + int(rng.random() * 3) if length == LENGTHS[0] else 10_000
    counted = 0
    if chat.persona.tools:
        return with_tools(chat, wanted, room)
    if not chat.turns:
        rng.choices(DRAWN, cum_weights=weights.first)[0](chat)
    while True:
        used += sum(len(turn.user) + len(turn.answer) + 30 for turn in chat.turns[counted:])
        counted = len(chat.turns)
        if counted and (used > room or counted >= wanted):
            return chat
        if skills.offer_of(chat) and chance(rng, 0.3):
            skills.accept_offer(chat)
        elif chat.known and chance(rng, 0.25):
            pick(rng, (skills.ask_memory, skills.ask_memory, skills.ask_memory, markup.ask_own))(chat)
        else:
            rng.choices(DRAWN, cum_weights=weights.later)[0](chat)


def with_tools(chat: Chat, wanted: int, room: float) -> Chat:
    """Calls, and talk that needs none."""
    rng = chat.rng
    while len(chat.turns) < wanted and (
        not chat.turns or sum(len(turn.user) + len(turn.answer) + 30 for turn in chat.turns) < room
    ):
        begin = len(chat.turns)
        (tools.use_tool if chance(rng, 0.55) else pick(rng, BESIDE_TOOLS))(chat)
        if any(
            word in turn.answer
            for turn in chat.turns[begin:]
            if not turn.skill.startswith("tool")
            for word in NEEDS_TOOL
        ):
            del chat.turns[begin:]
    return chat


def make_plain_text(rng: random.Random) -> str:
    """Text that is no chat, for those who ask for a plain completion."""
    draw = rng.random()
    if draw < 0.55:
        return stories.story(rng, stories.Hero.invent(rng))
    if draw < 0.65:
        return stories.poem(rng, skills.poem_topic(rng))
    if draw < 0.8:
        turns = []
        for _ in range(3):
            question = draw_question(rng)
            text = grammar.sentence_case(render(rng, question.template, question.slots)).rstrip("?. ")
            turns.append(f"Question: {text}?\nAnswer: {question.answer(rng)}")
        return "\n".join(turns)
    if draw < 0.9:
        lines = []
        for _ in range(6):
            a, b = number(rng), number(rng)
            if chance(rng, 0.5):
                lines.append(f"{a} + {b} = {a + b}")
            else:
                lines.append(f"{max(a, b)} - {min(a, b)} = {abs(a - b)}")
        return "\n".join(lines)
    topics = []
    for _ in range(4):
        rng.random()  # an earlier version drew once more here; conversations of a seed stay the same
        topics.append(pick(rng, quire_facts.TOPICS).what[0])
    return " ".join(topics)


class Encoder:
    """Conversations to token ids with the target bit; the same ids as the chat template's text gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}
        self.heads = {role: self.ids(f"<|im_start|>{role}\n") for role in ("system", "user", "assistant")}
        self.end = self.ids("<|im_end|>")[0]
        self.newline = self.ids("\n")
        self.end_of_text = self.ids("<|endoftext|>")[0]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, chats: list[Chat]) -> list[list[list[int]]]:
        """Per chat: the ids of its system prompt (may be none) and of each turn."""
        texts = [
            text
            for chat in chats
            for text in (
                chat.persona.tool_prompt,
                chat.persona.system,
                *(part for turn in chat.turns for part in (turn.user, turn.answer)),
            )
        ]
        # Many messages come again and again.
        missing = [text for text in dict.fromkeys(texts) if text not in self.known]
        if len(self.known) > 200_000:
            self.known, missing = {}, list(dict.fromkeys(texts))
        encodings = self.tokenizer.encode_batch_fast(missing, add_special_tokens=False)
        self.known |= {text: encoding.ids for text, encoding in zip(missing, encodings, strict=True)}
        encoded = (self.known[text] for text in texts)
        result = []
        for chat in chats:
            systems = (next(encoded), next(encoded))
            pieces = [
                [
                    token
                    for system in systems
                    if system
                    for token in (*self.heads["system"], *system, self.end, *self.newline)
                ]
            ]
            for _ in chat.turns:
                user, answer = next(encoded), next(encoded)
                pieces.append(
                    [
                        *self.heads["user"],
                        *user,
                        self.end,
                        *self.newline,
                        *self.heads["assistant"],
                        *(token | TARGET for token in answer),
                        self.end | TARGET,
                        *self.newline,
                    ]
                )
            result.append(pieces)
        return result

    def prompt(self, chat: Chat, turns: int) -> list[int]:
        """The ids of the chat up to the answer of turn number `turns`, for generation."""
        pieces = self.encode([chat])[0]
        ids = [token & ~TARGET for piece in pieces[: turns + 1] for token in piece]
        return [
            *ids,
            *self.heads["user"],
            *self.ids(chat.turns[turns].user),
            self.end,
            *self.newline,
            *self.heads["assistant"],
        ]


def make_rows(encoder: Encoder, seed: int, count: int, weights: Weights = USUAL) -> dict[int, np.ndarray]:
    """length → uint16 rows [n, length] of about `count` conversations, padded with the end of text, never a target."""
    rng = random.Random(seed)
    rows: dict[int, list[list[int]]] = {length: [] for length in LENGTHS}
    lengths = rng.choices(LENGTHS, LENGTH_WEIGHTS, k=count)
    chats = [make_chat(rng, length=length, weights=weights) for length in lengths]
    for length, pieces in zip(lengths, encoder.encode(chats), strict=True):
        # Whole turns only: the first one in any case, then as many as fit.
        row = [*pieces[0], *pieces[1]]
        if len(row) > LENGTHS[-1]:
            continue
        limit = max(length, fitting(len(row)))
        for piece in pieces[2:]:
            if len(row) + len(piece) > limit:
                break
            row += piece
        rows[fitting(len(row))].append(row)
    for _ in range(count // 40):
        ids = [*encoder.ids(make_plain_text(rng)), encoder.end_of_text]
        if len(ids) <= LENGTHS[-1]:
            rows[fitting(len(ids))].append([token | TARGET for token in ids])
    packed = {}
    for length, found in rows.items():
        array = np.full((len(found), length), encoder.end_of_text, dtype=np.uint16)
        for index, row in enumerate(found):
            array[index, : len(row)] = row
        packed[length] = array
    return packed


def fitting(length: int) -> int:
    """The shortest row that holds so many tokens."""
    return next(limit for limit in LENGTHS if length <= limit)


def evaluation(seed: int, per_skill: int) -> list[tuple[str, Chat, int]]:
    """(skill, chat, number of the turn) with known right answers, held out from training; `per_skill` of each skill."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    chosen = []
    for _ in range(per_skill * 400):
        chat = make_chat(rng, length=rng.choices((128, 256, 512), (4, 3, 2))[0], evaluating=True)
        for index, turn in enumerate(chat.turns):
            style = chat.persona.style
            if not turn.expect or (
                style
                and (
                    turn.exact or turn.layout or not is_right(turn, turn.answer) or not chat.persona.shows(turn.answer)
                )
            ):
                continue
            skill = f"system prompt: {style}" if style else turn.skill
            if found[skill] < per_skill:
                found[skill] += 1
                chosen.append((skill, chat, index))
    return chosen


def is_right(turn: Turn, answer: str) -> bool:
    """Is an answer to the turn right: one expected text, a list of its layout, or all expected words in it?"""
    if turn.exact:
        return answer in turn.expect
    if turn.layout:
        return layout(answer) == layout(turn.expect[0])
    words = f" {normal(answer)} "
    return all(f" {normal(word)} " in words for word in turn.expect)


def layout(text: str) -> tuple[object, ...]:
    """Layout of a list or a table: its kind, and how many different things are in it."""
    if text.startswith("["):
        try:
            return "json", len(set(json.loads(text)))
        except (ValueError, TypeError):
            return ("broken JSON",)
    lines = text.split("\n")
    if text.startswith("|"):
        cells = {line.count("|") for line in lines}
        whole = (
            len(cells) == 1
            and len(lines) > 2
            and set(lines[1]) == set("| -")
            and all(line.endswith("|") for line in lines)
        )
        return ("table", len(set(lines[2:]))) if whole else ("broken table",)
    if len(lines) == 1:
        return "comma", len(set(text.split(", ")))
    marks = [line.split(" ", 1)[0] if line[:1].isdigit() or line.startswith("- ") else "" for line in lines]
    return *marks, len({line.removeprefix(mark) for line, mark in zip(lines, marks, strict=True)})


def normal(text: str) -> str:
    return " ".join("".join(char if char.isalnum() or char == "-" else " " for char in text.lower()).split())


def texts(seed: int, count: int) -> Iterator[str]:
    """All kinds of text, for the training of the tokenizer."""
    rng = random.Random(seed)
    for length in rng.choices(LENGTHS, LENGTH_WEIGHTS, k=count):
        chat = make_chat(rng, length=length)
        yield chat.persona.tool_prompt
        yield chat.persona.system
        for turn in chat.turns:
            yield turn.user
            yield turn.answer
        if chance(rng, 0.025):
            yield make_plain_text(rng)
    for table in (unknown.TERMS, unknown.PEOPLE, world.NAMES):
        yield " ".join(table)
    yield " ".join(made_up_word(rng) for _ in range(count // 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--skill", default="", help="print only turns of this skill")
    parser.add_argument("--evaluating", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for _ in range(args.samples):
        chat = make_chat(rng, length=rng.choices(LENGTHS[:3], LENGTH_WEIGHTS[:3])[0], evaluating=args.evaluating)
        if args.skill and all(turn.skill != args.skill for turn in chat.turns):
            continue
        if not args.skill:
            print("=" * 20, chat.persona.system)
        for turn in chat.turns:
            if not args.skill or turn.skill == args.skill:
                print(f"[{turn.skill}] {turn.user}\n    > {turn.answer}")
    if args.speed:
        encoder = Encoder(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
        start = time.monotonic()
        packed = make_rows(encoder, args.seed, 4000)
        seconds = time.monotonic() - start
        filled = sum(int((rows != encoder.end_of_text).sum()) for rows in packed.values())
        targets = sum(int((rows >= TARGET).sum()) for rows in packed.values())
        share = filled / sum(rows.size for rows in packed.values())
        print({length: len(rows) for length, rows in packed.items()})
        print(
            f"4000 conversations in {seconds:.1f} s: {filled / seconds:,.0f} tokens/s, {filled / 4000:.0f} tokens each"
        )
        print(f"{share:.0%} of the rows filled, {targets / filled:.0%} to be predicted")


if __name__ == "__main__":
    main()
