"""LoRA on a CPU by a kernel of our own, so that decode steps can be captured. Large ranks of many tokens are computed
by PyTorch, one adapter after the other.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.elementwise import FLOATS, add_scaled, gate_and_mul
from kernels.cpu.library import library
from kernels.cpu.matmul import linear
from kernels.cpu.rotary import rms_norm
from kernels.data.activation import Gate
from kernels.data.layout import ADAPTER, RowState
from kernels.data.lora import AdapterTokens, LoraWeights
from kernels.data.quantized_weight import Weight

FEW_TOKENS = 64  # as many as captured steps have
# Of large ranks, PyTorch is faster with more tokens of an adapter, since it computes tiles of tokens and ranks.
MOST_RANK, FEW_OF_ADAPTER = 64, 16


class _Slots(ctypes.Structure):
    """`AdapterSlots` in lora.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "records", "out")),
        *((name, ctypes.c_int64) for name in ("segment", "seqs", "tokens", "columns", "column")),
    )


class _Lora(ctypes.Structure):
    """`Lora` in lora.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "x", "down", "up", "factor", "shift", "slots", "blocks", "inner")),
        *((name, ctypes.c_int64) for name in ("tokens", "in", "out", "ranks", "rank", "num_blocks")),
        *((name, ctypes.c_int64) for name in ("x_stride", "down_stride", "up_stride", "floats_stride")),
        ("is_bf16", ctypes.c_int32),
    )


def adapter_slots(packed: Tensor, segment: int, num_seqs: int, num_tokens: int, state: RowState) -> Tensor:
    """See `kernels.reference.adapter_slots`."""
    native, records = library(), state.records
    if native is None:
        return reference.adapter_slots(packed, segment, num_seqs, num_tokens, state)
    out = packed.new_empty(num_tokens)
    tensors = packed, records, out
    addresses = (each.data_ptr() for each in tensors)
    struct = _Slots(*addresses, segment, num_seqs, num_tokens, records.shape[1], ADAPTER)
    native.call("quire_adapter_slots", struct, tensors)
    return out


def _is_native(y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> bool:
    """Return whether there is a C++ kernel for these tensors."""
    w = weights
    return not (
        library() is None
        or tokens.numbers is not None
        or y.dtype not in FLOATS
        or any(each.dtype != y.dtype for each in (x, w.down, w.up))
        or x.stride(1) != 1
        or not y.is_contiguous()
    )


def _native_add(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor) -> Tensor:
    """Compute `lora_add` in C++. A token's bits do not depend on the others."""
    native, w = library(), weights
    assert native is not None
    ranks = w.down.shape[1]
    inner = torch.empty(len(y), ranks, dtype=torch.float32)
    tensors = y, x, w.down, w.up, w.factor, w.shift, slots, w.blocks, inner
    struct = _Lora(
        *(each.data_ptr() for each in tensors),
        len(y), x.shape[1], y.shape[1], ranks, w.rank, len(w.blocks),
        x.stride(0), w.down.stride(0), w.up.stride(0), w.factor.stride(0), y.dtype == torch.bfloat16,
    )  # fmt: skip
    native.call("quire_lora_add", struct, tensors)
    return y


def _suits(num_tokens: int, rank: int, tokens: AdapterTokens) -> bool:
    """Return whether the C++ kernel is at least as fast as PyTorch."""
    if rank <= MOST_RANK or num_tokens <= FEW_TOKENS:
        return True
    return num_tokens <= FEW_OF_ADAPTER * len(tokens.by_slot)


def lora_add(y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> Tensor:
    """See `kernels.reference.lora_add`."""
    rank = weights.rank
    if _is_native(y, x, weights, tokens) and _suits(len(y), rank, tokens):
        return _native_add(y, x, weights, tokens.slots)
    for slot, some in tokens.by_slot:
        own = x if some is None else x[some]
        inner = own @ weights.down[slot].T
        change = torch.cat(
            [
                inner[:, group * rank : (group + 1) * rank] @ weights.up[slot, start:stop].T
                for start, stop, group in weights.groups
            ],
            1,
        )
        result = torch.addcmul(weights.shift[slot] + change, y if some is None else y[some], weights.factor[slot])
        if some is None:
            y.copy_(result)
        else:
            y[some] = result.to(y.dtype)
    return y


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
    value = x if norm is None else rms_norm(x, *norm)
    y = lora_add(linear(value, weight, bias), value, lora, tokens)
    if gate is not None:
        y = gate_and_mul(y, gate)
    return y if residual is None else add_scaled(residual, y)
