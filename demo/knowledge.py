"""Questions of everyday knowledge with one right answer: animals, countries, words, the calendar."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from demo import world
from demo.chat import LINES, TABLES, Chat
from demo.grammar import article, chance, pick, render, sentence_case


@dataclass(frozen=True)
class Question:
    """A template and its slots, the answer (one of several texts), a short answer, and words of a right one."""

    template: str
    answers: str | Sequence[str]
    short: str
    slots: Mapping[str, object]
    expect: tuple[str, ...] = ()

    def answer(self, rng: random.Random) -> str:
        return self.answers if isinstance(self.answers, str) else pick(rng, self.answers)


def fact(key: str, /, **slots: object) -> Question:
    """The question and answer of this name in texts/turns.yaml."""
    lines = LINES[f"knowledge.{key}"]
    assert isinstance(lines.say, str)
    expect = tuple(word.format_map(slots) for word in lines.expect)
    return Question(lines.ask, lines.say.format_map(slots), lines.short.format_map(slots), slots, expect)


IRREGULAR = {"mouse": "mice", "goose": "geese", "wolf": "wolves", "fox": "foxes", "ostrich": "ostriches"}
IRREGULAR |= {"butterfly": "butterflies", "octopus": "octopuses", "sheep": "sheep", "fish": "fish", "deer": "deer"}


def plural(noun: str) -> str:
    return IRREGULAR.get(noun, noun + "s")


def says(sound: str) -> bool:
    """Does an animal say this, or does it make it?"""
    described = sound[0] == "a" or sound.startswith(("no ", "clicks", "high"))
    return not described and " " not in sound.replace("ooh ooh aah aah", "")


def animal_question(rng: random.Random) -> Question:
    name = pick(rng, list(world.ANIMALS))
    sound, young, kind, legs, home, food, size = world.ANIMALS[name]
    slots = {"x": name, "ax": article(name), "xs": plural(name), "Ax": sentence_case(article(name))}
    slots["Xs"] = sentence_case(plural(name))
    which = int(rng.random() * 9)
    if which >= 7:
        return fact("animal_what", **slots, kind=article(kind), a_kind=article(kind), home=home, food=food)
    if which == 0:
        return fact("animal_sound", **slots, verb="says" if says(sound) else "makes", sound=sound)
    if which == 1:
        return fact("animal_young", **slots, young=young, a_young=article(young))
    if which == 2:
        return fact("animal_kind", **slots, kind=kind, a_kind=article(kind))
    if which == 3:
        octopus = name == "octopus"
        count = "eight" if octopus else "no" if legs == 0 else world.NUMBER_WORDS[legs]
        return fact("animal_legs", **slots, count=count, noun="arms" if octopus else "legs")
    if which == 4:
        return fact("animal_home", **slots, home=home)
    if which == 5:
        return fact("animal_food", **slots, food=food)
    for _ in range(50):
        other = pick(rng, list(world.ANIMALS))
        if abs(world.ANIMALS[other][6] - size) >= 2:
            break
    else:
        return animal_question(rng)
    bigger = chance(rng, 0.6)
    winner = name if (size > world.ANIMALS[other][6]) == bigger else other
    word = "bigger" if bigger else "smaller"
    slots |= {"y": other, "ay": article(other), "word": word, "winner": winner}
    question = fact("animal_size", **slots, a_winner=article(winner), Winner=sentence_case(article(winner)))
    return replace(question, template=question.template.replace("{word}", word))


def country_question(rng: random.Random) -> Question:
    name = pick(rng, list(world.COUNTRIES))
    capital, continent, language = world.COUNTRIES[name]
    which = rng.random()
    if which < 0.6:
        return fact("capital", x=name, capital=capital, name=capital.removesuffix("."))
    if which < 0.75:
        return fact("continent", x=name, X=sentence_case(name), continent=continent)
    if which < 0.9:
        return fact("language", x=name, language=language)
    country = next(country for country, facts in world.COUNTRIES.items() if facts[0] == capital)
    return fact("country", c=capital, name=capital.removesuffix("."), country=country)


def thing_question(rng: random.Random) -> Question:
    which = rng.random()
    if which < 0.25:
        job = pick(rng, list(world.JOBS))
        return fact("job", x=article(job), X=sentence_case(article(job)), does=world.JOBS[job])
    if which < 0.35:
        thing = pick(rng, list(world.THING_COLOURS))
        return fact("thing_colour", x=thing, X=sentence_case(thing), colour=world.THING_COLOURS[thing])
    name = pick(rng, list(world.THINGS))
    what, use, material = world.THINGS[name]
    x = name if name in ("scissors", "paper", "soap") else article(name)
    be, it = ("are", "them") if name == "scissors" else ("is", "it")
    slots = {"x": x, "X": sentence_case(x), "be": be}
    if which < 0.6:
        return fact("thing", **slots, it=it, what=what, use=use)
    if which < 0.85:
        return fact("thing_use", **slots, use=use)
    return fact("thing_material", **slots, material=material)


def word_question(rng: random.Random) -> Question:
    which = rng.random()
    if which < 0.35:
        word, other = pick(rng, list(world.OPPOSITES.items()))
        values = list(world.OPPOSITES.values())
        if chance(rng, 0.5) and other not in world.OPPOSITES and values.count(other) == 1:
            word, other = other, word
        return fact("opposite", x=word, other=other)
    for below, key, pairs in (
        (0.55, "plural", world.PLURALS),
        (0.72, "past", world.PAST),
        (0.85, "synonym", world.SYNONYMS),
    ):
        if which < below:
            word, other = pick(rng, list(pairs.items()))
            return fact(key, x=word, other=other)
    group = pick(rng, world.RHYMES)
    word = pick(rng, group)
    others = [other for other in group if other != word]
    rhymes = [f"{sentence_case(other)} rhymes with {word}." for other in others]
    return Question(LINES["knowledge.rhyme"].ask, rhymes, others[0], {"x": word})


ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"


def calendar_question(rng: random.Random) -> Question:
    which = int(rng.random() * 8)
    cycle, unit = (world.DAYS, "day") if chance(rng, 0.5) else (world.MONTHS, "month")
    at = int(rng.random() * len(cycle))
    name = cycle[at]
    after, before = cycle[(at + 1) % len(cycle)], cycle[at - 1]
    slots = {"x": name, "u": unit}
    if which <= 1:
        return fact("after", **slots, after=after)
    if which == 2:
        return fact("before", **slots, before=before)
    if which == 3:
        return fact("two_days" if unit == "day" else "two_months", **slots, later=cycle[(at + 2) % len(cycle)])
    if which == 4 and unit == "day":
        return fact("tomorrow", **slots, after=after)
    if which == 5 or unit == "day":
        month = int(rng.random() * 12)
        leap = " (29 in a leap year)" if month == 1 else ""
        return fact("month_days", m=world.MONTHS[month], days=world.MONTH_DAYS[month], leap=leap)
    if which == 6:
        return fact("season", **slots, season=world.MONTH_SEASONS[at])
    return fact("ordinal", o=ORDINALS.split()[at], name=name)


def letter_question(rng: random.Random) -> Question:
    which = rng.random()
    letters = string.ascii_uppercase
    if which < 0.5:
        at = int(rng.random() * 26)
        if chance(rng, 0.6) and at < 25:
            return fact("next_letter", x=letters[at], after=letters[at + 1])
        at = max(at, 1)
        return fact("last_letter", x=letters[at], before=letters[at - 1])
    if which < 0.8:
        shape = article(pick(rng, list(world.SHAPE_SIDES)))
        return fact("sides", x=shape, X=sentence_case(shape), sides=world.SHAPE_SIDES[shape.split(" ")[1]])
    if which < 0.9:
        return fact("alphabet", all=" ".join(letters))
    word = "months"
    if chance(rng, 0.5):
        word = pick(rng, ("days of the week", "days", "weekdays", "days in a week"))
    return fact("calendar", x=word, all=", ".join(world.DAYS if word != "months" else world.MONTHS))


def definition(rng: random.Random) -> Question:
    name = pick(rng, list(world.DEFINITIONS))
    text, short = world.DEFINITIONS[name]
    return Question(LINES["quire.what"].ask, text, short, {"x": name}, (text,))


def everyday(rng: random.Random) -> Question:
    questions, answer, short = pick(rng, world.EVERYDAY)
    return Question(TABLES["openers"]["everyday"] + questions, answer, short, {}, (answer,))


def translation(rng: random.Random) -> Question:
    word = pick(rng, list(world.TRANSLATIONS))
    at = int(rng.random() * 4)
    return fact("translation", x=word, l=world.LANGUAGES[at], other=world.TRANSLATIONS[word][at])


KNOWLEDGE: dict[Callable[[random.Random], Question], int] = {
    everyday: 26,
    definition: 16,
    animal_question: 12,
    country_question: 14,
    thing_question: 11,
    word_question: 12,
    calendar_question: 7,
    letter_question: 4,
    translation: 6,
}
KNOWLEDGE_DRAW = [function for function, weight in KNOWLEDGE.items() for _ in range(weight)]


def draw_question(rng: random.Random) -> Question:
    return pick(rng, KNOWLEDGE_DRAW)(rng)


def ask_one(chat: Chat) -> Question:
    """A question, at times with a wish for the form of its answer, or two at once. Returns the first one."""
    rng = chat.rng
    question = draw_question(rng)
    text = chat.phrase(question.template, slots=question.slots)
    form = rng.random()
    short = question.short
    if form < 0.07 and " " not in short:
        asked = render(rng, pick(rng, TABLES["one_word"]), {"q": text}, "")
        chat.reply(asked, sentence_case(short), skill="one word", expect=(short,), plain=True)
    elif form < 0.1:
        asked = text + pick(rng, TABLES["loud"])
        chat.reply(asked, question.answer(rng).upper(), skill="upper case", plain=True)
    elif form < 0.12 and len(short) < 40:
        answer = json.dumps({"answer": short}, ensure_ascii=False)
        chat.reply(text + pick(rng, TABLES["as_json"]), answer, skill="json answer", plain=True)
    elif form < 0.15:
        other = draw_question(rng)
        second = chat.phrase(other.template, slots=other.slots)
        joined = text.rstrip("?.! ") + pick(rng, ("? And ", "? Also, ", " and ", "? ")) + second
        chat.reply(joined, f"{question.answer(rng)} {other.answer(rng)}", skill="two questions")
    else:
        chat.reply(text, question.answer(rng), short=short, skill="knowledge", expect=question.expect)
    return question


def follow_up(chat: Chat, question: Question) -> bool:
    """Ask "what about France?" after the capital of Italy. Returns whether there is such a question."""
    rng = chat.rng
    if "capital of {x}" in question.template and "which country" not in question.template:
        country = pick(rng, list(world.COUNTRIES))
        capital = world.COUNTRIES[country][0]
        chat.turn("follow_up.capital", x=country, c=capital, name=capital.removesuffix("."))
    elif "opposite of {x}" in question.template:
        word, other = pick(rng, list(world.OPPOSITES.items()))
        chat.turn("follow_up.opposite", x=word, c=other)
    elif "sound does {ax}" in question.template:
        name = pick(rng, ("cat", "dog", "cow", "sheep", "pig", "duck", "owl", "frog", "bee", "lion"))
        x = article(name)
        chat.turn("follow_up.sound", x=x, X=sentence_case(x), c=world.ANIMALS[name][0])
    else:
        return False
    return True
