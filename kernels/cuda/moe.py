"""MoE on CUDA devices: chooses the kernels that compute the experts of each token.

A few tokens are bound by reading the experts that they chose: one small-batch kernel for each of the two GEMMs. Beyond,
routed tokens, one for each token and expert, are sorted by expert, and grouped GEMMs compute tiles of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.cuda.choice import CHOICE, GLUON
from kernels.data.activation import UNGATED
from kernels.data.compressed_weight import CompressedWeight, ExpertWeight, compress
from kernels.data.moe import Experts
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight, in_panels
from kernels.gpu.device import is_hopper
from kernels.gpu.launch import next_power_of_2
from kernels.triton.moe import grouped, sum_experts
from kernels.triton.pairs import sort_pairs
from kernels.triton.scaled import finish_norm, quantize_pairs

if GLUON:
    from kernels.gluon.moe import (
        compressed,
        compressed_small_batch,
        decompress,
        scaled,
        small_batch,
        weight_only,
    )


def pack_experts(gate_up: Weight, down: Weight, dtype: torch.dtype) -> tuple[Weight, Weight]:
    """See `kernels.reference.pack_experts`. In panels, for `kernels.gluon.moe.scaled`."""
    if not GLUON or not scaled.supports(gate_up, dtype) or not scaled.supports(down, dtype):
        return gate_up, down
    assert isinstance(gate_up, QuantizedWeight)
    assert isinstance(down, QuantizedWeight)
    return in_panels(gate_up, scaled.GROUP), in_panels(down, scaled.GROUP)


def compress_experts(gate_up: Weight, down: Weight) -> tuple[CompressedWeight, CompressedWeight] | None:
    """See `kernels.reference.compress_experts`. Compresses bfloat16 on Hopper."""
    if not GLUON or not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or not is_hopper(gate_up.device):
        return None
    first = compress(gate_up, True)
    second = None if first is None else compress(down, False)
    return None if first is None or second is None else (first, second)


def experts(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, add_to: Tensor | None = None) -> Tensor:
    """See `kernels.reference.experts`. Tokens must be contiguous, their stride is free.

    Beyond `CHOICE.experts_float32_tokens` tokens, each expert's output is rounded to x's dtype before the sum.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add_to is None else add_to
    parts = _outputs(x, ids, weights, stack, out, add_to is not None)
    if parts is not None:
        sum_experts(parts, ids, out, add_to is not None, stack.first, len(stack))
    return out


def experts_add_norm(
    residual: Tensor, norm: NextNorm, x: Tensor, ids: Tensor, weights: Tensor, stack: Experts
) -> Tensor | QuantizedRows:
    """See `kernels.reference.experts_add_norm`, and `experts`."""
    parts = _outputs(x, ids, weights, stack, residual, True)
    if parts is None:
        return finish_norm(residual, norm)
    return sum_experts(parts, ids, residual, True, stack.first, len(stack), norm)


def _outputs(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, out: Tensor, add: bool) -> Tensor | None:
    """Return each routed token's output times its weight [routed token, hidden], yet to be summed.

    None: the sums are in `out`, or with `add` added to it.
    """
    num_tokens = len(x)
    assert out.stride(1) == 1
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    if not num_tokens:
        return None
    if isinstance(stack.gate_up, CompressedWeight) or isinstance(stack.down, CompressedWeight):
        if num_tokens <= CHOICE.experts_compressed_tokens:
            return _compressed(x, ids, weights, stack, out, add)
        stack = replace(stack, gate_up=_decompressed(stack.gate_up), down=_decompressed(stack.down))
    inner, is_gated = _inner(x, ids, stack), stack.activation != UNGATED
    configs = small_batch_configs(x, inner, stack, ids.shape[1]) if is_gated else None
    if configs is not None:
        return _small_batch(x, ids, weights, stack, inner, configs, out, add)
    parts = _parts(x, ids)
    if isinstance(stack.gate_up, QuantizedWeight) and stack.gate_up.panel:  # see `pack_experts`
        _scaled(x, ids, weights, stack, parts)
    elif is_gated and _supports_weight_only(x, stack):
        _weight_only(x, ids, weights, stack, parts)
    else:
        _grouped(x, ids, weights, stack, inner, parts)
    return parts


def _grouped(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, inner: Tensor, parts: Tensor) -> None:
    """Compute both GEMMs of tiles of routed tokens, into `parts`; `inner`: memory between them."""
    tiles = sort_pairs(ids, len(stack), stack.first, tile_height(ids.numel() / len(stack)))
    gate_up, down = float_or_codes(stack.gate_up), float_or_codes(stack.down)
    grouped(x, gate_up, stack.gate_up_bias, weights, tiles, inner, stack.activation, ids.shape[1])
    grouped(inner, down, stack.down_bias, weights, tiles, parts, "", ids.shape[1])


def float_or_codes(weight: ExpertWeight) -> Weight:
    """Return a weight that is not compressed."""
    assert not isinstance(weight, CompressedWeight)
    return weight


def _decompressed(weight: ExpertWeight) -> Tensor:
    assert isinstance(weight, CompressedWeight)
    return decompress.decompress(weight)


def _inner(x: Tensor, ids: Tensor, stack: Experts) -> Tensor:
    """Return memory for the activations between both GEMMs: [routed token, I]."""
    down = stack.down
    size = down.num_channels if isinstance(down, QuantizedWeight) else down.shape[2]
    return torch.empty(ids.numel(), size, dtype=x.dtype, device=x.device)


def _parts(x: Tensor, ids: Tensor) -> Tensor:
    """Return memory for the outputs of routed tokens: [routed token, hidden]."""
    dtype = torch.float32 if len(x) <= CHOICE.experts_float32_tokens else x.dtype
    return torch.empty(ids.numel(), x.shape[1], dtype=dtype, device=x.device)


