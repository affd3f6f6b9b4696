"""Arguments that are not written as JSON: what of a schema is enforced, and bounds."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.params.structured import Literals, Parameters
from engine.structured.arguments import prepare_arguments
from engine.structured.grammar import library_schema

MARKS = Parameters(key="<p=", value=">", end="</p>")
GEMMA = Literals(assign=":", separator=",", quote="<q>")


def prepared(schema: dict[str, Any], syntax: Any = MARKS, lenient: bool = False) -> list[str]:
    notes: list[str] = []
    prepare_arguments(schema, syntax, library_schema, notes, lenient)
    return notes


@pytest.mark.parametrize("syntax", [MARKS, GEMMA])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"patternProperties": {"a": {}}}, "patternProperties"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "not"),
        ({"allOf": [{"required": ["a"]}]}, "allOf"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], keyword: str, syntax: Any) -> None:
    with pytest.raises(ValueError, match=f"{keyword} is not supported"):
        prepared(schema, syntax)
    assert f"{keyword} is not enforced" in prepared(schema, syntax, lenient=True)


@pytest.mark.parametrize("syntax", [MARKS, GEMMA])
def test_references_that_double_are_bounded(syntax: Any) -> None:
    levels = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**levels, "d40": {"type": "string"}}}
    with pytest.raises(ValueError, match="too large"):
        prepared(schema, syntax)
