"""Quire's public API, which `quire` re-exports. Modules are imported when a name is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.utils.imports import uncollected
from engine.version import __version__ as __version__

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.config import EngineConfig
    from engine.core.engine_request import Adapter, EngineRequest
    from engine.core.params.pooling import PoolingParams
    from engine.core.params.sampling import SamplingParams
    from engine.core.params.structured import StructuredOutputs
    from engine.errors import (
        ConfigError,
        EngineAsleepError,
        EngineDeadError,
        EngineError,
        ParameterError,
        TagsError,
    )
    from engine.models.classifier import Classifier
    from engine.models.errors import ModelError
    from engine.offline.llm import LLM
    from engine.processing.adapters import LoRARequest
    from engine.processing.beam_search import BeamSearchParams
    from engine.processing.model_info import ModelInfo
    from engine.processing.output_collector import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        RequestMetrics,
        RequestOutput,
        RequestUpdate,
    )
    from engine.replicas.state import EngineState
    from engine.setup.weight_transfer import send_weights
    from engine.text.tokenizer import TokenizerError

__all__ = [
    "LLM",
    "Adapter",
    "AsyncEngine",
    "BeamSearchParams",
    "Classifier",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineAsleepError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineRequest",
    "EngineState",
    "LoRARequest",
    "ModelError",
    "ModelInfo",
    "ParameterError",
    "PoolingParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestUpdate",
    "SamplingParams",
    "StructuredOutputs",
    "TagsError",
    "TokenizerError",
    "__version__",
    "send_weights",
]

_MODULES = {
    "Adapter": "engine.core.engine_request",
    "AsyncEngine": "engine.async_engine",
    "BeamSearchParams": "engine.processing.beam_search",
    "Classifier": "engine.models.classifier",
    "CompletionOutput": "engine.processing.output_collector",
    "ConfigError": "engine.errors",
    "EmbeddingOutput": "engine.processing.output_collector",
    "EmbeddingRequestOutput": "engine.processing.output_collector",
    "EngineConfig": "engine.config",
    "EngineAsleepError": "engine.errors",
    "EngineDeadError": "engine.errors",
    "EngineError": "engine.errors",
    "EngineRequest": "engine.core.engine_request",
    "EngineState": "engine.replicas.state",
    "LLM": "engine.offline.llm",
    "LoRARequest": "engine.processing.adapters",
    "ModelError": "engine.models.errors",
    "ModelInfo": "engine.processing.model_info",
    "ParameterError": "engine.errors",
    "PoolingParams": "engine.core.params.pooling",
    "RequestMetrics": "engine.processing.output_collector",
    "RequestOutput": "engine.processing.output_collector",
    "RequestUpdate": "engine.processing.output_collector",
    "SamplingParams": "engine.core.params.sampling",
    "StructuredOutputs": "engine.core.params.structured",
    "TagsError": "engine.errors",
    "TokenizerError": "engine.text.tokenizer",
    "send_weights": "engine.setup.weight_transfer",
}


def __getattr__(name: str) -> Any:  # so that `quire --help` and the API process need not import PyTorch
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    with uncollected():
        module = importlib.import_module(_MODULES[name])
    return getattr(module, name)
