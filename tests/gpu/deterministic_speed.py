"""Deterministic GEMMs and attention whose programs share work: the same bytes for every size, and how fast."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from benchmarks.model_shapes import model_folder
from engine import LLM, SamplingParams
from engine.models.shard import Shard
from kernels import FORMS, AttentionArgs, PagedContext, SplitWeight
from kernels.cuda import attention as cuda_attention
from kernels.cuda import deterministic, linear, split_sums
from kernels.cuda.choice import CHOICE
from kernels.data.plan import DecodePlan
from kernels.gluon.linear import fixed, fixed_few
from kernels.triton import attention_decode, fixed_attention
from kernels.triton.activation import gate_and_mul
from kernels.triton.fixed_linear import fixed_linear
from kernels.triton.fixed_parts import Tile, fixed_parts
from tests.gpu.checks import BF16, F16, F32, LIMITS, Checks, relative_error

SIZES = (1, 2, 3, 7, 16, 17, 63, 64, 65, 129, 256, 300, 511, 512, 513, 1024, 2049, 4095)
MOST = 4096
# Forms of deterministic mode that wait for their checks.
ALL = {
    "fixed_overlaps": True, "fixed_early": True, "fixed_stages": 5, "fixed_shared_stages": 7, "fixed_prompt_stages": 5,
}  # fmt: skip
FORMS_BY_NAME: dict[str, dict[str, Any]] = {
    "few by Triton": {"fixed_row_tokens": 0},
    "overlaps": {"fixed_overlaps": True},
    "early": {"fixed_early": True},
    "stages": {"fixed_stages": 5, "fixed_shared_stages": 7, "fixed_prompt_stages": 5},
    "all": ALL,
    "all of 128": {"keys": 128, **ALL},
}
# Outputs, channels and pieces of a matrix: of Qwen3-0.6B and 8B, and of a rank's part.
MATRICES = (
    *((4096, 1024, 2), (1024, 3072, 8), (6144, 4096, 2)),
    *((4096, 4096, 8), (4096, 12288, 8), (4096, 1536, 1)),
)
GATES: tuple[kernels.Gate, ...] = ("silu", "gelu_tanh")
# Channels, rows of queries, keys and values, channels of all heads, and of the MLP.
LAYERS = {"0.6B": (1024, 4096, 2048, 3072), "8B": (4096, 6144, 4096, 12288)}
SHAPES = {"0.6B": ("qwen3-0.6b", 28), "8B": ("qwen3-8b", 12)}  # layers that are computed
# Requests, tokens of a prompt and of an answer.
WORK = {"latency1": (1, 512, 128), "decode": (256, 64, 128), "prefill": (32, 1024, 1)}


@contextmanager
def chosen(keys: int = fixed_attention.RANGE, **forms: Any) -> Iterator[None]:
    """Let deterministic mode compute by these forms, and by ranges of so many keys."""
    choice = replace(CHOICE, **forms)
    with mock.patch.object(deterministic, "CHOICE", choice), mock.patch.object(fixed_attention, "RANGE", keys):
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


def check_deterministic_tiles(checks: Checks) -> None:
    """Tiles of few tokens, and Gluon's GEMM of many, give the same bytes; their epilogues round as kernels apart."""
    for dtype in (BF16, F16):
        for n, k, pieces in ((4096, 1024, 1), (1024, 3072, 8), (6144, 4096, 1), (4096, 12288, 8), (3072, 1536, 4)):
            name = f"deterministic tiles {n} x {k} in {pieces} {dtype}"
            if checks.wants(name.replace("torch.", "")) and (dtype == BF16 or n == 6144):
                _check_tiles(checks, name, checks.random(MOST, k, dtype=dtype), n, pieces)
    for n, k in ((3072, 1024), (12288, 4096)):
        name = f"deterministic tiles gated {n} x {k}"
        if checks.wants(name):
            _check_gated(checks, name, checks.random(MOST, k), checks.random(2 * n, k) / k**0.5)


