"""The messages between the API process and the engine process, as msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.core.batch import SchedulerStats, StepOutputs
from engine.core.engine_request import EngineRequest
from engine.core.params.structured import Literals, Parameters, Syntax

# Commands: API process → engine process


class Start(msgspec.Struct, tag=True):
    """The first command."""

    config: EngineConfig
    eos_token_ids: tuple[int, ...]
    replica: int = 0  # the replica's index


class Add(msgspec.Struct, tag=True):
    """A new request."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    """Abort a request. It gets no further output."""

    request_id: str


class Call(msgspec.Struct, tag=True):
    """Call a method of the engine, one of `process.METHODS`. A `Reply` with the same id follows."""

    id: int
    method: str
    arguments: dict[str, Any] = {}


class Shutdown(msgspec.Struct, tag=True):
    """The last command."""


Command = Start | Add | Abort | Call | Shutdown  # a message is a list of commands

# Events: engine process → API process


class Starting(msgspec.Struct, tag=True):
    """Progress of the start; see `engine.models.files`."""

    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True):
    """The reply to `Start` on success."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    stats: SchedulerStats
    summary: str  # description of the engine, a few lines
    fingerprint: str = ""  # see `system_fingerprint`


class Failed(msgspec.Struct, tag=True):
    """The reason why the process exits: it cannot start or continue."""

    message: str


class Step(msgspec.Struct, tag=True, omit_defaults=True):
    """The outputs of one step for all requests."""

    outputs: StepOutputs
    stats: SchedulerStats
    expert_tokens: dict[int, list[int]] = {}  # see `ExpertTokens`


class Reply(msgspec.Struct, tag=True):
    """The result of a call, or why it failed."""

    id: int
    result: Any = None
    error: str = ""  # empty: it did not fail


Event = Starting | Ready | Failed | Step | Reply


def decode_other(kind: type, value: Any) -> Any:
    """A `Syntax` from its fields: msgpack has no names of classes, and msgspec takes one dataclass in a union."""
    if kind is not Syntax:
        raise NotImplementedError(kind)
    return msgspec.convert(value, Parameters if "key" in value else Literals)


encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command], dec_hook=decode_other).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
