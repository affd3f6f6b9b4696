"""The API reference as a page: the OpenAPI description in plain HTML, without scripts or external resources."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from server.http.bodies import NOT_SUPPORTED, WITHOUT_EFFECT


def page(schema: dict[str, Any], base_url: str) -> str:
    """Return the description as HTML. `base_url`: the server's URL, for example commands."""
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
    """Return an object's properties as a table; those without effect in a line below it."""
    rows: list[str] = []
    idle: dict[str, list[str]] = {}
    required = kind.get("required", ())
    for name, each in sorted(kind.get("properties", {}).items(), key=lambda item: item[0] not in required):
        words = each.get("description", "")
        if words in (NOT_SUPPORTED, WITHOUT_EFFECT):
            idle.setdefault(words, []).append(f"<code>{html.escape(name)}</code>")
            continue
        needed = "<b>required</b> " if name in required else ""
        default = each.get("default")
        words += f" Default: `{json.dumps(default)}`." if default is not None else ""
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{needed}{_type(each)}<td>{_marked(words)}")
    lines = [f"<p>{words.rstrip('.')}: {', '.join(names)}.</p>" for words, names in idle.items()]
    return (f"<table>{''.join(rows)}</table>" if rows else "") + "".join(lines)


def _type(kind: dict[str, Any]) -> str:
    """Describe a type in HTML."""
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
    return (method + re.sub(r"[^a-z0-9]+", "-", path)).lower().strip("-")
