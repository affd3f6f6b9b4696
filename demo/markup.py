"""Tables and code, as the chat page shows them."""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import random
from collections.abc import Sequence

from demo import quire_facts, stories, world
from demo.grammar import KEEP, chance, pick, render, sentence_case
from demo.skills import MEMORIES, Chat, Turn, memory_value, spoken, story_names

Rows = list[tuple[str, ...]]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in GitHub's Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def some(rng: random.Random, rows: Rows, count: int, *, first: bool = False) -> Rows:
    """So many rows as they follow each other, so that a row says which is next; `first`: from the first one on."""
    begin = 0 if first else int(rng.random() * len(rows))
    return [rows[(begin + i) % len(rows)] for i in range(count)]


def table_of(rng: random.Random) -> tuple[str, tuple[str, ...], Rows]:
    """(what is asked for, header, all rows there are)."""
    kind = rng.random()
    if kind < 0.3:
        countries = world.COUNTRIES.items()
        if chance(rng, 0.5):
            return "countries and their capitals", ("Country", "Capital"), [(name, facts[0]) for name, facts in countries]
        return "countries, capitals and languages", ("Country", "Capital", "Language"), [(name, facts[0], facts[2]) for name, facts in countries]
    if kind < 0.55:
        animals = world.ANIMALS.items()
        if chance(rng, 0.3):
            return "animals and their sounds", ("Animal", "Sound"), [(sentence_case(name), facts[0]) for name, facts in animals if facts[0]]
        if chance(rng, 0.5):
            return "animals and their young", ("Animal", "Young"), [(sentence_case(name), facts[1]) for name, facts in animals if facts[1]]
        return "animals and their legs", ("Animal", "Legs"), [(sentence_case(name), str(facts[3])) for name, facts in animals]
    if kind < 0.7:
        words = world.TRANSLATIONS.items()
        return "words in Spanish and French", ("English", "Spanish", "French"), [(word, other[0], other[1]) for word, other in words]
    if kind < 0.8:
        return "months and their days", ("Month", "Days"), [(month, str(days)) for month, days in zip(world.MONTHS, world.MONTH_DAYS, strict=True)]
    if kind < 0.9:
        return "numbers and their squares", ("Number", "Square"), [(str(n), str(n * n)) for n in range(1, 13)]
    return "opposites", ("Word", "Opposite"), list(world.OPPOSITES.items())


def show_table(chat: Chat) -> None:
    rng = chat.rng
    topic, header, rows = table_of(rng)
    if chance(rng, 0.3):
        asked = "[show me a table|show a table|make a table|can you make a table|write a table|a table please|give me a table|can you show a table|show me a markdown table|I want to see a table|example of a table|draw a table]"
        text = table(header, some(rng, rows, 3))
        return chat.say(chat.phrase(asked + "[.|!|]"), "{text}", text=text, skill="table", plain=True, expect=(text,), layout=True)
    count = 2 + int(rng.random() * 5)
    slots = {"n": pick(rng, (str(count), spoken(count))), "t": topic}
    asked = "[show me a table of|make a table of|a table of|write a table of|give me a table of|show a table with|can you make a table of|create a table with|put into a table:|I need a table of] {n} {t}"
    if chance(rng, 0.3):
        asked = "[list|show me|give me|name] {n} {t} [in a table|as a table|as a markdown table]"
    text = table(header, some(rng, rows, count, first=topic.startswith(("months", "numbers"))))
    chat.say(chat.phrase(asked + "[.|?|]", slots=slots), "{text}", text=text, skill="table", plain=True, expect=(text,), layout=True)
    return None


NAMES = ("add", "total", "combine", "compute", "work", "my_function", "run", "f")
FRUITS = ("apples", "pears", "words", "items", "names", "numbers", "colours", "tokens")

