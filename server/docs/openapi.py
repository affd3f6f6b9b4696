"""The API reference: examples and errors into the OpenAPI description, and that as a page. Knows OpenAPI; no endpoint.

The page is plain HTML from this server alone: no script, nothing from elsewhere.
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from server.docs.endpoints import ENDPOINTS, MODEL, Endpoint
from server.http.errors import is_anthropic
from server.openai.protocol import RANGES

_STATUSES = {
    400: "The request is not valid.",
    401: "The key is missing or wrong.",
    404: "There is no such model, or no such thing.",
    409: "The request was aborted.",
    500: "The server failed.",
    503: "The engine is not running, or takes no more requests.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "description": "Where a key is missing, only a text.",
            "anyOf": [
                {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"], "description": "the field that is to blame"},
                        "code": {"type": "integer", "description": "the HTTP status"},
                    },
                },
                {"type": "string"},
            ],
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_EVENT = {
    "type": "object",
    "description": "a server-sent event",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_INTRODUCTION = (
    "Quire speaks the APIs of OpenAI (base URL `http://HOST:PORT/v1`) and Anthropic (`http://HOST:PORT`). Fields that are "
    "unknown or have no effect are named in the answer's `warnings` and in the header `X-Quire-Warnings`; fields that "
    "would change the answer and are not supported are refused with status 400."
)


def add_reference(app: FastAPI, model_name: str) -> None:
    """/openapi.json and /docs. `model_name`: for the examples."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=_INTRODUCTION, routes=app.routes, servers=app.servers
            )
            app.openapi_schema = _described(schema, model_name)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False, response_model=None)
    async def docs(request: Request) -> Response:
        return Response(page(app.openapi(), str(request.base_url).rstrip("/")), media_type="text/html")


# ---- the description ----


