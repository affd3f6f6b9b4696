"""Checks of norms, activation, rotary embeddings and stores into the KV cache against their reference
implementations.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import kernels
from kernels import reference
from tests.gpu.checks import BF16, ELEMENTWISE_LIMITS, F16, F32, Checks, relative_error


def check_norms(checks: Checks) -> None:
    for rows, hidden, dtype in (
        (1, 1024, BF16), (1, 4096, BF16), (256, 1024, BF16), (256, 4096, BF16), (8192, 4096, BF16), (16384, 3840, BF16),
        (64, 5120, F16), (64, 16384, BF16), (64, 2880, F32),
    ):  # fmt: skip
        x, residual = checks.random(rows, hidden, dtype=dtype), checks.random(rows, hidden, dtype=dtype)
        weight = checks.random(hidden, dtype=dtype)
        name = f"{rows} x {hidden} {dtype}"
        call = partial(kernels.rms_norm, x, weight, 1e-6)
        error = relative_error(call(), reference.rms_norm(x.double(), weight.double(), 1e-6))
        checks.add(f"rms_norm {name}", error, ELEMENTWISE_LIMITS[dtype], call, 2 * x.nbytes)
        got = kernels.rms_norm_add(residual.clone(), x, weight, 1e-6, 0.22)
        want = reference.rms_norm_add(residual.double(), x.double(), weight.double(), 1e-6, 0.22)
        scratch = residual.clone()  # timed calls add to it again and again
        call_sum = partial(kernels.rms_norm_add, scratch, x, weight, 1e-6)
        checks.add(f"rms_norm_add {name}", relative_error(got, want), ELEMENTWISE_LIMITS[dtype], call_sum, 3 * x.nbytes)
        for x_weight in (None, weight.float()):  # float32, as of families with an offset
            got, want = residual.clone(), residual.double()
            normed = kernels.add_rms_norm(got, x, weight, 1e-6, x_weight, 1e-5)
            exact = None if x_weight is None else x_weight.double()
            reference.add_rms_norm(want, x.double(), weight.double(), 1e-6, exact, 1e-5)
            of_sum = reference.rms_norm(got.double(), weight.double(), 1e-6)
            error = max(relative_error(got, want), relative_error(normed, of_sum))
            call_both = partial(kernels.add_rms_norm, scratch, x, weight, 1e-6, x_weight, 1e-5)
            what = f"add_rms_norm{' after a norm' if x_weight is not None else ''} {name}"
            checks.add(what, error, ELEMENTWISE_LIMITS[dtype], call_both, 4 * x.nbytes)


def check_activation(checks: Checks) -> None:
    for rows, width, dtype in (
        (1, 3072, BF16),
        (256, 3072, BF16),
        (256, 14336, BF16),
        (8192, 14336, BF16),
        (99, 8960, F32),
    ):
        x = checks.random(rows, 2 * width, dtype=dtype)
        call = partial(kernels.gate_and_mul, x, "silu")
        error = relative_error(call(), reference.silu_and_mul(x.double()))
        checks.add(f"gate_and_mul {rows} x {width} {dtype}", error, ELEMENTWISE_LIMITS[dtype], call, 3 * x.nbytes // 2)


def check_rotary(checks: Checks) -> None:
    for tokens, heads, kv_heads, head_dim, normed, dtype, huge in (
        (1, 16, 8, 128, True, BF16, False), (256, 16, 8, 128, True, BF16, True), (8192, 16, 8, 128, True, BF16, False),
        (1, 32, 8, 128, False, BF16, False), (256, 32, 8, 128, False, BF16, True),
        (8192, 32, 8, 128, False, BF16, False),
        (256, 32, 8, 64, False, F16, False), (256, 32, 32, 80, False, BF16, False), (256, 8, 4, 256, True, BF16, False),
        (256, 24, 8, 128, True, F32, False),
    ):  # fmt: skip
        check_rotary_case(checks, tokens, heads, kv_heads, head_dim, normed, dtype, huge)
    for tokens, heads, kv_heads, head_dim, normed, dtype in (
        (1, 16, 8, 128, True, BF16), (256, 16, 8, 128, True, BF16), (8192, 32, 8, 128, False, BF16),
        (256, 28, 4, 80, False, F16), (256, 8, 4, 256, True, F32),
    ):  # fmt: skip
        check_e4m3_store(checks, tokens, heads, kv_heads, head_dim, normed, dtype)


def check_rotary_case(
    checks: Checks, tokens: int, heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype, huge: bool
) -> None:
    """rope_and_store and store_kv; `huge`: into slots beyond 2^31 elements, where memory allows."""
    block_size = 16
    block = kv_heads * block_size * head_dim
    num_blocks = 2**31 // block + 4096 if huge else max(tokens // block_size, 1) * 2
    free = torch.cuda.mem_get_info()[0]
    if huge and 4 * num_blocks * block * dtype.itemsize > free:
        print(f"skip slots beyond 2^31 elements: {free / 2**30:.0f} GiB free")
        huge, num_blocks = False, max(tokens // block_size, 1) * 2
    key_cache, value_cache = torch.zeros(
        2, num_blocks, kv_heads, block_size, head_dim, dtype=dtype, device=checks.device
    )
    slots = num_blocks * block_size - 1 - torch.randperm(2 * tokens, device=checks.device)[:tokens]
    if tokens > 1:
        slots[:: tokens // 4] = -1
    qkv = checks.random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    positions = torch.randint(0, 40_000, (tokens,), device=checks.device, dtype=torch.int32)
    angles = torch.rand(40_000, head_dim // 2, device=checks.device) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), -1)
    q_norm, k_norm = (checks.random(head_dim, dtype=dtype) if normed else None for _ in "qk")
    args, into = (
        kernels.RopeArgs(heads, kv_heads, table, q_norm, k_norm),
        kernels.KVSlots(key_cache, value_cache, slots),
    )
    call = partial(kernels.rope_and_store, qkv, positions, args, into)
    query = call()

    q, k, v = qkv.view(tokens, -1, head_dim).double().split((heads, kv_heads, kv_heads), 1)
    q_exact, k_exact = (None if w is None else w.double() for w in (q_norm, k_norm))
    q, k = reference.rope(q, k, positions, table, q_exact, k_exact)
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    errors = relative_error(query, q), relative_error(key_cache[blocks, :, offsets], k[kept])
    error = max(*errors, relative_error(value_cache[blocks, :, offsets], v[kept]))
    touched = sum(int((cache != 0).any(-1).any(1).sum()) for cache in (key_cache, value_cache))
    error = error if touched == 2 * int(kept.sum()) else float("nan")  # nothing beside the slots
    name = f"{tokens} x ({heads} + {kv_heads}) x {head_dim} {dtype}"
    name += (" normed" if normed else "") + (" slots > 2^31" if huge else "")
    checks.add(f"rope_and_store {name}", error, ELEMENTWISE_LIMITS[dtype], call, 2 * qkv.nbytes)

    key, value = qkv.view(tokens, -1, head_dim)[:, heads:].split(kv_heads, 1)
    key_cache[blocks, :, offsets] = value_cache[blocks, :, offsets] = 0
    store = partial(kernels.store_kv, key, value, key_cache, value_cache, slots)
    store()
    got = key_cache[blocks, :, offsets], value_cache[blocks, :, offsets]
    error = max(relative_error(got[0], key[kept]), relative_error(got[1], value[kept]))
    checks.add(f"store_kv {name}", error, 0.0, store, 4 * key.numel() * dtype.itemsize)


def check_e4m3_store(
    checks: Checks, tokens: int, heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """rope_and_store and store_kv into an e4m3 cache, some values too large for it, infinite or NaN."""
    shape = (2, max(tokens // 16, 1) * 2, kv_heads, 16, head_dim)
    caches = torch.zeros(shape, dtype=torch.uint8, device=checks.device).view(torch.float8_e4m3fn)
    slots = torch.randperm(shape[1] * 16, device=checks.device)[:tokens]
    qkv = checks.random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    qkv[-1, -head_dim:] = torch.tensor([1e4, -1e4, float("nan"), float("inf")], device=checks.device).repeat(
        head_dim // 4
    )
    scale = torch.rand(2, kv_heads, device=checks.device) + 0.05
    table = torch.randn(64, head_dim, device=checks.device)
    positions = torch.randint(0, 64, (tokens,), device=checks.device)
    q_norm, k_norm = (checks.random(head_dim, dtype=dtype) if normed else None for _ in "qk")

    def stored() -> tuple[Tensor, Tensor]:
        found = caches.view(torch.uint8)[:, slots // 16, :, slots % 16].view(torch.float8_e4m3fn).float()
        caches.view(torch.uint8).zero_()
        return found[:, 0], found[:, 1]

    def difference(got: Tensor, want: Tensor) -> float:
        if not got.isnan().equal(want.isnan()):
            return float("nan")
        return relative_error(got.nan_to_num(), want.nan_to_num())

    query, key, value = qkv.view(tokens, -1, head_dim).split((heads, kv_heads, kv_heads), 1)
    args = kernels.RopeArgs(heads, kv_heads, table, q_norm, k_norm)
    call = partial(kernels.rope_and_store, qkv, positions, args, kernels.KVSlots(caches[0], caches[1], slots, scale))
    call()
    got = stored()
    _, rotated = reference.rope(query, key, positions, table, q_norm, k_norm)
    want = tuple(reference.to_e4m3(x, s).float() for x, s in zip((rotated, value), scale, strict=True))
    name = f"{tokens} x ({heads} + {kv_heads}) x {head_dim} {dtype}{' normed' if normed else ''} fp8 cache"
    checks.add(f"rope_and_store {name}: keys", difference(got[0], want[0]), 6e-3, call, 3 * qkv.nbytes // 2)
    checks.add(f"rope_and_store {name}: values", difference(got[1], want[1]), 0.0)
    stored()
    store = partial(kernels.store_kv, key, value, caches[0], caches[1], slots, scale)
    store()
    got = stored()
    error = max(
        difference(g, reference.to_e4m3(x, s).float()) for g, x, s in zip(got, (key, value), scale, strict=True)
    )
    checks.add(f"store_kv {name}", error, 0.0, store, 3 * key.numel() * dtype.itemsize)
