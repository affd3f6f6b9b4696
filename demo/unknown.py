"""Questions that the demo model must not pretend to answer, and what it says instead: texts/unknown.yaml."""

from __future__ import annotations

from demo.tables import load

_tables = load("unknown")
PEOPLE: list[str] = _tables["people"]
TERMS: list[str] = _tables["terms"]
COUNTRIES: list[str] = _tables["countries"]
PLACES: list[str] = _tables["places"]
LIVE: list[tuple[str, list[str]]] = _tables["live"]
WORK: list[tuple[str, list[str]]] = _tables["work"]
CARE: list[tuple[str, list[str]]] = _tables["care"]
ABOUT_TERM: str = _tables["about_term"]
ABOUT_PERSON: str = _tables["about_person"]
ABOUT_COUNTRY: str = _tables["about_country"]
ABOUT_THING: str = _tables["about_thing"]
MISC: list[str] = _tables["misc"]
DO_NOT_KNOW: list[str] = _tables["do_not_know"]
DO_NOT_KNOW_X: list[str] = _tables["do_not_know_x"]
SUGGESTIONS: list[str] = _tables["suggestions"]