def _described(schema: dict[str, Any], model_name: str) -> dict[str, Any]:
    components = schema["components"]
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    components["schemas"] |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "where the server was given --api-key"},
        "x-api-key": {
            "type": "apiKey",
            "in": "header",
            "name": "x-api-key",
            "description": "the same, as Anthropic has it",
        },
    }
    for kind in components["schemas"].values():
        for name, field in kind.get("properties", {}).items():
            lowest, highest = RANGES.get(name, (None, None))
            field |= {"minimum": lowest} if lowest is not None else {}
            field |= {"maximum": highest} if highest is not None else {}
    for endpoint in ENDPOINTS:
        operation = schema["paths"][endpoint.path][endpoint.method.lower()]
        operation |= {"tags": [endpoint.tag], "summary": endpoint.summary}
        if endpoint.description:
            operation["description"] = endpoint.description
        if endpoint.path.startswith("/v1"):
            operation["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
        if endpoint.requests:
            content = operation["requestBody"]["content"]["application/json"]
            content["examples"] = {
                title: {"value": _named(body, model_name)} for title, body in endpoint.requests.items()
            }
        operation["responses"] = _answers(endpoint, model_name) | _errors(endpoint)
    schema["tags"] = [{"name": tag} for tag in dict.fromkeys(endpoint.tag for endpoint in ENDPOINTS)]
    return schema


def _named(value: Any, model_name: str) -> Any:
    return json.loads(_named_text(json.dumps(value), model_name))


def _named_text(text: str, model_name: str) -> str:
    return text.replace(MODEL, json.dumps(model_name)[1:-1])


def _answers(endpoint: Endpoint, model_name: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answer is not None:
        kind = {"type": "object", "required": [*endpoint.answer]}
        content["application/json"] = {"schema": kind, "example": _named(endpoint.answer, model_name)}
    if endpoint.events is not None:
        example = _named_text(endpoint.events, model_name)
        content["text/event-stream"] = {"schema": _EVENT, "example": example}
    if endpoint.text:
        content["text/plain"] = {"schema": {"type": "string"}, "example": _named_text(endpoint.text, model_name)}
    return {"200": {"description": "The answer.", **({"content": content} if content else {})}}


def _errors(endpoint: Endpoint) -> dict[str, Any]:
    statuses = set(endpoint.statuses)
    if endpoint.requests:
        statuses |= {400, 500, 503}
    if "input_items" in endpoint.path:
        statuses.add(400)
    if endpoint.path.startswith("/v1"):
        statuses.add(401)
    name = "AnthropicError" if is_anthropic(endpoint.path) else "Error"
    body = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}
    empty = endpoint.text == ""
    return {str(status): {"description": _STATUSES[status], **({} if empty else body)} for status in sorted(statuses)}


# ---- the page ----


def page(schema: dict[str, Any], base_url: str) -> str:
    """The description as HTML. `base_url`: where the server is, for the commands."""
    operations = [
        (method.upper(), path, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    menu, sections = [], []
    for tag in schema["tags"]:
        own = [each for each in operations if each[2].get("tags") == [tag["name"]]]
        links = "".join(
            f'<li><a href="#{_anchor(method, path)}"><b>{method}</b> {html.escape(path)}</a>' for method, path, _ in own
        )
        menu.append(f"<h2>{html.escape(tag['name'])}</h2><ul>{links}</ul>")
        sections += [_section(method, path, operation, schema, base_url) for method, path, operation in own]
    bodies = {_body_name(operation) for _, _, operation in operations}
    objects = [
        f'<article id="{name}"><h3>{name}</h3>{_words(kind.get("description"))}{_fields(kind)}</article>'
        for name, kind in schema["components"]["schemas"].items()
        if name not in bodies and kind.get("properties")
    ]
    return _PAGE.format(
        title=html.escape(f"{schema['info']['title']} {schema['info']['version']}: API reference"),
        introduction=_words(schema["info"]["description"]),
        menu="".join(menu),
        sections="".join(sections),
        objects="".join(objects),
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'self'; img-src 'self'">
  <title>{title}</title>
  <link rel="icon" type="image/svg+xml" href="static/icon.svg">
  <link rel="stylesheet" href="static/docs.css">
</head>
<body>
<nav>{menu}<p><a href="openapi.json">openapi.json</a> · <a href="./">chat page</a></p></nav>
<main>
<h1>{title}</h1>
{introduction}
{sections}
<h2>Objects</h2>
{objects}
</main>
</body>
</html>
"""


def _section(method: str, path: str, operation: dict[str, Any], schema: dict[str, Any], base_url: str) -> str:
    parts = [
        f'<article id="{_anchor(method, path)}"><h3><b>{method}</b> {html.escape(path)}</h3>',
        _words(operation["summary"] + "."),
        _words(operation.get("description")),
    ]
    if parameters := operation.get("parameters"):
        kind = {
            "properties": {each["name"]: each["schema"] for each in parameters},
            "required": [each["name"] for each in parameters if each.get("required")],
        }
        parts.append(_fields(kind))
    if "requestBody" in operation:
        parts.append(_body(operation, schema))
    examples = _examples(operation)
    command = _command(method, base_url + path, next(iter(examples.values()), None))
    parts.append(f"<h4>Try it</h4><pre>{html.escape(command)}</pre>")
    for title, example in list(examples.items())[1:]:
        text = json.dumps(example, ensure_ascii=False, indent=1)
        parts.append(f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>")
    for kind, content in operation["responses"]["200"].get("content", {}).items():
        example = content["example"]
        text = example if isinstance(example, str) else json.dumps(example, ensure_ascii=False, indent=1)
        parts.append(f"<h4>Answer <small>{kind}</small></h4><pre>{html.escape(text)}</pre>")
    errors = "".join(
        f"<li><b>{status}</b> {html.escape(answer['description'])}"
        for status, answer in operation["responses"].items()
        if status != "200"
    )
    parts.append(f"<h4>Errors</h4><ul>{errors}</ul>" if errors else "")
    return "".join(parts) + "</article>"


def _examples(operation: dict[str, Any]) -> dict[str, Any]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return {title: example["value"] for title, example in content.get("examples", {}).items()}


def _command(method: str, url: str, body: Any) -> str:
    command = f"curl {url}" if method == "GET" else f"curl -X {method} {url}"
    if body is None:
        return command
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"curl {url} -H 'Content-Type: application/json' -d '{data}'"


def _body_name(operation: dict[str, Any]) -> str:
    kind = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return str(kind.get("$ref", "")).rpartition("/")[2]


def _body(operation: dict[str, Any], schema: dict[str, Any]) -> str:
    name = _body_name(operation)
    if name:
        return _fields(schema["components"]["schemas"][name])
    kind = operation["requestBody"]["content"]["application/json"]["schema"]
    return f"<p>The body: {_type(kind)}.</p>"


def _fields(kind: dict[str, Any]) -> str:
    """The properties of an object as a table; those that do nothing in one line below it."""
    rows: list[str] = []
    idle: dict[str, list[str]] = {}
    required = kind.get("required", ())
    for name, each in sorted(kind.get("properties", {}).items(), key=lambda item: item[0] not in required):
        words = each.get("description", "")
        if words in ("Not supported yet.", "Accepted; has no effect."):
            idle.setdefault(words, []).append(f"<code>{html.escape(name)}</code>")
            continue
        needed = "<b>required</b> " if name in required else ""
        default = each.get("default")
        words += f" Default: `{json.dumps(default)}`." if default is not None else ""
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{needed}{_type(each)}<td>{_marked(words)}")
    lines = [f"<p>{words.rstrip('.')}: {', '.join(names)}.</p>" for words, names in idle.items()]
    return (f"<table>{''.join(rows)}</table>" if rows else "") + "".join(lines)


def _type(kind: dict[str, Any]) -> str:
    """The type in words, as HTML."""
    match kind:
        case {"$ref": str(reference)}:
            name = html.escape(reference.rpartition("/")[2])
            return f'<a href="#{name}">{name}</a>'
        case {"anyOf": list(members)} | {"oneOf": list(members)}:
            return " or ".join(dict.fromkeys(_type(each) for each in members if each != {"type": "null"}))
        case {"enum": list(values)}:
            return ", ".join(f"<code>{html.escape(json.dumps(value))}</code>" for value in values)
        case {"const": value}:
            return f"<code>{html.escape(json.dumps(value))}</code>"
        case {"type": "array", "items": dict(items)}:
            return f"list of {_type(items)}"
        case {"type": list(names)}:
            return " or ".join(html.escape(name) for name in names if name != "null")
        case {"type": str(name)}:
            return html.escape(name)
    return "any"


def _words(text: str | None) -> str:
    return f"<p>{_marked(' '.join(text.split()))}</p>" if text else ""


def _marked(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _anchor(method: str, path: str) -> str:
    return (method + re.sub(r"[^a-z]+", "-", path)).lower().strip("-")
