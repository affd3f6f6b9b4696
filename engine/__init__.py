"""Quire's public API, which `quire` re-exports. Modules are imported when a name is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.config import EngineConfig
    from engine.core.engine_request import EngineRequest
    from engine.core.params.pooling import PoolingParams
    from engine.core.params.sampling import SamplingParams
    from engine.core.params.structured import StructuredOutputs
    from engine.errors import ConfigError, EngineError
    from engine.models.errors import ModelError
    from engine.offline.llm import LLM
    from engine.processing.beam_search import BeamSearchParams
    from engine.processing.output_collector import CompletionOutput, EmbeddingRequestOutput, RequestOutput

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineError",
    "EngineRequest",
    "ModelError",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_HOMES = {
    "LLM": "engine.offline.llm",
    "AsyncEngine": "engine.async_engine",
    "BeamSearchParams": "engine.processing.beam_search",
    "CompletionOutput": "engine.processing.output_collector",
    "ConfigError": "engine.errors",
    "EmbeddingRequestOutput": "engine.processing.output_collector",
    "EngineConfig": "engine.config",
    "EngineError": "engine.errors",
    "EngineRequest": "engine.core.engine_request",
    "ModelError": "engine.models.errors",
    "PoolingParams": "engine.core.params.pooling",
    "RequestOutput": "engine.processing.output_collector",
    "SamplingParams": "engine.core.params.sampling",
    "StructuredOutputs": "engine.core.params.structured",
}


def __getattr__(name: str) -> Any:  # so that `quire --help` and the API process need not import PyTorch
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
