"""A server whose model says what a test wrote, over real HTTP: for agents, which no small model would play."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from engine.core.params.sampling import SamplingParams
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, run_server
from tests.support.templates import QWEN3


class ScriptedEngine(FakeEngine):
    """Answers with the turn whose number is that of the tools' results in the prompt; after the last with the last."""

    def __init__(self, *turns: str) -> None:
        super().__init__(template=QWEN3, max_model_len=1 << 18)
        self.turns = turns
        self.result_mark = "<tool_response>"  # what stands before a tool's result in a prompt

    def prompt(self, index: int = -1) -> str:
        """The text of a request's prompt."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(self.requests[index][1], skip_special_tokens=False)

    def tokens(self, sampling: SamplingParams) -> list[int]:
        self.answer = self.turns[min(self.prompt().count(self.result_mark), len(self.turns) - 1)]
        return super().tokens(sampling)


def call(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@contextlib.contextmanager
def scripted(*turns: str) -> Iterator[tuple[Live, ScriptedEngine]]:
    """The server, which serves `toy`, and its engine."""
    engine = ScriptedEngine(*turns)
    with run_server(engine) as live:
        yield live, engine
