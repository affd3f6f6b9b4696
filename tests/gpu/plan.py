"""KV cache as `quire plan` counts it, beside what the engine allocates; it takes the whole GPU."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_shapes import model_folder
from engine.config import EngineConfig
from engine.engine import Engine
from engine.setup.plan import gpu_here, make_plan
from tests.gpu.checks import Checks

LIMIT = 0.05
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {},
    "llama-3.1-8b": {},
    "llama-3.1-8b-fp8-block": {"kv_cache_dtype": "fp8"},
    "gemma-3-12b": {"max_num_batched_tokens": 16384},
    "qwen3-32b": {"max_num_seqs": 256},
}


def _allocated(config: EngineConfig) -> int:
    engine = Engine(config)
    num_bytes = engine.runner.kv_cache_bytes
    engine.close()
    return num_bytes


def check_plan(checks: Checks) -> None:
    gpu = gpu_here()
    if gpu is None:
        print("left out: plans (there is no GPU)")
        return
    with tempfile.TemporaryDirectory() as folder:
        for shape, settings in SHAPES.items():
            if not checks.wants(shape):
                continue
            model = str(model_folder(shape, Path(folder)))
            config = EngineConfig(model=model, load_format="dummy", enforce_eager=True, **settings)
            plan = make_plan(config, gpu)
            planned, allocated = plan.kv_cache_bytes, _allocated(config)
            gc.collect()
            torch.cuda.empty_cache()
            name = f"{shape}: KV cache of {planned / 2**30:.1f} GiB planned, {allocated / 2**30:.1f} allocated"
            checks.add(name, abs(planned / allocated - 1), LIMIT)