def tile_height(routed_tokens: float, least: int = 16) -> int:
    """Return a height for which most experts with so many routed tokens on average fill one tile, or several."""
    return min(max(next_power_of_2(int(routed_tokens + 2 * routed_tokens**0.5)), least), 128)


def small_batch_configs(
    x: Tensor, inner: Tensor, stack: Experts, chosen: int
) -> tuple[small_batch.Config, small_batch.Config] | None:
    """Return how Gluon's small-batch kernel computes both GEMMs; None: it does not."""
    gate_up, down = float_or_codes(stack.gate_up), float_or_codes(stack.down)
    most = CHOICE.experts_small_batch_tokens
    if isinstance(gate_up, Tensor):
        most = min(most, CHOICE.experts_float_tokens)
    elif gate_up.panel:
        most = min(most, CHOICE.experts_panel_tokens)
    elif gate_up.kind == "e2m1" and _supports_weight_only(x, stack):
        most = min(most, CHOICE.experts_e2m1_tokens)
    if not GLUON or len(x) > most:
        return None
    first = small_batch.config(x, gate_up, len(x), True)
    second = small_batch.config(inner, down, len(x), False, chosen if len(x) == 1 else 1)
    return None if first is None or second is None else (first, second)


def _small_batch(
    x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, inner: Tensor,
    configs: tuple[small_batch.Config, small_batch.Config], out: Tensor, add: bool,
) -> Tensor | None:  # fmt: skip
    """Compute `_outputs`. For a single token, the GEMMs with its experts' down matrices are one, which writes the
    sum.
    """
    gate_up, down, first = float_or_codes(stack.gate_up), float_or_codes(stack.down), stack.first
    small_batch.launch(
        x, gate_up, stack.gate_up_bias, ids, weights, inner, configs[0], activation=stack.activation, first=first
    )
    if len(x) == 1:
        residual, chosen = out if add else None, ids.shape[1]
        small_batch.launch(
            inner, down, stack.down_bias, ids, weights, out, configs[1], experts=chosen, residual=residual, first=first
        )
        return None
    parts = _parts(x, ids)
    small_batch.launch(inner, down, stack.down_bias, ids, weights, parts, configs[1], first=first)
    return parts


def _compressed(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, out: Tensor, add: bool) -> Tensor | None:
    """Compute `_outputs` of compressed weights."""
    gate_up, down, first, activation = stack.gate_up, stack.down, stack.first, stack.activation
    assert isinstance(gate_up, CompressedWeight)
    assert isinstance(down, CompressedWeight)
    num_tokens, chosen = ids.shape
    inner = _inner(x, ids, stack)
    if num_tokens == 1:
        compressed_small_batch.launch(x, gate_up, ids, weights, inner, activation=activation, first=first)
        residual = out if add else None
        compressed_small_batch.launch(inner, down, ids, weights, out, experts=chosen, residual=residual, first=first)
        return None
    parts = _parts(x, ids)
    if num_tokens <= CHOICE.experts_compressed_small_batch_tokens:
        compressed_small_batch.launch(x, gate_up, ids, weights, inner, activation=activation, first=first)
        compressed_small_batch.launch(inner, down, ids, weights, parts, first=first)
        return parts
    height = tile_height(ids.numel() / len(stack), 8 if num_tokens <= 8 else 16)
    tiles = sort_pairs(ids, len(stack), first, height)
    in_order = compressed.gather(x, tiles.order, chosen)
    compressed.launch(in_order, gate_up, weights, tiles, inner, activation)
    compressed.launch(inner, down, weights, tiles, parts)
    return parts


def _supports_weight_only(x: Tensor, stack: Experts) -> bool:
    return GLUON and all(weight_only.supports(x, float_or_codes(each)) for each in (stack.gate_up, stack.down))


def _weight_only(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, parts: Tensor) -> None:
    """Compute both weight-only GEMMs, into `parts`."""
    gate_up, down = stack.gate_up, stack.down
    assert isinstance(gate_up, QuantizedWeight)
    assert isinstance(down, QuantizedWeight)
    height = tile_height(ids.numel() / len(stack), 8 if len(x) <= 8 else 16)
    tiles = sort_pairs(ids, len(stack), stack.first, height)
    in_order, inner = weight_only.gather(x, tiles.order, ids.shape[1], gate_up, down)
    weight_only.launch(in_order, gate_up, stack.gate_up_bias, weights, tiles, inner, stack.activation, down)
    weight_only.launch(inner, down, stack.down_bias, weights, tiles, parts)


def _scaled(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, parts: Tensor) -> None:
    """Compute both GEMMs of codes by codes, into `parts`; the activations between them are quantised as x is."""
    gate_up, down = stack.gate_up, stack.down
    assert isinstance(gate_up, QuantizedWeight)
    assert isinstance(down, QuantizedWeight)
    assert x.dtype == torch.bfloat16
    tiles = sort_pairs(ids, len(stack), stack.first, scaled.block_m(ids.numel() / len(stack)), with_positions=True)
    assert tiles.positions is not None
    codes, scale = quantize_pairs(x, gate_up.codes.dtype, gate_up.group, ids, tiles.positions, stack.first, len(stack))
    inner = torch.empty(len(tiles.order), down.num_channels, dtype=codes.dtype, device=x.device)
    inner_scale = torch.empty(len(codes), down.num_channels // down.group, dtype=torch.float32, device=x.device)
    scaled.launch(codes, scale, gate_up, weights, tiles, inner, inner_scale, stack.activation)
    scaled.launch(inner, inner_scale, down, weights, tiles, parts, None)
