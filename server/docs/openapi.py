"""The OpenAPI description with examples and errors, at /openapi.json and /docs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from server.apis.api import API
from server.apis.endpoint import MODEL, Endpoint
from server.apis.openai.errors import ERROR_SCHEMA
from server.docs.page import page
from server.http.auth import is_open

_STATUSES = {
    400: "The request is not valid.",
    401: "The key is missing or wrong.",
    403: "The key may not do this.",
    404: "There is no such model, or no such thing.",
    409: "The request was aborted, or others are in its way.",
    500: "The server failed.",
    503: "The engine is not running, or takes no more requests.",
}
_EVENT = {
    "type": "object",
    "description": "a server-sent event",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_INTRODUCTION = (
    "Quire speaks the APIs of OpenAI (base URL `http://HOST:PORT/v1`), Anthropic and Ollama (`http://HOST:PORT`). "
    "Fields that "
    "are unknown or have no effect are named in the answer's `warnings` and in the header `X-Quire-Warnings`; fields "
    "that "
    "would change the answer and are not supported are refused with status 400."
)


def add_reference(app: FastAPI, apis: Sequence[API], model_name: str) -> None:
    """Add /openapi.json and /docs. `model_name`: for the examples."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=_INTRODUCTION, routes=app.routes, servers=app.servers
            )
            app.openapi_schema = _described(schema, apis, model_name)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False, response_model=None)
    async def docs(request: Request) -> Response:
        return Response(page(app.openapi(), str(request.base_url).rstrip("/")), media_type="text/html")


def _described(schema: dict[str, Any], apis: Sequence[API], model_name: str) -> dict[str, Any]:
    components = schema["components"]
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    components["schemas"] |= {"Error": ERROR_SCHEMA}
    components["schemas"] |= {api.errors.name: api.errors.schema for api in apis if api.errors is not None}
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "where the server asks for keys"},
        "x-api-key": {
            "type": "apiKey",
            "in": "header",
            "name": "x-api-key",
            "description": "the same, as Anthropic has it",
        },
    }
    for api in apis:
        for endpoint in api.endpoints:
            _describe(schema["paths"][endpoint.path][endpoint.method.lower()], api, endpoint, model_name)
    tags = dict.fromkeys(endpoint.tag for api in apis for endpoint in api.endpoints)
    schema["tags"] = [{"name": tag} for tag in tags]
    return schema


def _describe(operation: dict[str, Any], api: API, endpoint: Endpoint, model_name: str) -> None:
    operation |= {"tags": [endpoint.tag], "summary": endpoint.summary}
    if endpoint.description:
        operation["description"] = endpoint.description
    known = {each["name"] for each in operation.get("parameters", ())}
    for name in re.findall(r"{(\w+)}", endpoint.path):
        if name not in known:  # the handler reads this path parameter itself
            parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            operation.setdefault("parameters", []).append(parameter)
    if not is_open(endpoint.path):
        operation["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
    if endpoint.requests:
        content = operation["requestBody"]["content"]["application/json"]
        content["examples"] = {title: {"value": _named(body, model_name)} for title, body in endpoint.requests.items()}
    operation["responses"] = _answers(endpoint, model_name) | _errors(api, endpoint)


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
    if endpoint.lines is not None:
        example = _named_text(endpoint.lines, model_name)
        content["application/x-ndjson"] = {"schema": {"type": "object"}, "example": example}
    if endpoint.text:
        content["text/plain"] = {"schema": {"type": "string"}, "example": _named_text(endpoint.text, model_name)}
    return {"200": {"description": "The answer.", **({"content": content} if content else {})}}


def _errors(api: API, endpoint: Endpoint) -> dict[str, Any]:
    statuses = set(endpoint.statuses)
    if endpoint.requests:
        statuses |= {400, 500, 503}
    if "input_items" in endpoint.path:
        statuses.add(400)
    if not is_open(endpoint.path):
        statuses.add(401)
    name = api.errors.name if api.errors is not None else "Error"
    body = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}
    empty = endpoint.text == ""
    return {str(status): {"description": _STATUSES[status], **({} if empty else body)} for status in sorted(statuses)}
