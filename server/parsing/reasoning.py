"""Separates a model's reasoning from its answer by the markers around it."""

from __future__ import annotations

from dataclasses import dataclass

from server.parsing.pieces import begun


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around the reasoning, which starts an answer."""

    begin: str
    end: str
    label: str = ""  # text between `begin` and the reasoning
    is_harmony: bool = False  # the answer is a series of messages: see harmony.py
    answer: tuple[str, str] = ("", "")  # marks around the content, which are no part of it

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Return whether the prompt ends inside the reasoning, so that the answer continues it.

        `continued`: the start of the answer, if the prompt contains it (`continue_final_message`).
        """
        before = prompt.rstrip().removesuffix(self.label.rstrip())
        return before.endswith(self.begin) or continued.rfind(self.begin) > continued.rfind(self.end)

    def closed_by(self, prompt: str, continued: str = "") -> bool:
        """Return whether no reasoning follows: it is in the prompt, or the answer began without reasoning."""
        if self.is_harmony:
            return bool(continued)
        return not self.opened_by(prompt, continued) and (bool(continued) or prompt.rstrip().endswith(self.end))


_THINK = ReasoningFormat("<think>", "</think>")
HARMONY = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", is_harmony=True)
REASONING_FORMATS = {
    "think": _THINK,
    "deepseek_r1": _THINK,
    "glm45": _THINK,
    "qwen3": _THINK,
    "openai_gptoss": HARMONY,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", "thought\n"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "cohere_command3": ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "cohere_command4": ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_TEXT|>", "<|END_TEXT|>")
    ),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    "granite": ReasoningFormat("<think>", "</think>", answer=("<response>", "</response>")),
    "apriel": ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
}


def find_reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the format with this name; for "auto", the one whose markers the chat template contains, or None."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    found = [
        each
        for each in REASONING_FORMATS.values()
        if each.begin in template or (each.end in template and not each.is_harmony)
    ]
    # Several formats may have the same marks around the reasoning, and differ in those around the content.
    alike = [each for each in found if (each.begin, each.end) == (found[0].begin, found[0].end)]
    plain = [each for each in alike if not each.answer[0]]
    for each in alike:
        begin, end = each.answer
        if begin and (f"{begin}{end}" if plain else end) in template:
            return each
    return (plain or found)[0] if found else None


_LEAST_MARK = 2  # characters of a marker by which the end of a cut answer is told from text


class ReasoningReader:
    """Splits one answer as it arrives. White space around the reasoning is dropped with the markers."""

    def __init__(self, format: ReasoningFormat, opened: bool) -> None:
        """`opened`: the prompt ends inside the reasoning."""
        self._format, self._opened = format, opened
        self._label = "" if opened else format.label  # expected before the reasoning
        self._held = ""
        self._read = self._read_start
        self._is_cut = False  # the answer was cut off here: a marker that has begun is no text
        self.found = opened  # the answer has reasoning
        self.over = False  # all remaining text is content

    @property
    def answer(self) -> tuple[str, str]:
        """The marks around the content."""
        return self._format.answer

    def push(self, text: str, finished: bool, cut: bool = False) -> tuple[str, str]:
        """Return the new (reasoning, content) that is certain. `finished`: no more text follows; `cut`: the answer was
        cut off, not ended.
        """
        self._held += text
        self._is_cut = cut
        return self._read(finished)

    def _read_start(self, finished: bool) -> tuple[str, str]:
        begin, text = self._format.begin, self._held.lstrip()
        if text.startswith(begin):
            self.found, self._held = True, text.removeprefix(begin)
        elif begin.startswith(text) and not finished:
            return "", ""
        elif not self._opened:
            if self._is_cut and len(text) >= _LEAST_MARK and begin.startswith(text):
                self._held = ""
            return self._content(finished)
        self._read = self._read_lead
        return self._read(finished)

    def _read_lead(self, finished: bool) -> tuple[str, str]:
        text = self._held.lstrip()
        if self._label and text.startswith(self._label):
            text, self._label = text.removeprefix(self._label).lstrip(), ""
        self._held = text
        if not text or (self._label.startswith(text) and not finished):
            return "", ""
        self._read = self._read_reasoning
        return self._read(finished)

    def _read_reasoning(self, finished: bool) -> tuple[str, str]:
        reasoning, end, rest = self._held.partition(self._format.end)
        if end:
            self._held, self._read = rest, self._read_gap
            return reasoning.rstrip(), self._read(finished)[1]
        if finished:
            self._held = ""
            num_begun = begun(reasoning, self._format.end) if self._is_cut else 0
            return reasoning[:-num_begun].rstrip() if num_begun >= _LEAST_MARK else reasoning, ""
        certain = reasoning[: len(reasoning) - begun(reasoning, self._format.end)].rstrip()
        self._held = reasoning[len(certain) :]
        return certain, ""

    def _read_gap(self, finished: bool) -> tuple[str, str]:
        self._held = self._held.lstrip()
        return self._content(finished) if self._held or finished else ("", "")

    def _content(self, finished: bool) -> tuple[str, str]:
        self.over, self._read = True, self._content
        text, self._held = self._held, ""
        return "", text
