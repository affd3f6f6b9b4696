"""Conversations with tools: the chat page's clock and calculator, and the weather of every API's documentation.

A call is the assistant's whole message, its result the user's next one, as the chat template writes them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import datetime, timedelta

from demo import world
from demo.chat import LINES, TABLES, Chat, Turn
from demo.grammar import KEEP, chance, pick, render

CLOCK, CALCULATOR, WEATHER = "get_time", "calculate", "get_weather"

DESCRIPTIONS: dict[str, list[str]] = TABLES["tool_descriptions"]
CITIES: dict[str, str] = TABLES["zones"]


def definition(rng: random.Random, name: str) -> dict[str, object]:
    """A tool as clients send it: mostly as the chat page does."""
    parameters: dict[str, object] = {"type": "object", "properties": {}}
    if name == CLOCK:
        parameters["properties"] = {
            "time_zone": {"type": "string", "description": "An IANA time zone such as Europe/Berlin."}
        }
    elif name == CALCULATOR:
        parameters["properties"] = {"expression": {"type": "string", "description": "For instance (17 + 25) * 3"}}
        parameters["required"] = ["expression"]
    else:
        parameters["properties"] = {"city": {"type": "string"}}
        parameters["required"] = ["city"]
    return {
        "type": "function",
        "function": {"name": name, "description": pick(rng, DESCRIPTIONS[name]), "parameters": parameters},
    }


def tool_prompt(rng: random.Random, names: tuple[str, ...]) -> str:
    """First system message, as the chat template writes it for tools."""
    lines = "".join(json.dumps(definition(rng, name), ensure_ascii=False) + "\n" for name in names)
    return f'<tools>\n{lines}</tools>\n<tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>'


def draw_tools(rng: random.Random) -> tuple[str, ...]:
    if chance(rng, 0.6):
        return CLOCK, CALCULATOR
    names = [CLOCK, CALCULATOR, WEATHER]
    rng.shuffle(names)
    return tuple(names[: 1 + int(rng.random() * 3)])


def call(
    chat: Chat, question: str, name: str, arguments: dict[str, str], result: str, answer: str, short: str = ""
) -> None:
    """The question, the call, its result and the answer. `question`: with marks."""
    rng = chat.rng
    made = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    called = f"<tool_call>\n{made}\n</tool_call>"
    chat.reply(question, called, skill=f"tool: {name}", expect=(called,), exact=True, plain=True)
    response = f"<tool_response>\n{result}\n</tool_response>"
    spoken = chat.persona.speak(rng, answer, short or result, plain=False)
    chat.turns.append(Turn(response, spoken, "tool results", (short or result,)))


SIGNS = {
    "+": ("+", "+", " plus "),
    "-": ("-", "-", " minus "),
    "*": ("*", "x", "×", " times "),
    "/": ("/", "/", " divided by "),
}


def use_calculator(chat: Chat) -> None:
    """Sums that the model could not do itself, and those that it could: the calculator is surer."""
    rng = chat.rng

    def number() -> str:
        draw = rng.random()
        if draw < 0.45:
            return str(2 + int(rng.random() * 98))
        if draw < 0.9:
            return str(int(10 ** (2 + 4 * rng.random())))
        return f"{rng.random() * 100:.{pick(rng, (1, 2))}f}"

    form = rng.random()
    if form < 0.68:
        sign = pick(rng, "++-***/")
        a, b = chat.draw(lambda: (number(), number()))
        between = pick(rng, SIGNS[sign])
        shown = f"{a}{between}{b}" if len(between) > 1 or chance(rng, 0.3) else f"{a} {between} {b}"
        expression = f"{a} {sign} {b}"
    elif form < 0.8:
        a, b, c = chat.draw(lambda: (number(), number(), number()))
        first, second = pick(rng, "+-"), pick(rng, "*/")
        expression = shown = f"({a} {first} {b}) {second} {c}"
    elif form < 0.9:
        a = str(chat.draw(lambda: 2 + int(rng.random() * 9998)))
        shown, expression = pick(rng, (f"the square root of {a}", f"sqrt({a})", f"the root of {a}")), f"sqrt({a})"
    else:
        a, b = chat.draw(lambda: (str(2 + int(rng.random() * 30)), str(2 + int(rng.random() * 9))))
        shown, expression = pick(rng, (f"{a}^{b}", f"{a} to the power of {b}", f"{a} ^ {b}")), f"{a} ^ {b}"
    question = render(rng, LINES["tools.sum"].ask, {"x": shown}, KEEP).strip()
    result = value_of(expression)
    call(chat, question, CALCULATOR, {"expression": expression}, result, f"{expression} = {result}.")


def value_of(expression: str) -> str:
    """Value of an arithmetic expression, as JavaScript writes it."""
    try:
        value = eval(
            expression.replace("sqrt", "_root").replace("^", "**"), {"__builtins__": {}, "_root": lambda x: x**0.5}
        )
    except ZeroDivisionError:
        return "Infinity"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def use_clock(chat: Chat) -> None:
    rng = chat.rng
    moment = datetime(2026, 1, 1) + timedelta(seconds=int(rng.random() * 10 * 365 * 86400))
    city = pick(rng, list(CITIES)) if chance(rng, 0.45) else ""
    zone = pick(rng, ("GMT", "CET", "CEST", "UTC", "BST", "GMT+2", "GMT-5", "GMT+9"))
    comma = pick(rng, (",", ""))
    date = f"{moment:%A}{comma} {moment.day} {moment:%B} {moment.year}"
    result = f"{date} at {moment:%H:%M:%S} {zone}"
    if city:
        key = "time_in"
        answer, short = f"It is {moment:%H:%M} in {city}.", f"{moment:%H:%M}"
    elif chance(rng, 0.6):
        key = "time"
        answer, short = f"It is {moment:%H:%M}.", f"{moment:%H:%M}"
    else:
        key = "date"
        answer, short = f"Today is {date}.", date
    asked = chat.phrase(LINES[f"tools.{key}"].ask, slots={"c": city})
    call(chat, asked, CLOCK, {"time_zone": CITIES[city]} if city else {}, result, answer, short)


def use_weather(chat: Chat) -> None:
    rng = chat.rng
    city = str(chat.draw(lambda: pick(rng, world.CITIES)))
    sky, degrees = pick(rng, ("sunny", "cloudy", "rain", "snow", "windy", "clear", "fog")), int(rng.random() * 45) - 8
    result = pick(
        rng,
        (
            f"{sky}, {degrees} °C",
            f"{degrees} degrees and {sky}",
            json.dumps({"temperature": degrees, "conditions": sky}),
        ),
    )
    question = chat.phrase(LINES["tools.weather"].ask, slots={"c": city})
    call(chat, question, WEATHER, {"city": city}, result, f"In {city}: {sky}, {degrees} degrees.", str(degrees))


USES: dict[str, Callable[[Chat], None]] = {CLOCK: use_clock, CALCULATOR: use_calculator, WEATHER: use_weather}


def use_tool(chat: Chat) -> None:
    """One of the tools that there are is needed."""
    USES[pick(chat.rng, chat.persona.tools)](chat)
