"""JSON Schemas: what is accepted yields instances that validate, what is not is refused by name."""

from __future__ import annotations

import gc
import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine import LLM, SamplingParams
from engine.core.params.structured import StructuredOutputs
from engine.structured.grammar import Compiler, json_grammar
from engine.structured.json_schema import prepare
from engine.structured.unique import of_grammar
from tests.support.schemas import SUPPORTED, UNSUPPORTED
from tests.support.walks import walk

pytestmark = pytest.mark.filterwarnings("ignore:Possible (nested set|set intersection):FutureWarning")


def check(text: str, schema: Any) -> None:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


def test_a_schema_leaves_no_garbage_for_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        prepare({"properties": {"a": {"enum": [1, 2]}, "b": {"anyOf": [{"type": "null"}, {"minLength": 2}]}}})
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_there_are_enough() -> None:
    assert len(SUPPORTED) >= 150


@pytest.mark.parametrize("name", SUPPORTED)
def test_random_walks_validate(name: str, compiler: Compiler) -> None:
    grammar = json_grammar(SUPPORTED[name])
    compiler.check(grammar)
    matcher = compiler.compile(grammar)
    texts = [walk(matcher, random.Random(seed), of_grammar(grammar)) for seed in range(3)]
    assert any(text is not None for text in texts)
    for text in texts:
        if text is not None:
            check(text, SUPPORTED[name])


@pytest.mark.parametrize(
    ("word", "schema"), [(word, schema) for word, schemas in UNSUPPORTED.items() for schema in schemas]
)
def test_refused_by_name(word: str, schema: Any, compiler: Compiler) -> None:
    with pytest.raises(ValueError, match=re.escape(word)) as caught:
        compiler.check(json_grammar(schema))
    assert len(str(caught.value)) < 500


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 10), marks=pytest.mark.slow)])
def test_a_model_that_knows_nothing_obeys(tiny_model: Path, seeds: range) -> None:
    """Through the whole engine, all at once, hot."""
    llm = LLM(model=str(tiny_model), device="cpu", max_num_seqs=64, max_num_batched_tokens=1024)
    asked = [(name, seed) for name in SUPPORTED for seed in seeds]
    sampling = [
        SamplingParams(
            temperature=1.5,
            max_tokens=2500,
            seed=seed,
            structured_outputs=StructuredOutputs(json=json.dumps(SUPPORTED[name])),
        )
        for name, seed in asked
    ]
    results = llm.generate([{"prompt_token_ids": [1, i % 60]} for i in range(len(asked))], sampling, use_tqdm=False)
    unfinished = 0
    for result, (name, _) in zip(results, asked, strict=True):
        (answer,) = result.outputs
        if answer.finish_reason == "length":
            unfinished += 1
        else:
            assert answer.finish_reason == "stop", name
            check(answer.text, SUPPORTED[name])
    assert unfinished <= 3 * len(seeds)
    llm.close()


def test_switches_of_the_library_are_not_for_users(compiler: Compiler) -> None:
    assert "x-guidance" not in prepare({"x-guidance": {"lenient": True}, "type": "null"})
    with pytest.raises(ValueError, match="not"):
        compiler.check(json_grammar({"x-guidance": {"lenient": True}, "not": {"multipleOf": 3}}))


def test_text_and_object_are_the_same() -> None:
    schema = {"type": "object", "properties": {"ä": {"type": "string", "pattern": "^\\d$"}}}
    assert prepare(schema) == prepare(json.dumps(schema))
    assert schema["properties"]["ä"]["pattern"] == "^\\d$", "the user's own schema stays as it is"  # type: ignore[index]
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        prepare({"default": {1, 2}})


@pytest.mark.parametrize(("day", "good"), [("2024-02-29", True), ("2023-02-29", False), ("1900-02-29", False),
    ("2000-02-29", True), ("0000-01-01", False), ("0400-02-29", True), ("0010-01-31", True),
    ("2024-04-31", False)])  # fmt: skip
def test_dates_know_leap_years(day: str, good: bool, compiler: Compiler) -> None:
    matcher = compiler.compile(json_grammar({"type": "string", "format": "date"}))
    written = f'"{day}"'.encode()
    assert (matcher.try_consume_tokens(list(written)) == len(written)) is good
