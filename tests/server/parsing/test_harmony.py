"""gpt-oss's harmony format: answers read as they arrive."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.text.chat_template import ChatTemplate
from server.parsing.harmony import HarmonyReader
from server.parsing.pieces import Blocks, CallStart, Content, Reasoning
from server.parsing.probe import find_tool_format
from server.parsing.reasoning import HARMONY, find_reasoning_format
from tests.support import templates

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Four."
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'


def read(text: str, cuts: int = 0, names: tuple[str, ...] = ("f",), **options: Any) -> tuple[HarmonyReader, Blocks]:
    """The answer, cut this many times; a token is a character."""
    reader, blocks = HarmonyReader(names, chr, continued=options.pop("continued", False), **options), Blocks()
    at = sorted(random.Random(cuts).choices(range(len(text) + 1), k=cuts))
    for start, stop in zip([0, *at], [*at, len(text)], strict=True):
        part = text[start:stop]
        blocks.extend(reader.push(part, map(ord, part), stop == len(text) and start == (at[-1] if at else 0)))
    return reader, blocks


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (THOUGHT + FINAL, "Hm.", "Four.", []),
        (FINAL, "", "Four.", []),
        (THOUGHT + THOUGHT + FINAL, "Hm.Hm.", "Four.", []),
        (THOUGHT + CALL, "Hm.", "", [("f", '{"x": 1}')]),
        # what is said to the user before a call
        (THOUGHT + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL, "Hm.", "I look.", 1),
        # the recipient before the channel, without the token for the type
        (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', "", "", [("f", '{"x": 1}')]),
        (THOUGHT + ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', "Hm.", "", 1),
        ('<|channel|>analysis to=functions.f code<|message|>{"x": 1}', "", "", [("f", '{"x": 1}')]),
        # tools that are none of the client's
        ("<|channel|>analysis to=python code<|message|>1+1<|end|><|start|>assistant" + FINAL, "1+1", "Four.", []),
        # text after the last message
        ("<|channel|>final<|message|>It ends with <|end|>, see?", "", "It ends with , see?", []),
        (THOUGHT.removesuffix("<|start|>assistant") + "Four.", "Hm.", "Four.", []),
        # text between messages, and messages without all of their marks
        (THOUGHT.replace("<|start|>", "so: <|start|>") + FINAL, "Hm.", "Four.", []),
        (THOUGHT.removesuffix("<|start|>assistant") + FINAL, "Hm.", "Four.", []),
        (THOUGHT.replace("<|end|>", "") + FINAL, "Hm.", "Four.", []),
        (THOUGHT.replace("<|end|><|start|>assistant", "") + FINAL, "Hm.", "Four.", []),
        (THOUGHT.removeprefix("<|channel|>") + FINAL, "Hm.", "Four.", []),
        (THOUGHT.removesuffix("assistant") + FINAL, "Hm.", "Four.", []),
        (THOUGHT + FINAL.replace("Four.", "Fo<|message|>ur."), "Hm.", "Four.", []),
        (THOUGHT.replace("<|start|>", "Well <|start|>") + CALL, "Hm.", "", [("f", '{"x": 1}')]),
        ("<|channel|>final<|message|>Done<|end|>", "", "Done", []),
        ("Plain text.", "", "Plain text.", []),
        ("", "", "", []),
    ],
)
def test_answers(text: str, reasoning: str, content: str, calls: Any) -> None:
    for cuts in range(12):
        reader, blocks = read(text, cuts)
        assert (blocks.text(Reasoning), blocks.text(Content)) == (reasoning, content)
        found = [(call.name, call.text) for call in blocks.calls]
        assert len(found) == calls if isinstance(calls, int) else found == calls
        assert reader.has_calls is bool(found)
        assert not reader.is_cut


@pytest.mark.parametrize("length", range(len(THOUGHT) + 1, len(THOUGHT + CALL)))
def test_a_call_that_is_cut_leaves_no_marks(length: int) -> None:
    reader, blocks = read((THOUGHT + CALL)[:length], 3)
    assert blocks.text(Content) == ""
    assert blocks.text(Reasoning) == "Hm."
    assert reader.is_cut is (length >= len(THOUGHT + "<|channel|>commentary to=functions."))
    assert all('{"x": 1}'.startswith(call.text) for call in blocks.calls)


def test_a_whole_call_is_not_cut_unless_the_model_was_stopped() -> None:
    reader = HarmonyReader(["f"], chr)
    reader.push(CALL, (), True, cut=True)
    assert reader.is_cut


def test_a_prompt_that_ends_within_the_content() -> None:
    reader, blocks = read("and five.", continued=True)
    assert blocks.text(Content) == "and five."
    assert reader.num_reasoning_tokens == 0


def test_without_tools_a_call_is_reasoning() -> None:
    reader, blocks = read(CALL, names=())
    assert not reader.has_calls
    assert blocks.text(Reasoning) == '{"x": 1}'


def test_reasoning_may_be_left_out() -> None:
    _, blocks = read(THOUGHT + FINAL, shows_reasoning=False)
    assert [block.kind for block in blocks.all] == [Content]


@pytest.mark.parametrize("cuts", [0, 1, 5, 40])
def test_tokens_of_the_analysis(cuts: int) -> None:
    reader, _ = read(THOUGHT + FINAL, cuts)
    assert reader.num_reasoning_tokens == len(THOUGHT.removesuffix("<|start|>assistant"))
    reader, _ = read(THOUGHT + THOUGHT + CALL, cuts)
    assert reader.num_reasoning_tokens == 2 * len(THOUGHT) - len("<|start|>assistant")


def test_it_is_found_by_the_template() -> None:
    assert find_reasoning_format("auto", templates.HARMONY) is HARMONY
    assert find_reasoning_format("openai_gptoss", "") is HARMONY
    assert find_reasoning_format("auto", "<|user|>{{ m }}<|end|>") is None  # Phi's
    assert getattr(find_tool_format("auto", ChatTemplate(templates.HARMONY)), "name", "") == "openai"


def test_a_header_without_an_end_is_content() -> None:
    text = "<|channel|>final" + "x" * 5000
    assert read(text, 40)[1].text(Content) == text.removeprefix("<|channel|>")


@pytest.mark.parametrize(
    "last", [FINAL, CALL, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL]
)
@pytest.mark.parametrize(
    "gap", ["<|end|><|start|>assistant", "<|end|>", "<|start|>assistant", "<|end|>so<|start|>assistant"]
)
def test_no_cut_leaves_markup(gap: str, last: str) -> None:
    text = THOUGHT.replace("<|end|><|start|>assistant", gap) + last
    for end in range(2, len(text)):
        blocks = Blocks()
        blocks.extend(HarmonyReader(["f"], lambda _: "").push(text[:end], (), True, True))
        for kind in (Content, Reasoning):
            assert "<|" not in blocks.text(kind), text[:end]
            assert "assistant" not in blocks.text(kind), text[:end]
        assert blocks.text(Content) in ("", "so") or blocks.text(Content) in text[len(THOUGHT) - 20 :], text[:end]


def test_kinds_of_blocks() -> None:
    _, blocks = read(THOUGHT + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL)
    assert [block.kind for block in blocks.all] == [Reasoning, Content, CallStart]
