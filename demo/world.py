"""The small closed world of the demo model. texts/world.yaml says what each column is."""

from __future__ import annotations

from demo.tables import load

Names = list[str]
Pairs = dict[str, str]

_tables = load("world")

NAMES: Names = _tables["names"]
FEMALE_NAMES: frozenset[str] = frozenset(_tables["female_names"])
SURNAMES: Names = _tables["surnames"]
PET_NAMES: Names = _tables["pet_names"]
PETS: Names = _tables["pets"]  # spaces are underscores here, in FOODS and in LISTS' words
JOBS: Pairs = _tables["jobs"]
ROLES: Names = _tables["roles"]
ANIMALS: dict[str, tuple[str, str, str, int, str, str, int]] = _tables["animals"]
COUNTRIES: dict[str, tuple[str, str, str]] = _tables["countries"]
CITIES: Names = _tables["cities"]
THINGS: dict[str, tuple[str, str, str]] = _tables["things"]
THING_COLOURS: Pairs = _tables["thing_colours"]
COLOURS: Names = _tables["colours"]
FOODS: Names = _tables["foods"]
HOBBIES: Names = _tables["hobbies"]
DEFINITIONS: dict[str, tuple[str, str]] = _tables["definitions"]
EVERYDAY: list[tuple[str, str, str]] = _tables["everyday"]
OPPOSITES: Pairs = _tables["opposites"]
SYNONYMS: Pairs = _tables["synonyms"]
PLURALS: Pairs = _tables["plurals"]
PAST: Pairs = _tables["past"]
RHYMES: list[Names] = _tables["rhymes"]
LANGUAGES: Names = _tables["languages"]
TRANSLATIONS: dict[str, Names] = _tables["translations"]
OTHER_LANGUAGES: Names = _tables["other_languages"]
FOREIGN: Names = _tables["foreign"]
COMMON_WORDS: Names = _tables["common_words"]
ADJECTIVES: Names = _tables["adjectives"]
SENTENCES: Names = _tables["sentences"]
TOPICS: Names = _tables["topics"]
ABSTRACT: Names = _tables["abstract"]
LISTS: dict[str, Names] = {
    topic: [word.replace("_", " ") for word in words.split()] for topic, words in _tables["lists"].items()
}
SINGULAR: Pairs = _tables["singular"]
IDEAS: Pairs = _tables["ideas"]
JOKES: list[tuple[str, str]] = _tables["jokes"]
RIDDLES: list[tuple[str, str]] = _tables["riddles"]
FUN_FACTS: Names = _tables["fun_facts"]
DAYS: Names = _tables["days"]
MONTHS: Names = _tables["months"]
MONTH_DAYS: list[int] = _tables["month_days"]
MONTH_SEASONS: Names = _tables["month_seasons"]
NUMBER_WORDS: Names = _tables["number_words"]
TENS: Names = _tables["tens"]
SHAPE_SIDES: Pairs = _tables["shape_sides"]
