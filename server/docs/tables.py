"""The tables of request parameters in docs/api.md, generated from the requests' fields.

`python -m server.docs.tables` rewrites them. A table stands between `<!-- parameters: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from server.generation.parameters import LEFT_OUT
from server.http.bodies import NOT_SUPPORTED, WITHOUT_EFFECT
from server.openai.chat.protocol import ChatCompletionRequest
from server.openai.completions.protocol import CompletionRequest
from server.openai.embeddings.protocol import EmbeddingTextRequest

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
_TABLE = re.compile(r"(<!-- parameters: (.*?) -->\n\n).*?(\n<!-- end -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """The tables by name, in Markdown."""
    chat, completions = _rows(ChatCompletionRequest), _rows(CompletionRequest)
    embeddings = _rows(EmbeddingTextRequest)
    common = {name: row for name, row in chat.items() if completions.get(name) == row}
    found = {
        "both": common,
        "chat": {name: row for name, row in chat.items() if name not in common},
        "completions": {name: row for name, row in completions.items() if name not in common},
        "embeddings": {name: row for name, row in embeddings.items() if name not in common},
    }
    head = "| parameter | meaning | range | default |\n|---|---|---|---|\n"
    return {name: head + "".join(rows.values()) for name, rows in found.items()}


def _rows(request: type[BaseModel]) -> dict[str, str]:
    """A row for each field that has an effect, required ones first."""
    schema = request.model_json_schema()
    required = schema.get("required", [])
    fields = sorted(schema["properties"].items(), key=lambda item: item[0] not in required)
    return {
        name: _row(name, field, name in required)
        for name, field in fields
        if field.get("description", NOT_SUPPORTED) not in (NOT_SUPPORTED, WITHOUT_EFFECT)
    }


def _row(name: str, field: dict[str, Any], is_required: bool) -> str:
    meaning, _, unset = field["description"].partition(LEFT_OUT)
    default = field.get("default")
    shown = "required" if is_required else unset.removesuffix(".")
    if default is not None:
        shown = f"`{default:g}`" if type(default) is float else f"`{json.dumps(default)}`"
    return f"| `{name}` | {meaning} | {_range(field)} | {shown} |\n"


def _range(field: dict[str, Any]) -> str:
    low, above, high = (field.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if (most := field.get("maxItems")) is not None:
        return f"at most {most} entries"
    if high is not None and high >= 2**31 - 1:  # as much as an integer holds
        low, high = (None, None) if low is not None and low < -1 else (low, None)
    bounds = [("above", above), ("at least", low), ("at most", high)]
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def updated(text: str) -> str:
    """A document with its tables as they should be."""
    found = tables()
    return _TABLE.sub(lambda match: match[1] + found[match[2]].rstrip("\n") + "\n" + match[3], text)


if __name__ == "__main__":
    API.write_text(updated(API.read_text(encoding="utf-8")), encoding="utf-8")
