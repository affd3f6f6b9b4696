"""Writes the table of features in docs/composition.md: `python -m tests.composition.table`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.composition.features import BY_NAME, FEATURES, NO_PAIR, REFUSED

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "composition.md"
HOW = {"model": "the model", "weights": "the checkpoint", "setting": "the default", "request": "the request"}
_TABLE = re.compile(r"(<!-- features -->\n\n).*?(\n<!-- end -->)", re.DOTALL)


def rows() -> str:
    """Return a row for each feature: with what it is not used together, and why."""
    lines = ["| feature | how to get it | refused with | no pair with |", "|---|---|---|---|"]
    for feature in FEATURES:
        flags = " ".join(f"`{_flag(name, value)}`" for name, value in feature.settings.items() if value is not False)
        how = feature.how or flags or HOW[feature.kind]
        lines.append(f"| {feature.name} | {how} | {_pairs(feature.name, REFUSED)} | {_pairs(feature.name, NO_PAIR)} |")
    return "\n".join(lines) + "\n"


def _flag(name: str, value: object) -> str:
    option = "--" + name.replace("_", "-")
    return option if value is True else f"{option} {str(value).replace('{folder}/', '')}"


def _pairs(name: str, reasons: dict[frozenset[str], str]) -> str:
    kinds = {BY_NAME[name].kind}
    found: dict[str, list[str]] = {}
    for pair, reason in reasons.items():
        if name in pair:
            [other] = pair - {name}
            found.setdefault(reason, []).append(
                "other formats" if BY_NAME[other].kind in kinds & {"weights"} else other
            )
    return "; ".join(f"{', '.join(dict.fromkeys(others))}: {reason}" for reason, others in found.items())


def updated(text: str) -> str:
    """Return the document with the current table."""
    return _TABLE.sub(lambda match: match[1] + rows() + match[2], text)


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