def _check_tiles(checks: Checks, name: str, x: Tensor, n: int, pieces: int) -> None:
    weight, residual = checks.random(n, x.shape[1], dtype=x.dtype) / x.shape[1] ** 0.5, checks.random(MOST, n)
    bias, residual = checks.random(n, dtype=x.dtype), residual.to(x.dtype)
    wide = torch.empty(MOST, n, dtype=F32, device=x.device)
    fixed_linear(x, weight, bias, wide, None, pieces)
    once, twice = (wide + residual.float()).to(x.dtype), (wide.to(x.dtype).float() + residual.float()).to(x.dtype)

    def wrong(launch: Callable[..., object], sizes: Sequence[int]) -> int:
        count = 0
        for size in sizes:
            own, sums, into = x[:size].clone(), wide.new_empty(size, n), residual[:size].clone()
            launch(own, weight, bias, sums, pieces=pieces)
            launch(own, weight, bias, into, residual=into, pieces=pieces)
            rounded = residual[:size].clone()
            launch(own, weight, bias, rounded, residual=rounded, rounds=True, pieces=pieces)
            found, wanted = (sums, into, rounded), (wide, once, twice)
            count += any(not torch.equal(each, want[:size]) for each, want in zip(found, wanted, strict=True))
        return count

    tiles = [Tile(64, 32, 128, 4, 4, True), Tile(64, 64, 64, 4, 4), Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)]
    for tile in (*tiles, Tile(16, 32, 128, 4, 4)):
        found = wrong(partial(fixed_parts, tile=tile), (1, 5, 64, 300, MOST))
        checks.add(f"{name}: {tile.block_m} x {tile.block_n} x {tile.block_k}: {found} of 5 differ", found, 0)
    found = wrong(fixed_few.launch, (1, 2, 5, 8, 9, 16))
    checks.add(f"{name}: rows: {found} of 6 differ", found, 0)
    for config in itertools.starmap(fixed.Config, itertools.product((64, 128), (1, 2), (False, True))):
        if pieces == 1 or config.halves == 1:
            found, how = (
                wrong(partial(_launched, config), (1, 65, 256, 300, 1024, MOST)),
                ", overlapping" * config.overlaps,
            )
            checks.add(f"{name}: Gluon {config.block_m}, {config.halves}{how}: {found} of 6 differ", found, 0)


def _launched(
    config: fixed.Config, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, **options: Any
) -> None:
    fixed.launch(x, weight, bias, out, config, **options)


def _check_gated(checks: Checks, name: str, x: Tensor, weight: Tensor) -> None:
    n = len(weight) // 2
    for gate in GATES:
        both = fixed_linear(x, weight, None, x.new_empty(MOST, 2 * n))
        want, wrong = gate_and_mul(both, gate), 0
        for size in (1, 5, 64, 65, 300, 1024, MOST):
            out = x.new_empty(size, n)
            tile = Tile(64, 32, 128, 4, 4, True)
            wrong += not torch.equal(
                fixed_parts(x[:size].clone(), weight, None, out, gate=gate, tile=tile), want[:size]
            )
            for config in (fixed.Config(64, 2), fixed.Config(128, 2), fixed.Config(128, 2, True)):
                fixed.launch(x[:size].clone(), weight, None, out, config, gate=gate)
                wrong += not torch.equal(out, want[:size])
            if size <= fixed_few.TOKENS:
                fixed_few.launch(x[:size].clone(), weight, None, out, gate=gate)
                wrong += not torch.equal(out, want[:size])
        checks.add(f"{name} {gate}: {wrong} of 30 differ", wrong, 0)


def check_deterministic_layer_times(checks: Checks) -> None:
    """Times of a layer's GEMMs with their epilogues, of each form and without the mode."""
    for shape, sizes in LAYERS.items():
        for num_tokens in (1, 8, 64, 256, 2048, 8192):
            name = f"deterministic times {shape}, {num_tokens} tokens"
            if checks.wants(name):
                _time_layer(checks, name, sizes, num_tokens)


