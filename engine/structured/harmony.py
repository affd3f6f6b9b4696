"""Grammars for gpt-oss's harmony format: analysis and commentary, then the content or a tool call.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>content
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}

The model may also write the recipient before the channel, and omit `<|constrain|>`.
https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.core.params.structured import Tags
from engine.structured.tags import Composition, Instances, quoted

_CHANNEL, _MESSAGE, _NEXT = "<|channel|>", "<|message|>", "<|end|><|start|>assistant"
_FREE = ("analysis", "commentary")  # channels before the answer


def compose_messages(
    content: str | None, tags: Tags | None, schemas: Sequence[Instances], special: Mapping[str, int]
) -> str:
    """Return a grammar of `content` (a grammar; None: free text) in the final message, or a call of one of `tags`.

    `schemas`: a grammar for each tag. `special`: the vocabulary's special tokens, except end-of-text tokens.
    """
    return _Messages(content, tags, schemas, None, special).text()


class _Messages(Composition):
    def marks(self) -> list[str]:
        return [_CHANNEL, _MESSAGE, _NEXT, "<|constrain|>"]

    def begins(self) -> dict[str, list[str]]:
        return {"content": [f"{_CHANNEL}final{_MESSAGE}"]}

    def answer(self) -> str:
        self.rule("end", self.reached("ended", "<|end|>"))
        start = self.literal(_NEXT.removeprefix("<|end|>"))
        headers = (self.literal(f"{_CHANNEL}{channel}{_MESSAGE}") for channel in _FREE)
        self.rule("free", *(f"{header} end {start}" for header in headers))
        answers = []
        if self.tags is None or not self.tags.required:
            content = "@content" if self.content is not None else "TEXT"
            answers.append(f"{self.literal(f'{_CHANNEL}final{_MESSAGE}')} {content}")
        for i, tag in enumerate(self.tags.tags if self.tags is not None else ()):
            recipient = quoted(f" to=functions.{tag.begin}")
            commentary, json_mark = self.literal(f"{_CHANNEL}commentary"), self.literal("<|constrain|>")
            self.rule(
                f"tag_{i}",
                f'({recipient} {commentary} | {commentary} {recipient}) (" "? {json_mark} | " ") "json" '
                f"{self.literal(_MESSAGE)} @schema_{i}",
            )
            answers.append(f"tag_{i}")
        self.rule("answer", *answers)
        return "free* answer"
