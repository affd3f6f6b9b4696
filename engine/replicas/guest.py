"""Requests of another API process that this process's engine runs, and the engine as that process sees it send them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from engine.core.batch import EngineOutput, StepOutputs
from engine.core.engine_request import EngineRequest
from engine.errors import EngineError
from engine.processing.output_collector import RequestMetrics
from engine.replicas.availability import Availability
from engine.replicas.stream_table import StreamTable


class Outputs(msgspec.Struct, tag=True):
    """New outputs of a guest's requests."""

    outputs: StepOutputs


class Lost(msgspec.Struct, tag=True):
    """A request will get no more output: the engine refused it, or has lost it."""

    request_id: str
    reason: str


class _Counted:
    """Counts of a guest's request, as far as the engine's process needs them."""

    __slots__ = ("finished", "metrics")

    def __init__(self) -> None:
        self.finished = False
        self.metrics = RequestMetrics(0.0)


class GuestStream:
    """A guest's request. Passes its outputs on; the guest collects and detokenises them."""

    __slots__ = ("_guest", "has_begun", "is_closed", "num_losses", "output", "request")

    def __init__(self, request: EngineRequest, guest: Guest) -> None:
        self.request, self._guest = request, guest
        self.output = _Counted()
        self.num_losses = 0
        self.has_begun = self.is_closed = False

    def add(self, output: EngineOutput, now: float) -> None:
        if self.output.finished:
            return
        self.has_begun = True
        self.output.metrics.num_generation_tokens += len(output.new_token_ids)
        self._guest.send_output(output)
        if output.finish_reason is not None:
            self.output.finished = True
            self._guest.ended(self)

    def add_token(self, token_id: int, now: float) -> None:
        if not self.output.finished:
            self.output.metrics.num_generation_tokens += 1
            self._guest.send_tokens(self.request.request_id, [token_id])

    def add_tokens(self, token_ids: list[int], now: float) -> None:
        if not self.output.finished:
            self.output.metrics.num_generation_tokens += len(token_ids)
            self._guest.send_tokens(self.request.request_id, token_ids)

    def close(self, how: str) -> None:
        """The engine has lost the request. `how`: how it died."""
        if not self.is_closed and not self.output.finished:
            self.is_closed = True
            self._guest.lose(self.request.request_id, how)
            self._guest.ended(self)


class Guest:
    """An API process whose requests the engine runs. Bound to an event loop."""

    def __init__(
        self,
        begin: Callable[[GuestStream], None],
        forget: Callable[[GuestStream], None],
        send: Callable[[Any], None],
    ) -> None:
        """`begin`: runs a request; raises `ValueError` or `EngineError`. `forget`: its reader is gone. `send`: sends a
        message to the process.
        """
        self._begin, self._forget, self._send = begin, forget, send
        self._streams: dict[str, GuestStream] = {}
        self._unsent = StepOutputs()
        self._loop = asyncio.get_running_loop()
        self._is_called = False  # whether `_flush` is scheduled

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, request: EngineRequest) -> None:
        """Run a request; `Lost` says if it is refused."""
        stream = GuestStream(request, self)
        try:
            self._begin(stream)
        except (ValueError, EngineError) as error:
            self.lose(request.request_id, str(error))
        else:
            if not stream.is_closed:
                self._streams[request.request_id] = stream

    def abort(self, request_id: str) -> None:
        """The guest wants no more of a request. Unknown ids are ignored."""
        if (stream := self._streams.pop(request_id, None)) is not None:
            self._forget(stream)

    def close(self) -> None:
        """Abort all requests: the process is lost."""
        self._send = _nowhere
        for request_id in list(self._streams):
            self.abort(request_id)

    # ---- called by its streams ----

    def ended(self, stream: GuestStream) -> None:
        """A request has its last output, or will have none."""
        self._loop.call_soon(self.abort, stream.request.request_id)

    def send_tokens(self, request_id: str, token_ids: list[int]) -> None:
        if self._unsent.outputs:  # columns are read before other outputs, and these are older
            self._flush()
        unsent = self._unsent
        unsent.request_ids.append(request_id)
        unsent.token_ids += token_ids
        unsent.counts.append(len(token_ids))
        self._call()

    def send_output(self, output: EngineOutput) -> None:
        self._unsent.outputs.append(output)
        self._call()

    def lose(self, request_id: str, reason: str) -> None:
        self._flush()
        self._send(Lost(request_id, reason))

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._flush_called)

    def _flush_called(self) -> None:
        self._is_called = False
        self._flush()

    def _flush(self) -> None:
        """Send what the step has given."""
        if self._unsent:
            if len(self._unsent.token_ids) == len(self._unsent.request_ids):
                self._unsent.counts.clear()  # one token each
            self._send(Outputs(self._unsent))
            self._unsent = StepOutputs()


class Guests:
    """The door of an engine for guests. `refusal`: why no request is taken now; "": they are."""

    def __init__(self, availability: Availability, streams: StreamTable) -> None:
        self._availability, self._streams = availability, streams

    @property
    def refusal(self) -> str:
        return self._availability.refusal

    def host(self, send: Callable[[Any], None]) -> Guest:
        """Return a new guest. `send`: sends it a message."""

        def begin(stream: GuestStream) -> None:
            self._availability.check()
            self._streams.begin(stream)

        return Guest(begin, self._streams.forget, send)


def _nowhere(message: Any) -> None:
    """Drop a message for a process that is lost."""
