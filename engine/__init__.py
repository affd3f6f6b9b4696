"""Quire's public API: `from engine import LLM, SamplingParams`. Modules are imported when a name is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.beam_search import BeamSearchParams
    from engine.config import EngineConfig
    from engine.core.engine_request import EngineRequest
    from engine.core.pooling_params import PoolingParams
    from engine.core.sampling_params import SamplingParams
    from engine.core.structured_outputs import StructuredOutputs
    from engine.llm import LLM
    from engine.output_collector import CompletionOutput, EmbeddingRequestOutput, RequestOutput

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineRequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_HOMES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.async_engine",
    "BeamSearchParams": "engine.beam_search",
    "CompletionOutput": "engine.output_collector",
    "EmbeddingRequestOutput": "engine.output_collector",
    "EngineConfig": "engine.config",
    "EngineRequest": "engine.core.engine_request",
    "PoolingParams": "engine.core.pooling_params",
    "RequestOutput": "engine.output_collector",
    "SamplingParams": "engine.core.sampling_params",
    "StructuredOutputs": "engine.core.structured_outputs",
}


def __getattr__(name: str) -> Any:  # so that `quire --help` and the API process need not import PyTorch
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
