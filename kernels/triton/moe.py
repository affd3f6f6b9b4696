"""Grouped GEMMs of MoE, and the sum of each token's experts, in Triton.

Routed tokens are sorted by expert on the device (`kernels.triton.pairs`), so nothing that the CPU sees depends on what
was chosen. The rows of an expert's weight are the rows of the tensor core's tile and its tokens the columns: a tile
may have few of these. The sum adds in the order of a token's ids, without atomics, so the same input gives the same
bytes.
"""

# ruff: noqa: RUF005 - kernels have no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.data.activation import UNGATED
from kernels.data.capability import shared_memory
from kernels.data.moe import Tiles
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.gpu.codes import decode
from kernels.gpu.launch import (
    EARLY,
    cdiv,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    wait_for_inputs,
)
from kernels.gpu.rounding import norm_arguments, store_norm
from kernels.triton.activation import activate_gated
from kernels.triton.weight_only import FOUR_BITS, _bytes, _or, _scales, _words

NUM_PROGRAMS = 264  # that keep an H200 busy: two on each multiprocessor
PROGRAM_BYTES = 112_000  # of shared memory, so that there are two


@triton.jit
def _load_block(pointers, at, k, ROW: tl.constexpr, WIDTH: tl.constexpr):
    """Columns [at, at + WIDTH) of rows of ROW."""
    if ROW % WIDTH == 0:
        block = tl.load(pointers + at)
    else:
        block = tl.load(pointers + at, mask=(at + k < ROW)[None, :], other=0)
    return block


