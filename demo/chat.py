"""A conversation that grows turn by turn, and the persona that answers in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from demo import world
from demo.grammar import EXACT, KEEP, Typist, chance, held_out, made_up_word, pick, render, sentence_case
from demo.tables import load

Slots = Mapping[str, object]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Turn:
    """A user's message and the assistant's.

    `expect` are words that a right answer holds. With `exact`, it is one of these texts; with `layout`, a list of that
    layout.
    """

    user: str
    answer: str
    skill: str = ""
    expect: tuple[str, ...] = ()
    exact: bool = False
    layout: bool = False


@dataclass(frozen=True)
class Lines:
    """Templates of one turn; texts/turns.yaml explains the fields."""

    ask: str = ""
    say: str | Sequence[str] = ""
    skill: str = ""
    short: str = ""
    expect: Sequence[str] = ()
    exact: bool = False
    plain: bool = False
    layout: bool = False
    split: bool = False
    canonical: str = ""


LINES = {
    f"{section}.{name}": Lines(**fields) for section, turns in load("turns").items() for name, fields in turns.items()
}
TABLES = load("skills")

# How a persona begins or ends what it says.
BEFORE = {"pirate": ("Arr!", "Ahoy, matey!", "Aye aye!", "Yo ho ho!"), "robot": ("Beep boop.",)}
AFTER = {"cat": ("Meow!",), "cheerful": ("Hooray!", "How wonderful!", "What a great day!")}

# Skills whose questions may come with a word of greeting or thanks.
WITH_MANNERS = frozenset(TABLES["manners"]["skills"])


@dataclass
class Persona:
    """The system prompt, and the wishes in it."""

    system: str = ""
    style: str = ""
    name: str = ""
    role: str = ""
    phrase: str = ""
    tools: tuple[str, ...] = ()  # their names
    tool_prompt: str = ""  # the chat template's text about them, before the system prompt

    def speak(self, rng: random.Random, text: str, short: str, plain: bool) -> str:
        """The answer as this persona says it; `plain` answers (lists, JSON, copies) are only re-cased."""
        if self.style == "upper":
            return text.upper()
        if self.style == "lower":
            return text.lower()
        if self.style == "brief":
            end = "" if short.endswith((".", "!", "?")) else "."
            return sentence_case(short) + end if short and not plain else text
        if plain or not self.style or (self.style == "cheerful" and "sorry" in text):
            return text
        if self.style in BEFORE:
            return f"{pick(rng, BEFORE[self.style])} {text}"
        if self.style in AFTER:
            return f"{text} {pick(rng, AFTER[self.style])}"
        if self.style == "ending":
            return f"{text} {self.phrase}"
        assert self.style in ("formal", "title")
        # Names and abbreviations keep their capitals.
        first = text.split(" ", 1)[0]
        begin = text if first.startswith(("I", "Q")) or first[1:] != first[1:].lower() else text[:1].lower() + text[1:]
        return f"{self.phrase or 'Dear user'}, {begin}"

    def shows(self, answer: str) -> bool:
        """Does an answer sound like this persona?"""
        if self.style in ("upper", "lower"):
            return answer == (answer.upper() if self.style == "upper" else answer.lower())
        if self.style == "brief":
            return len(answer) < 60
        if self.style in BEFORE:
            return answer.startswith(BEFORE[self.style])
        if self.style in AFTER:
            return answer.endswith(AFTER[self.style])
        return answer.endswith(self.phrase) if self.style == "ending" else answer.startswith(self.phrase or "Dear user")


@dataclass
class Chat:
    """A conversation that grows. `evaluating` draws held-out names, numbers and phrasings instead of all the others."""

    rng: random.Random
    evaluating: bool = False
    persona: Persona = field(default_factory=Persona)
    turns: list[Turn] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)  # told by the user

    def __post_init__(self) -> None:
        self.typist = Typist(self.rng)

    def turn(self, key: str, /, *, prefix: str = "", **slots: object) -> None:
        """One turn by its name in texts/turns.yaml; `prefix` is a template before the question."""
        lines = LINES[key]
        self.say(self.question(prefix + lines.ask, lines, slots), lines, slots)

    def add(self, ask: str, say: str | Sequence[str], *, skill: str, short: str = "", **slots: object) -> None:
        """One turn from templates that are drawn or put together."""
        lines = Lines(ask, say, skill, short)
        self.say(self.question(ask, lines, slots), lines, slots)

    def reply(
        self,
        question: str,
        text: str,
        *,
        skill: str,
        short: str = "",
        expect: Sequence[str] = (),
        exact: bool = False,
        plain: bool = False,
    ) -> None:
        """One turn whose question is a text with marks already and whose answer is a text."""
        lines = Lines("", "{text}", skill, "{short}" if short else "", (), exact, plain)
        self.say(question, lines, {"text": text, "short": short}, expect)

    def question(self, ask: str, lines: Lines, slots: Slots) -> str:
        if lines.split:
            return self.phrase(ask, lines.canonical, slots)
        return render(self.rng, ask, slots, KEEP)

    def say(self, question: str, lines: Lines, slots: Slots, expect: Sequence[str] | None = None) -> None:
        """One turn whose question is a text with marks already. `expect` replaces the one of the lines."""
        rng = self.rng
        text = render(rng, lines.say if isinstance(lines.say, str) else pick(rng, lines.say), slots)
        spoken = self.persona.speak(rng, text, render(rng, lines.short, slots) if lines.short else "", lines.plain)
        if lines.skill in WITH_MANNERS and chance(rng, 0.06):
            question = pick(rng, TABLES["manners"]["before"]) + question
        if lines.skill in WITH_MANNERS and chance(rng, 0.04) and not question.endswith(EXACT):
            question = question.rstrip("?.! ") + pick(rng, TABLES["manners"]["after"])
        kept = question.startswith(KEEP)
        question = question[0] + sentence_case(question[1:]) if kept else sentence_case(question)
        typed = self.typist.type(rng, question).strip()
        right = tuple(expect) if expect is not None else tuple(word.format_map(slots) for word in lines.expect)
        self.turns.append(Turn(typed, spoken.strip(), lines.skill, right, lines.exact, lines.layout))

    def fresh(self, value: object) -> bool:
        """Does a slot value belong to this chat's side of the split?"""
        return held_out(value) == self.evaluating

    def draw(self, make: Callable[[], Value]) -> Value:
        """A value on this chat's side of the split."""
        for _ in range(200):
            value = make()
            if self.fresh(value):
                return value
        raise RuntimeError("the split leaves no value for this slot")

    def name(self) -> str:
        rng = self.rng
        return self.draw(
            lambda: (
                pick(rng, world.NAMES) if chance(rng, 0.75) else made_up_word(rng, pick(rng, (2, 2, 3))).capitalize()
            )
        )

    def phrase(self, template: str, canonical: str = "", slots: Slots | None = None) -> str:
        """A question on this chat's side of the split; the canonical one is always trained and never evaluated."""
        slots = slots or {}
        if canonical and not self.evaluating and chance(self.rng, 0.25):
            return render(self.rng, canonical, slots, KEEP)
        for _ in range(30):
            text = render(self.rng, template, slots, KEEP)
            if text != canonical and self.fresh(text):
                return text
        return render(self.rng, template, slots, KEEP)


def exactly(text: str) -> str:
    """The text with marks that keep it from being typed in another way."""
    return f"{EXACT}{text}{EXACT}"