def _time_layer(checks: Checks, name: str, sizes: tuple[int, int, int, int], num_tokens: int) -> None:
    hidden, qkv, heads, inner = sizes
    x, out, mid = (checks.random(num_tokens, n) for n in (hidden, heads, inner))
    norm, residual = checks.random(hidden), checks.random(num_tokens, hidden)
    of_qkv, of_gate = checks.random(qkv, hidden) / 99, checks.random(2 * inner, hidden) / 99
    of_out, of_down = checks.random(hidden, heads) / 99, checks.random(hidden, inner) / 99
    split_out, split_down = (split_sums.split_weight(w, Shard().eighths(w.shape[1])) for w in (of_out, of_down))

    def added(value: Tensor, split: SplitWeight) -> Tensor:
        if split_sums.adds_split_sums(value, split):
            return split_sums.split_linear_add(residual, value, split)
        return residual.add_(split_sums.split_linear(value, split).to(residual.dtype))

    calls: dict[str, Callable[[], object]] = {
        "qkv": lambda: deterministic.norm_linear(x, norm, 1e-6, of_qkv),
        "out": lambda: added(out, split_out),
        "gate_up": lambda: deterministic.norm_gated(x, norm, 1e-6, of_gate),
        "down": lambda: added(mid, split_down),
    }
    plain: dict[str, Callable[[], object]] = {
        "qkv": lambda: linear.norm_linear(x, norm, 1e-6, of_qkv),
        "out": lambda: linear.linear_add(residual, out, of_out),
        "gate_up": lambda: linear.norm_gated(x, norm, 1e-6, of_gate),
        "down": lambda: linear.linear_add(residual, mid, of_down),
    }
    for what, weight in (("qkv", of_qkv), ("out", of_out), ("gate_up", of_gate), ("down", of_down)):
        size = weight.nbytes
        checks.add(f"{name}: {what}, without the mode", 0.0, 0.0, plain[what], size, graph=True)
        for form, forms in {"with it": {}, **FORMS_BY_NAME}.items():
            with chosen(**forms):
                checks.add(f"{name}: {what}, {form}", 0.0, 0.0, calls[what], size, graph=True)


def check_deterministic_decode_rows(checks: Checks) -> None:
    """Decode attention in tiles of 16 rows and of 64 gives the same bytes; times of both with two stages and three."""
    for heads, kv_heads, dim in ((16, 8, 128), (32, 8, 128), (8, 8, 64)):
        for count, length in ((1, 640), (16, 640), (256, 130), (256, 900)):
            name = f"deterministic rows {heads}/{kv_heads} {dim}, {count} of {length} keys"
            if checks.wants(name):
                _check_decode_rows(checks, name, (heads, kv_heads, dim), count, length)


