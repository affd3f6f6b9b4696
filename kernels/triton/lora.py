"""LoRA in Triton: A and then B for all adapters of a step, in one launch or in two.

Tokens are sorted by slot in tiles on the device (`AdapterTokens`), so nothing that the CPU sees depends on the adapters
of a step, and a CUDA graph can hold the kernels. A · x is divided along the channels among programs, whose partial
sums are always added in the same order.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.activation import Gate
from kernels.data.forms import FORMS
from kernels.data.lora import BLOCK_ROWS, LARGE_STEP, SMALL_TILE, WIDE_ROWS, AdapterTokens, LoraWeights
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton.activation import activate

AT_ONCE = tl.constexpr(8)  # parts of a sum that a program loads together
MIN_CHANNELS = 256  # that a program of A multiplies
MAX_RANKS = 64  # rows of A of a program
# Partial sums of A · x, so that enough programs read A: for steps of at most so many tokens. B's kernel loads all of a
# tile at once.
SPLITS = ((64, 16), (256, 8), (LARGE_STEP - 1, 4))
LARGE_SPLITS = 2
FIXED_SPLITS = 8  # of all steps, in deterministic mode
REDUCED_SPLITS = ((256, 16), (LARGE_STEP - 1, 8))  # in one launch, where the last program of a tile sums the parts
GATED_ROWS = 128  # of a program that computes the gated activation: more need too many registers


@triton.jit
def _down_kernel(
    x, down, order, tiles, out, stride_x, stride_slot, stride_split, channels,
    NUM_RANKS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [splits, T, NUM_RANKS], in the order of tiles: partial sums of x [T, K] · A [NUM_RANKS, K], float32."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    _down(
        x, down, order, tiles, out, order, tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2),
        stride_x, stride_slot, stride_split, channels, NUM_RANKS, K, TILE, BLOCK_R, BLOCK_K, False, PRECISION,
    )  # fmt: skip


@triton.jit
def _down(
    x, down, order, tiles, out, arrivals, tile, block, split, splits, stride_x, stride_slot, stride_split, channels,
    NUM_RANKS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    REDUCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One of the splits of a tile's A · x, for a block of ranks: see `_down_kernel`.

    REDUCE: out has one more part, in which the last of these programs to arrive stores the sum of all parts, always
    in the same order. arrivals: 0 before; splits + 1 when the sum is complete.
    """
    slot = tl.load(tiles + tile * 3)
    if slot >= 0:
        first, end = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        row = first + tl.arange(0, TILE)
        is_row = row < end
        token = tl.load(order + row, mask=is_row, other=0).to(tl.int64)
        rank = block * BLOCK_R + tl.arange(0, BLOCK_R)
        is_rank = rank < NUM_RANKS
        k = split * channels + tl.arange(0, BLOCK_K)
        stop = tl.minimum(split * channels + channels, K)
        a = down + slot.to(tl.int64) * stride_slot + rank.to(tl.int64)[:, None] * K
        acc = tl.zeros([TILE, BLOCK_R], tl.float32)
        for at in range(0, channels, BLOCK_K):
            is_k = (k + at < stop)[None, :]
            xk = tl.load(x + token[:, None] * stride_x + (k + at)[None, :], mask=is_row[:, None] & is_k, other=0.0)
            ak = tl.load(a + (k + at)[None, :], mask=is_rank[:, None] & is_k, other=0.0)
            acc = tl.dot(xk, tl.trans(ak), acc, input_precision=PRECISION)
        part = out + row.to(tl.int64)[:, None] * NUM_RANKS + rank[None, :]
        mask = is_row[:, None] & is_rank[None, :]
        tl.store(part + split * stride_split, acc, mask=mask)
        if REDUCE:
            tl.debug_barrier()  # all of this program's part is stored
            if tl.atomic_add(arrivals, 1, sem="acq_rel") == splits - 1:
                total = tl.zeros([TILE, BLOCK_R], tl.float32)
                for first_part in range(0, splits, AT_ONCE):
                    for each in tl.static_range(AT_ONCE):
                        is_part = mask & (first_part + each < splits)
                        found = part + (first_part + each) * stride_split
                        total += tl.load(found, mask=is_part, other=0.0, cache_modifier=".cg")
                tl.store(part + splits * stride_split, total, mask=mask)
                tl.debug_barrier()
                tl.atomic_add(arrivals, 1, sem="release")


