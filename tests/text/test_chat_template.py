"""Chat templates against transformers' apply_chat_template, and templates that must not hang or blow up the server."""

import time
from typing import Any

import jinja2
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.text import chat_template
from engine.text.chat_template import ChatTemplate, ChatTemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last_user < 0 and message.role == "user" and message.content is string %}
        {%- set ns.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": '
                ~ call.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023
Today Date: {{ date_string }}

{{ system_message }}<|eot_id|>
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
  {% if message['role'] == 'system' %}{% continue %}{% endif %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) and messages[0].role != 'system' %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {% endif %}
  {% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}\
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""

MACROS = """\
{% macro item(node, depth) %}{{ '%s%s;' % ('-' * depth, node.content) }}\
{% if depth < 2 %}{{ item(node, depth + 1) }}{% endif %}\
{% endmacro %}{% set sep = joiner(", ") %}{% for message in messages recursive %}{{ sep() }}\
{{ loop.depth }}{{ loop.length }}\
{{ item(message, 1) }}{{ loop(message.children) if message.children }}{% if not loop.last %}|{% endif %}{% endfor %}
{% filter upper %}{{ messages | map(attribute='role') | unique | join('-') }}{% endfilter %}
{% set block %}{{ {'b': [1, 2.5, none, true], 'a': '<é>'} | tojson(indent=2) }}{% endset %}{{ block | indent(2) }}
{{ '{:>6}|{}'.format('ab', eos_token) }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ undefined_one }}
{{ 'a b c'.split() | batch(2, '-') | list }} {{ (3 * 'x') ~ 2 ** 10 ~ 7 % 4 }} \
{{ 'a-b'.replace('-', '+') | default('z') }}"""

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <b>& 'you'</b> 👋"}],
    "system": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Hi\n{{ x }}"}],
    "turns": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n 4 "},
        {"role": "user", "content": "sure? "},
    ],
    "answer": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The answer is "}],
}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}],
    },
    {"role": "tool", "content": '{"t": 21}'},
    {"role": "tool", "content": "again"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def reference(template: str, messages: list[Any], *, special: dict[str, str] = SPECIAL, **kwargs: Any) -> str:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    "template", [CHATML_TOOLS, LLAMA3, MISTRAL, MACROS], ids=["chatml", "llama3", "mistral", "macros"]
)
def test_renders_as_transformers(template: str, chat: str) -> None:
    messages = CHATS[chat]
    ours = ChatTemplate(template, SPECIAL)
    for generation in (True, False):
        variables: list[dict[str, Any]] = [{}, {"enable_thinking": False, "date_string": "1 Jan"}]
        for kwargs in variables:
            expected = reference(template, messages, add_generation_prompt=generation, **kwargs)
            assert ours.render(messages, add_generation_prompt=generation, **kwargs) == expected


def test_tools_as_transformers() -> None:
    expected = reference(CHATML_TOOLS, TOOL_CHAT, tools=TOOLS, add_generation_prompt=True)
    assert ChatTemplate(CHATML_TOOLS, SPECIAL).render(TOOL_CHAT, tools=TOOLS) == expected
    assert '"Köln"' in expected


@pytest.mark.parametrize("template", [CHATML_TOOLS, LLAMA3, MISTRAL], ids=["chatml", "llama3", "mistral"])
@pytest.mark.parametrize("content", ["The answer is ", "The answer is", " ", "a\n\n", "2+2?"])
def test_continue_final_message_as_transformers(template: str, content: str) -> None:
    messages = [*CHATS["answer"][:1], {"role": "assistant", "content": content}]
    expected = reference(template, messages, continue_final_message=True)
    ours = ChatTemplate(template, SPECIAL)
    assert ours.render(messages, continue_final_message=True, add_generation_prompt=False) == expected
    assert messages[-1]["content"] == content


@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4))
def test_any_text_as_transformers(texts: list[str]) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    assert ChatTemplate(CHATML_TOOLS, SPECIAL).render(messages) == reference(
        CHATML_TOOLS, messages, add_generation_prompt=True
    )


