"""Facts and status of an engine, for other API processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.replicas.state import EngineState


@dataclass(frozen=True)
class EngineFacts:
    """The properties that stay while an engine runs. `config`: with the model's folder on this machine."""

    config: EngineConfig
    max_model_len: int
    fingerprint: str
    num_blocks: int
    block_size: int
    max_num_seqs: int


@dataclass(frozen=True)
class EngineStatus:
    """The properties that change."""

    state: EngineState
    refusal: str  # why no request is taken now; "": they are
    weights_path: str
    weights_version: int


def facts_of(engine: AsyncEngine) -> EngineFacts:
    """Return the facts of an engine that is ready."""
    model = engine.model
    numbers = engine.num_blocks, engine.block_size, engine.max_num_seqs
    config = engine.local_config
    config = replace(config, served_model_name=config.served_model_name or (model.name,))
    return EngineFacts(config, model.max_model_len, model.fingerprint, *numbers)


def status_of(engine: AsyncEngine) -> EngineStatus:
    return EngineStatus(engine.state, engine.guests.refusal, engine.weights_path, engine.weights_version)