@triton.jit
def _changed(
    y, inner, up, factor, shift, slot, row, token, n, is_row, is_n, group, stride_up, stride_factor, stride_split,
    splits,
    NUM_RANKS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """factor · y + B · (sum of inner's partial sums) + shift of a tile's rows and y's channels n: [TILE, BLOCK_N]. y:
    pointers.
    """
    mask = is_row[:, None] & is_n[None, :]
    before = tl.load(y, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(factor + slot * stride_factor + n, mask=is_n, other=0.0)
    added = tl.load(shift + slot * stride_factor + n, mask=is_n, other=0.0)
    acc = tl.zeros([TILE, BLOCK_N], tl.float32)
    for at in tl.static_range(0, RANK, BLOCK_R):
        rank = at + tl.arange(0, BLOCK_R)
        is_rank = rank < RANK
        mask = is_row[:, None] & is_rank[None, :]
        part = inner + row.to(tl.int64)[:, None] * NUM_RANKS + (group * RANK + rank)[None, :]
        if SPLITS == 1:
            u = tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
        else:
            split = tl.arange(0, SPLITS)[:, None, None]
            u = tl.sum(tl.load(part[None] + split * stride_split, mask=mask[None] & (split < splits), other=0.0), 0)
        b = tl.load(
            up + slot * stride_up + n.to(tl.int64)[:, None] * RANK + rank[None, :],
            mask=is_n[:, None] & is_rank[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(u.to(b.dtype), tl.trans(b), acc, input_precision=PRECISION)
    return before * scale[None, :] + acc + added[None, :]


@triton.jit(do_not_specialize=["splits"])
def _up_kernel(
    y, inner, up, factor, shift, order, tiles, blocks, stride_y, stride_up, stride_factor, stride_split, splits,
    NUM_RANKS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] → factor · y + B · (sum of inner's partial sums) + shift, in place. SPLITS: a power of two, at least
    splits.
    """
    if PDL:
        launch_dependents()
        wait_for_inputs()
    _up(
        y, y, inner, up, factor, shift, order, tiles, blocks, order, tl.program_id(0), tl.program_id(1), 0, stride_y,
        stride_y, stride_up, stride_factor, stride_split, splits, 0, NUM_RANKS, RANK, 0, SPLITS, TILE, BLOCK_N,
        BLOCK_R, "", PRECISION, False,
    )  # fmt: skip


@triton.jit
def _up(
    y, out, inner, up, factor, shift, order, tiles, blocks, arrivals, tile, block, num_shrink, stride_y, stride_out,
    stride_up, stride_factor, stride_split, splits,
    N: tl.constexpr, NUM_RANKS: tl.constexpr, RANK: tl.constexpr, UP_GROUP: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """One block of a tile: see `_up_kernel`. WAIT: until the num_shrink programs of the tile's A · x are done.

    GATE "silu", "gelu_tanh": out [T, N] = activation(gate) · up of y [T, 2N], of all tokens; up rows use the A of
    UP_GROUP.
    """
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    first, end = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if GATE == "":
        n = tl.load(blocks + block * 3) + tl.arange(0, BLOCK_N)
        is_n = n < tl.load(blocks + block * 3 + 1)
        group = tl.load(blocks + block * 3 + 2)
    else:
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_n = n < N
        group = 0
    row = first + tl.arange(0, TILE)
    is_row = row < end
    token = tl.load(order + row, mask=is_row, other=0).to(tl.int64)
    mask = is_row[:, None] & is_n[None, :]
    at = y + token[:, None] * stride_y + n[None, :]
    if WAIT:  # noqa: SIM102 (the first is a constant)
        if slot >= 0:
            while tl.atomic_add(arrivals + tile, 0, sem="acquire") <= num_shrink:
                pass
    if GATE == "":
        if slot >= 0:
            result = _changed(
                at, inner, up, factor, shift, slot, row, token, n, is_row, is_n, group, stride_up, stride_factor,
                stride_split, splits, NUM_RANKS, RANK, SPLITS, TILE, BLOCK_N, BLOCK_R, PRECISION,
            )  # fmt: skip
            tl.store(at, result.to(y.dtype.element_ty), mask=mask)
    elif slot >= -1:
        if slot >= 0:
            gate = _changed(
                at, inner, up, factor, shift, slot, row, token, n, is_row, is_n, group, stride_up, stride_factor,
                stride_split, splits, NUM_RANKS, RANK, SPLITS, TILE, BLOCK_N, BLOCK_R, PRECISION,
            )  # fmt: skip
            value = _changed(
                at + N, inner, up, factor, shift, slot, row, token, n + N, is_row, is_n, UP_GROUP, stride_up,
                stride_factor, stride_split, splits, NUM_RANKS, RANK, SPLITS, TILE, BLOCK_N, BLOCK_R, PRECISION,
            )  # fmt: skip
        else:
            gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(at + N, mask=mask, other=0.0).to(tl.float32)
        gate = gate.to(y.dtype.element_ty).to(tl.float32)  # as separate kernels round
        value = value.to(y.dtype.element_ty).to(tl.float32)
        active = activate(gate, GATE).to(y.dtype.element_ty).to(tl.float32)
        to = out + token[:, None] * stride_out + n[None, :]
        tl.store(to, (active * value).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tiles", "splits"])
def _both_kernel(
    x, y, out, inner, down, up, factor, shift, order, tiles, blocks, arrivals,
    stride_x, stride_y, stride_out, stride_down, stride_up, stride_factor, stride_split, channels, num_tiles, splits,
    K: tl.constexpr, N: tl.constexpr, NUM_RANKS: tl.constexpr, RANK: tl.constexpr, UP_GROUP: tl.constexpr,
    TILE: tl.constexpr, BLOCK_RANKS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    GATE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_down_kernel` and `_up_kernel` in one launch: the first programs compute A · x, the others wait for their tile.

    All of the first have been started when another one is, so none waits for a program that finds no place.
    """
    if PDL:
        launch_dependents()
        wait_for_inputs()
    program = tl.program_id(0)
    if program < num_tiles * splits:
        tile = program % num_tiles
        _down(
            x, down, order, tiles, inner, arrivals + tile, tile, 0, program // num_tiles, splits, stride_x, stride_down,
            stride_split, channels, NUM_RANKS, K, TILE, BLOCK_RANKS, BLOCK_K, True, PRECISION,
        )  # fmt: skip
    else:
        program -= num_tiles * splits
        _up(
            y, out, inner + splits * stride_split, up, factor, shift, order, tiles, blocks, arrivals,
            program % num_tiles, program // num_tiles, splits, stride_y, stride_out, stride_up, stride_factor,
            stride_split, 1, N, NUM_RANKS, RANK, UP_GROUP, 1, TILE, BLOCK_N, BLOCK_R, GATE, PRECISION, True,
        )  # fmt: skip


def is_one_launch(weights: LoraWeights, tokens: AdapterTokens) -> bool:
    """Return whether `both` computes a layer with these adapters in this step: all ranks are one block."""
    return tokens.tiles.size == SMALL_TILE and weights.down.shape[1] <= MAX_RANKS


def gates(weights: LoraWeights, tokens: AdapterTokens) -> bool:
    """Return whether `both` computes the gated activation of a layer with these adapters in this step."""
    groups, half = weights.groups, weights.factor.shape[1] // 2
    starts = [group.start for group in groups]
    return tokens.tiles.size == SMALL_TILE and half % GATED_ROWS == 0 and starts in ([0], [0, half])


def both(y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens, gate: Gate | None = None) -> Tensor:
    """Compute `lora_add` in one launch, see `is_one_launch`; with `gate`, see `gates`, return the gated activation
    [T, out / 2] instead. Rows of x and y must be contiguous, their row strides are free.
    """
    assert x.stride(1) == y.stride(1) == 1
    assert weights.factor.stride() == weights.shift.stride()
    order, tiles, tile = tokens.tiles
    num_ranks, channels = weights.down.shape[1:]
    own = _channels_of_split(len(x), channels, REDUCED_SPLITS)
    splits, num_tiles = cdiv(channels, own), len(tiles)
    inner = torch.empty(splits + 1, len(x), num_ranks, dtype=torch.float32, device=x.device)
    blocks, n, out = weights.wide_blocks, y.shape[1], y
    num_blocks = len(blocks)
    if gate is not None:
        n //= 2
        num_blocks, out = n // GATED_ROWS, torch.empty(len(y), n, dtype=y.dtype, device=y.device)
    _both_kernel[(num_tiles * (splits + num_blocks),)](
        x, y, out, inner, weights.down, weights.up, weights.factor, weights.shift, order, tiles, blocks,
        tokens.counters(num_tiles), x.stride(0), y.stride(0), out.stride(0), weights.down.stride(0),
        weights.up.stride(0), weights.factor.stride(0), inner.stride(0), own, num_tiles, splits,
        K=channels, N=n, NUM_RANKS=num_ranks, RANK=weights.rank, UP_GROUP=len(weights.groups) - 1, TILE=tile,
        BLOCK_RANKS=max(next_power_of_2(num_ranks), 16), BLOCK_K=128 if num_ranks <= 32 and y.itemsize == 2 else 64,
        BLOCK_N=WIDE_ROWS if gate is None else GATED_ROWS,
        BLOCK_R=max(min(next_power_of_2(weights.rank), MAX_RANKS), 16), GATE=gate or "", PRECISION=_precision(y),
        num_warps=8, **pdl_options(y.device),
    )  # fmt: skip
    return out


def lora_add(y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> Tensor:
    """See `kernels.reference.lora_add`. Rows of x and y must be contiguous, their row strides are free."""
    return _expand(y, _shrink(x, weights, tokens), weights, tokens)


def _shrink(x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> Tensor:
    """Compute A · x of x [T, in], in the order of `Tiles`: partial sums [splits, T, G · R] float32."""
    assert x.stride(1) == 1
    num_ranks, channels = weights.down.shape[1:]
    order, tiles, tile = tokens.tiles
    own = _channels_of_split(len(x), channels, ((len(x), FIXED_SPLITS),) if FORMS.deterministic else SPLITS)
    splits = cdiv(channels, own)
    block_ranks = min(max(next_power_of_2(num_ranks), 16), MAX_RANKS)
    inner = torch.empty(splits, len(x), num_ranks, dtype=torch.float32, device=x.device)
    _down_kernel[len(tiles), cdiv(num_ranks, block_ranks), splits](
        x, weights.down, order, tiles, inner, x.stride(0), weights.down.stride(0), inner.stride(0), own,
        NUM_RANKS=num_ranks, K=channels, TILE=tile, BLOCK_R=block_ranks,
        BLOCK_K=64 if x.dtype == torch.float32 else 128, PRECISION=_precision(x), num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    return inner


def _expand(y: Tensor, inner: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> Tensor:
    """Change a layer's result y [T, out] by B · (A · x), in place, and return it."""
    assert y.stride(1) == 1
    assert weights.factor.stride() == weights.shift.stride()
    order, tiles, tile = tokens.tiles
    splits, rank, blocks = len(inner), weights.rank, weights.blocks
    padded = next_power_of_2(splits)
    block_ranks = max(min(next_power_of_2(rank), 256 // padded, MAX_RANKS), 16)
    _up_kernel[len(tiles), len(blocks)](
        y, inner, weights.up, weights.factor, weights.shift, order, tiles, blocks,
        y.stride(0), weights.up.stride(0), weights.factor.stride(0), inner.stride(0), splits,
        NUM_RANKS=inner.shape[2], RANK=rank, SPLITS=padded, TILE=tile, BLOCK_N=BLOCK_ROWS, BLOCK_R=block_ranks,
        PRECISION=_precision(y), num_warps=4, **pdl_options(y.device),
    )  # fmt: skip
    return y


def _channels_of_split(num_tokens: int, channels: int, limits: Sequence[tuple[int, int]]) -> int:
    """Return how many channels of A · x a program multiplies. limits: the last number of tokens with as many splits."""
    wanted = next((splits for tokens, splits in limits if num_tokens <= tokens), LARGE_SPLITS)
    return cdiv(max(cdiv(channels, wanted), MIN_CHANNELS), 128) * 128


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
