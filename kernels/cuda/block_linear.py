"""Linear layers with GGUF's blocks on CUDA devices: chooses the kernel.

For few tokens one kernel reads each type's blocks, with what comes before and after it. Beyond, a GEMM dequantises
tiles, Gluon's on Hopper, else Triton's; for most tokens the whole weight is dequantised for cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cuda.choice import CHOICE, GLUON
from kernels.data.block_weight import BLOCK_KINDS, BlockRows, BlockWeight, have_order, pack_rows, reads_blocks
from kernels.data.capability import compute_capability
from kernels.data.forms import FORMS
from kernels.data.fusion import Fusion
from kernels.triton.activation import epilogue
from kernels.triton.block_weight import block_gemm, dequantize
from kernels.triton.norm import rms_norm

if GLUON:
    from kernels.gluon.linear import block_small_batch, block_weight_only


def pack_blocks(
    first: Tensor, others: Sequence[Tensor], kinds: Sequence[str], dtype: torch.dtype
) -> BlockWeight | None:
    """See `kernels.reference.pack_blocks`."""
    capability = compute_capability(first.device) if first.is_cuda else None
    reads = CHOICE.block_order and GLUON and reads_blocks(capability, dtype) and not FORMS.deterministic
    return packed([first, *others], kinds) if reads else None


def packed(blocks: Sequence[Tensor], kinds: Sequence[str]) -> BlockWeight | None:
    """Pack blocks [n, blocks, bytes] of these types; None: one of them is not supported. Neighbours of the same type
    become one.
    """
    names = {name.upper(): name for name in BLOCK_KINDS}
    if not have_order(kinds, blocks[0].shape[1] * (32 if kinds[0] == "Q8_0" else 256)):
        return None
    parts: list[BlockRows] = []
    first = 0
    for i, kind in enumerate(kinds):
        if i + 1 == len(kinds) or kinds[i + 1] != kind:
            parts.append(pack_rows(names[kind], blocks[first : i + 1]))
            first = i + 1
    return BlockWeight.of(parts)


def is_small_batch(x: Tensor, weight: BlockWeight) -> bool:
    """Return whether the kernel for few tokens computes x [M, K] times the weight."""
    most = CHOICE.block_small_batch_tokens if is_weight_only(x, False) else CHOICE.small_batch_tokens
    return GLUON and len(x) <= most and block_small_batch.config(x, weight.parts[0]) is not None


def linear(x: Tensor, weight: BlockWeight, bias: Tensor | None, fusion: Fusion) -> Tensor:
    """Compute x [M, K] times the weight, plus bias -> [M, N]."""
    swiglu, one = fusion.gate is not None, len(weight.parts) == 1
    if is_small_batch(x, weight) and (one or not swiglu):
        into = fusion.into(x, len(weight))
        for rows, own in _spans(weight, into.shape[1]):
            config = block_small_batch.config(x, rows)
            assert config is not None
            residual = None if fusion.residual is None else fusion.residual[:, own]
            block_small_batch.launch(
                x, rows, bias if bias is None or swiglu else bias[own], into[:, own], config,
                fusion._replace(residual=residual),
            )  # fmt: skip
        return into
    before = Fusion(fusion.norm_weight, fusion.eps)
    if is_small_batch(x, weight):
        result = linear(x, weight, bias, before)
    elif is_weight_only(x, swiglu and one):
        if one:
            return _weight_only(x, weight.parts[0], bias, fusion)
        result = torch.cat([_weight_only(x, rows, None, before) for rows in weight.parts], 1)
        result = result if bias is None else result.add_(bias)
    else:
        x = x if fusion.norm_weight is None else rms_norm(x, fusion.norm_weight, fusion.eps)
        if len(x) > CHOICE.block_gemm_tokens:
            result = F.linear(x, dequantize(weight, x.dtype), bias)
        elif fusion.residual is None or swiglu:
            result = block_gemm(x, weight, bias, None)
        else:
            return block_gemm(x, weight, bias, fusion.residual)
    return epilogue(result, fusion)


def is_weight_only(x: Tensor, swiglu: bool) -> bool:
    """Return whether Gluon's weight-only GEMM multiplies x [M, K]."""
    most = CHOICE.weight_only_swiglu_tokens if swiglu else CHOICE.weight_only_tokens
    return GLUON and len(x) <= most and block_weight_only.supports(x)


def _weight_only(x: Tensor, rows: BlockRows, bias: Tensor | None, fusion: Fusion) -> Tensor:
    into, swiglu = fusion.into(x, len(rows)), fusion.gate is not None
    config = block_weight_only.config(len(x), rows, swiglu)
    x = block_weight_only.in_order(x, rows, fusion.norm_weight, fusion.eps)
    block_weight_only.launch(x, rows, bias, into, config, residual=fusion.residual, swiglu=swiglu)
    return into


def _spans(weight: BlockWeight, width: int) -> Iterator[tuple[BlockRows, slice]]:
    """Yield the parts and their columns of the result, of `width` in all."""
    if len(weight.parts) == 1:
        yield weight.parts[0], slice(0, width)
        return
    first = 0
    for rows in weight.parts:
        yield rows, slice(first, first + len(rows))
        first += len(rows)
