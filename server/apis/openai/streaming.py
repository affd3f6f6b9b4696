"""The parts that streams of chat and of text completions have in common: the head of an event, and token counts."""

from __future__ import annotations

from typing import Any

import msgspec

from server.apis.openai.fields import SamplingFields
from server.apis.openai.usage import metrics_object, usage_object
from server.generation.generation import Generation
from server.generation.usage import Usage
from server.http.sse import event

_encode = msgspec.json.encode


def head_members(generation: Generation, kind: str) -> dict[str, Any]:
    """Return the first members of a response or an event. `kind`: its `object`."""
    head = {"id": generation.id, "object": kind, "created": generation.created, "model": generation.model}
    return head | ({"system_fingerprint": generation.fingerprint} if generation.fingerprint else {})


class CompletionStream:
    """The head and the token counts of a stream's events, as its body asks for them."""

    def __init__(self, body: SamplingFields, generation: Generation, kind: str) -> None:
        """`kind`: the `object` of each event."""
        self._generation = generation
        options = body.stream_options
        self.with_usage = options is not None and bool(options.include_usage)
        self.usage_always = self.with_usage and options is not None and bool(options.continuous_usage_stats)
        self.head = _encode(head_members(generation, kind))[:-1]  # without the closing brace

    def usage_member(self, usage: Usage | None = None) -> bytes:
        """Return the token counts as a member of an event; empty unless every event has them."""
        return b',"usage":' + _encode(usage_object(usage or self._generation.usage)) if self.usage_always else b""

    def usage_event(self) -> bytes:
        """Return the last event, with the token counts and no choice."""
        usage = _encode(usage_object(self._generation.usage))
        metrics = _encode(metrics_object(self._generation.timings))
        return event(b'%b,"choices":[],"usage":%b,"metrics":%b}' % (self.head, usage, metrics))
