"""Skills with numbers: sums, word problems, counting, comparing."""

from __future__ import annotations

import random

from demo import world
from demo.chat import LINES, TABLES, Chat
from demo.grammar import KEEP, chance, pick, render

SIGNS = {"+": "plus", "-": "minus", "*": "times"}


def number(rng: random.Random) -> int:
    size = rng.random()
    return int(rng.random() * (21 if size < 0.25 else 100 if size < 0.6 else 1000))


def calculate(sign: str, a: int, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def problem(chat: Chat) -> tuple[str, int, int, int]:
    """sign, a, b and the result."""
    rng = chat.rng
    sign = pick(rng, "+++---**")

    def make() -> tuple[int, int]:
        if sign == "*":
            tops = (13, 13) if chance(rng, 0.8) else (100, 10)
            return int(rng.random() * tops[0]), int(rng.random() * tops[1])
        a, b = number(rng), number(rng)
        return (b, a) if sign == "-" and a < b and chance(rng, 0.85) else (a, b)

    # A sum and its mirror image are on the same side of the split.
    for _ in range(200):
        a, b = make()
        if chat.fresh((sign, min(a, b), max(a, b))):
            return sign, a, b, calculate(sign, a, b)
    raise RuntimeError("the split leaves no numbers")


def spoken(value: int) -> str:
    """A number from -999 to 1000 in words."""
    if value < 0:
        return "minus " + spoken(-value)
    if value <= 20:
        return world.NUMBER_WORDS[value]
    if value < 100:
        return world.TENS[value // 10] + (f"-{world.NUMBER_WORDS[value % 10]}" if value % 10 else "")
    if value < 1000:
        return f"{world.NUMBER_WORDS[value // 100]} hundred" + (f" and {spoken(value % 100)}" if value % 100 else "")
    return "one thousand"


def arithmetic(chat: Chat) -> None:
    rng = chat.rng
    if chance(rng, 0.06):
        return too_large(chat)
    if chance(rng, 0.12):
        return other_sums(chat)
    sign, a, b, result = problem(chat)
    slots: dict[str, object] = {"a": a, "b": b, "c": result, "s": sign, "w": SIGNS[sign]}
    lines, asks = LINES["numbers.sum"], TABLES["sums"]
    if rng.random() < 0.1 and a <= 20 and b <= 20:
        slots |= {"a": spoken(a), "b": spoken(b)}
        ask = asks["words"]
    else:
        if sign == "*":
            slots["s"] = pick(rng, ("*", "x", "×"))
        ask = asks[sign] if chance(rng, 0.15) else lines.ask
    slots |= {"equation": f"{a} {sign} {b}", "spoken": f"{a} {SIGNS[sign]} {b}"}
    chat.say(render(rng, ask, slots, KEEP).strip(), lines, slots)
    while chance(rng, 0.25):
        sign = pick(rng, "++-*")
        a, b = result, int(rng.random() * (10 if sign == "*" else 50))
        result = calculate(sign, a, b)
        if not -99 <= result <= 999:
            return None
        chat.turn(f"numbers.and_{SIGNS[sign]}", a=a, b=b, c=result)
    return None


def other_sums(chat: Chat) -> None:
    """Round numbers, three numbers at once, and sums to check."""
    rng = chat.rng
    form = rng.random()
    if form < 0.35:
        unit = pick(rng, (10, 100, 1000, 1000))
        a, b = unit * (1 + int(rng.random() * 9)), unit * (1 + int(rng.random() * 9))
        sign = pick(rng, "++-*")
        if sign == "*":
            b = pick(rng, (2, 3, 5, 10, 100))
        if sign == "-":
            a, b = (max(a, b), min(a, b)) if chance(rng, 0.6) else (unit, 1)
        chat.turn("numbers.larger_sum", p=f"{a} {sign} {b}", c=calculate(sign, a, b))
    elif form < 0.7:
        values = [1 + int(rng.random() * (10 if chance(rng, 0.5) else 40)) for _ in range(pick(rng, (3, 3, 3, 4)))]
        chat.turn("numbers.larger_sum", p=" + ".join(map(str, values)), c=sum(values))
    else:
        sign, a, b, right = problem(chat)
        claimed = right if chance(rng, 0.5) else right + pick(rng, (-10, -2, -1, 1, 2, 10))
        verdict = "Yes" if claimed == right else "No"
        p = f"{a} {sign} {b}"
        chat.turn("numbers.check", p=p, c=claimed, right=right, verdict=verdict, word=verdict.lower())


def too_large(chat: Chat) -> None:
    rng = chat.rng
    a: object = int(10 ** (3.1 + 5 * rng.random()))
    b: object = int(10 ** (3.1 + 5 * rng.random()))
    if chance(rng, 0.4):
        a = number(rng)
    if chance(rng, 0.5):
        a, b = b, a
    if chance(rng, 0.2):
        a, b = f"{number(rng)}.{int(rng.random() * 10)}", f"{number(rng)}.{int(rng.random() * 100)}"
        sign = pick(rng, "+-*/")
    else:
        sign = pick(rng, "+-**/")
        if sign == "*" and chance(rng, 0.7):
            a, b = 100 + int(rng.random() * 9900), 13 + int(rng.random() * 900)
    chat.turn("numbers.too_large", a=a, b=b, s=sign)


def word_problem(chat: Chat) -> None:
    rng = chat.rng
    name, other, things = chat.name(), chat.name(), pick(rng, TABLES["objects"])
    a, b = 2 + int(rng.random() * 60), 1 + int(rng.random() * 40)
    kind, sign = pick(rng, (("gain", "+"), ("loss", "-"), ("bags", "*"), ("age", "+")))
    if kind == "loss":
        a, b = max(a, b), min(a, b)
    elif kind == "bags":
        a, b = 2 + int(rng.random() * 9), 2 + int(rng.random() * 9)
    chat.turn(f"numbers.{kind}", n=name, o=other, x=things, a=a, b=b, c=calculate(sign, a, b))


def number_sense(chat: Chat) -> None:
    rng = chat.rng
    kind = int(rng.random() * 22)
    a, b = chat.draw(lambda: (number(rng), number(rng)))
    if kind == 19:
        chance_question(chat)
    elif kind in (7, 8, 18):
        count(chat, kind, a)
    elif kind < 7:
        compare(chat, kind, a, b)
    else:
        work_out(chat, kind, a)


def compare(chat: Chat, kind: int, a: int, b: int) -> None:
    """Two numbers compared, or the neighbours of one."""
    match kind:
        case 0 | 1 if a != b:
            chat.turn("numbers.bigger", a=a, b=b, c=max(a, b))
        case 2 if a != b:
            chat.turn("numbers.smaller", a=a, b=b, c=min(a, b))
        case 3 if a != b:
            verdict, word = ("Yes", "bigger") if a > b else ("No", "smaller")
            chat.turn("numbers.is_bigger", a=a, b=b, c=verdict, word=word)
        case 4:
            chat.turn("numbers.after", a=a, c=a + 1)
        case 5 if a:
            chat.turn("numbers.before", a=a, c=a - 1)
        case 6:
            chat.turn("numbers.even", a=a, c="odd" if a % 2 else "even")
        case _:
            units(chat)


def count(chat: Chat, kind: int, a: int) -> None:
    rng = chat.rng
    if kind == 7:
        first, last = 1, 0
        if chance(rng, 0.6):
            last = pick(rng, (3, 4, 5, 6, 7, 8, 9, 10, 10, 12, 15, 20))
        else:
            first = a % 90
            last = first + 2 + int(rng.random() * 9)
        text = ", ".join(map(str, range(first, last + 1)))
        chat.turn("numbers.count" if first == 1 else "numbers.count_from", text=text, a=first, b=last)
    elif kind == 8:
        top = 3 + int(rng.random() * 9)
        chat.turn("numbers.count_down", text=", ".join(map(str, range(top, 0, -1))), a=top)
    else:
        step, times = pick(rng, (2, 2, 3, 5, 10, 10)), 3 + int(rng.random() * 8)
        text = ", ".join(str(step * index) for index in range(1, times + 1))
        chat.turn("numbers.count_by", text=text, s=step, t=step * times)


def work_out(chat: Chat, kind: int, a: int) -> None:
    """A small computation."""
    rng = chat.rng
    match kind:
        case 9:
            chat.turn("numbers.double", a=a % 500, c=2 * (a % 500))
        case 10:
            chat.turn("numbers.half", a=2 * (a % 250), c=a % 250)
        case 11:
            divisor, result = 2 + int(rng.random() * 10), 1 + int(rng.random() * 12)
            chat.turn("numbers.divided", a=divisor * result, b=divisor, c=result)
        case 12:
            step, start = pick(rng, (1, 2, 2, 3, 5, 10)), int(rng.random() * 30)
            row = [start + step * index for index in range(5)]
            chat.turn("numbers.series", r=", ".join(map(str, row[:-1])), c=row[-1])
        case 13:
            values = [number(rng) for _ in range(3 + int(rng.random() * 3))]
            key, choose = ("largest", max) if chance(rng, 0.5) else ("smallest", min)
            chat.turn(f"numbers.{key}", r=", ".join(map(str, values)), c=choose(values))
        case 14:
            values = [int(rng.random() * 100) for _ in range(3 + int(rng.random() * 3))]
            chat.turn("numbers.sort", r=", ".join(map(str, values)), text=", ".join(map(str, sorted(values))))
        case 15:
            words = spoken(a)
            key, answer = ("to_words", words) if chance(rng, 0.5) else ("to_digits", str(a))
            chat.turn(f"numbers.{key}", a=a, w=words, c=answer)
        case 16:
            root = 2 + int(rng.random() * 14)
            if chance(rng, 0.6):
                chat.turn("numbers.squared", r=root, c=root * root)
            else:
                chat.turn("numbers.root", a=root * root, c=root)
        case 17:
            value = 2 + int(rng.random() * 60)
            divisor = next(divisor for divisor in range(2, value + 1) if value % divisor == 0)
            prime = divisor == value
            why = f"{value} is a prime number" if prime else f"{value} = {divisor} * {value // divisor}"
            chat.turn("numbers.prime", n=value, c="Yes" if prime else "No", why=why)
        case 20:
            (share, per), whole = pick(rng, ((10, 10), (50, 2), (25, 4), (100, 1), (20, 5))), 1 + int(rng.random() * 20)
            chat.turn("numbers.percent", s=share, n=per * whole, c=whole)
        case _:
            units(chat)


UNITS = (
    ("hours", 60, "minutes"),
    ("minutes", 60, "seconds"),
    ("days", 24, "hours"),
    ("weeks", 7, "days"),
    ("years", 12, "months"),
    ("metres", 100, "centimetres"),
)


def units(chat: Chat) -> None:
    unit, per, small = pick(chat.rng, UNITS)
    amount = 2 + int(chat.rng.random() * 8)
    chat.turn("numbers.units", s=small, n=amount, u=unit, c=amount * per)


def chance_question(chat: Chat) -> None:
    """A coin, a die, a random number."""
    rng = chat.rng
    form = int(rng.random() * 4)
    if form == 0:
        chat.turn("numbers.coin", side=pick(rng, ("Heads.", "Tails.", "It is heads.", "It is tails.")))
    elif form == 1:
        chat.turn("numbers.die", c=1 + int(rng.random() * 6))
    elif form == 2:
        top = pick(rng, (5, 6, 10, 10, 20, 50, 100))
        chat.turn("numbers.pick", n=top, c=1 + int(rng.random() * top))
    else:
        chat.turn("numbers.random", c=number(rng))
