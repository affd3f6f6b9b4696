"""A sample of the JSON Schemas that public packages bring, for `tests.structured.coverage`.

    pip download --no-deps -d wheels …
    for each in wheels/*.whl; do unzip -q $each '*.json' -d unpacked/$(basename $each | cut -d- -f1,2); done
    npm install --prefix npm --ignore-scripts …
    python -m tests.structured.public_schemas unpacked npm/node_modules --into schemas
    python -m tests.structured.coverage schemas --list

docs/benchmarks.md names the packages. Of each at most 20 schemas are chosen at random; schemas of ESLint's rules count
as a package of 40.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST, MOST_RULES = 20, 40
TESTS_OF_OTHERS = ("ajv", "schema-utils", "jsonschema_specifications")
RULES = """
const rules = {};
for (const [name, rule] of require("eslint/use-at-your-own-risk").builtinRules) {
  const schema = rule.meta.schema;
  if (schema) rules[name] = Array.isArray(schema)
    ? {type: "array", items: schema, minItems: 0, maxItems: schema.length} : schema;
}
console.log(JSON.stringify(rules));
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of unpacked packages")
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    seen: set[str] = set()
    for group, name, schema in (each for folder in args.folders for each in of_folder(folder)):
        text = json.dumps(schema, sort_keys=True)
        if text not in seen:
            seen.add(text)
            groups[group][name] = schema
    for group, schemas in groups.items():
        most = MOST_RULES if group == "eslint_rules" else MOST
        names = sorted(schemas)
        for name in random.Random(0).sample(names, most) if len(names) > most else names:
            path = args.into / group / f"{name.removesuffix('.json')}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(schemas[name]), encoding="utf-8")
    return 0


def of_folder(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Package, name and schema of each file that looks like one, and of ESLint's rules where it is installed."""
    for path in sorted(folder.rglob("*.json")):
        parts = path.relative_to(folder).parts
        if "node_modules" in parts or any(part.startswith(TESTS_OF_OTHERS) for part in parts):
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(found, dict) and is_schema(found):
            group = "_".join(parts[:2]) if parts[0].startswith("@") else parts[0]
            yield group, "_".join(parts[1:])[-100:], found
    if (folder / "eslint").is_dir():
        rules = json.loads(subprocess.check_output(["node", "-e", RULES], cwd=folder.parent))
        for name, schema in rules.items():
            if schema.get("maxItems") != 0:
                yield "eslint_rules", f"{name}.json", {"$schema": "http://json-schema.org/draft-04/schema#", **schema}


def is_schema(found: dict[str, Any]) -> bool:
    is_object = found.get("type") == "object" and isinstance(found.get("properties"), dict)
    return is_object or "json-schema.org" in str(found.get("$schema", ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
