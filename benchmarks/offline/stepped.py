"""Engines that are stepped by their caller, so that it sees when each token comes: Quire in this process, and vLLM."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine

BLOCK = 16  # tokens
VLLM_MEMORY = 0.4  # of the GPU's memory: other engines are beside it, and its cache has a given size


class NewTokens(NamedTuple):
    """Tokens that a step has made for a request."""

    request: str
    token_ids: list[int]
    is_end: bool


class Stepped(Protocol):
    """An engine with greedy requests of given lengths."""

    def add(self, name: str, prompt: list[int], num_output: int) -> None: ...

    def has_work(self) -> bool: ...

    def step(self) -> Iterator[NewTokens]: ...

    def close(self) -> None: ...


class Quire:
    """Works only while it is stepped."""

    def __init__(self, model: Path, **settings: Any) -> None:
        """`settings`: of `EngineConfig`."""
        self.engine = Engine(
            EngineConfig(
                model=str(model), load_format="dummy", skip_tokenizer_init=True, block_size=BLOCK, **settings,
            )
        )  # fmt: skip

    def add(self, name: str, prompt: list[int], num_output: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        self.engine.add_request(EngineRequest(name, prompt, sampling))

    def has_work(self) -> bool:
        return self.engine.has_work()

    def step(self) -> Iterator[NewTokens]:
        for output in self.engine.step():
            yield NewTokens(output.request_id, output.new_token_ids, output.finish_reason is not None)

    def close(self) -> None:
        self.engine.close()


class Vllm:
    """Its own process works on between steps, too: let its requests end before another engine is measured."""

    def __init__(self, model: Path, *, cache_tokens: int, host_gib: float, **settings: Any) -> None:
        """`host_gib`: of its own offload to host memory; 0: none. `settings`: of its `EngineArgs`."""
        if importlib.util.find_spec("flashinfer") is None:  # vLLM's start would end without it
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._params, self._delta = vllm.SamplingParams, RequestOutputKind.DELTA
        arguments = vllm.EngineArgs(
            model=str(model), load_format="dummy", skip_tokenizer_init=True, block_size=BLOCK,
            num_gpu_blocks_override=cache_tokens // BLOCK, kv_offloading_size=host_gib or None,
            gpu_memory_utilization=VLLM_MEMORY, **settings,
        )  # fmt: skip
        self._engine = vllm.LLMEngine.from_engine_args(arguments)

    def add(self, name: str, prompt: list[int], num_output: int) -> None:
        params = self._params(
            temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> Iterator[NewTokens]:
        for output in self._engine.step():
            yield NewTokens(output.request_id, list(output.outputs[0].token_ids), output.finished)

    def close(self) -> None:
        self._engine.engine_core.shutdown()
