"""The experts of a mixture, in Triton: pairs of a token and an expert that it chose, sorted by expert, in grouped products.

They are sorted on the device (`kernels.triton.pairs`): nothing that the CPU sees depends on what was chosen. In the products
the rows of an expert's weight are the rows of the matrix unit's tile and its tokens the columns, of which there may be few. A
last kernel sums the experts of each token, in the order of its ids: no atomics, so the same input gives the same bytes.
"""

# ruff: noqa: RUF005 - kernels have no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.compressed_weight import CompressedWeight, ExpertWeight, compress
from kernels.data.moe import ExpertActivation
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight, in_panels
from kernels.gpu.codes import decode
from kernels.gpu.device import is_hopper
from kernels.gpu.launch import (
    EARLY,
    cdiv,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    wait_for_inputs,
)
from kernels.gpu.rounding import norm_arguments, store_norm
from kernels.triton.pairs import Tiles, sort_pairs
from kernels.triton.scaled import finish_norm, quantize_pairs
from kernels.triton.weight_only import FOUR_BITS, _bytes, _or, _scales, _words

if triton.__version__.startswith(("3.6.", "3.7.")):  # Gluon's interface is not stable: the versions it was checked on
    from kernels.gluon.moe import compressed as compressed_experts
    from kernels.gluon.moe import compressed_small_batch as compressed_few
    from kernels.gluon.moe import decompress, scaled
    from kernels.gluon.moe import small_batch as few
    from kernels.gluon.moe import weight_only as quantized_experts
else:
    compressed_experts = compressed_few = decompress = few = quantized_experts = scaled = None  # type: ignore[assignment]