# (what is asked for, the language, the code); {n}: a number, {f}: a function's name, {w}: a word.
CODE: Sequence[tuple[str, str, str]] = (
    ("[hello world|a hello world program|a hello world]", "python", 'print("Hello, world!")'),
    ("a function that adds two numbers", "python", "def add(a, b):\n    return a + b"),
    ("a function that multiplies two numbers", "python", "def multiply(a, b):\n    return a * b"),
    ("a function [named|called] {f} that adds two numbers", "python", "def {f}(a, b):\n    return a + b"),
    ("a loop [from 1 to {n}|that counts to {n}]", "python", "for i in range(1, {n} + 1):\n    print(i)"),
    ("[a function that reverses a string|a function that turns a text around]", "python", "def reverse(text):\n    return text[::-1]"),
    ("[a list of three {w}|a list with three {w}]", "python", "{w} = [\"first\", \"second\", \"third\"]\nprint({w})"),
    ("[a script that reads a file|a program that reads a file]", "python", 'with open("file.txt") as file:\n    print(file.read())'),
    ("[a function that checks if a number is even|a function that tests for even numbers]", "python", "def is_even(n):\n    return n % 2 == 0"),
    ("a function for the factorial", "python", "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)"),
    ("a function for fibonacci numbers", "python", "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"),
    ("[a program that sorts a list of {w}|a script that sorts {w}]", "python", "print(sorted({w}))"),
    ("[how to call Quire with the OpenAI client|how to use the OpenAI client|an example with the OpenAI client]", "python",
     'from openai import OpenAI\n\nclient = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any")\nanswer = client.chat.completions.create(\n    model="quire-demo", messages=[{"role": "user", "content": "Hi!"}]\n)\nprint(answer.choices[0].message.content)'),
    ("[how to use Quire offline|how to use the LLM class|an example of the LLM class]", "python", 'from engine import LLM\n\nllm = LLM("configs/demo")\nprint(llm.generate("Once upon a time")[0].outputs[0].text)'),
    ("[how to start a server|how to start Quire|how to serve a model|the command that serves a model]", "sh", "quire serve Qwen/Qwen3-0.6B --port 8000"),
    ("[how to call the API with curl|a curl request|an example with curl]", "sh",
     "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi!\"}]}'"),
)
ASK = "[write|show me|can you write|please write|give me|can you show me|write me|code for|show] {x}[ in python| in Python||, please|]"


def show_code(chat: Chat) -> None:
    rng = chat.rng
    if chat.persona.style in ("upper", "lower"):
        return None
    asked, language, code = pick(rng, CODE)
    if chance(rng, 0.25):
        asked = "[show me a code block|a code block please|show a code block|show me some code|write some code|show me code|an example of code|write code|can you show me a code block|print some code|show me python code|write some python]"
        asked, language, code = asked, "python", pick(rng, [code for _, language, code in CODE[:10] if "{" not in code])
        text = f"```{language}\n{code}\n```"
        return chat.say(chat.phrase(asked + "[.|!|]"), "{text}", text=text, skill="code", plain=True, expect=("python",))
    slots = {"n": str(chat.draw(lambda: 2 + int(rng.random() * 98))), "f": pick(rng, NAMES), "w": pick(rng, FRUITS)}
    for name, value in slots.items():
        code = code.replace("{" + name + "}", value)
    text = f"```{language}\n{code}\n```"
    asks = ASK if language == "python" and "how to" not in asked else "[show me|can you show me|tell me|please show me|show] {x}[||, please]"
    chat.say(chat.phrase(asks.replace("{x}", asked), slots=slots), "{text}", text=text, skill="code", plain=True, expect=(text,), exact=True)
    return None


