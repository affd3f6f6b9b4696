"""Keywords of JSON Schema that the grammar library lacks, said in those that it has.

Each rewrite leaves a schema with the same instances, or fewer of them: what is generated is always valid. What cannot be
said so is left as it is, and the library refuses it by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from engine.structured.exclusive import Judge, Schema, exclusive, views
from engine.structured.regex import MAX_LENGTH, end_of_group
from engine.structured.values import TYPES, escaped, listed, pattern_without, values_of, without

MAX_AHEAD = 16  # parts of a pattern that look ahead
_OTHERS = frozenset(["anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "not", "$dynamicRef", "$recursiveRef"])
MAX_CONTAINED = 16  # elements that `minContains` asks for
MAX_UNIQUE = 6  # values whose sets are written out

# Of widely used libraries that write look-ahead, each with a pattern of the same texts without.
_PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)$",  # pydantic's Decimal
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (  # zod's email
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
}


def rewrite(schema: Schema, judge: Judge) -> None:
    """In place, this schema and not those inside it. `judge`: of the document that it is in."""
    _unevaluated(schema, judge)  # before the others add schemas
    for rule in (_pattern, _negation, _dependent, _conditions, _contains, _unique):
        rule(schema)
    _names(schema, judge)
    _one_of(schema, judge)


def _pattern(schema: Schema) -> None:
    """What looks ahead from the beginning is a pattern of its own."""
    pattern = schema.get("pattern", "")
    if (known := _PATTERNS.get(pattern)) is not None:
        schema["pattern"] = known
        return
    if len(pattern) > MAX_LENGTH:
        return  # it will be refused
    for _ in range(MAX_AHEAD):  # each is looked for in all of the rest
        if not pattern.startswith("^(?=") or (end := end_of_group(pattern, 1)) is None:
            return
        also(schema, {"pattern": f"^(?:{pattern[4 : end - 1]})"})
        pattern = schema["pattern"] = "^" + pattern[end:]


def _negation(schema: Schema) -> None:
    """`not` of types, of values where those allowed are named or are texts, and of conditions on properties."""
    refused = schema.get("not")
    if refused is False or refused is True:
        schema.pop("not")
        if refused:
            schema["enum"] = []
    elif isinstance(refused, dict) and refused.keys() == {"type"}:
        kinds = listed(refused["type"])
        types = [kind for kind in listed(schema.get("type", list(TYPES))) if kind not in kinds]
        if "number" in kinds:
            types = [kind for kind in types if kind != "integer"]
        elif "integer" in kinds and "number" in types:
            if "type" in schema:
                return  # fractions alone cannot be said
            types.remove("number")
        schema["type"] = types
        del schema["not"]
    elif isinstance(refused, dict) and "not" in schema and (opposites := _opposites(schema, refused)) is not None:
        del schema["not"]
        also(schema, _any_of(opposites))


def _dependent(schema: Schema) -> None:
    """`dependentRequired`, `dependentSchemas`, `dependencies`: the name is absent, or the rest holds."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        dependent = schema.get(keyword)
        if not isinstance(dependent, dict):
            continue
        del schema[keyword]
        for name, needed in dependent.items():
            more = {"required": [name, *needed]} if isinstance(needed, list) else {"required": [name]}
            there = more if isinstance(needed, list) else {"allOf": [more, needed]}
            also(schema, {"anyOf": [{"properties": {name: False}}, there]})


def _one_of(schema: Schema, judge: Judge) -> None:
    """Where at most one of them can match, it is `anyOf`."""
    if "oneOf" not in schema:
        return
    for branch in schema["oneOf"]:
        if isinstance(branch, dict):
            _negation(branch)
    if (branches := exclusive(schema, judge)) is not None:
        del schema["oneOf"]
        also(schema, {"anyOf": branches})


