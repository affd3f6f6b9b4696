"""Short stories and poems from plots and couplets with slots, all in texts/stories.yaml."""

from __future__ import annotations

import random
from dataclasses import dataclass

from demo.grammar import article, chance, made_up_word, pick, render, sentence_case
from demo.tables import load
from demo.world import FEMALE_NAMES, NAMES, PET_NAMES

_tables = load("stories")
ANIMAL_HEROES: list[str] = _tables["animal_heroes"]
SHE_PEOPLE: list[str] = _tables["she_people"]
HE_PEOPLE: list[str] = _tables["he_people"]
PEOPLE: list[str] = _tables["people"]
THINGS: list[str] = _tables["things"]
PLACES: list[str] = _tables["places"]
FRIENDS: list[str] = _tables["friends"]
FOODS: list[str] = _tables["foods"]
TREASURES: list[str] = _tables["treasures"]
TITLES: list[str] = _tables["titles"]
OPENINGS: list[str] = _tables["openings"]
ENDINGS: list[str] = _tables["endings"]
CONTINUATIONS: list[str] = _tables["continuations"]
SHORT_PLOTS: list[str] = _tables["short_plots"]
COUPLETS: list[str] = _tables["couplets"]
HAIKU: list[str] = _tables["haiku"]
WISHES: list[tuple[str, str, str]] = _tables["wishes"]
FEARS: list[tuple[str, str]] = _tables["fears"]
PLOTS: list[str] = list(_tables["plots"].values())
TOPIC_HAIKU: dict[str, list[str]] = _tables["topic_haiku"]


@dataclass
class Hero:
    """Who a story is about: kind is a noun such as "cat", name a first name."""

    kind: str
    name: str
    pronouns: tuple[str, str, str]  # he, him, his

    @classmethod
    def invent(cls, rng: random.Random, kind: str = "", name: str = "", names: list[str] | None = None) -> Hero:
        if not kind:
            female = name in FEMALE_NAMES
            people = [*PEOPLE, *(["girl"] * 6 if female else ["boy"] * 6)]
            kind = pick(
                rng,
                people if name else pick(rng, (ANIMAL_HEROES, ANIMAL_HEROES, people, SHE_PEOPLE + HE_PEOPLE, THINGS)),
            )
        gender = "she" if kind in SHE_PEOPLE else "he" if kind in HE_PEOPLE else pick(rng, ("she", "he"))
        if name and kind not in SHE_PEOPLE + HE_PEOPLE:
            gender = "she" if name in FEMALE_NAMES else "he"
        if not name:
            pool = PET_NAMES if kind in ANIMAL_HEROES and chance(rng, 0.5) else names or NAMES
            matching = [known for known in pool if (known in FEMALE_NAMES) == (gender == "she")]
            name = pick(rng, matching or pool)
        return cls(kind, name, ("she", "her", "her") if gender == "she" else ("he", "him", "his"))


def story(rng: random.Random, hero: Hero, *, place: str = "", friend: str = "", short: bool = False) -> str:
    """A whole story of about four to ten sentences about the hero."""
    slots = story_slots(rng, hero, place=place, friend=friend)
    opening = render(rng, pick(rng, OPENINGS[1:] if place else OPENINGS), slots)
    if short:
        body = pick(rng, SHORT_PLOTS)
        return opening + render(rng, body, slots)
    return opening + render(rng, pick(rng, PLOTS), slots) + render(rng, pick(rng, ENDINGS), slots)


def continuation(rng: random.Random, hero: Hero, friend: str) -> str:
    return render(rng, pick(rng, CONTINUATIONS), story_slots(rng, hero, friend=friend))


def story_slots(rng: random.Random, hero: Hero, *, place: str = "", friend: str = "") -> dict[str, str]:
    he, him, his = hero.pronouns
    skill, skill_place, skill_done = pick(rng, WISHES)
    fear, fear_words = pick(rng, FEARS)
    if not friend:
        friend = pick(rng, FRIENDS)
        while friend == hero.kind:
            friend = pick(rng, FRIENDS)
    title = pick(rng, TITLES)
    kind = hero.kind if chance(rng, 0.25) or hero.kind.startswith(title) else f"{title} {hero.kind}"
    where = place or pick(rng, PLACES)
    return {
        "name": hero.name,
        "a_title_kind": article(kind),
        "he": he,
        "him": him,
        "his": his,
        "He": he.capitalize(),
        "His": his.capitalize(),
        "place": where,
        "Place": sentence_case(where),
        "friend": friend,
        "food": pick(rng, FOODS),
        "food_little": "a little bread",
        "treasure": pick(rng, TREASURES),
        "skill": skill,
        "skill_place": skill_place,
        "skill_done": skill_done,
        "fear": fear,
        "fear_words": fear_words,
    }


def poem(rng: random.Random, topic: str) -> str:
    """Four rhyming lines about the topic."""
    first, second = rng.sample(COUPLETS, 2)
    lines = f"{first}\n{second}".replace("{t}", topic).split("\n")
    return "\n".join(sentence_case(line) if index % 2 == 0 else line for index, line in enumerate(lines))


def haiku(rng: random.Random, topic: str) -> str:
    own = TOPIC_HAIKU.get(topic)
    text = pick(rng, own) if own and chance(rng, 0.7) else pick(rng, HAIKU).replace("{t}", topic)
    return "\n".join(sentence_case(line) if index == 0 else line for index, line in enumerate(text.split("\n")))


def hero_kind(rng: random.Random) -> str:
    """A noun that a user may ask a story about, at times one that does not exist."""
    kinds = pick(rng, (ANIMAL_HEROES, ANIMAL_HEROES, SHE_PEOPLE + HE_PEOPLE, PEOPLE, THINGS))
    return pick(rng, kinds) if chance(rng, 0.95) else made_up_word(rng, 2)