def test_template_variables_override_special_tokens() -> None:
    assert ChatTemplate("{{ bos_token }}{{ x }}", SPECIAL).render([], bos_token="!", x=1) == "!1"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'secret' %}", "loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_failures_are_one_clear_error(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as error:
        ChatTemplate(template, SPECIAL).render(CHATS["one"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ x", "{% for a in b %}", "{{ a | no_such_filter }}", "(" * 9 + "{{" + "(" * 5000]
)
def test_broken_templates(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template"):
        ChatTemplate(template)


def test_continue_needs_text_at_the_end() -> None:
    with pytest.raises(ChatTemplateError, match="requires text content"):
        ChatTemplate(LLAMA3).render([], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="requires text content"):
        ChatTemplate(LLAMA3).render([{"role": "assistant", "content": None}], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="omits the end"):
        ChatTemplate("fixed").render(CHATS["answer"], continue_final_message=True)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}"
END = "{% endfor %}{% endfor %}"
DOUBLE = (
    "{% set ns = namespace(a=START) %}{% for i in range(200) %}{% set ns.a = EXPR %}{% endfor %}{{ ns.a | length }}"
)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        LOOP + END,
        LOOP + "some text that repeats" + END,
        "{% macro m() %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endmacro %}{{ m() | length }}",
        "{% set b %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}{{ b | length }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in range(3) recursive %}{% if loop.depth < 6 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
        "{{ range(99999) | map('string') | map('upper') | map('center', 9999) | join }}",
        "{{ range(99999) | map('string') | map('replace', '1', 'x' * 99999) | join | length }}",
        "{{ 'x' * 10**9 }}",
        "{{ ('x' * 10**6) * 10**6 }}",
        "{{ [1] * 10**11 }}",
        "{{ 10**(10**10) }}",
        "{{ (10**9999) ** 9999 }}",
        DOUBLE.replace("START", "3").replace("EXPR", "ns.a * ns.a"),
        DOUBLE.replace("START", "'x'").replace("EXPR", "ns.a ~ ns.a"),
        DOUBLE.replace("START", "'x'").replace("EXPR", "ns.a + ns.a"),
        DOUBLE.replace("START", "'x'").replace("EXPR", "ns.a.replace('x', 'xx')"),
        DOUBLE.replace("START", "'x'").replace("EXPR", "ns.a | replace('', ns.a)"),
        DOUBLE.replace("START", "'xx'").replace("EXPR", "ns.a.join([ns.a, ns.a, ns.a])"),
        DOUBLE.replace("START", "'xx'").replace("EXPR", "'%s%s' % (ns.a, ns.a)"),
        DOUBLE.replace("START", "'xx'").replace("EXPR", "'{0}{0}'.format(ns.a)"),
        DOUBLE.replace("START", "[1]").replace("EXPR", "ns.a + ns.a"),
        DOUBLE.replace("START", "[1]").replace("EXPR", "[ns.a, ns.a]").replace("length", "string"),
        DOUBLE.replace("START", "[1]").replace("EXPR", "[ns.a, ns.a]").replace("length", "tojson"),
        DOUBLE.replace("START", "[1]").replace("EXPR", "[ns.a, ns.a]").replace(" | length", ""),
        "{% set ns = namespace(l=[]) %}{% set s = 'x' * 10**6 %}{% for i in range(99999) %}"
        "{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x'.translate({120: 'y' * 10**8}) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**10) }}",
        "{{ strftime_now('%9999999999d') }}",
        "{{ (1).to_bytes(10**11, 'big') }}",
        "{{ {'a': [1]} | tojson(indent=10**10) }}",
        "{{ [1] | batch(10**10, 0) | list }}",
        "{{ 1.5 | round(10**10) }}",
        "{{ lipsum(10**6) }}",
    ],
)
def test_hostile_templates_end_soon(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(template, SPECIAL).render(CHATS["one"])


def test_long_conversations_are_well_within_bounds() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 1000} for i in range(1000)]
    start = time.process_time()
    assert ChatTemplate(CHATML_TOOLS, SPECIAL).render(messages).count("<|im_end|>") == 1000
    assert time.process_time() - start < 5, "seconds; 0.06 are usual"


def test_what_is_written_out_is_counted_by_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the value, of which tools have tens of thousands."""
    num_calls = 0

    def clock() -> float:
        nonlocal num_calls
        num_calls += 1
        return 0.0

    monkeypatch.setattr(chat_template, "monotonic", clock)
    budget = chat_template._Budget(100_000, 100_000, 1.0)
    budget.spend_on({"a": [True, "text", None, {"b": ("c", 1.5)}] * 1000})
    assert (budget.steps, budget.chars) == (100_000 - 7001, 100_000 - 6001)
    assert num_calls <= 10
    shared: list[Any] = []
    for _ in range(60):
        shared = [shared, shared]
    with pytest.raises(jinja2.TemplateError):
        budget.spend_on(shared)


def test_a_busy_machine_makes_no_template_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the CPU time of the thread counts, and it is looked at only when the clock says so."""
    num_calls, used = 0, 0.0

    def cpu_time() -> float:
        nonlocal num_calls
        num_calls += 1
        return used if num_calls > 1 else 0.0

    hours = iter(range(0, 10**6, 3600))
    monkeypatch.setattr(chat_template, "monotonic", lambda: float(next(hours)))
    monkeypatch.setattr(chat_template, "thread_time", cpu_time)
    template = ChatTemplate("{% for each in range(5) %}{{ each }}{% endfor %}")
    assert template.render([]) == "01234"
    assert num_calls > 1
    used = chat_template.MAX_SECONDS + 1
    num_calls = 0
    with pytest.raises(ChatTemplateError, match="CPU time"):
        template.render([])