def _unevaluated(schema: Schema, judge: Judge) -> None:
    """What no other schema for the same object or array speaks of, where these hold always."""
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if schema.get(keyword) in (True, {}):
            del schema[keyword]
    if "unevaluatedItems" in schema and not schema.keys() & {*_OTHERS, "$ref", "allOf", "contains", "additionalItems"}:
        schema.setdefault("items", schema.pop("unevaluatedItems"))
    if "unevaluatedProperties" not in schema:
        return
    always = views(schema, judge.resolve)
    if any(view.keys() & _OTHERS for view in always):
        return
    rest = schema.pop("unevaluatedProperties")
    if any(view.keys() & {"additionalProperties", "unevaluatedProperties"} for view in always):
        return  # all are spoken of
    for keyword in ("properties", "patternProperties"):
        if names := {name: True for view in always for name in view.get(keyword, {})}:
            schema[keyword] = names | schema.get(keyword, {})
    schema["additionalProperties"] = rest


def _conditions(schema: Schema) -> None:
    """`if` of which the opposite can be said, too; of others `then` and `else` both hold."""
    if "if" not in schema:
        for name in ("then", "else"):
            schema.pop(name, None)  # they say nothing
        return
    condition = schema["if"]
    if isinstance(condition, bool):
        also(schema, schema.get("then" if condition else "else", True))
    elif (opposites := _opposites(schema, condition)) is not None:
        met = {"allOf": [condition, schema.get("then", True)]}
        unmet = [{"allOf": [opposite, schema.get("else", True)]} for opposite in opposites]
        also(schema, {"anyOf": [met, *unmet]})
    else:
        also(schema, schema.get("then", True))
        also(schema, schema.get("else", True))
    for name in ("if", "then", "else"):
        schema.pop(name, None)


def _opposites(schema: Schema, condition: Any) -> list[Schema] | None:
    """Schemas of which an instance of `schema` matches one if and only if it does not match `condition`; None: not known."""
    if isinstance(condition, bool):
        return [] if condition else [{}]
    if condition.keys() == {"not"}:
        return [condition["not"]] if isinstance(condition["not"], dict) else None
    if condition.keys() <= {"const", "enum", "type"} and condition.keys() & {"const", "enum"}:
        return _other_values(schema, condition)
    if condition.keys() == {"anyOf"}:
        parts = [_opposites(schema, each) for each in condition["anyOf"]]
        return None if None in parts else [{"allOf": [_any_of(part or []) for part in parts]}]
    if condition.keys() == {"allOf"}:
        parts = [_opposites(schema, each) for each in condition["allOf"]]
        return None if None in parts else [each for part in parts for each in part or ()]
    found = list(_opposites_of_object(schema, condition))
    return None if None in found else [{"type": "object", **each} for each in found if each is not None]


def _other_values(schema: Schema, condition: Schema) -> list[Schema] | None:
    named, chosen = values_of(schema), values_of(condition) or []
    if named is not None:
        return [{"enum": rest}] if (rest := without(named, chosen)) else []
    texts = [value for value in chosen if isinstance(value, str)]
    if schema.get("type") == "string" and (pattern := pattern_without(texts)) is not None:
        return [{"type": "string", "pattern": pattern}]
    return None


def _opposites_of_object(schema: Schema, condition: Schema) -> Iterator[Schema | None]:
    if not condition.keys() <= {"properties", "required", "type"} or condition.get("type", "object") != "object":
        yield None
        return
    wanted, required = condition.get("properties", {}), condition.get("required", [])
    for name in required:
        if name not in schema.get("required", ()):
            yield {"properties": {name: False}}
    for name, value in wanted.items():
        inner = schema.get("properties", {}).get(name)
        others = _opposites(inner if isinstance(inner, dict) else {}, value)
        if others is None:
            yield None
            return
        for other in others:
            yield {"properties": {name: other}, "required": [name]}


