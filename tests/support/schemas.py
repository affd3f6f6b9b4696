"""JSON Schemas as people write them: those that are supported, and those that are not with the keyword to be named."""

from __future__ import annotations

from typing import Any


def obj(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """A closed object; all properties are required unless said otherwise."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": t} for t in ("string", "integer", "number", "boolean", "null"))
SHORT = {"type": "string", "maxLength": 12}

SUPPORTED: dict[str, Any] = {
    # the types
    "string": STRING,
    "integer": INTEGER,
    "number": NUMBER,
    "boolean": BOOLEAN,
    "null": NULL,
    "several types": {"type": ["integer", "boolean", "null"]},
    "string or number": {"type": ["string", "number"], "maxLength": 5, "maximum": 3},
    "anything small": {"enum": [1, "a", None, True, [], {}]},
    "a schema of nothing but words": {
        "title": "T",
        "description": "D",
        "type": "null",
        "$comment": "c",
        "examples": [1],
    },
    "unknown words": {"type": "boolean", "x-order": 3, "nullable": True, "deprecated": False, "default": True},
    # strings
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "exact length": {"type": "string", "minLength": 4, "maxLength": 4},
    "empty string": {"type": "string", "maxLength": 0},
    "long at least": {"type": "string", "minLength": 30, "maxLength": 40},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,6}$"},
    "pattern in the middle": {"type": "string", "pattern": "abc", "maxLength": 9},
    "pattern of digits": {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    "pattern without digits": {"type": "string", "pattern": r"^[^\d]{4}$"},
    "pattern of no digit": {"type": "string", "pattern": r"^\D{4}$"},
    "pattern of words": {"type": "string", "pattern": r"^\w+$", "maxLength": 10},
    "pattern of no word": {"type": "string", "pattern": r"^\W{5}$"},
    "pattern without words": {"type": "string", "pattern": r"^[^\w\s]{5}$"},
    "pattern of spaces": {"type": "string", "pattern": r"^\s{3}$"},
    "pattern of no space": {"type": "string", "pattern": r"^\S{5}$"},
    "pattern without spaces": {"type": "string", "pattern": r"^[^\s@]+@[^\s@]+\.[^\s@]+$", "maxLength": 30},
    "pattern of alternatives": {"type": "string", "pattern": "^(red|green|blue)(-(light|dark))?$"},
    "pattern, begin of one, end of other": {"type": "string", "pattern": "^a|b$", "maxLength": 8},
    "pattern with brackets": {"type": "string", "pattern": r"^[[\]]{2}[a&&b]{3}$"},
    "pattern with braces": {"type": "string", "pattern": "^{[a-c]}$"},
    "pattern with groups": {"type": "string", "pattern": "^(?:(?P<x>a)|(b)){3}$"},
    "pattern, any case": {"type": "string", "pattern": "^(?i:yes|no)$"},
    "pattern with escapes": {"type": "string", "pattern": r"^\/\-\.\t\x41\u00e9$"},
    "pattern without quotes": {"type": "string", "pattern": r'^[^"]+$', "maxLength": 9},
    "pattern without backslashes": {"type": "string", "pattern": r"^[^\\]+$", "maxLength": 9},
    "pattern of controls": {"type": "string", "pattern": r"^[\x00-\x1f]{4}$"},
    "pattern of quotes": {"type": "string", "pattern": r'^"[\\"]"$'},
    "pattern beyond ASCII": {"type": "string", "pattern": "^[à-ÿ]{2}日?$"},
    "pattern and length": {"type": "string", "pattern": "^(ab)+$", "minLength": 6, "maxLength": 6},
    "pattern, lazy": {"type": "string", "pattern": "^a+?b*?c$", "maxLength": 9},
    "pattern, dot": {"type": "string", "pattern": "^.{3}$"},
    "hex colour": {"type": "string", "pattern": "^#(?:[0-9a-fA-F]{3}){1,2}$"},
    "semantic version": {
        "type": "string",
        "pattern": r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]{1,8})?$",
    },
    "snake case": {"type": "string", "pattern": "^[a-z]+(_[a-z]+)*$", "maxLength": 20},
    # formats
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "email": {"type": "string", "format": "email", "maxLength": 40},
    "hostname": {"type": "string", "format": "hostname", "maxLength": 40},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "uri": {"type": "string", "format": "uri", "maxLength": 60},
    "duration": {"type": "string", "format": "duration", "maxLength": 20},
    "date in the 21st century": {"type": "string", "format": "date", "pattern": "^20"},
    "OpenAPI's numbers": obj(a={"type": "integer", "format": "int32"}, b={"type": "number", "format": "double"}),
    "OpenAPI's int64": {"type": "integer", "format": "int64", "minimum": 0},
    "password": {"type": "string", "format": "password", "maxLength": 8},
    # numbers
    "minimum": {"type": "integer", "minimum": 17},
    "maximum": {"type": "integer", "maximum": -3, "minimum": -300},
    "range": {"type": "integer", "minimum": 0, "maximum": 150},
    "one number": {"type": "integer", "minimum": 7, "maximum": 7},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "both kinds of bounds": {"type": "integer", "minimum": 1, "exclusiveMinimum": 4, "maximum": 9},
    "range of fractions": {"type": "number", "minimum": 0, "maximum": 1},
    "exclusive range of fractions": {"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 2.25},
    "negative fractions": {"type": "number", "minimum": -1.5, "maximum": -0.25},
    "integer between fractions": {"type": "integer", "minimum": 0.5, "maximum": 2.5},
    "latitude": {"type": "number", "minimum": -90, "maximum": 90},
    "large bounds": {"type": "integer", "minimum": -9007199254740992, "maximum": 9007199254740992},
    "multiple": {"type": "integer", "multipleOf": 5},
    "multiple in a range": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 50},
    "multiple of a half": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 4},
    "multiple of a quarter": {"type": "number", "multipleOf": 0.25, "minimum": -3, "maximum": 3},
    "draft 4's exclusive bound": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 6,
    },
    # enum, const
    "enum": {"enum": ["red", "amber", "green"]},
    "enum of numbers": {"enum": [1, 2.5, -3, 1e3]},
    "enum of objects": {"enum": [{"a": 1, "b": [True, None]}, {"a": 2, "b": []}]},
    "enum of unicode": {"enum": ["Grüße", "日本語", "🙂", 'quo"te', "back\\slash", "new\nline", "\u0007"]},
    "enum narrowed by its type": {"type": "string", "enum": ["a", "b", 3]},
    "enum narrowed by a pattern": {"enum": ["apple", "pear", "plum"], "pattern": "^p"},
    "const": {"const": "fixed"},
    "const number": {"const": 42},
    "const object": {"const": {"k": ["v", {"deep": None}]}},
    "const null": {"const": None},
    "const in an object": obj(kind={"const": "circle"}, radius={"type": "integer", "minimum": 0, "maximum": 9}),
    "enum of one": obj(a={"enum": ["only"]}),
    "many values": {"enum": [f"value {i}" for i in range(2000)]},
    # arrays
    "array": {"type": "array", "items": INTEGER, "maxItems": 4},
    "array of a length": {"type": "array", "items": BOOLEAN, "minItems": 3, "maxItems": 3},
    "empty array": {"type": "array", "maxItems": 0},
    "array at least": {"type": "array", "items": NULL, "minItems": 2, "maxItems": 9},
    "tuple": {"type": "array", "prefixItems": [INTEGER, SHORT, BOOLEAN], "items": False, "minItems": 3},
    "tuple with a rest": {"type": "array", "prefixItems": [BOOLEAN], "items": NULL, "maxItems": 4},
    "tuple of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INTEGER, BOOLEAN],
        "additionalItems": False,
        "minItems": 2,
    },
    "array of arrays": {"type": "array", "maxItems": 3, "items": {"type": "array", "maxItems": 3, "items": BOOLEAN}},
    "matrix": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
        },
    },
    "array of enums": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 5},
    "array of objects": {"type": "array", "items": obj(x=INTEGER), "maxItems": 3},
    "unique, of one": {"type": "array", "items": BOOLEAN, "maxItems": 1, "uniqueItems": True},
    "set of texts": {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 5, "uniqueItems": True},
    "set of few texts, draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "array",
        "items": {"enum": ["a", "b", "c"]},
        "uniqueItems": True,
    },
    "contained, draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": {"enum": ["a", "b", "c"]},
        "contains": {"const": "b"},
        "maxItems": 3,
    },
    "tuple of draft 7 by reference": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [BOOLEAN, {"$ref": "#/items/0"}],
        "minItems": 2,
        "maxItems": 2,
    },
    "set of numbers": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 12},
        "minItems": 9,
        "uniqueItems": True,
    },
    "set of objects": {"type": "array", "items": obj(a=SHORT), "minItems": 1, "maxItems": 3, "uniqueItems": True},
    "set of sets": obj(
        a={"type": "array", "items": {"$ref": "#/$defs/set"}, "minItems": 2, "maxItems": 3, "uniqueItems": True},
        b={"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2},
    )
    | {"$defs": {"set": {"type": "array", "items": {"enum": [*range(9), "red", "redder"]}, "uniqueItems": True}}},
    "not unique": {"type": "array", "items": BOOLEAN, "maxItems": 3, "uniqueItems": False},
    "array of anything of": {"type": "array", "maxItems": 4, "items": {"anyOf": [BOOLEAN, NULL, {"const": "x"}]}},
    # objects
    "object": obj(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "optional properties": obj(["b"], a=BOOLEAN, b=NULL, c=INTEGER),
    "all optional": obj([], a=BOOLEAN, b=BOOLEAN, c=BOOLEAN),
    "no properties": {"type": "object", "additionalProperties": False},
    "open object": {"type": "object", "properties": {"a": BOOLEAN}, "required": ["a"], "maxProperties": 1},
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 3,
    },
    "map at least one": {"type": "object", "additionalProperties": BOOLEAN, "minProperties": 1, "maxProperties": 2},
    "extra properties of a type": {"type": "object", "properties": {"a": NULL}, "additionalProperties": BOOLEAN},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": {"type": "integer"}, "^b_[a-z]{1,3}$": BOOLEAN},
        "additionalProperties": False,
    },
    "pattern properties beside others": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0}},
        "required": ["id"],
        "patternProperties": {r"^\w{1,4}!$": NULL},
        "additionalProperties": False,
    },
    "required without properties": {"type": "object", "required": ["a", "b"], "additionalProperties": BOOLEAN},
    "property that may not be": {
        "type": "object",
        "properties": {"a": False, "b": NULL},
        "additionalProperties": False,
    },
    "property that may be anything of": obj(a={"anyOf": [SHORT, NULL]}),
    "names to be escaped": obj(**{'a"b': BOOLEAN, "c\\d": BOOLEAN, "e\nf": BOOLEAN, "": NULL}),  # type: ignore[arg-type]
    "names beyond ASCII": obj(**{"größe": INTEGER, "名前": SHORT, "🙂": BOOLEAN}),  # type: ignore[arg-type]
    "names like keywords": obj(["required", "enum"], **{"required ": NULL, "enum": BOOLEAN, "type": NULL})
    | {"properties": {"properties": BOOLEAN, "required": NULL, "enum": BOOLEAN, "$ref": NULL, "items": BOOLEAN}},
    "nested": obj(a=obj(b=obj(c=obj(d=obj(e=BOOLEAN))))),
    "nested optional": obj([], a=obj([], b=obj([], c=BOOLEAN))),
    "at least one of all": {**obj([], a=BOOLEAN, b=BOOLEAN), "minProperties": 1},
    "many properties": obj([f"p{i}" for i in range(0, 60, 2)], **{f"p{i}": BOOLEAN for i in range(60)}),
    # combinations
    "anyOf": {"anyOf": [BOOLEAN, {"type": "string", "maxLength": 4}, obj(a=NULL)]},
    "anyOf of objects": {"anyOf": [obj(cat=BOOLEAN), obj(dog=INTEGER)]},
    "anyOf with siblings": {"type": "string", "anyOf": [{"minLength": 2, "maxLength": 3}, {"const": "x"}]},
    "oneOf of types": {"oneOf": [BOOLEAN, NULL, {"type": "integer", "minimum": 0, "maximum": 5}]},
    "oneOf by kind": {"oneOf": [obj(kind={"const": "a"}, x=BOOLEAN), obj(kind={"const": "b"}, y=NULL)]},
    "oneOf of constants": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]},
    "oneOf of ranges": {"oneOf": [{"type": "integer", "maximum": 3, "minimum": 0}, {"type": "string", "maxLength": 2}]},
    "allOf": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 8}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": BOOLEAN}, "required": ["a"]},
            {"type": "object", "properties": {"b": NULL}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "allOf of strings": {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 4}, {"pattern": "^[ab]+$"}]},
    "allOf with a reference": {
        "allOf": [ref("base"), {"properties": {"b": BOOLEAN}, "required": ["b"]}],
        "$defs": {"base": {"type": "object", "properties": {"a": NULL}, "required": ["a"]}},
        "maxProperties": 2,
    },
    "anyOf in allOf": {"allOf": [{"anyOf": [BOOLEAN, NULL]}, {"anyOf": [NULL, {"type": "integer"}]}]},
    "nullable reference": {"anyOf": [ref("a"), NULL], "$defs": {"a": obj(x=BOOLEAN)}},
    # references
    "reference": obj(a=ref("t"), b=ref("t")) | {"$defs": {"t": {"enum": ["x", "y"]}}},
    "definitions": {"$ref": "#/definitions/t", "definitions": {"t": {"type": "integer", "minimum": 1, "maximum": 3}}},
    "reference to a reference": {"$ref": "#/$defs/a", "$defs": {"a": ref("b"), "b": ref("c"), "c": BOOLEAN}},
    "reference with siblings": {
        "$ref": "#/$defs/a",
        "maxLength": 3,
        "$defs": {"a": {"type": "string", "minLength": 1}},
    },
    "reference to a property": obj(a={"enum": [1, 2]}, b={"$ref": "#/properties/a"}),
    "reference with escapes": {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": {"const": 5}}},
    "anchor": {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "null"}}},
    "identified": {"$id": "https://example.com/root", "$ref": "inner", "$defs": {"i": {"$id": "inner", "const": 1}}},
    "reference outside of definitions": {
        "$ref": "#/components/x",
        "components": {"x": {"pattern": r"^\W$", "type": "string"}},
    },
    # recursion
    "list": {**ref("n"), "$defs": {"n": obj(["v"], v=BOOLEAN, next={"anyOf": [ref("n"), NULL]})}},
    "tree": {
        **ref("n"),
        "$defs": {"n": obj(["v"], v=BOOLEAN, children={"type": "array", "items": ref("n"), "maxItems": 1})},
    },
    "optional recursion": {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    "mutual recursion": {
        **ref("a"),
        "$defs": {"a": obj([], b=ref("b")), "b": obj([], a=ref("a"), stop=BOOLEAN)},
    },
    "expression": {
        **ref("e"),
        "$defs": {
            "e": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, obj(op={"enum": ["-"]}, of=ref("e"))]}
        },
    },
    "nested lists": {**ref("l"), "$defs": {"l": {"type": "array", "items": ref("l"), "maxItems": 1}}},
    # as applications have them
    "person": obj(
        name=SHORT,
        born={"type": "string", "format": "date"},
        email={"type": "string", "format": "email", "maxLength": 30},
        address=obj(
            street=SHORT, zip={"type": "string", "pattern": r"^\d{5}(-\d{4})?$"}, country={"enum": ["DE", "FR"]}
        ),
        tags={"type": "array", "items": SHORT, "maxItems": 3},
    ),
    "tool call": obj(
        name={"const": "get_weather"},
        arguments=obj(["city"], city=SHORT, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
    "invoice": obj(
        number={"type": "string", "pattern": "^INV-[0-9]{6}$"},
        lines={
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": obj(
                sku={"type": "string", "pattern": "^[A-Z]{3}$"},
                quantity={"type": "integer", "minimum": 1, "maximum": 99},
                price={"type": "number", "minimum": 0, "maximum": 999.99},
            ),
        },
        paid=BOOLEAN,
    ),
    "GeoJSON point": obj(
        type={"const": "Point"},
        coordinates={
            "type": "array",
            "prefixItems": [
                {"type": "number", "minimum": -180, "maximum": 180},
                {"type": "number", "minimum": -90, "maximum": 90},
            ],
            "items": False,
            "minItems": 2,
        },
    ),
    "shapes": {
        "anyOf": [ref("circle"), ref("square")],
        "$defs": {
            "circle": obj(kind={"const": "circle"}, r={"type": "number", "exclusiveMinimum": 0, "maximum": 10}),
            "square": obj(kind={"const": "square"}, side={"type": "integer", "minimum": 1, "maximum": 10}),
        },
    },
    "pydantic model": {
        "$defs": {
            "Item": {
                "properties": {
                    "name": {"title": "Name", "type": "string", "maxLength": 10},
                    "price": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 100}, NULL], "default": None},
                },
                "required": ["name"],
                "title": "Item",
                "type": "object",
                "additionalProperties": False,
            }
        },
        "properties": {"items": {"items": ref("Item"), "maxItems": 2, "title": "Items", "type": "array"}},
        "required": ["items"],
        "title": "Order",
        "type": "object",
        "additionalProperties": False,
    },
    "OpenAI's strict style": obj(
        steps={"type": "array", "maxItems": 2, "items": obj(explanation=SHORT, output=SHORT)}, final_answer=SHORT
    ),
    "yes or no with a reason": obj(reason={"type": "string", "maxLength": 30}, answer={"enum": ["yes", "no"]}),
    "classification": obj(label={"enum": ["spam", "ham"]}, confidence={"type": "number", "minimum": 0, "maximum": 1}),
    "entity extraction": {
        "type": "array",
        "maxItems": 3,
        "items": obj(
            text=SHORT, type={"enum": ["PER", "ORG", "LOC"]}, start={"type": "integer", "minimum": 0, "maximum": 99}
        ),
    },
    "settings": {
        "type": "object",
        "properties": {
            "theme": {"enum": ["dark", "light"], "default": "dark"},
            "size": {"type": "integer", "minimum": 8},
        },
        "patternProperties": {"^x-[a-z]{1,4}$": SHORT},
        "additionalProperties": False,
    },
    "any object": {"type": "object"},
}

# keyword → schemas that must be refused by a message that names it
UNSUPPORTED: dict[str, list[Any]] = {
    "uniqueItems": [{"$ref": "#/$defs/a", "uniqueItems": True, "$defs": {"a": {"$anchor": "b"}, "c": {"$ref": "#b"}}}],
    "contains": [{"type": "array", "contains": {"multipleOf": 2}, "maxContains": 2}],
    "not": [{"not": {"multipleOf": 3}}, obj(a={"not": {"const": 1}})],
    "propertyNames": [{"type": "object", "propertyNames": {"pattern": "(a)\\1", "maxLength": 3}}],
    "dependentSchemas": [{"type": "object", "dependentSchemas": {"a": 3}}],
    "dependencies": [{"type": "object", "dependencies": {"a": "b"}}],
    "dependentRequired": [{"type": "object", "dependentRequired": {"a": "b"}}],
    "unevaluatedItems": [{"type": "array", "unevaluatedItems": False, "anyOf": [{"prefixItems": [True]}, {}]}],
    "oneOf": [{"oneOf": [{"type": "integer"}, {"type": "number"}]}],
    "pattern": [
        {"type": "string", "pattern": "(?:a(?=b.).)*c"},
        {"type": "string", "pattern": "(?<!a)b"},
        {"type": "string", "pattern": "x" * 30_000},
        {"type": "string", "pattern": "(x{1000}){1000}"},
        {"type": "string", "pattern": 5},
    ],
    "patternProperties": [{"type": "object", "patternProperties": {"(?<=a)": BOOLEAN}}],
    "minProperties": [{"type": "object", "minProperties": 3}],
    "multipleOf": [{"type": "number", "multipleOf": 1e-7}, {"type": "integer", "multipleOf": 999999937}],
    "minimum": [{"type": "integer", "minimum": 2**60}, {"type": "integer", "minimum": "3"}],
    "minimum (5) is greater than maximum": [{"type": "integer", "minimum": 5, "maximum": 3}],
    "exclusiveMaximum": [{"type": "number", "exclusiveMaximum": -1e300}],
    "enum": [{"enum": [2**70]}, {"enum": "a"}, {"enum": list(range(11_000))}],
    "const": [{"const": {"a": [2**63]}}],
    "type": [{"type": "strng"}, {"type": 3}, {"type": []}, {"type": ["string", 3]}],
    "properties": [{"type": "object", "properties": [1]}, obj(**{f"p{i}": BOOLEAN for i in range(1500)})],  # type: ignore[arg-type]
    "required": [{"type": "object", "required": "a"}],
    "anyOf": [{"anyOf": []}, {"anyOf": {"type": "string"}}],
    "allOf": [{"allOf": [3]}],
    "incompatible types": [{"allOf": [{"type": "string"}, {"type": "object"}]}],
    "minLength": [{"type": "string", "minLength": -1}, {"type": "string", "minLength": "3"}],
    "items": [{"type": "array", "items": 3}],
    "$ref": [
        {"$ref": "https://example.com/elsewhere.json"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": obj(a={"$ref": "#/$defs/a"})}},
        obj(a={"type": "array", "minItems": 1, "items": {"$ref": "#"}}),
        {"allOf": [{"$ref": f"#/$defs/{i}"} for i in range(900)], "$defs": {str(i): {} for i in range(900)}},
    ],
    "written out": [
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{(i + 1) % n}"}] * 2} for i in range(n)}
            | {str(n - 1): {"type": "object", "properties": {"a": {"$ref": "#/$defs/0", "minProperties": 1}}}},
        }
        for n in (30, 390)
    ],
    "$dynamicRef": [{"$dynamicRef": "#x"}],
    "levels": ['{"items":' * 100 + "{}" + "}" * 100, '{"items":' * 5000 + "{}" + "}" * 5000],
    "characters": [{"description": "x" * 2_000_000}, {"x" * 200_000: 1}],
    "not valid JSON": ["{", '{"minimum": NaN}', "{'type': 'string'}"],
    "must be an object": ["[]", "3", '"string"'],
}
