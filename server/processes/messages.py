"""The messages between the main process and the API processes, as msgpack. Requests to the engine and their outputs are
those of `engine.replicas`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.replicas.facts import EngineFacts, EngineStatus
from engine.replicas.guest import Lost, Outputs
from engine.replicas.messages import Abort, Add, Call, Reply, Shutdown, decode_other
from server.settings import ServerConfig

# ---- main process → API process ----


class Configure(msgspec.Struct, tag=True):
    """The first message. `number`: the process's, from 0; `count`: of all processes."""

    settings: ServerConfig
    number: int
    count: int


class Serve(msgspec.Struct, tag=True):
    """The engine is ready."""

    facts: EngineFacts
    status: EngineStatus


class Changed(msgspec.Struct, tag=True):
    """The engine's status has changed, or the server stops: then running requests may finish, and no other begins."""

    status: EngineStatus
    is_draining: bool


class BodyWanted(msgspec.Struct, tag=True):
    """The main process wants the next part of a forwarded request's body, or to know of its disconnection."""

    id: int


class Answer(msgspec.Struct, tag=True):
    """A part of the answer to a forwarded request: its head, if it has a status, or some of its body."""

    id: int
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    more: bool = True


class Failed(msgspec.Struct, tag=True):
    """A forwarded request was not answered, or not to its end."""

    id: int


Told = Configure | Serve | Changed | BodyWanted | Answer | Failed | Outputs | Lost | Call | Reply | Shutdown

# ---- API process → main process ----


class Listening(msgspec.Struct, tag=True):
    """The process takes connections."""


class Working(msgspec.Struct, tag=True):
    """The number of complete requests that are unanswered, sent at intervals while the server stops."""

    num: int


class Forward(msgspec.Struct, tag=True):
    """A request for the main process."""

    id: int
    scope: dict[str, Any]
    headers: list[tuple[bytes, bytes]]


class Body(msgspec.Struct, tag=True):
    """A part of a forwarded request's body, or the end of its connection."""

    id: int
    body: bytes = b""
    more: bool = False
    is_disconnected: bool = False


class Sent(msgspec.Struct, tag=True):
    """A part of an answer was taken by the client's connection."""

    id: int


Said = Listening | Working | Forward | Body | Sent | Add | Abort | Call | Reply

decode_told = msgspec.msgpack.Decoder(list[Told], dec_hook=decode_other).decode
decode_said = msgspec.msgpack.Decoder(list[Said], dec_hook=decode_other).decode
