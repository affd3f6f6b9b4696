"""Formats of tool calls, as data: the marks, and how names and arguments are written.

A new format is a new entry of `TOOL_FORMATS`. `probe.py` finds a model's format from its chat template, and also
formats that are not listed here.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.core.params.structured import Literals, Parameters

_PUNCTUATION = "[],;"
_TOKEN = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]")
_MARK = re.compile(r"<[^<>\s]*>|[^\s<]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Form of a model family's tool calls: `begin`, `opening`, calls with `separator` between them, `closing`.

    A call is `call[0]`, the tool's name, `call[1]`, the arguments, `call[2]`. In these texts `{id}` stands for the
    call's id, and `{index}` for its number.
    """

    name: str  # the name of vLLM's parser, where it has one
    aliases: tuple[str, ...] = ()
    begin: str  # mark before one call, or before several calls
    call: tuple[str, str, str] = ("", "", "")
    arguments: Parameters | Literals | None = None  # None: a JSON object
    opening: str = ""
    separator: str = ""
    closing: str = ""
    first_index: int = 0
    single: bool = False  # one call in each answer
    bare: bool = False  # an answer that consists of calls only needs no mark
    content: str = ""  # what stands before content instead of a tool's name, where the mark precedes both
    # Also read `name{…}` and `name[ARGS]{…}`.
    headed: bool = False
    short_ids: bool = False  # the chat template requires ids of nine letters and digits
    names_are_ids: bool = False  # a call's id is its name as written, `functions.f:0`, also in later prompts
    signs: tuple[str, ...] = ()  # templates that do not write calls, but describe them, contain one of these
    # Derived: marks that may precede or follow any call, and the characters between calls.
    marks: tuple[str, ...] = field(init=False)
    between: str = field(init=False)

    def __post_init__(self) -> None:
        # The brackets that end an object with name and arguments, or literals, belong to the call.
        ends_itself = self.is_object or isinstance(self.arguments, Literals)
        last = self.call[2].lstrip("}) \t\r\n") if ends_itself else self.call[2]
        written = f"{last} {self.closing.lstrip(_PUNCTUATION + ' ')}".replace(self.begin, " ")
        marks = [mark for each in _MARK.findall(written) if (mark := each.strip(_PUNCTUATION))]
        object.__setattr__(self, "marks", tuple(dict.fromkeys((self.begin.strip(), *marks))))
        listed = (self.opening + self.separator + self.closing).replace(self.begin, "")
        between = "[,]" if self.headed else "".join(each for each in _PUNCTUATION if each in listed)
        object.__setattr__(self, "between", between)

    @property
    def is_object(self) -> bool:
        """A call is a JSON object with a name and arguments."""
        return self.arguments is None and bool(
            re.match(r'\s*\{\s*"\w*name"|\s*\{.*"\w*name": "$', self.call[0], re.DOTALL)
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """Return all literal texts of a call."""
        marks = self.arguments.marks if self.arguments is not None else ()
        return (self.begin, self.opening, *self.call, self.separator, self.closing, *marks)

    @property
    def special_marks(self) -> list[str]:
        """Return the marks that a vocabulary may have as special tokens."""
        return [self.begin, *(mark for text in self.texts for mark in _TOKEN.findall(text))]

    def new_id(self) -> str:
        """Return a new id for a call."""
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


_JSON = ('{"name": "', '", "arguments": ', "}")
_LLAMA = ('{"name": "', '", "parameters": ', "}")
_FUNCTION = Parameters(key="<parameter=", value=">\n", end="\n</parameter>\n")
_INVOKE = Parameters(key='<parameter name="', value='">', end="</parameter>\n")
_DSML = Parameters(
    key='<｜DSML｜parameter name="',
    value='" string="{kind}">',
    end="</｜DSML｜parameter>\n",
    kinds=(("string", "true"), ("", "false")),
)
_ARG = Parameters(key="<arg_key>", value="</arg_key>\n<arg_value>", end="</arg_value>\n")
_K3_TYPES = ("string", "number", "boolean", "object", "array", "null")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def _tagged(tag: str, separator: str = "\n") -> dict[str, Any]:
    """Return the fields of a format whose calls are JSON objects, each between `<tag>` and `</tag>`."""
    call = (f"\n{_JSON[0]}", _JSON[1], f"}}\n</{tag}>")
    return {"begin": f"<{tag}>", "call": call, "separator": f"{separator}<{tag}>"}


def _listed(begin: str, end: str = "", call: tuple[str, str, str] = _JSON) -> dict[str, Any]:
    """Return the fields of a format whose calls are a JSON list between two marks."""
    return {"begin": begin, "opening": "[", "call": call, "separator": ", ", "closing": f"]{end}"}


def _dsml(section: str) -> dict[str, Any]:
    return {
        "begin": f"<｜DSML｜{section}>",
        "opening": "\n",
        "call": ('<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n"),
        "closing": f"</｜DSML｜{section}>",
        "arguments": _DSML,
    }


_FORMATS = (
    ToolFormat(
        name="mistral_args",
        begin="[TOOL_CALLS]",
        call=("", "[ARGS]", ""),
        separator="[TOOL_CALLS]",
        headed=True,
        short_ids=True,
        signs=("[ARGS]",),
    ),
    ToolFormat(
        name="mistral",
        headed=True,
        short_ids=True,
        signs=("[TOOL_CALLS]",),
        **_listed("[TOOL_CALLS]"),
    ),
    ToolFormat(
        name="llama3_json",
        aliases=("llama4_json",),
        begin="<|python_tag|>",
        call=_LLAMA,
        separator="; ",
        bare=True,
        signs=("<|python_tag|>", '"parameters": dictionary of argument name'),
    ),
    ToolFormat(name="openai", aliases=("gpt_oss",), begin=" to=functions.", signs=("<|channel|>commentary",)),
    ToolFormat(
        name="qwen3_coder",
        aliases=("qwen3_xml", "step3p5", "nemotron_v3"),
        begin="<tool_call>",
        call=("\n<function=", ">\n", "</function>\n</tool_call>"),
        separator="\n<tool_call>",
        arguments=_FUNCTION,
        signs=("<function=",),
    ),
    ToolFormat(
        name="seed_oss",
        begin="<seed:tool_call>",
        call=("\n<function=", ">\n", "</function>\n</seed:tool_call>"),
        separator="\n<seed:tool_call>",
        arguments=Parameters(key="<parameter=", value=">", end="</parameter>\n"),
        signs=("<seed:tool_call>",),
    ),
    ToolFormat(
        name="glm45",
        aliases=("glm4_moe", "ling3"),
        begin="<tool_call>",
        call=("", "\n", "</tool_call>"),
        separator="\n<tool_call>",
        arguments=_ARG,
        signs=("<arg_key>",),
    ),
    ToolFormat(
        name="glm47",
        aliases=("glm47_moe",),
        begin="<tool_call>",
        call=("", "", "</tool_call>"),
        separator="<tool_call>",
        arguments=Parameters(key="<arg_key>", value="</arg_key><arg_value>", end="</arg_value>"),
    ),
    ToolFormat(
        name="hunyuan_v3",
        begin="<tool_calls:opensource>",
        opening="\n",
        call=("<tool_call:opensource>", "<tool_sep:opensource>\n", "</tool_call:opensource>\n"),
        closing="</tool_calls:opensource>",
        arguments=Parameters(
            key="<arg_key:opensource>",
            value="</arg_key:opensource>\n<arg_value:opensource>",
            end="</arg_value:opensource>\n",
        ),
    ),
    ToolFormat(
        name="minimax_m2",
        begin="<minimax:tool_call>",
        opening="\n",
        call=('<invoke name="', '">\n', "</invoke>\n"),
        closing="</minimax:tool_call>",
        arguments=_INVOKE,
    ),
    ToolFormat(name="deepseek_v32", **_dsml("function_calls")),
    ToolFormat(name="deepseek_v4", aliases=("deepseek_v41",), **_dsml("tool_calls")),
    ToolFormat(
        name="step3",
        begin="<｜tool_calls_begin｜>",
        call=(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            '">',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        closing="<｜tool_calls_end｜>",
        arguments=Parameters(key='<steptml:parameter name="', value='">', end="</steptml:parameter>"),
        signs=("<steptml:invoke",),
    ),
    ToolFormat(
        name="kimi_k3",
        begin="<|open|>tools<|sep|>",
        call=('<|open|>call tool="', '" index="{index}"<|sep|>', "<|close|>call<|sep|>"),
        closing="<|close|>tools<|sep|>",
        first_index=1,
        arguments=Parameters(
            key='<|open|>argument key="',
            value='" type="{kind}"<|sep|>',
            end="<|close|>argument<|sep|>",
            kinds=tuple((each, each) for each in _K3_TYPES),
        ),
    ),
    ToolFormat(
        name="minicpm5",
        begin='<function name="',
        call=("", '">', "</function>"),
        separator='\n<function name="',
        arguments=Parameters(key='<param name="', value='">', end="</param>", wrapping=("<![CDATA[", "]]>")),
    ),
    ToolFormat(
        name="deepseek_v3",
        aliases=("deepseek_r1",),
        begin=_DEEPSEEK[0],
        call=(f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}", "\n```json\n", f"\n```{_DEEPSEEK[3]}"),
        separator="\n",
        closing=_DEEPSEEK[4],
    ),
    ToolFormat(
        name="deepseek_v31",
        begin=_DEEPSEEK[0],
        call=(_DEEPSEEK[1], _DEEPSEEK[2], _DEEPSEEK[3]),
        closing=_DEEPSEEK[4],
        signs=("<｜tool▁calls▁begin｜>",),
    ),
    ToolFormat(
        name="kimi_k2",
        begin="<|tool_calls_section_begin|>",
        call=("<|tool_call_begin|>functions.", ":{index}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        closing="<|tool_calls_section_end|>",
        names_are_ids=True,
        signs=("<|tool_calls_section_begin|>",),
    ),
    ToolFormat(
        name="solar_open",
        begin="<|tool_calls|>",
        call=("<|tool_call:begin|>{id}<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
    ),
    ToolFormat(
        name="functionary",
        aliases=("functionary_v31", "llama3_function"),
        begin="<function=",
        call=("", ">", "</function>"),
        separator="<function=",
    ),
    ToolFormat(
        name="functionary_v32",
        begin=">>>",
        call=("", "\n", ""),
        separator=">>>",
        bare=True,  # the prompt ends in the first mark
        content="all\n",
    ),
    ToolFormat(
        name="apertus",
        begin="<|tools_prefix|>",
        opening="[",
        call=('{"', '": ', "}"),
        separator=", ",
        closing="]<|tools_suffix|>",
    ),
    ToolFormat(
        name="cohere_command3",
        aliases=("cohere_command", "command_r7b", "command_a"),
        begin="<|START_ACTION|>",
        opening="[\n    ",
        call=('{"tool_call_id": "{index}", "tool_name": "', '", "parameters": ', "}"),
        separator=",\n    ",
        closing="\n]<|END_ACTION|>",
        signs=("<|START_ACTION|>",),
    ),
    ToolFormat(
        name="command_r",
        begin="Action:\n```json",
        opening="\n[\n    ",
        call=('{\n        "tool_name": "', '",\n        "parameters": ', "\n    }"),
        separator=",\n    ",
        closing="\n]```",
        signs=(
            "Write 'Action:' followed by a json-formatted list",
            "Write \\'Action:\\' followed by a json-formatted list",
        ),
    ),
    ToolFormat(name="granite", **_listed("<|tool_call|>"), signs=("only with <|tool_call|> followed by a JSON list",)),
    ToolFormat(
        name="granite-20b-fc",
        begin="<function_call>",
        call=(" " + _JSON[0], _JSON[1], _JSON[2]),
        separator="\n<function_call>",
        signs=("<function_call>",),
    ),
    ToolFormat(
        name="phi4_mini_json",
        aliases=("firefunction",),
        begin="functools[",
        call=_JSON,
        separator=", ",
        closing="]",
        signs=("functools[",),
    ),
    ToolFormat(
        name="phi4_mini",
        **_listed("<|tool_call|>", "<|/tool_call|>"),
        signs=("<|/tool_call|>", "<|/tool|>"),
    ),
    ToolFormat(name="jamba", aliases=("hunyuan_a13b", "apriel"), **_listed("<tool_calls>", "</tool_calls>")),
    ToolFormat(name="nemotron_json", **_listed("<TOOLCALL>", "</TOOLCALL>"), signs=("<TOOLCALL>",)),
    ToolFormat(
        name="minimax",
        begin="<tool_calls>",
        opening="\n",
        call=_JSON,
        separator="\n",
        closing="\n</tool_calls>",
    ),
    ToolFormat(
        name="gigachat3",
        begin="<|function_call|>",
        call=_JSON,
        separator="<|function_call|>",
    ),
    ToolFormat(
        name="gigachat3_role",
        begin="<|message_sep|>\n\nfunction call<|role_sep|>",
        call=("\n" + _JSON[0], _JSON[1], _JSON[2]),
        separator="<|message_sep|>\n\nfunction call<|role_sep|>",
    ),
    ToolFormat(
        name="internlm",
        begin="<|action_start|><|plugin|>",
        call=_LLAMA,
        closing="<|action_end|>",
        signs=("<|action_start|><|plugin|>",),
    ),
    ToolFormat(name="xlam", bare=True, **_listed("[TOOL_CALLS]")),
    ToolFormat(
        name="lfm2",
        begin="<|tool_call_start|>",
        opening="[",
        call=("", "(", ")"),
        separator=", ",
        closing="]<|tool_call_end|>",
        arguments=Literals(),
        signs=("<|tool_call_start|>", "<|tool_list_start|>", '"List of tools: ["'),
    ),
    ToolFormat(
        name="llama4_pythonic",
        aliases=("pythonic", "olmo3", "gemma3"),
        begin="<|python_start|>",
        opening="[",
        call=("", "(", ")"),
        separator=", ",
        closing="]",
        arguments=Literals(),
        bare=True,
        signs=("[func_name1(params_name1=params_value1", "<|python_start|>"),
    ),
    ToolFormat(
        name="gemma4",
        begin="<|tool_call>",
        call=("call:", "{", "}<tool_call|>"),
        separator="<|tool_call>",
        arguments=Literals(assign=":", separator=",", quote='<|"|>'),
        signs=("<|tool_call>",),
    ),
    ToolFormat(
        name="functiongemma",
        begin="<start_function_call>",
        call=("call:", "{", "}<end_function_call>"),
        separator="<start_function_call>",
        arguments=Literals(assign=":", separator=",", quote="<escape>"),
        signs=("<start_function_call>",),
    ),
    ToolFormat(name="longcat", **_tagged("longcat_tool_call"), signs=("<longcat_tool_call>",)),
    ToolFormat(
        name="hermes",
        aliases=("qwen", "granite4", "ernie45", "exaone4"),
        signs=("<tool_call>",),
        **_tagged("tool_call"),
    ),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _FORMATS}
# For a model whose format is unknown, if a call is required.
GENERIC = ToolFormat(name="generic", bare=True, **_listed("<tool_calls>"))
# The names of vLLM's parsers, with those that share a format.
PARSER_NAMES: Mapping[str, ToolFormat] = {name: each for each in _FORMATS for name in (each.name, *each.aliases)}
