"""Deterministic GEMMs and attention whose programs share work: the same bytes for every size, and how fast."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.model_shapes import model_folder
from engine import LLM, SamplingParams
from kernels.cuda import deterministic
from kernels.cuda.choice import CHOICE
from kernels.triton.fixed_linear import fixed_linear
from kernels.triton.fixed_parts import fixed_parts
from tests.gpu.checks import BF16, F16, F32, LIMITS, Checks, relative_error

SIZES = (1, 2, 3, 7, 16, 17, 63, 64, 65, 129, 256, 300, 511, 512, 513, 1024, 2049, 4095)
MOST = 4096
# Outputs, channels and pieces of a matrix: of Qwen3-0.6B and 8B, and of a rank's part.
MATRICES = (
    *((4096, 1024, 2), (1024, 3072, 8), (6144, 4096, 2)),
    *((4096, 4096, 8), (4096, 12288, 8), (4096, 1536, 1)),
)
SHAPES = {"0.6B": ("qwen3-0.6b", 28), "8B": ("qwen3-8b", 12)}  # layers that are computed
# Requests, tokens of a prompt and of an answer.
WORK = {"latency1": (1, 512, 128), "decode": (256, 64, 128), "prefill": (32, 1024, 1)}


@contextmanager
def shared_work(parts: bool = True, ranges: bool = True) -> Iterator[None]:
    """Let programs of deterministic mode share tiles of GEMMs, and ranges of keys."""
    with mock.patch.object(deterministic, "CHOICE", replace(CHOICE, fixed_parts=parts, fixed_ranges=ranges)):
        yield


def check_deterministic_parts(checks: Checks) -> None:
    """A token has the same sums however programs divide the pieces, in tiles of 64 and of 128; times beside cuBLAS."""
    for dtype in (BF16, F16, F32):
        for n, k, pieces in MATRICES:
            name = f"deterministic parts {n} x {k} in {pieces} {dtype}"
            if not checks.wants(name.replace("torch.", "")) or (dtype != BF16 and n != 6144):
                continue
            x, weight = checks.random(MOST, k, dtype=dtype), checks.random(n, k, dtype=dtype) / k**0.5

            def product(x: Tensor) -> Tensor:
                return fixed_parts(x, weight, None, x.new_empty(len(x), len(weight)), pieces=pieces)  # noqa: B023

            whole, wrong = product(x), 0
            for size in SIZES:
                wrong += not torch.equal(product(x[:size].clone()), whole[:size])
            for i in range(0, MOST, 97):
                wrong += not torch.equal(product(x[i : i + 1].clone()), whole[i : i + 1])
            checks.add(f"{name}: {wrong} sizes differ", wrong, 0)
            one = fixed_linear(x, weight, None, torch.empty_like(whole), pieces=pieces)
            checks.add(f"{name}: beside one program", int((one != whole).any(1).sum()), 0)
            checks.add(f"{name}: right", relative_error(whole, F.linear(x.float(), weight.float())), LIMITS[dtype])
            if dtype == BF16:
                _time_product(checks, name, x, weight, pieces)


def _time_product(checks: Checks, name: str, x: Tensor, weight: Tensor, pieces: int) -> None:
    for size in (1, 256, MOST):
        own = x[:size].clone()
        out = own.new_empty(size, len(weight))
        shared = partial(fixed_parts, own, weight, None, out, pieces=pieces)
        before = partial(fixed_linear, own, weight, None, out, pieces=pieces)
        for what, call in (("", shared), (", one program", before), (", cuBLAS", partial(F.linear, own, weight))):
            checks.add(
                f"{name}: {size} tokens{what}", 0.0, 0.0, call, weight.nbytes + own.nbytes + out.nbytes, graph=True
            )


def check_deterministic_speed(checks: Checks) -> None:
    """Engines of Qwen3-0.6B's and 8B's layers: with the mode ÷ without."""
    for shape, (folder_name, layers) in SHAPES.items():
        if checks.device == "cpu" or not checks.wants(f"deterministic speed {shape}"):
            continue
        with tempfile.TemporaryDirectory() as root:
            folder = model_folder(folder_name, Path(root))
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
            without = _times(folder, checks.device, deterministic=False)
            found = _times(folder, checks.device, deterministic=True)
        for work, took in found.items():
            what = f"{took:.3f} s, {without[work]:.3f} s without: speed {without[work] / took:.2f}"
            checks.saw(f"deterministic speed {shape} {work}", True, what)


def _times(folder: Path, device: str, **settings: Any) -> dict[str, float]:
    """Return the seconds of each work: the least of two."""
    draw = random.Random(1)
    llm = LLM(
        str(folder), device=device, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=256,
        max_num_batched_tokens=8192, kv_cache_memory_bytes=8 << 30, enable_prefix_caching=False, **settings,
    )  # fmt: skip
    found: dict[str, float] = {}
    for _ in range(2):
        for work, (count, prompt, answer) in WORK.items():
            prompts: list[Any] = [
                {"prompt_token_ids": [draw.randrange(150000) for _ in range(prompt)]} for _ in range(count)
            ]
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            found[work] = min(found.get(work, 1e9), time.perf_counter() - start)
    llm.close()
    return found