def _contains(schema: Schema) -> None:
    """The first elements are those."""
    if "contains" not in schema:
        for name in ("minContains", "maxContains"):
            schema.pop(name, None)  # they say nothing
    if "contains" not in schema or schema.keys() & {"prefixItems", "additionalItems", "maxContains"}:
        return
    if isinstance(items := schema.get("items", True), list) or schema.get("minContains", 1) > MAX_CONTAINED:
        return
    least = schema.pop("minContains", 1)
    schema["prefixItems"] = [{"allOf": [schema["contains"], items]}] * least
    del schema["contains"]
    if not least:
        del schema["prefixItems"]
        return
    schema["minItems"] = max(schema.get("minItems", 0), least)
    schema["type"] = "array" if "array" in listed(schema.get("type", "array")) else schema["type"]


def _unique(schema: Schema) -> None:
    """Of a few named values all sets are written out, in one order each; of more there are at most as many elements."""
    if schema.get("uniqueItems") is not True or schema.keys() & {"prefixItems", "additionalItems", "contains"}:
        return
    values = values_of(schema.get("items"))
    if values is None:
        return
    values = [value for i, value in enumerate(values) if without([value], values[:i])]
    if len(values) > MAX_UNIQUE or schema.get("type") != "array":
        schema["maxItems"] = min(schema.get("maxItems", len(values)), len(values))
        return
    least, most = schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values))
    sets = [chosen for count in range(least, most + 1) for chosen in combinations(values, count)]
    for name in ("uniqueItems", "items", "minItems", "maxItems"):
        schema.pop(name, None)
    arrays = [
        {
            "type": "array",
            **({"prefixItems": [{"const": value} for value in chosen]} if chosen else {}),
            "minItems": len(chosen),
            "maxItems": len(chosen),
        }
        for chosen in sets
    ]
    also(schema, {"anyOf": arrays} if arrays else {"enum": []})


def _names(schema: Schema, judge: Judge) -> None:
    """`propertyNames` by a pattern, a length or a list becomes `patternProperties`."""
    names = schema.get("propertyNames")
    seen = 0
    while isinstance(names, dict) and names.keys() == {"$ref"} and seen < 8:
        names, seen = judge.resolve(names["$ref"]), seen + 1
    if names is True or names in ({}, {"type": "string"}):
        del schema["propertyNames"]
        return
    if names is False:
        schema["maxProperties"] = 0
        del schema["propertyNames"]
    if not isinstance(names, dict) or "patternProperties" in schema or "allOf" in schema or "$ref" in schema:
        return
    pattern, rest = _pattern_of(names), schema.get("additionalProperties", True)
    if pattern is None:
        return
    properties = {name: inner for name, inner in schema.get("properties", {}).items() if _may_be(name, names)}
    if properties and (isinstance(rest, dict) or "pattern" in names):
        return  # patternProperties would be for those, too; and a pattern of others may take a long time to match
    del schema["propertyNames"]
    schema["properties"] = properties
    if rest is not False:
        schema["patternProperties"] = {pattern: rest}
    schema["additionalProperties"] = False


def _may_be(name: str, names: Schema) -> bool:
    """Whether `names`, whose pattern is not looked at, allow it."""
    values = values_of(names)
    in_list = values is None or name in values
    return in_list and names.get("minLength", 0) <= len(name) <= names.get("maxLength", len(name))


def _pattern_of(names: Schema) -> str | None:
    """What the names match; None where no one pattern says it."""
    said = names.keys() - {"type", "description", "title"}
    if said == {"pattern"}:
        pattern = names["pattern"]
        return _PATTERNS.get(pattern, pattern) if isinstance(pattern, str) else None
    if said in ({"enum"}, {"const"}) and all(isinstance(value, str) for value in values_of(names) or [0]):
        return "^(?:" + "|".join(escaped(value) for value in values_of(names) or []) + ")$"
    if said and said <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else {"enum": []}


def also(schema: Schema, more: Any) -> None:
    """Make the schema hold for what both it and `more` hold for."""
    if more is not True:
        schema["allOf"] = [*schema.get("allOf", []), more]