# What the user has told of themselves, asked of the model: a question, an answer, words of it.
OWN: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "name": ("[what is your name|what's your name|and what is your name|and what are you called|who are you|what are you called|and who are you|what should I call you]?", "My name is Quire Demo.", ("Quire Demo",)),
    "age": ("[how old are you|and how old are you|and you, how old are you|what is your age]?", "I have no age as people do.", ("no age",)),
    "city": ("[where do you live|and where do you live|where are you|which city do you live in|and you, where do you live]?", "I run on the computer where Quire was started.", ("computer",)),
    "colour": ("[what is your favourite colour|what's your favorite color|which colour do you like|do you have a favourite colour]?", "I cannot see colours.", ("cannot see",)),
    "food": ("[what is your favourite food|what do you eat|and what do you like to eat|what food do you like]?", "I do not eat, because I am a program.", ("program",)),
    "hobby": ("[what is your hobby|what are your hobbies|do you have a hobby]?", "I have no hobby. I am here to chat.", ("no hobby",)),
    "job": ("[what is your job|what do you do for work|what do you work as|do you have a job]?", "I am a language model. My job is to answer you.", ("language model",)),
    "pet": ("[do you have a pet|do you have pets|what is your pet called]?", "I have no pet, because I am a program.", ("no pet",)),
    "friend": ("[do you have a friend|do you have friends|who is your best friend]?", "I have no friends as people do, but I like to chat with you.", ("no friends",)),
}  # fmt: skip


def ask_own(chat: Chat) -> None:
    """The model is asked about itself what the user has told of themselves: theirs is not its own."""
    rng = chat.rng
    told = [key for key in OWN if key in chat.known]
    if not told:
        return
    key = pick(rng, told)
    question, answer, expect = OWN[key]
    if key == "name" and chat.persona.name:
        answer, expect = f"My name is {chat.persona.name}.", (chat.persona.name,)
    elif chat.persona.role and key in ("name", "job"):
        return
    chat.say(chat.phrase(question), answer, short=answer, skill="its own", expect=expect)


def tell_and_ask(chat: Chat) -> None:
    """The user tells something of themselves and asks the model the same, in one message."""
    rng = chat.rng
    keys = [key for key in OWN if key not in chat.known and not (chat.persona.role and key in ("name", "job"))]
    if not keys:
        return
    key = pick(rng, ("name", *keys)) if "name" in keys else pick(rng, keys)
    question, answer, expect = OWN[key]
    if key == "name" and chat.persona.name:
        answer, expect = f"My name is {chat.persona.name}.", (chat.persona.name,)
    slots = memory_value(chat, key)
    told = render(rng, MEMORIES[key].tell, slots, KEEP) + pick(rng, (". ", ". ", ", ", "! ", " and "))
    if chance(rng, 0.25) and key != "job":
        question = {"pet": "[and you|do you have one]?", "friend": "[and you|do you have one]?"}.get(key, "[and you|what about you|what is yours|and yours]?")
    begin = f"Nice to meet you, {slots['v']}!" if key == "name" else pick(rng, ("Good to know!", "Thank you for telling me!"))
    asked = chat.phrase(question)
    chat.say(told + (sentence_case(asked) if told[-2] in ".!" else asked), f"{begin} {answer}", short=answer, skill="its own", expect=expect)
    chat.known |= {key: slots["v"], f"{key} fact": render(rng, MEMORIES[key].fact, slots)}
    if key == "pet":
        chat.known["pet kind"] = slots["k"]


def suggestion(chat: Chat) -> None:
    """What the chat page suggests, word by word. It is trained as it is tested."""
    rng = chat.rng
    asked = pick(rng, ("What is 17 plus 25?", "What is paged attention?", "Tell me a short story about a lighthouse."))
    answer, short, expect = "17 + 25 = 42.", "42", ("42",)
    if "paged" in asked:
        topic = next(topic for topic in quire_facts.TOPICS if "paged attention" in topic.names)
        answer, short, expect = pick(rng, topic.what), topic.short, ("block table",)
    elif "story" in asked:
        hero = stories.Hero.invent(rng, kind="lighthouse", names=story_names(chat))
        friend = pick(rng, [name for name in stories.FRIENDS if name != hero.kind])
        answer, short, expect = stories.story(rng, hero, friend=friend, short=True), "", ("lighthouse",)
    chat.turns.append(Turn(asked, chat.persona.speak(rng, answer, short, False), "suggestions", expect))