@triton.jit
def _add_product(
    acc, w, xk, rows, channel, scale, zero,
    STORED: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    ZERO: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """acc [N, M] + weight [N, BLOCK_K] · xk [BLOCK_K, M], from `channel` on; a scale of whole rows is left to the
    caller.

    SCALED: the scale of a group is applied to the weight, as its checkpoint's users do, else to the products, exactly.
    """
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    w = w.to(xk.dtype)
    if ZERO:
        w -= tl.load(zero + rows + channel // GROUP * STORED).to(xk.dtype)[:, None]
    if KIND == "float" or GROUPS == 1:
        acc = tl.dot(w, xk, acc, input_precision="ieee")
    else:
        if ROWS == 1:
            at = rows + channel // GROUP * STORED
        else:
            at = rows // ROWS * GROUPS + channel // GROUP
        s = _scales(tl.load(scale + at))[:, None]
        if SCALED:
            acc = tl.dot(w * s.to(w.dtype), xk, acc, input_precision="ieee")
        else:
            acc += tl.dot(w, xk, input_precision="ieee") * s
    return acc


@triton.jit
def _of_rows(
    acc, rows, scale, factor, bias, WHOLE_ROWS: tl.constexpr, ROWS: tl.constexpr, FACTOR: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """acc times the scales of whole rows, plus the bias."""
    if WHOLE_ROWS:
        acc *= _scales(tl.load(scale + rows // ROWS))[:, None]
    if FACTOR:
        acc *= tl.load(factor + rows)[:, None]
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    return acc


@triton.jit
def _tile(
    x, codes, scale, zero, factor, bias, weights, order, out, stride_x, first, stop, n,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, ZERO: tl.constexpr,
    FACTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Outputs n of the first BLOCK_M routed tokens of [first, stop); pointers to weights are the expert's. See
    `_grouped_kernel`.
    """
    BYTES: tl.constexpr = K // HALVES
    WORD: tl.constexpr = 4 if KIND == "e2m1" else 1  # bytes that are loaded as one number
    ROW: tl.constexpr = BYTES // WORD
    WIDTH: tl.constexpr = BLOCK_K // WORD
    FIRST: tl.constexpr = ACTIVATION != ""
    GATED: tl.constexpr = FIRST and ACTIVATION != "relu2"
    STORED: tl.constexpr = 2 * N if GATED else N
    WHOLE_ROWS: tl.constexpr = KIND != "float" and GROUP >= K
    SCALED: tl.constexpr = BLOCK_M > 32
    k = tl.arange(0, BLOCK_K)
    position = first + tl.arange(0, BLOCK_M)
    inside = tl.minimum(position, stop - 1)
    pair = tl.load(order + inside).to(tl.int64)
    x_rows = pair // CHOSEN if FIRST else inside.to(tl.int64)
    rows = tl.minimum(n, N - 1)
    word = tl.arange(0, WIDTH)
    pointers = codes + rows.to(tl.int64)[:, None] * ROW + word[None, :]
    x_pointers = x + x_rows[None, :] * stride_x + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(0, BYTES, BLOCK_K):
        low = _load_block(pointers, at // WORD, word, ROW, WIDTH)
        high = low
        if KIND != "float":
            low, high = decode(low, KIND)
        if GATED:
            up_low = _load_block(pointers + N * ROW, at // WORD, word, ROW, WIDTH)
            up_high = up_low
            if KIND != "float":
                up_low, up_high = decode(up_low, KIND)
        for half in tl.static_range(HALVES):
            channel = half * BYTES + at
            if BYTES % BLOCK_K == 0:
                xk = tl.load(x_pointers + channel)
            else:
                xk = tl.load(x_pointers + channel, mask=(at + k < BYTES)[:, None], other=0.0)
            w = low if half == 0 else high
            acc = _add_product(acc, w, xk, rows, channel, scale, zero, STORED, K, GROUP, ROWS, KIND, ZERO, SCALED)
            if GATED:
                w = up_low if half == 0 else up_high
                up_acc = _add_product(
                    up_acc, w, xk, N + rows, channel, scale, zero, STORED, K, GROUP, ROWS, KIND, ZERO, SCALED
                )
    acc = _of_rows(acc, rows, scale, factor, bias, WHOLE_ROWS, ROWS, FACTOR, BIAS)
    if GATED:
        up_acc = _of_rows(up_acc, N + rows, scale, factor, bias, WHOLE_ROWS, ROWS, FACTOR, BIAS)
        acc = activate_gated(acc, up_acc, ACTIVATION)
        row = position.to(tl.int64)
    elif FIRST:
        acc = tl.maximum(acc, 0.0)
        acc *= acc
        row = position.to(tl.int64)
    else:
        acc *= tl.load(weights + pair)[None, :]
        row = pair
    mask = (n < N)[:, None] & (position < stop)[None, :]
    tl.store(out + row[None, :] * N + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_kernel(
    x, codes, scale, zero, factor, bias, weights, order, tiles, out, stride_x,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, ZERO: tl.constexpr,
    FACTOR: tl.constexpr, BLOCK_M: tl.constexpr, SMALL_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one tile of routed tokens; at most SMALL_M routed tokens, unless it is 0, are computed as such
    a tile.

    With ACTIVATION: from tokens x [T, K] to the activation of gate and up, out [routed token in order, N]; the weight
    has 2N rows, for "relu2" N. Without: from x [routed token in order, K] to out [routed token, N], times the routed
    token's routing weight. A group has one or more BLOCK_K.
    """
    BYTES: tl.constexpr = K // HALVES
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    FIRST: tl.constexpr = ACTIVATION != ""
    STORED: tl.constexpr = 2 * N if FIRST and ACTIVATION != "relu2" else N
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    entry = tiles + tl.program_id(0) // blocks * 3
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        if FIRST:  # in this order: the next kernel reads the entries before it waits
            wait_for_inputs()
        launch_dependents()
    expert = tl.load(entry, cache_modifier=EARLY).to(tl.int64)
    first, stop = tl.load(entry + 1, cache_modifier=EARLY), tl.load(entry + 2, cache_modifier=EARLY)
    if expert >= 0:
        if PDL and not FIRST:
            wait_for_inputs()
        codes += expert * (STORED * BYTES // (4 if KIND == "e2m1" else 1))
        scale += expert * ((STORED + ROWS - 1) // ROWS) * GROUPS
        zero += expert * STORED * GROUPS
        factor += expert * STORED
        bias += expert * STORED
        if SMALL_M == 0:
            _tile(
                x, codes, scale, zero, factor, bias, weights, order, out, stride_x, first, stop, n, N, K, CHOSEN,
                ACTIVATION, BIAS, GROUP, ROWS, KIND, HALVES, ZERO, FACTOR, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif stop - first <= SMALL_M:
            _tile(
                x, codes, scale, zero, factor, bias, weights, order, out, stride_x, first, stop, n, N, K, CHOSEN,
                ACTIVATION, BIAS, GROUP, ROWS, KIND, HALVES, ZERO, FACTOR, SMALL_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _tile(
                x, codes, scale, zero, factor, bias, weights, order, out, stride_x, first, stop, n, N, K, CHOSEN,
                ACTIVATION, BIAS, GROUP, ROWS, KIND, HALVES, ZERO, FACTOR, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first", "stride_row", "stride_group"])
def _sum_kernel(
    parts, ids, add_to, out, norm_weight, normed, scale, eps, stride_row, stride_group, first, stride_out,
    N: tl.constexpr, E: tl.constexpr, CHOSEN: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A piece of a token's sum over its experts, from parts [routed token, N]; with NORM all of it, and its norm, see
    `store_norm`.

    It reads all but the parts at once: the experts' first kernels waited for it before they let the next ones start.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // GROUP)[:, None]
    n = tl.program_id(1) * BLOCK + group * GROUP + tl.arange(0, GROUP)[None, :]
    if PDL:
        launch_dependents()
    local_ids = ()
    for i in tl.static_range(CHOSEN):
        local_ids = local_ids + (tl.load(ids + token * CHOSEN + i, cache_modifier=EARLY) - first,)
    before = tl.zeros([BLOCK // GROUP, GROUP], tl.float32)
    if ADD:
        before = tl.load(add_to + token * stride_out + n, mask=n < N, other=0.0, cache_modifier=EARLY).to(tl.float32)
    if PDL:
        wait_for_inputs()
    total = tl.zeros([BLOCK // GROUP, GROUP], tl.float32)
    for i in tl.static_range(CHOSEN):
        mask = (n < N) & (local_ids[i] >= 0) & (local_ids[i] < E)
        total += tl.load(parts + (token * CHOSEN + i) * N + n, mask=mask, other=0.0).to(tl.float32)
    total = (total + before).to(out.dtype.element_ty)
    tl.store(out + token * stride_out + n, total, mask=n < N)
    if NORM:
        store_norm(
            total.to(tl.float32), norm_weight, eps, normed, scale, token, group, n, stride_row, stride_group, N, GROUP,
            LARGEST, out.dtype.element_ty,
        )  # fmt: skip


def grouped(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    weights: Tensor,
    tiles: Tiles,
    out: Tensor,
    activation: str,
    chosen: int,
) -> None:
    """Launch one grouped GEMM; see `_grouped_kernel`."""
    n, k = out.shape[1], x.shape[1]
    kind: str
    if isinstance(weight, QuantizedWeight):
        assert weight.order is None, "experts cannot have permuted channels"
        assert not weight.panel, "only `kernels.gluon.moe.scaled` multiplies panels"
        assert weight.lies_by_groups()
        codes, scale = _words(weight.codes, weight.kind), _bytes(weight.scale)
        zero, factor = _or(weight.zero, scale), _or(weight.factor, scale)
        kind, group, rows, size = weight.kind, weight.group, weight.rows, 1
        halves = 2 if kind in FOUR_BITS else 1
        has_zero, has_factor = weight.zero is not None, weight.factor is not None
    else:
        codes = scale = zero = factor = weight
        kind, group, rows, size, halves, has_zero, has_factor = "float", k, 1, weight.element_size(), 1, False, False
    assert codes.is_contiguous()
    assert x.stride(1) == 1
    gated = activation not in ("", UNGATED)
    config = _config(n, k // halves, group if group < k else 0, size, tiles, gated)
    step = config.block_k * (config.block_n * size * (2 if gated else 1) + tiles.block_m * 2 * halves)
    num_stages = max(min(config.num_stages, shared_memory(x.device) // step), 1)
    _grouped_kernel[(len(tiles.entries) * cdiv(n, config.block_n),)](
        x, codes, scale, zero, factor, _or(bias, x), weights, tiles.order, tiles.entries, out, x.stride(0),
        N=n, K=k, CHOSEN=chosen, ACTIVATION=activation, BIAS=bias is not None, GROUP=group, ROWS=rows, KIND=kind,
        HALVES=halves, ZERO=has_zero, FACTOR=has_factor, BLOCK_M=tiles.block_m,
        SMALL_M=tiles.block_m // 2 if tiles.block_m >= 64 and not tiles.one_tile else 0, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, num_warps=config.num_warps, num_stages=num_stages, **pdl_options(x.device),
    )  # fmt: skip


class Config(NamedTuple):
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def _config(n: int, row: int, group: int, size: int, tiles: Tiles, gated: bool) -> Config:
    """Return tile sizes for rows of codes of `size` bytes.

    Few tokens are bound by reading the codes, many by the tensor cores. Codes of one load have one scale, where there
    are groups. Measured on an H200.
    """
    if size == 4:
        return Config(32, 32, 4, 2)
    many = tiles.block_m >= 64
    block_k = 64 if many else 128
    while block_k > 16 and (group % block_k or row % block_k):
        block_k //= 2
    if many and gated and size == 2:
        return Config(128, block_k, 8, 4)
    block_n = 64 if gated else 128
    if many:
        return Config(block_n, block_k, 4, 3)
    while block_n > 16 and len(tiles.entries) * cdiv(n, block_n) < NUM_PROGRAMS:
        block_n //= 2
    per_channel = block_n * size * (2 if gated else 1) + tiles.block_m * 2
    while block_k > 32 and 3 * block_k * per_channel > PROGRAM_BYTES:
        block_k //= 2
    return Config(block_n, block_k, 4, min(max(PROGRAM_BYTES // (block_k * per_channel), 2), 5))


def sum_experts(
    parts: Tensor, ids: Tensor, out: Tensor, add: bool, first: int, count: int, norm: NextNorm | None = None
) -> Tensor | QuantizedRows:
    """Write each token's sum of parts [routed token, N] to out [T, N], in the order of its ids, or add it to out.

    ids [T, k] int32; ids outside [first, first + count) add nothing. Returns out, or with `norm` its norm.
    """
    n, chosen = out.shape[1], ids.shape[1]
    constants: dict[str, Any] = {"N": n, "E": count, "CHOSEN": chosen, "ADD": add}
    if norm is None:
        block = min(next_power_of_2(n), 1024)
        _sum_kernel[(len(ids), cdiv(n, block))](
            parts, ids, out, out, out, out, out, 0.0, 0, 0, first, out.stride(0), NORM=False, BLOCK=block, GROUP=block,
            LARGEST=0, num_warps=4, **constants, **pdl_options(out.device),
        )  # fmt: skip
        return out
    normed, arguments, options = norm_arguments(out, norm)
    _sum_kernel[(len(ids), 1)](
        parts, ids, out, out, *arguments, first, out.stride(0), NORM=True,
        num_warps=min(max(options["BLOCK"] // 256, 1), 16), **constants, **options, **pdl_options(out.device),
    )  # fmt: skip
    return normed
