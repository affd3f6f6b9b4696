"""Generates the tables in docs/ from their declarations: request parameters (api.md), flags (flags.md), models
(models.md).

`python -m server.docs.tables` rewrites them. A table is between `<!-- parameters: NAME -->`, or `flags` or `table`
instead of `parameters`, and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from engine import EngineConfig
from engine.flags import settings_of
from engine.models.catalog import families, quantizations
from server.apis.anthropic.protocol import MessagesRequest
from server.apis.ollama import protocol as ollama
from server.apis.openai.chat.protocol import ChatCompletionRequest
from server.apis.openai.completions.protocol import CompletionRequest
from server.apis.openai.embeddings.protocol import EmbeddingChatRequest, EmbeddingTextRequest
from server.apis.openai.generate.protocol import TokensRequest
from server.apis.openai.models.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from server.apis.openai.pooling.protocol import PoolingRequest
from server.apis.openai.responses.protocol import ResponsesRequest
from server.apis.openai.scores.protocol import ClassifyRequest, RerankRequest, ScoreRequest
from server.apis.parameters import LEFT_OUT
from server.docs.chat_formats import formats_table
from server.http.bodies import NOT_SUPPORTED, WITHOUT_EFFECT
from server.settings import ServerConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENTS = (DOCS / "api.md", DOCS / "flags.md", DOCS / "models.md")
REQUESTS: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/chat/completions": (ChatCompletionRequest,),
    "/v1/completions": (CompletionRequest,),
    "/inference/v1/generate": (TokensRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/messages": (MessagesRequest,),
    "/v1/embeddings": (EmbeddingTextRequest, EmbeddingChatRequest),
    "/v1/score": (ScoreRequest,),
    "/v1/rerank": (RerankRequest,),
    "/v1/classify": (ClassifyRequest,),
    "/pooling": (PoolingRequest,),
    "/tokenize": (TokenizeTextRequest, TokenizeChatRequest),
    "/detokenize": (DetokenizeRequest,),
    "/api/chat": (ollama.ChatRequest,),
    "/api/generate": (ollama.GenerateRequest,),
    "/api/embed": (ollama.EmbedRequest,),
    "/api/embeddings": (ollama.EmbeddingsRequest,),
    "/api/show": (ollama.ShowRequest,),
}
WITH_A_TABLE = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")  # endpoints with a table of their own
_TABLE = re.compile(r"(<!-- (?:parameters|flags|table): (.*?) -->\n\n).*?(\n<!-- end -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Return the tables by name, in Markdown."""
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
    parameters = {name: head + "".join(rows.values()) for name, rows in found.items()}
    flags = {"engine": _flags(EngineConfig), "server": _flags(ServerConfig)}
    models = {"families": _described("architecture", families()), "formats": _described("method", quantizations())}
    models["tool calls"] = formats_table()
    fields = {"taken": _fields(None), "refused": _fields(NOT_SUPPORTED), "ignored": _fields(WITHOUT_EFFECT)}
    return parameters | flags | models | fields


def _fields(description: str | None) -> str:
    """List the fields of each endpoint with this description; None: fields with an effect, of the others."""
    rows = []
    for path, requests in REQUESTS.items():
        if description is None and path in WITH_A_TABLE:
            continue
        schemas = [request.model_json_schema()["properties"] for request in requests]
        said = {name: field.get("description") for schema in schemas for name, field in schema.items()}
        plain = [name for name, words in said.items() if words not in (NOT_SUPPORTED, WITHOUT_EFFECT)]
        names = plain if description is None else [name for name, words in said.items() if words == description]
        rows += [f"| `{path}` | {', '.join(f'`{name}`' for name in sorted(names))} |\n"] if names else []
    return "| endpoint | parameters |\n|---|---|\n" + "".join(rows)


def _described(title: str, rows: dict[str, str]) -> str:
    return f"| {title} | description |\n|---|---|\n" + "".join(
        f"| `{name}` | {about} |\n" for name, about in rows.items()
    )


def _flags(cls: type) -> str:
    """Return a row for each flag of a settings class."""
    rows = []
    for setting in settings_of(cls).values():
        variable = f" (environment: `{setting.env}`)" if setting.declaration.env else ""
        meaning = setting.declaration.help.replace("|", "\\|") + variable
        default = setting.default
        shown = f"`{str(default).lower() if type(default) is bool else default}`"
        names = " ".join(f"`{name}`" for name in (setting.option, setting.declaration.short) if name)
        rows.append(f"| {names} | {meaning} | {'' if default in (None, '', (), [], {}) else shown} |\n")
    return "| flag | meaning | default |\n|---|---|---|\n" + "".join(rows)


def _rows(request: type[BaseModel]) -> dict[str, str]:
    """Return a row for each field with an effect, required fields first."""
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
    if high is not None and high >= 2**31 - 1:  # the limit of the type, not worth showing
        low, high = (None, None) if low is not None and low < -1 else (low, None)
    bounds = [("above", above), ("at least", low), ("at most", high)]
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def updated(text: str) -> str:
    """Return a document with regenerated tables."""
    found = tables()
    return _TABLE.sub(lambda match: match[1] + found[match[2]].rstrip("\n") + "\n" + match[3], text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(updated(document.read_text(encoding="utf-8")), encoding="utf-8")
