"""Chat templates that write tool calls in the shapes of published ones, with marks of their own."""

from __future__ import annotations

_HEAD = """
{%- if tools %}[system]{% for t in tools %}{{ t | tojson }}{% endfor %}[/system]{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- '[tool]' + m.content + '[/tool]' }}
    {%- elif m.tool_calls %}{{- '[assistant]' + (m.content or '') }}"""
_TAIL = """{{- '[/assistant]' }}
    {%- else %}{{- '[' + m.role + ']' + (m.content or '') + '[/' + m.role + ']' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""


def template(call: str, before: str = "", between: str = "", after: str = "") -> str:
    """Return a template. `call`: Jinja for one call `c`; `before`, `between`, `after`: texts around the calls."""
    joint = "{%- if not loop.last %}{{- " + repr(between) + " }}{%- endif %}"
    body = (
        "{{- " + repr(before) + " }}"
        "{%- for c in m.tool_calls %}{%- set c = c.function %}" + call + joint + "{%- endfor %}"
        "{{- " + repr(after) + " }}"
    )
    return _HEAD + body + _TAIL


def _parameters(key: str, value: str, end: str) -> str:
    return (
        "{%- for k, v in c.arguments.items() %}{{- " + repr(key) + " + k + " + repr(value) + " }}"
        "{{- v if v is string else v | tojson }}{{- " + repr(end) + " }}{%- endfor %}"
    )


_OBJECT = """{{- '{"name": "' + c.name + '", "arguments": ' + (c.arguments | tojson) + '}' }}"""
_PYTHON = (
    "{{- c.name + '(' }}{%- for k, v in c.arguments.items() %}{{- k + '=' + (v | tojson) }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}"
)
# Templates of listed formats, by the format's name.
LISTED: dict[str, str] = {
    "xlam": template(_OBJECT, "[", ", ", "]"),
    "llama4_pythonic": template(_PYTHON, "[", ", ", "]"),
    "lfm2": template(_PYTHON, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "phi4_mini": template(_OBJECT, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "granite": template(_OBJECT, "<|tool_call|>[", ", ", "]"),
    "phi4_mini_json": template(_OBJECT, "functools[", ", ", "]"),
    "deepseek_v31": template(
        "{{- '<｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + (c.arguments | tojson) + '<｜tool▁call▁end｜>' }}",
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": template(
        "{{- '<|tool_call_begin|>functions.' + c.name + ':' + loop.index0 | string + '<|tool_call_argument_begin|>' }}"
        "{{- (c.arguments | tojson) + '<|tool_call_end|>' }}",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
}
# Name of the shape → (template, the calls f(x="a b", n=3) and g(x="c") as it writes them).
SHAPES: dict[str, tuple[str, str]] = {
    "objects between marks": (
        template("{{- '<use>' }}" + _OBJECT + "{{- '</use>' }}", between="\n"),
        '<use>{"name": "f", "arguments": {"x": "a b", "n": 3}}</use>\n'
        '<use>{"name": "g", "arguments": {"x": "c"}}</use>',
    ),
    "a list": (
        template(_OBJECT, "<uses>[", ", ", "]</uses>"),
        '<uses>[{"name": "f", "arguments": {"x": "a b", "n": 3}}, {"name": "g", "arguments": {"x": "c"}}]</uses>',
    ),
    "lines": (
        template(_OBJECT, "<uses>\n", "\n", "\n</uses>"),
        '<uses>\n{"name": "f", "arguments": {"x": "a b", "n": 3}}\n{"name": "g", "arguments": {"x": "c"}}\n</uses>',
    ),
    "name, then object": (
        template(
            "{{- '<|use|>' + c.name + '<|with|>' + (c.arguments | tojson) + '<|done|>' }}", "<|uses|>", "", "<|/uses|>"
        ),
        '<|uses|><|use|>f<|with|>{"x": "a b", "n": 3}<|done|><|use|>g<|with|>{"x": "c"}<|done|><|/uses|>',
    ),
    "name as key": (
        template("""{{- '{"' + c.name + '": ' + (c.arguments | tojson) + '}' }}""", "<|uses|>[", ", ", "]<|/uses|>"),
        '<|uses|>[{"f": {"x": "a b", "n": 3}}, {"g": {"x": "c"}}]<|/uses|>',
    ),
    "function and parameters": (
        template(
            "{{- '<use>\\n<do=' + c.name + '>\\n' }}"
            + _parameters("<with=", ">\n", "\n</with>\n")
            + "{{- '</do>\\n</use>' }}",
            between="\n",
        ),
        "<use>\n<do=f>\n<with=x>\na b\n</with>\n<with=n>\n3\n</with>\n</do>\n</use>\n"
        "<use>\n<do=g>\n<with=x>\nc\n</with>\n</do>\n</use>",
    ),
    "keys and values": (
        template(
            "{{- '<use>' + c.name + '\\n' }}" + _parameters("<k>", "</k>\n<v>", "</v>\n") + "{{- '</use>' }}",
            between="\n",
        ),
        "<use>f\n<k>x</k>\n<v>a b</v>\n<k>n</k>\n<v>3</v>\n</use>\n<use>g\n<k>x</k>\n<v>c</v>\n</use>",
    ),
    "python": (
        template(_PYTHON, "<|use|>[", ", ", "]<|/use|>"),
        '<|use|>[f(x="a b", n=3), g(x="c")]<|/use|>',
    ),
    "relative of JSON": (
        template(
            "{{- '<use>do:' + c.name + '{' }}{%- for k, v in c.arguments.items() %}"
            "{{- k + ':' + (('<q>' + v + '<q>') if v is string else (v | tojson)) }}"
            "{%- if not loop.last %}{{- ',' }}{%- endif %}{%- endfor %}{{- '}</use>' }}"
        ),
        "<use>do:f{x:<q>a b<q>,n:3}</use><use>do:g{x:<q>c<q>}</use>",
    ),
}
