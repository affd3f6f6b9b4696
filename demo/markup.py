"""Tables and code, as the chat page shows them, and the user's own facts asked of the model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from demo import quire_facts, stories, world
from demo.chat import TABLES, Chat, Turn
from demo.grammar import KEEP, chance, pick, render, sentence_case
from demo.skills import MEMORIES, another_friend, learn, memory_value, new_hero
from demo.sums import spoken

Rows = Sequence[tuple[str, ...]]


def table(header: Sequence[str], rows: Rows) -> str:
    """A table in GitHub's Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def some(rng: random.Random, rows: Rows, count: int, *, first: bool = False) -> Rows:
    """So many rows as they follow each other, so that a row says which is next; `first`: from the first one on."""
    begin = 0 if first else int(rng.random() * len(rows))
    return [rows[(begin + i) % len(rows)] for i in range(count)]


def table_of(rng: random.Random) -> tuple[str, tuple[str, ...], Rows]:
    """(topic of a table, its header, all rows there are)."""
    kind = rng.random()
    if kind < 0.3:
        countries = world.COUNTRIES.items()
        if chance(rng, 0.5):
            rows = [(name, facts[0]) for name, facts in countries]
            return "countries and their capitals", ("Country", "Capital"), rows
        header = ("Country", "Capital", "Language")
        return "countries, capitals and languages", header, [(name, facts[0], facts[2]) for name, facts in countries]
    if kind < 0.55:
        title, column = "Legs", 3
        if chance(rng, 0.3):
            title, column = "Sound", 0
        elif chance(rng, 0.5):
            title, column = "Young", 1
        topic = {"Legs": "legs", "Sound": "sounds", "Young": "young"}[title]
        animals = [(sentence_case(name), str(facts[column])) for name, facts in world.ANIMALS.items()]
        return f"animals and their {topic}", ("Animal", title), animals
    if kind < 0.7:
        words = [(word, other[0], other[1]) for word, other in world.TRANSLATIONS.items()]
        return "words in Spanish and French", ("English", "Spanish", "French"), words
    if kind < 0.8:
        return (
            "months and their days",
            ("Month", "Days"),
            list(zip(world.MONTHS, map(str, world.MONTH_DAYS), strict=True)),
        )
    if kind < 0.9:
        return "numbers and their squares", ("Number", "Square"), [(str(n), str(n * n)) for n in range(1, 13)]
    return "opposites", ("Word", "Opposite"), list(world.OPPOSITES.items())


def show_table(chat: Chat) -> None:
    rng = chat.rng
    topic, header, rows = table_of(rng)
    if chance(rng, 0.3):
        return chat.turn("markup.any_table", text=table(header, some(rng, rows, 3)))
    count = 2 + int(rng.random() * 5)
    n = pick(rng, (str(count), spoken(count)))
    key = "markup.table_list" if chance(rng, 0.3) else "markup.table"
    text = table(header, some(rng, rows, count, first=topic.startswith(("months", "numbers"))))
    return chat.turn(key, n=n, t=topic, text=text)


NAMES = ("add", "total", "combine", "compute", "work", "my_function", "run", "f")
FRUITS = ("apples", "pears", "words", "items", "names", "numbers", "colours", "tokens")


def show_code(chat: Chat) -> None:
    rng = chat.rng
    if chat.persona.style in ("upper", "lower"):
        return None
    asked, language, code = pick(rng, TABLES["code"])
    if chance(rng, 0.25):
        fixed = [code for _, language, code in TABLES["code"][:10] if "{" not in code]
        return chat.turn("markup.any_code", text=f"```python\n{pick(rng, fixed)}\n```")
    slots = {"n": str(chat.draw(lambda: 2 + int(rng.random() * 98))), "f": pick(rng, NAMES), "w": pick(rng, FRUITS)}
    for name, value in slots.items():
        code = code.replace("{" + name + "}", value)
    text = f"```{language}\n{code}\n```"
    asks = TABLES["code_requests"]["python" if language == "python" and "how to" not in asked else "other"]
    question = chat.phrase(asks.replace("{x}", asked), slots=slots)
    return chat.reply(question, text, skill="code", plain=True, expect=(text,), exact=True)


# The same facts asked of the model: a question, an answer, words of it.
OWN: dict[str, tuple[str, str, list[str]]] = TABLES["own"]


def own_facts(chat: Chat) -> list[str]:
    """The facts that the model has in this chat: a role has a name and a job of its own."""
    return [key for key in OWN if not (chat.persona.role and key in ("name", "job"))]


def own(chat: Chat, key: str) -> tuple[str, str, Sequence[str]]:
    question, answer, expect = OWN[key]
    if key == "name" and chat.persona.name:
        return question, f"My name is {chat.persona.name}.", (chat.persona.name,)
    return question, answer, expect


def ask_own(chat: Chat) -> None:
    """The model is asked about itself what the user has told of themselves: theirs is not its own."""
    told = [key for key in OWN if key in chat.known]
    key = pick(chat.rng, told) if told else ""
    if key in own_facts(chat):
        question, answer, expect = own(chat, key)
        chat.reply(chat.phrase(question), answer, short=answer, skill="its own", expect=expect)


def tell_and_ask(chat: Chat) -> None:
    """The user tells something of themselves and asks the model the same, in one message."""
    rng = chat.rng
    keys = [key for key in own_facts(chat) if key not in chat.known]
    if not keys:
        return
    key = pick(rng, ("name", *keys)) if "name" in keys else pick(rng, keys)
    question, answer, expect = own(chat, key)
    slots = memory_value(chat, key)
    told = render(rng, MEMORIES[key].tell, slots, KEEP) + pick(rng, (". ", ". ", ", ", "! ", " and "))
    if chance(rng, 0.25) and key != "job":
        has = key in ("pet", "friend")
        question = "[and you|do you have one]?" if has else "[and you|what about you|what is yours|and yours]?"
    begin = f"Nice to meet you, {slots['v']}!"
    if key != "name":
        begin = pick(rng, ("Good to know!", "Thank you for telling me!"))
    asked = chat.phrase(question)
    asked = told + (sentence_case(asked) if told[-2] in ".!" else asked)
    chat.reply(asked, f"{begin} {answer}", short=answer, skill="its own", expect=expect)
    learn(chat, key, slots)


def suggestion(chat: Chat) -> None:
    """A question that the chat page suggests, word by word. It is trained as it is tested."""
    rng = chat.rng
    asked = pick(rng, ("What is 17 plus 25?", "What is paged attention?", "Tell me a short story about a lighthouse."))
    answer, short, expect = "17 + 25 = 42.", "42", ("42",)
    if "paged" in asked:
        topic = next(topic for topic in quire_facts.TOPICS if "paged attention" in topic.names)
        answer, short, expect = pick(rng, topic.what), topic.short, ("block table",)
    elif "story" in asked:
        hero = new_hero(chat, "lighthouse")
        friend = another_friend(chat, hero)
        answer, short, expect = stories.story(rng, hero, friend=friend, short=True), "", ("lighthouse",)
    chat.turns.append(Turn(asked, chat.persona.speak(rng, answer, short, False), "suggestions", expect))
