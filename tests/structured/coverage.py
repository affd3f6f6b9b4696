"""Count the accepted JSON Schemas of a collection by keyword, and check instances that they allow.

    python -m tests.structured.coverage --packages openai.types anthropic.types     # of every pydantic model in them
    python -m tests.structured.coverage jsonschemabench/data                        # a clone of JSONSchemaBench
    python -m tests.structured.coverage jsonschema-4.26.0/json/tests/draft2020-12/*.json   # the official suite

A folder has files of one schema each, or, as the official suite has them, of groups of tests for one schema each. For
each schema that is accepted a few instances are drawn, all tokens that the grammar allows being equally likely;
jsonschema judges them. The suite's own tests tell which of its instances can be generated.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import pkgutil
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import referencing.exceptions

from engine.structured.grammar import Compiler, Vocabulary, json_grammar
from engine.structured.unique import of_grammar
from tests.support.walks import END, TOKENS, follows, walk

# Said of instances; all others are annotations, or only say how to read these.
KEYWORDS = frozenset(
    """additionalItems additionalProperties allOf anyOf const contains dependencies dependentRequired
    dependentSchemas else enum exclusiveMaximum exclusiveMinimum format if items maxContains maxItems maxLength
    maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern
    patternProperties prefixItems properties propertyNames required then type unevaluatedItems unevaluatedProperties
    uniqueItems $ref $dynamicRef $recursiveRef""".split()  # noqa: SIM905
)
NAMED = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"])


@dataclass
class Outcome:
    name: str
    keywords: set[str]
    refusal: str = ""
    num_instances: int = 0
    invalid: list[str] = field(default_factory=list)  # what is wrong with each
    possible: Counter[tuple[bool, bool]] = field(default_factory=Counter)  # of the suite: (valid, can be generated)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="or a file")
    parser.add_argument("--packages", nargs="+", default=[], metavar="PACKAGE")
    parser.add_argument("--sample", type=int, metavar="N", help="so many schemas, chosen at random; left out: all")
    parser.add_argument("--instances", type=int, default=3, metavar="N", help="drawn of each schema")
    parser.add_argument("--list", action="store_true", help="name every schema that is refused, and why")
    args = parser.parse_args(argv)
    found: dict[str, tuple[Any, list[Any]]] = {name: (schema, []) for name, schema in of_packages(args.packages)}
    found |= {name: (schema, tests) for name, schema, tests in of_folders(args.folders)}
    names = sorted(found)
    if args.sample is not None and args.sample < len(names):
        names = random.Random(0).sample(names, args.sample)
    compiler = Compiler(lambda: Vocabulary(TOKENS, [END - 1, END], [END]))
    outcomes = [tried(name, *found[name], compiler, args.instances) for name in names]
    print(table(outcomes))
    for each in outcomes if args.list else ():
        if each.refusal or each.invalid:
            print(f"{each.name}: {each.refusal or each.invalid[0]}")
    return int(any(each.invalid for each in outcomes))


def of_packages(names: list[str]) -> Iterator[tuple[str, Any]]:
    """The schema of every pydantic model that is defined in these packages."""
    for name in names:
        package = importlib.import_module(name)
        paths = getattr(package, "__path__", [])
        modules = [package, *(_imported(each.name) for each in pkgutil.walk_packages(paths, f"{name}."))]
        for module in filter(None, modules):
            for model in vars(module).values():
                if not (inspect.isclass(model) and issubclass(model, pydantic.BaseModel)):
                    continue
                if model.__module__ == module.__name__:
                    try:
                        yield f"{module.__name__}.{model.__qualname__}", model.model_json_schema()
                    except (pydantic.errors.PydanticUserError, RecursionError):
                        continue  # it has fields of which there is no schema


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # of a package that needs others
        return None


def of_folders(folders: list[Path]) -> Iterator[tuple[str, Any, list[Any]]]:
    """A name, a schema, and the suite's tests of it."""
    for path in [path for each in folders for path in ([each] if each.is_file() else sorted(each.rglob("*.json")))]:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, list):
            yield from ((f"{path}: {each['description']}", each["schema"], each["tests"]) for each in content)
        else:
            yield str(path), content, []


def keywords(schema: Any) -> set[str]:
    found: set[str] = set()
    stack = [schema]
    while stack:
        each = stack.pop()
        if isinstance(each, list):
            stack += each
        elif isinstance(each, dict):
            found |= each.keys() & KEYWORDS
            for name, inner in each.items():
                stack += inner.values() if name in NAMED and isinstance(inner, dict) else [inner]
    return found


def tried(name: str, schema: Any, tests: list[Any], compiler: Compiler, num_instances: int) -> Outcome:
    outcome = Outcome(name, keywords(schema))
    try:
        grammar = json_grammar(json.dumps(schema))
        compiler.check(grammar)
    except ValueError as error:
        outcome.refusal = str(error)
        return outcome
    matcher = compiler.compile(grammar)
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    for seed in range(num_instances):
        if (text := walk(matcher, random.Random(seed), of_grammar(grammar))) is not None:
            outcome.num_instances += 1
            with contextlib.suppress(re.error, referencing.exceptions.Unresolvable):  # what the judge does not know
                outcome.invalid += [error.message[:200] for error in judge.iter_errors(json.loads(text))][:1]
    for test in tests:
        can_be = follows(matcher, json.dumps(test["data"], ensure_ascii=False), of_grammar(grammar))
        outcome.possible[test["valid"], can_be] += 1
        if can_be and not test["valid"]:
            outcome.invalid.append(f"{json.dumps(test['data'])[:200]}: {test['description']}")
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """In Markdown: a line for each keyword, the rarest last."""
    accepted = [each for each in outcomes if not each.refusal]
    num_instances = sum(each.num_instances for each in outcomes)
    possible = sum((each.possible for each in outcomes), Counter[tuple[bool, bool]]())
    num_valid = num_instances - sum(len(each.invalid) for each in outcomes) + possible[False, True]
    lines = [
        f"{len(outcomes)} schemas, {len(accepted)} accepted ({100 * len(accepted) / max(len(outcomes), 1):.1f} %); "
        f"of {num_instances} instances drawn {num_valid} valid",
    ]
    if possible:
        valid, invalid = (possible[kind, True] + possible[kind, False] for kind in (True, False))
        lines += [
            f"of the suite's instances {possible[True, True]} of {valid} valid ones can be generated, "
            f"{possible[False, True]} of {invalid} invalid ones"
        ]
    lines += [
        "",
        "| keyword | schemas | accepted |",
        "|---|---|---|",
    ]
    of_all = Counter(word for each in outcomes for word in each.keywords)
    of_accepted = Counter(word for each in accepted for word in each.keywords)
    lines += [f"| `{word}` | {count} | {of_accepted[word]} |" for word, count in of_all.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