# Tokens beyond which another kernel is faster than `experts_few`:
MAX_FEW_FLOATS = 3  # with floats, the one here
MAX_FEW_E2M1 = 4  # with e2m1 codes, `quantized_experts`
MAX_FEW_PANELS = 1  # with panels, `scaled_experts`
MAX_FEW_COMPRESSED = 4  # likewise `compressed_few`: `compressed_experts`
MAX_COMPRESSED = 4096  # and that one: decompressing all weights first
MAX_WIDE = 32  # tokens up to which what an expert adds to a token stays float32 until it is summed
NUM_PROGRAMS = 264  # that keep an H200 busy: two on each multiprocessor
PROGRAM_BYTES = 112_000  # of shared memory, so that there are two


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)
    if ACTIVATION == "gelu_tanh":  # tanh(z) = 1 - 2 / (exp(2z) + 1); z = sqrt(2 / pi) (gate + 0.044715 gate^3)
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (tl.exp(2.0 * z) + 1.0)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


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
    STORED: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """acc [N, M] + weight [N, BLOCK_K] · xk [BLOCK_K, M], from `channel` on; a scale of whole rows is left to the caller.

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
    acc,
    rows,
    scale,
    factor,
    bias,
    WHOLE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    BIAS: tl.constexpr,
):
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
    """Outputs n of the first BLOCK_M pairs of [first, stop); pointers to weights are the expert's. See `_grouped_kernel`."""
    BYTES: tl.constexpr = K // HALVES
    WORD: tl.constexpr = 4 if KIND == "e2m1" else 1  # bytes that are loaded as one number
    ROW: tl.constexpr = BYTES // WORD
    WIDTH: tl.constexpr = BLOCK_K // WORD
    GATED: tl.constexpr = ACTIVATION != ""
    STORED: tl.constexpr = 2 * N if GATED else N
    WHOLE_ROWS: tl.constexpr = KIND != "float" and GROUP >= K
    SCALED: tl.constexpr = BLOCK_M > 32
    k = tl.arange(0, BLOCK_K)
    position = first + tl.arange(0, BLOCK_M)
    inside = tl.minimum(position, stop - 1)
    pair = tl.load(order + inside).to(tl.int64)
    x_rows = pair // CHOSEN if GATED else inside.to(tl.int64)
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
        acc = _activate(acc, up_acc, ACTIVATION)
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
    """BLOCK_N outputs of one tile of pairs; at most SMALL_M pairs, unless it is 0, are computed as such a tile.

    With ACTIVATION: from tokens x [T, K] to the activation of gate and up, out [pair in order, N]; the weight has 2N rows.
    Without: from x [pair in order, K] to out [pair, N], times the pair's routing weight. A group has one or more BLOCK_K.
    """
    BYTES: tl.constexpr = K // HALVES
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    GATED: tl.constexpr = ACTIVATION != ""
    STORED: tl.constexpr = 2 * N if GATED else N
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    entry = tiles + tl.program_id(0) // blocks * 3
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        if GATED:  # in this order: the next kernel reads the entries before it waits
            wait_for_inputs()
        launch_dependents()
    expert = tl.load(entry, cache_modifier=EARLY).to(tl.int64)
    first, stop = tl.load(entry + 1, cache_modifier=EARLY), tl.load(entry + 2, cache_modifier=EARLY)
    if expert >= 0:
        if PDL and not GATED:
            wait_for_inputs()
        codes += expert * (STORED * BYTES // (4 if KIND == "e2m1" else 1))
        scale += expert * ((STORED + ROWS - 1) // ROWS) * GROUPS
        zero += expert * STORED * GROUPS
        factor += expert * STORED
        bias += expert * STORED
        if SMALL_M == 0:
            _tile(
                x, codes, scale, zero, factor, bias, weights, order, out, stride_x, first, stop, n, N, K, CHOSEN, ACTIVATION,
                BIAS, GROUP, ROWS, KIND, HALVES, ZERO, FACTOR, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif stop - first <= SMALL_M:
            _tile(
                x, codes, scale, zero, factor, bias, weights, order, out, stride_x, first, stop, n, N, K, CHOSEN, ACTIVATION,
                BIAS, GROUP, ROWS, KIND, HALVES, ZERO, FACTOR, SMALL_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _tile(
                x, codes, scale, zero, factor, bias, weights, order, out, stride_x, first, stop, n, N, K, CHOSEN, ACTIVATION,
                BIAS, GROUP, ROWS, KIND, HALVES, ZERO, FACTOR, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first", "stride_row", "stride_group"])
def _sum_kernel(
    parts, ids, add_to, out, norm_weight, normed, scale, eps, stride_row, stride_group, first, stride_out,
    N: tl.constexpr, E: tl.constexpr, CHOSEN: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A piece of a token's sum over its experts, from parts [pair, N]; with NORM all of it, and its norm, see `store_norm`.

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


def _tile_height(pairs: float, least: int = 16) -> int:
    """For experts with so many pairs on average: so that most experts' pairs fill one tile, or several."""
    return min(max(next_power_of_2(int(pairs + 2 * pairs**0.5)), least), 128)


def _grouped(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    weights: Tensor,
    tiles: Tiles,
    out: Tensor,
    activation: str,
    chosen: int,
) -> None:
    """See `_grouped_kernel`."""
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
    config = _config(n, k // halves, group if group < k else 0, size, tiles, bool(activation))
    step = config.block_k * (config.block_n * size * (2 if activation else 1) + tiles.block_m * 2 * halves)
    num_stages = max(min(config.num_stages, _shared_memory(x.device) // step), 1)
    _grouped_kernel[(len(tiles.entries) * cdiv(n, config.block_n),)](
        x, codes, scale, zero, factor, _or(bias, x), weights, tiles.order, tiles.entries, out, x.stride(0),
        N=n, K=k, CHOSEN=chosen, ACTIVATION=activation, BIAS=bias is not None, GROUP=group, ROWS=rows, KIND=kind,
        HALVES=halves, ZERO=has_zero, FACTOR=has_factor, BLOCK_M=tiles.block_m,
        SMALL_M=tiles.block_m // 2 if tiles.block_m >= 64 else 0, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, num_warps=config.num_warps, num_stages=num_stages, **pdl_options(x.device),
    )  # fmt: skip


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type != "cuda":
        return 160 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


class Config(NamedTuple):
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def _config(n: int, row: int, group: int, size: int, tiles: Tiles, gated: bool) -> Config:
    """How a product with rows of codes of `size` bytes is cut up: few tokens are bound by reading them, many by the matrix unit.

    A step's codes have one scale, where there are groups. Measured on an H200.
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


def pack_experts(gate_up: Weight, down: Weight, dtype: torch.dtype) -> tuple[Weight, Weight]:
    """See `kernels.reference.pack_experts`. In panels, for `kernels.gluon.moe.scaled`."""
    if scaled is None or not scaled.packs(gate_up, dtype) or not scaled.packs(down, dtype):
        return gate_up, down
    assert isinstance(gate_up, QuantizedWeight)
    assert isinstance(down, QuantizedWeight)
    return in_panels(gate_up, scaled.GROUP), in_panels(down, scaled.GROUP)


def compress_experts(gate_up: Weight, down: Weight) -> tuple[CompressedWeight, CompressedWeight] | None:
    """See `kernels.reference.compress_experts`. On Hopper, of bfloat16."""
    if few is None or not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or not is_hopper(gate_up.device):
        return None
    first = compress(gate_up, True)
    second = None if first is None else compress(down, False)
    return None if first is None or second is None else (first, second)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: ExpertActivation = "silu",
    add_to: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """See `kernels.reference.experts`. Tokens must be contiguous, their stride is free; what an expert adds to a token is
    rounded to x's dtype, if there are many tokens.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add_to is None else add_to
    parts = _products(
        x,
        ids,
        weights,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        activation,
        out=out,
        add=add_to is not None,
        first=first,
    )
    if parts is not None:
        n = out.shape[1]
        block = min(next_power_of_2(n), 1024)
        _sum_kernel[(len(x), cdiv(n, block))](
            parts, ids, out, out, out, out, out, 0.0, 0, 0, first, out.stride(0), N=n, E=len(gate_up), CHOSEN=ids.shape[1],
            ADD=add_to is not None, NORM=False, BLOCK=block, GROUP=block, LARGEST=0, num_warps=4, **pdl_options(x.device),
        )  # fmt: skip
    return out


def experts_add_norm(
    residual: Tensor, norm: NextNorm, x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertWeight, *others: Any,
    first: int = 0, **options: Any,
) -> Tensor | QuantizedRows:  # fmt: skip
    """See `kernels.reference.experts_add_norm`, and `experts`."""
    parts = _products(x, ids, weights, gate_up, *others, out=residual, add=True, first=first, **options)
    if parts is None:
        return finish_norm(residual, norm)
    normed, arguments, constants = norm_arguments(residual, norm)
    _sum_kernel[(len(x), 1)](
        parts, ids, residual, residual, *arguments, first, residual.stride(0), N=residual.shape[1], E=len(gate_up),
        CHOSEN=ids.shape[1], ADD=True, NORM=True, num_warps=min(max(constants["BLOCK"] // 256, 1), 16), **constants,
        **pdl_options(x.device),
    )  # fmt: skip
    return normed


def _products(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertWeight, down: ExpertWeight, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, activation: str = "silu", *, out: Tensor, add: bool, first: int,
) -> Tensor | None:  # fmt: skip
    """What each expert adds to each token, times its weight: [pair, hidden]; None: the sums are in `out`, or added to it."""
    num_tokens, hidden = x.shape
    count, chosen = len(gate_up), ids.shape[1]
    assert out.stride(1) == 1
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    if not num_tokens:
        return None
    if isinstance(gate_up, CompressedWeight) or isinstance(down, CompressedWeight):
        assert isinstance(gate_up, CompressedWeight)
        assert isinstance(down, CompressedWeight)
        if num_tokens <= MAX_COMPRESSED:
            return _multiply_compressed(x, ids, weights, gate_up, down, activation, out, add, first)
        gate_up, down = decompress.decompress(gate_up), decompress.decompress(down)
    inner_size = down.num_channels if isinstance(down, QuantizedWeight) else down.shape[2]
    inner = torch.empty(ids.numel(), inner_size, dtype=x.dtype, device=x.device)
    wide = num_tokens <= MAX_WIDE
    parts = torch.empty(ids.numel(), hidden, dtype=torch.float32 if wide else x.dtype, device=x.device)
    configs = _few_configs(x, inner, gate_up, down, chosen)
    if configs is not None:
        few.launch(x, gate_up, gate_up_bias, ids, weights, inner, configs[0], activation=activation, first=first)
        if num_tokens == 1:
            few.launch(
                inner, down, down_bias, ids, weights, out, configs[1], experts=chosen, residual=out if add else None,
                first=first,
            )  # fmt: skip
            return None
        few.launch(inner, down, down_bias, ids, weights, parts, configs[1], first=first)
    elif isinstance(gate_up, QuantizedWeight) and gate_up.panel:  # see `pack_experts`
        tiles = sort_pairs(ids, count, first, scaled.block_m(ids.numel() / count), with_positions=True)
        _multiply_scaled(x, ids, weights, gate_up, down, activation, parts, tiles, first)
    elif _multiplies_quantized(x, gate_up, down):
        tiles = sort_pairs(ids, count, first, _tile_height(ids.numel() / count, 8 if num_tokens <= 8 else 16))
        _multiply_quantized(x, weights, gate_up, down, gate_up_bias, down_bias, activation, parts, tiles)
    else:
        tiles = sort_pairs(ids, count, first, _tile_height(ids.numel() / count))
        _grouped(x, gate_up, gate_up_bias, weights, tiles, inner, activation, chosen)
        _grouped(inner, down, down_bias, weights, tiles, parts, "", chosen)
    return parts


def _multiply_compressed(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: CompressedWeight, down: CompressedWeight, activation: str, out: Tensor,
    add: bool, first: int,
) -> Tensor | None:  # fmt: skip
    """See `_products`."""
    num_tokens, hidden = x.shape
    pairs, chosen = ids.numel(), ids.shape[1]
    inner = torch.empty(pairs, down.shape[2], dtype=x.dtype, device=x.device)
    if num_tokens == 1:
        compressed_few.launch(x, gate_up, ids, weights, inner, activation=activation, first=first)
        residual = out if add else None
        compressed_few.launch(inner, down, ids, weights, out, experts=chosen, residual=residual, first=first)
        return None
    parts = torch.empty(pairs, hidden, dtype=torch.float32 if num_tokens <= MAX_WIDE else x.dtype, device=x.device)
    if num_tokens <= MAX_FEW_COMPRESSED:
        compressed_few.launch(x, gate_up, ids, weights, inner, activation=activation, first=first)
        compressed_few.launch(inner, down, ids, weights, parts, first=first)
        return parts
    height = _tile_height(pairs / len(gate_up), 8 if num_tokens <= 8 else 16)
    order, entries, block_m, _ = sort_pairs(ids, len(gate_up), first, height)
    in_order = compressed_experts.gather(x, order, chosen)
    compressed_experts.launch(in_order, gate_up, weights, order, entries, inner, block_m, activation)
    compressed_experts.launch(inner, down, weights, order, entries, parts, block_m)
    return parts


def _multiplies_quantized(x: Tensor, gate_up: Weight, down: Weight) -> bool:
    """Whether `kernels.gluon.moe.weight_only` applies to both products."""
    return quantized_experts is not None and all(quantized_experts.applies(x, each) for each in (gate_up, down))


def _multiply_quantized(
    x: Tensor, weights: Tensor, gate_up: Any, down: Any, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, parts: Tensor, tiles: Tiles,
) -> None:  # fmt: skip
    """Both products, into `parts`."""
    order, entries, block_m, _ = tiles
    in_order, inner = quantized_experts.gather(x, order, weights.shape[1], gate_up, down)
    quantized_experts.launch(in_order, gate_up, gate_up_bias, weights, order, entries, inner, block_m, activation, down)
    quantized_experts.launch(inner, down, down_bias, weights, order, entries, parts, block_m)


def _multiply_scaled(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Any, down: Any, activation: str, parts: Tensor, tiles: Tiles,
    first: int,
) -> None:  # fmt: skip
    """Both products of codes, into `parts`; what is between them is quantised as x is."""
    order, entries, block_m, positions = tiles
    assert positions is not None
    assert x.dtype == torch.bfloat16
    codes, scale = quantize_pairs(x, gate_up.codes.dtype, gate_up.group, ids, positions, first, len(gate_up))
    inner = torch.empty(len(order), down.num_channels, dtype=codes.dtype, device=x.device)
    inner_scale = torch.empty(len(order), down.num_channels // down.group, dtype=torch.float32, device=x.device)
    scaled.launch(codes, scale, gate_up, weights, order, entries, inner, inner_scale, block_m, activation)
    scaled.launch(inner, inner_scale, down, weights, order, entries, parts, None, block_m)


def _few_configs(
    x: Tensor, inner: Tensor, gate_up: Weight, down: Weight, chosen: int
) -> tuple[few.Config, few.Config] | None:
    """How `kernels.gluon.moe.small_batch` cuts up both products, where it applies."""
    if few is None:
        return None
    most = few.MAX_FEW
    if isinstance(gate_up, Tensor):
        most = MAX_FEW_FLOATS
    elif gate_up.panel:
        most = MAX_FEW_PANELS
    elif gate_up.kind == "e2m1" and _multiplies_quantized(x, gate_up, down):
        most = MAX_FEW_E2M1
    if len(x) > most:
        return None
    first = few.config(x, gate_up, len(x), True)
    second = few.config(inner, down, len(x), False, chosen if len(x) == 1 else 1)
    return None if first is None or second is None else (first, second)