def _check_decode_rows(checks: Checks, name: str, sizes: tuple[int, int, int], count: int, length: int) -> None:
    (heads, kv_heads, dim), device, page = sizes, checks.device, 16
    blocks = -(-length // page)
    cache = checks.random(2, count * blocks, kv_heads, page, dim)
    tables = torch.arange(count * blocks, dtype=torch.int32, device=device).view(count, blocks)
    lens = torch.randint(length // 2, length + 1, (count,), device=device, dtype=torch.int32)
    context = PagedContext(cache[0], cache[1], tables, torch.arange(count, dtype=torch.int32, device=device), lens)
    query, args = checks.random(count, heads, dim), AttentionArgs(dim**-0.5)
    want = torch.empty_like(query)
    fixed_attention.decode(query, context, args, want)
    num_bytes = int(lens.sum()) * kv_heads * dim * 4
    plain = fixed_attention.PLAIN
    forms = {
        "64 rows": plain._replace(rows=64),
        "16 rows": plain,
        "2 warps": plain._replace(warps=2),
        "1 warp": plain._replace(warps=1),
        "5 stages": plain._replace(stages=5, shared_stages=5),
        "7 stages": plain._replace(stages=7, shared_stages=7),
        "early": plain._replace(early=True),
        "all": plain._replace(stages=5, shared_stages=7, early=True),
    }
    for how, form in forms.items():
        out = torch.empty_like(query)
        call = partial(fixed_attention.decode, query, context, args, out, form)
        call()
        wrong = int((out != want).flatten(1).any(1).sum())
        checks.add(f"{name}: {how}: {wrong} differ", wrong, 0, call, num_bytes, graph=True)
    plan = DecodePlan.allocate(count, heads, kv_heads, dim, query.device, kv_dtype=query.dtype)
    attention_decode.plan_decode(lens, context.rows, plan)
    without = partial(
        cuda_attention.paged_attention_decode, query, context, args, plan=plan, out=torch.empty_like(want)
    )
    checks.add(f"{name}: without the mode", 0, 0, without, num_bytes, graph=True)
    for size, form in itertools.product((64, 128), (plain, forms["all"])):
        with mock.patch.object(fixed_attention, "RANGE", size):
            call = partial(fixed_attention.decode, query, context, args, torch.empty_like(want), form)
            how = f"ranges of {size}{', all' * (form != plain)}"
            checks.add(f"{name}: {how}", 0, 0, call, num_bytes, graph=True)


def check_norms_of_sums(checks: Checks) -> None:
    """The norm of a sum has the same bytes with the sum and by itself."""
    FORMS.choose(True)
    try:
        for dtype, hidden in itertools.product((BF16, F16, F32), (128, 1024, 2560, 4096, 7168, 8192)):
            x, residual = checks.random(300, hidden, dtype=dtype), checks.random(300, hidden, dtype=dtype)
            weight = checks.random(hidden, dtype=dtype)
            want = kernels.add_rms_norm(residual, x, weight, 1e-6)
            wrong = int((kernels.rms_norm(residual, weight, 1e-6) != want).any(1).sum())
            checks.add(f"deterministic norms of sums {hidden} {dtype}: {wrong} differ", wrong, 0)
            if dtype == BF16:
                _check_norms_of_rows(checks, f"deterministic norms of sums {hidden} and rows", residual, weight, want)
    finally:
        FORMS.choose(False)


def _check_norms_of_rows(checks: Checks, name: str, x: Tensor, norm: Tensor, normed: Tensor) -> None:
    """The product's kernel computes the norm of one token with the same bytes, x [300, K] and `normed`."""
    matrix = checks.random(512, x.shape[1]) / x.shape[1] ** 0.5
    both, single = x.new_empty(300, 512), [x[i : i + 1].clone() for i in range(0, 300, 5)]
    fixed_linear(normed, matrix, None, both)
    gates, wrong = gate_and_mul(both, "silu"), 0
    for i, row in zip(range(0, 300, 5), single, strict=True):
        out, gated = both.new_empty(1, 512), both.new_empty(1, 256)
        one = fixed_few.Normed(row, norm, 1e-6)
        fixed_few.launch(one, matrix, None, out)
        fixed_few.launch(one, matrix, None, gated, gate="silu")
        wrong += not torch.equal(out[0], both[i]) or not torch.equal(gated[0], gates[i])
    checks.add(f"{name}: {wrong} of 60 differ", wrong, 0)


def check_deterministic_speed(checks: Checks) -> None:
    """Engines of Qwen3-0.6B's and 8B's layers: with the mode ÷ without."""
    for shape, (folder_name, layers) in SHAPES.items():
        names = [f"deterministic speed {shape}", *(f"deterministic speed {shape}, {form}" for form in FORMS_BY_NAME)]
        if checks.device == "cpu" or not any(map(checks.wants, names)):
            continue
        with tempfile.TemporaryDirectory() as root:
            folder = model_folder(folder_name, Path(root))
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
            without = _times(folder, checks.device, deterministic=False)
            for form, forms in {"": {}, **FORMS_BY_NAME}.items():
                name = f"deterministic speed {shape}{form and ', '}{form}"
                if not checks.wants(name):
                    continue
                with chosen(**forms):
                    found = _times(folder, checks.device, deterministic=True)
                for work, took in found.items():
                    what = f"{took:.3f} s, {without[work]:.3f} s without: speed {without[work] / took:.2f}"
                    checks.saw(f"{name} {work}", True, what)


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
