"""Linear layers with LoRA adapters on CUDA devices.

Few tokens and a float weight: one kernel, see `kernels.gluon.linear.adapters`. Otherwise one launch, or two in large
steps, computes A · x and adds B times that to the GEMM's result. With `Choice.extended_tokens` the GEMM computes A · x
itself, see `kernels.triton.extended_lora`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cuda.choice import CHOICE, GLUON
from kernels.cuda.linear import linear, small_batch_config
from kernels.cuda.moe import float_or_codes, tile_height
from kernels.data.activation import CLAMP, SLOPE, ExpertActivation, Gate
from kernels.data.fusion import Fusion
from kernels.data.lora import BLOCK_ROWS, SMALL_TILE, UNUSED, WIDE_ROWS, AdapterTokens, ExpertLora, LoraWeights, Tiles
from kernels.data.moe import Experts
from kernels.data.moe import Tiles as ExpertTiles
from kernels.data.quantized_weight import Weight
from kernels.triton import extended_lora
from kernels.triton.activation import gate_and_mul
from kernels.triton.lora import both, gates, is_one_launch, lora_add
from kernels.triton.moe import grouped, sum_experts
from kernels.triton.norm import rms_norm
from kernels.triton.pairs import sort_pairs

if GLUON:
    from kernels.gluon.linear import adapters, small_batch


def fuses_adapters(x: Tensor, weight: Weight, lora: LoraWeights, gate: Gate | None = None) -> bool:
    """See `kernels.reference.fuses_adapters`."""
    if not isinstance(weight, Tensor) or len(x) > CHOICE.adapted_tokens or lora.rank > CHOICE.adapted_rank:
        return False
    config = small_batch_config(x, len(weight) // (1 if gate is None else 2), gate is not None)
    if config is None or (config.tokens_first and not CHOICE.adapted_tokens_first):
        return False
    return adapters.supports(lora, config.block_n, gate is not None)


def adapted_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    lora: LoraWeights,
    tokens: AdapterTokens,
    *,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.adapted_linear`."""
    if fuses_adapters(x, weight, lora, gate):
        return small_batch_linear(x, weight, bias, lora, tokens, norm=norm, gate=gate, residual=residual)
    value = x if norm is None else rms_norm(x, *norm)
    if bias is None and _is_extended(value, weight, lora):
        assert lora.extended is not None
        rows = WIDE_ROWS if CHOICE.extended_wide and tokens.tiles.size == SMALL_TILE else BLOCK_ROWS
        fused = gate if gate is not None and extended_lora.gates(lora, rows) else None
        y = extended_lora.expand_extended(F.linear(value, lora.extended), lora, tokens, fused, rows=rows)
        y = y if gate is None or fused is not None else gate_and_mul(y, gate)
        return y if residual is None else residual.add_(y)
    y = linear(value, weight, bias)
    if not is_one_launch(lora, tokens):
        y = lora_add(y, value, lora, tokens)
    elif gate is not None and gates(lora, tokens):
        return both(y, value, lora, tokens, gate)
    else:
        y = both(y, value, lora, tokens)
    if gate is not None:
        y = gate_and_mul(y, gate)
    return y if residual is None else residual.add_(y)


def extended_weight(weight: Weight, num_rows: int) -> Tensor | None:
    """See `kernels.reference.extended_weight`."""
    if not CHOICE.extended_tokens or not isinstance(weight, Tensor) or num_rows > CHOICE.extended_share * len(weight):
        return None
    return torch.cat([weight, weight.new_zeros(num_rows, weight.shape[1])])


def _is_extended(x: Tensor, weight: Weight, lora: LoraWeights) -> bool:
    """Return whether one GEMM computes W · x and A · x of all slots; not where W has been replaced by another one."""
    extended = lora.extended
    if extended is None or not isinstance(weight, Tensor) or len(x) > CHOICE.extended_tokens:
        return False
    return extended.data_ptr() == weight.data_ptr()


def small_batch_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    lora: LoraWeights,
    tokens: AdapterTokens,
    *,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute `adapted_linear` in one kernel."""
    assert isinstance(weight, Tensor)
    norm_weight, eps = norm or (None, 0.0)
    fusion = Fusion(norm_weight, eps, gate, residual)
    config = small_batch_config(x, fusion.num_outputs(len(weight)), gate is not None)
    assert config is not None
    out = fusion.into(x, len(weight))
    small_batch.launch(x, weight, bias, out, config, fusion, adapters.Adapters(lora, tokens))
    return out


def adapted_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: Experts,
    lora: ExpertLora,
    tokens: AdapterTokens,
    add_to: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.adapted_experts`. GEMMs are grouped by expert, adapters by expert and slot."""
    count = len(stack)
    tiles = sort_pairs(ids, count, stack.first, tile_height(ids.numel() / count))
    parts = routed_outputs(x, ids, stack, lora, tokens, tiles) * weights.flatten()[:, None]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add_to is None else add_to
    sum_experts(parts, ids, out, add_to is not None, stack.first, count)
    return out


def routed_outputs(
    x: Tensor, ids: Tensor, stack: Experts, lora: ExpertLora, tokens: AdapterTokens, tiles: ExpertTiles
) -> Tensor:
    """Return the output of each expert that a token has chosen, with adapters: [T · k, hidden]; tiles: of `ids`."""
    chosen = ids.shape[1]
    routed = lora.routed(ids, stack.first, len(stack), tokens)
    routed.tiles = tiles_of_routed(routed, chosen)
    x, order = x.repeat_interleave(chosen, 0), tiles.order.long()
    ones = torch.ones(ids.shape, dtype=torch.float32, device=x.device)
    y = x.new_zeros(len(x), lora.gate_up.up.shape[1])  # routed tokens of other ranks are not written
    grouped(x[order], float_or_codes(stack.gate_up), stack.gate_up_bias, ones, tiles, y, "", chosen)
    inner = activated(lora_add(y, x, lora.gate_up, routed), stack.activation)
    parts = torch.zeros_like(x)
    grouped(inner[order], float_or_codes(stack.down), stack.down_bias, ones, tiles, parts, "", chosen)
    return lora_add(parts, inner, lora.down, routed)


def activated(y: Tensor, activation: ExpertActivation) -> Tensor:
    """Return the activation of gate and up [n, 2I], or of up alone [n, I]: [n, I]."""
    if activation == "relu2":
        return F.relu(y).square()
    if activation == "clamped_swiglu":
        gate, up = y.float().chunk(2, 1)
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return ((up + 1) * gate * (SLOPE * gate).sigmoid()).to(y.dtype)
    return gate_and_mul(y, activation)


def tiles_of_routed(routed: AdapterTokens, chosen: int) -> Tiles:
    """Return `AdapterTokens.tiles` of routed tokens, sorted as experts' tokens are."""
    assert routed.numbers is not None
    found = sort_pairs(routed.slots.view(-1, chosen), routed.num_slots, 0, SMALL_TILE)
    slot = found.entries[:, 0]
    number = torch.where(slot >= 0, routed.numbers[slot.clamp(min=0).long()], UNUSED)
    return Tiles(found.order, torch.cat([number[:, None], found.entries[:, 1:]], 1), SMALL_TILE)
