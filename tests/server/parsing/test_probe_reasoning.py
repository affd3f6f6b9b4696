"""The marks around reasoning, by what chat templates contain or write."""

from __future__ import annotations

import pytest

from engine.text.chat_template import ChatTemplate
from server.parsing.answer import MarkedReader
from server.parsing.pieces import Blocks, Content, Reasoning
from server.parsing.probe_reasoning import probe_reasoning_format
from server.parsing.reasoning import REASONING_FORMATS, ReasoningReader
from tests.support.templates import HARMONY, QWEN3, THINKER


def writes(begin: str, end: str, opening: str = "", closing: str = "", opened: str = "") -> ChatTemplate:
    return ChatTemplate(
        "{% for m in messages %}<|start|>{{ m.role }}<|text|>{% if m.reasoning_content %}"
        + begin
        + "{{ m.reasoning_content }}"
        + end
        + "{% endif %}{% if m.role == 'assistant' %}"
        + opening
        + "{{ m.content }}"
        + closing
        + "{% else %}{{ m.content }}{% endif %}<|over|>{% endfor %}"
        + "{% if add_generation_prompt %}<|start|>assistant<|text|>"
        + opened
        + "{% endif %}"
    )


@pytest.mark.parametrize("opened", ["", "<mull>\n"])
def test_marks_that_are_not_listed(opened: str) -> None:
    found = probe_reasoning_format("auto", writes("<mull>\n", "\n</mull>\n\n", opened=opened))
    assert found is not None
    assert (found.begin, found.end, found.answer) == ("<mull>", "</mull>", ("", ""))


def test_marks_around_the_content() -> None:
    found = probe_reasoning_format("auto", writes("<|mull|>", "<|mulled|>", "<|say|>", "<|said|>"))
    assert found is not None
    assert (found.begin, found.end, found.answer) == ("<|mull|>", "<|mulled|>", ("<|say|>", "<|said|>"))


def test_templates_without_reasoning() -> None:
    assert probe_reasoning_format("auto", writes("", "")) is None
    assert probe_reasoning_format("auto", writes("[", "]")) is None
    assert probe_reasoning_format("auto", ChatTemplate("{{ messages[0].content }}")) is None
    assert probe_reasoning_format("none", writes("<mull>", "</mull>")) is None
    assert probe_reasoning_format("auto", None) is None


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (QWEN3, "think"),
        (THINKER, "think"),
        (HARMONY, "openai_gptoss"),
        ("<think></think> and <response></response>", "granite"),
        ("<think> and a tool's <response>x</response>", "think"),
        ("<|START_THINKING|><|START_TEXT|><|END_TEXT|>", "cohere_command4"),
    ],
)
def test_listed_marks(source: str, name: str) -> None:
    assert probe_reasoning_format("auto", ChatTemplate(source)) is REASONING_FORMATS[name]


@pytest.mark.parametrize("lead", ["", "<think>Hm.</think>\n"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_marks_around_the_content_are_left_out(lead: str, size: int) -> None:
    text = f"{lead}<response>Four <r> 4.</response>"
    reader, blocks = MarkedReader(ReasoningReader(REASONING_FORMATS["granite"], False)), Blocks()
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    for index, part in enumerate(parts, 1):
        blocks.extend(reader.push(part, (), index == len(parts)))
    assert (blocks.text(Reasoning), blocks.text(Content)) == ("Hm." if lead else "", "Four <r> 4.")
