"""A model with a published chat template that runs ten commands, writes text beside calls, and is interrupted once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.core.params.sampling import SamplingParams
from engine.text.chat_template import ChatTemplate
from server.parsing.formats import ToolFormat
from server.parsing.probe import find_tool_format
from server.parsing.probe_reasoning import probe_reasoning_format
from server.parsing.written import written
from tests.support.fake_engine import FakeEngine, make_tokenizer

NUM_TURNS = 10
HARMONY = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|constrain|>")
COMMANDS = {
    4: "echo result-$((40+4)); exit 3",  # an error
    7: "printf 'result-%s\\n<b> \"q\" é\\n' $((40+7))",
}
INTERRUPTED = 5  # the turn that the client cancels


def results(turn: int) -> list[str]:
    """Return what the commands of a turn print; their text does not contain it."""
    return [f"result-{40 + turn}"] + (["second-90"] if turn == 3 else [])


def commands(turn: int) -> list[str]:
    found = [COMMANDS.get(turn, f"echo result-$((40+{turn}))")]
    return found + (["echo second-$((45+45))"] if turn == 3 else [])


class SessionEngine(FakeEngine):
    """Writes the calls of the first turn whose results the prompt lacks, in the template's format; then "All done."."""

    def __init__(self, source: str, tool: str, argument: str, more: Mapping[str, Any] | None = None) -> None:
        """`tool`: runs the command in `argument`; `more`: its other arguments."""
        super().__init__(template=source, max_model_len=1 << 18)
        special = HARMONY if "<|channel|>" in source else ()
        self.tokenizer = make_tokenizer(source, special)
        self.tokenizer.special_tokens_map["bos_token"] = "<|bos|>"
        template = ChatTemplate(source, self.tokenizer.special_tokens_map)
        self.format: ToolFormat | None = find_tool_format("auto", template)
        self.reasoning = probe_reasoning_format("auto", template)
        self.tool, self.argument, self.more = tool, argument, dict(more or {})
        self.is_interrupted = False  # the turn to be cancelled has been begun
        self.is_resumed = False

    def prompt(self, index: int = -1) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(self.requests[index][1], skip_special_tokens=False)

    def tokens(self, sampling: SamplingParams) -> list[int]:
        prompt = self.prompt()
        self.holds_after = None
        if self.tool not in prompt:
            self.answer = "A session"  # a title for it, or the like
            return super().tokens(sampling)
        turn = next((i for i in range(NUM_TURNS) if not all(each in prompt for each in results(i))), NUM_TURNS)
        if turn == INTERRUPTED and not self.is_resumed:
            self.is_interrupted, self.holds_after = True, 3
        self.answer = self._thoughts(prompt) + ("All done." if turn == NUM_TURNS else self._turn(turn, prompt))
        if self.reasoning is not None and self.reasoning.is_harmony and turn == NUM_TURNS:
            self.answer = "<|channel|>final<|message|>All done."
        return super().tokens(sampling)

    def _thoughts(self, prompt: str) -> str:
        if self.reasoning is None or self.reasoning.is_harmony or self.reasoning.closed_by(prompt):
            return ""
        begin = "" if self.reasoning.opened_by(prompt) else self.reasoning.begin
        return f"{begin}Hm.{self.reasoning.end}\n\n"

    def _turn(self, turn: int, prompt: str) -> str:
        missing = [i for i, each in enumerate(results(turn)) if each not in prompt]
        calls = [(self.tool, {self.argument: commands(turn)[i], **self.more}) for i in missing]
        text = "I look at it." if turn == 6 else ""
        assert self.format is not None
        if self.format.name == "openai":
            said = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant" if text else ""
            thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            call = f"<|channel|>commentary to=functions.{self.tool} <|constrain|>json<|message|>"
            return thought + said + call + json.dumps(calls[0][1]) + "<|call|>"
        return text + written(self.format, calls[:1] if self.format.single else calls)
