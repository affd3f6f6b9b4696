"""The reader of thoughts: where they begin and end, however the text is cut, and how many tokens they are."""

import random

import pytest

from server.parsing.answer import MarkedReader, TokenCounter
from server.parsing.pieces import Blocks, Content, Reasoning
from server.parsing.reasoning import REASONING_FORMATS, ReasoningReader, find_reasoning_format
from tests.server.parsing.test_tools import cuts
from tests.support.templates import HERMES, QWEN3, THINKER

THINK = REASONING_FORMATS["think"]


def read(parts: list[str], opened: bool) -> tuple[str, str]:
    reader = ReasoningReader(THINK, opened)
    found = [reader.push(part, number == len(parts)) for number, part in enumerate(parts, 1)]
    return "".join(thoughts for thoughts, _ in found), "".join(content for _, content in found)


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "content"),
    [
        ("<think>\nHm, 4.\n</think>\n\nFour.\n", False, "Hm, 4.", "Four.\n"),
        (" \n<think>Hm</think>Four", False, "Hm", "Four"),
        ("Hm, 4.\n\n</think>\n\nFour.", True, "Hm, 4.", "Four."),
        ("<think>\nHm</think>Four.", True, "Hm", "Four."),
        ("\n\nHm", True, "Hm", ""),
        ("Hm </thin", True, "Hm </thin", ""),
        ("Hm </thin k> a\n b </think> c", True, "Hm </thin k> a\n b", "c"),
        ("</think>Four", True, "", "Four"),
        ("<think></think>\n", False, "", ""),
        ("Four <think>no</think>.", False, "", "Four <think>no</think>."),
        ("  Four", False, "", "  Four"),
        ("<thi", False, "", "<thi"),
        ("", False, "", ""),
        ("", True, "", ""),
        ("<think>a</think>b</think>", False, "a", "b</think>"),
    ],
)
def test_forms(text: str, opened: bool, thoughts: str, content: str) -> None:
    assert read([text], opened) == (thoughts, content)
    assert read([*text, ""], opened) == (thoughts, content)
    rng = random.Random(text)
    for _ in range(30):
        assert read([*cuts(text, rng), ""], opened) == (thoughts, content)


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "content"),
    [
        ("<|channel>thought\nHm, 4.\n<channel|>Four.", False, "Hm, 4.", "Four."),
        ("<|channel>thought\n<channel|>Four.", False, "", "Four."),
        ("<|channel>thoughtful<channel|>Four.", False, "thoughtful", "Four."),
        ("<|channel>thou", False, "thou", ""),
        ("thought\nHm<channel|>Four", True, "thought\nHm", "Four"),
        ("Four", False, "", "Four"),
    ],
)
def test_gemma_s_channel_of_thoughts(text: str, opened: bool, thoughts: str, content: str) -> None:
    format = REASONING_FORMATS["gemma4"]
    for parts in ([text], [*text, ""]):
        reader = ReasoningReader(format, opened)
        found = [reader.push(part, number == len(parts)) for number, part in enumerate(parts, 1)]
        assert ("".join(each for each, _ in found), "".join(each for _, each in found)) == (thoughts, content)


def test_gemma_s_prompts() -> None:
    format = REASONING_FORMATS["gemma4"]
    assert find_reasoning_format("auto", r"{{ '<|channel>thought\n<channel|>' }}") is format
    for prompt, opened, closed in (
        ("<|turn>model\n", False, False),
        ("<|turn>model\n<|channel>thought\n", True, False),
        ("<|turn>model\n<|channel>thought\n<channel|>", False, True),
    ):
        assert (format.opened_by(prompt), format.closed_by(prompt)) == (opened, closed)


def test_thoughts_are_given_out_as_they_come() -> None:
    reader = ReasoningReader(THINK, False)
    assert [reader.push(part, False) for part in ("<think>", "\n", "Hm", " so </", "i>", "\n</think>", "\n",
    "Yes")] == [
        ("", ""), ("", ""), ("Hm", ""), (" so", ""), (" </i>", ""), ("", ""), ("", ""), ("", "Yes"),
    ]  # fmt: skip


@pytest.mark.parametrize(("template", "known"), [(QWEN3, True), (THINKER, True), (HERMES, False), ("", False)])
def test_the_template_tells_the_format(template: str, known: bool) -> None:
    assert (find_reasoning_format("auto", template) is THINK) is known
    assert find_reasoning_format("none", template) is None
    assert find_reasoning_format("deepseek_r1", template) is THINK


@pytest.mark.parametrize(
    ("prompt", "continued", "opened"),
    [
        ("a<think>\n", "", True),
        ("a<think>\n\n</think>\n\n", "", False),
        ("a", "", False),
        ("<think>Hm, so", "<think>Hm, so", True),
        ("<think>Hm</think>so", "<think>Hm</think>so", False),
        ("What is <think>?\nassistant:", "", False),
    ],
)
def test_prompts_that_end_inside_thoughts(prompt: str, continued: str, opened: bool) -> None:
    assert THINK.opened_by(prompt, continued) is opened


@pytest.mark.parametrize(
    ("text", "opened", "tokens"), [("<think>ab</think>cd", False, 17), ("ab</think>cd", True, 10), ("cd", False, 0)]
)
def test_tokens_of_the_thoughts(text: str, opened: bool, tokens: int) -> None:
    for size in (1, 4, 100):  # tokens in an update; here a token is a character
        reader = MarkedReader(ReasoningReader(THINK, opened), counter=TokenCounter("</think>", chr))
        blocks = Blocks()
        for at in range(0, len(text), size):
            part = text[at : at + size]
            blocks.extend(reader.push(part, map(ord, part), at + size >= len(text)))
        assert (blocks.text(Reasoning), blocks.text(Content)) == (("ab" if tokens else ""), "cd")
        assert reader.num_reasoning_tokens == tokens


def test_a_marker_that_was_cut_is_no_text() -> None:
    for text, kept in (
        ("<thin", ("", "")),
        ("<", ("", "<")),
        ("<think>Hm.\n</thi", ("Hm.", "")),
        ("<think>a <", ("a <", "")),
    ):
        assert ReasoningReader(THINK, False).push(text, True, cut=True) == kept
    assert ReasoningReader(THINK, False).push("<thin", True) == ("", "<thin")
    assert ReasoningReader(THINK, True).push("a </thi", True) == ("a </thi", "")
