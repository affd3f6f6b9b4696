"""Messages between two processes, in the event loop of this one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from engine.replicas.messages import encode

RECEIVED_AT_ONCE = 16  # most messages in one iteration of the event loop


class Link:
    """Two sockets, one for each direction. Bound to an event loop; the sockets are its creator's to close."""

    def __init__(self, outgoing: zmq.Socket[bytes], incoming: zmq.Socket[bytes]) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Any] = []
        self._is_called = False  # whether `_send_rest` is scheduled for the next iteration of the event loop
        self._is_closed = False
        self._take: Callable[[bytes], None] = _ignore

    def send(self, message: Any, *, at_once: bool = False) -> None:
        """Send a message, as part of a list. Each list wakes the other process, so only the first message of an
        iteration of the event loop is sent at once; the others follow in one list.
        """
        self._unsent.append(message)
        if not self._is_called or at_once:
            self._send_all()
        if not self._is_called and not self._loop.is_closed():
            self._is_called = True
            self._loop.call_soon(self._send_rest)

    def _send_rest(self) -> None:
        self._is_called = False
        self._send_all()

    def _send_all(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages and not self._is_closed:
            self._outgoing.send(encode(messages), zmq.NOBLOCK)

    def listen(self, take: Callable[[bytes], None]) -> None:
        """Pass each message of the other process to `take`, in the iteration of the event loop in which it arrives."""
        self._take = take
        self._loop.add_reader(self._incoming.fileno(), self._receive)
        self._receive()

    def _receive(self) -> None:
        for _ in range(RECEIVED_AT_ONCE):
            if self._is_closed:
                return
            try:
                message = self._incoming.recv(zmq.NOBLOCK)
            except zmq.Again:  # only then does the descriptor signal new messages
                return
            self._take(message)
        self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Stop. What arrives later is lost."""
        self._is_closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._incoming.fileno())
        self._take = _ignore  # the callback refers to its owner


def _ignore(message: bytes) -> None:
    """Discard messages that arrive before `listen` or after `close`."""
