"""Linear layers with quantised weights on CUDA devices: chooses the kernel.

A few tokens are bound by reading the weight, which is dequantised in registers. Beyond `CHOICE.small_batch_tokens`
tokens, activations are quantised too where the checkpoint allows it, and tensor cores multiply codes by codes. Else a
weight-only GEMM dequantises tiles on their way to the tensor cores; most tokens dequantise the whole weight, for
cuBLAS.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cuda import block_linear
from kernels.cuda.choice import CHOICE, GLUON
from kernels.data.activation import Gate
from kernels.data.block_weight import BlockWeight
from kernels.data.fusion import NOTHING, Fusion
from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight
from kernels.gpu.device import is_hopper, multiplies_e4m3
from kernels.gpu.launch import cdiv
from kernels.gpu.parts import sum_parts, sum_parts_norm
from kernels.triton.activation import epilogue, gate_and_mul
from kernels.triton.norm import rms_norm
from kernels.triton.scaled import finish_norm, quantize_into, scaled_linear
from kernels.triton.weight_only import dequantize, weight_only_linear

if GLUON:
    from kernels.gluon.linear import quantized_small_batch, scaled, weight_only


def linear(x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear`."""
    return _linear(x, weight, bias, NOTHING)


def linear_add(
    residual: Tensor, x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.linear_add`."""
    return _linear(x, weight, bias, Fusion(residual=residual))


def linear_gated(
    x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None, gate: Gate = "silu"
) -> Tensor:
    """See `kernels.reference.linear_gated`."""
    return _gated(x, weight, bias, gate, NOTHING)


def linear_add_norm(
    residual: Tensor, x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None, norm: NextNorm
) -> Tensor | QuantizedRows:
    """See `kernels.reference.linear_add_norm`."""
    if not isinstance(x, QuantizedRows) and not _takes_codes(x, weight, False):
        return finish_norm(linear_add(residual, x, weight, bias), norm)
    config = scaled_config(x, weight, bias, False)
    if config is None:
        return finish_norm(_scaled_linear(x, weight, bias, Fusion(residual=residual)), norm)
    parts = scaled.multiply(_quantized(x, weight, bias), weight, config)
    return sum_parts_norm(parts, residual, norm, bias=bias)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.norm_linear`."""
    return _linear(x, weight, bias, Fusion(norm_weight, eps, out=out))


def norm_gated(
    x: Tensor, norm_weight: Tensor, eps: float, weight: QuantizedWeight, bias: Tensor | None = None, gate: Gate = "silu"
) -> Tensor:
    """See `kernels.reference.norm_gated`."""
    return _gated(x, weight, bias, gate, Fusion(norm_weight, eps))


def norms_apart(x: Tensor, weight: QuantizedWeight, gate: Gate | None = None) -> bool:
    """See `kernels.reference.norms_apart`. A kernel that quantises x, or permutes its channels, also computes the
    norm.
    """
    if isinstance(weight, BlockWeight):
        return not (block_linear.is_small_batch(x, weight) or block_linear.is_weight_only(x, gate == "silu"))
    weight, swiglu = dataclasses.replace(weight, order=None), gate == "silu"
    return (
        small_batch_config(x, weight, swiglu) is None
        and not quantizes(x, weight)
        and weight_only_config(x, weight, swiglu) is None
    )


def quantized_input(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, gate: Gate | None = None
) -> QuantizedRows | None:
    """See `kernels.reference.quantized_input`."""
    swiglu = gate == "silu"
    return _unwritten(x, weight, bias, swiglu) if _takes_codes(x, weight, swiglu) else None


def quantizes(x: Tensor, weight: QuantizedWeight) -> bool:
    """Return whether x [M, K] is quantised, too: allowed, worth it, and in a form that the kernels multiply."""
    return (
        weight.rounds_activations
        and len(x) > CHOICE.small_batch_tokens
        and weight.zero is None
        and weight.factor is None
        and (weight.scale.shape[1] == 1 or weight.group % 128 == 0)
        and (weight.kind == "int8" or (weight.kind == "e4m3" and multiplies_e4m3(x.device)))
    )


def _takes_codes(x: Tensor, weight: QuantizedWeight, swiglu: bool) -> bool:
    """Return whether `_linear` quantises x without permuting its channels."""
    return quantizes(x, weight) and weight.order is None and small_batch_config(x, weight, swiglu) is None


def _gated(
    x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None, gate: Gate, fusion: Fusion
) -> Tensor:
    """Compute as `_linear` with a gate, which kernels fuse if it is SiLU's."""
    if gate != "silu":
        return gate_and_mul(_linear(x, weight, bias, fusion), gate)
    return _linear(x, weight, bias, fusion._replace(gate=gate))


def _linear(x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None, fusion: Fusion) -> Tensor:
    """Compute x [M, K] times the weight, plus bias -> [M, N]."""
    if isinstance(weight, BlockWeight):
        assert isinstance(x, Tensor)
        return block_linear.linear(x, weight, bias, fusion)
    if isinstance(x, QuantizedRows):
        return _scaled_linear(x, weight, bias, fusion)
    if weight.order is not None:
        x = x[:, weight.order]
        if fusion.norm_weight is not None:
            fusion = fusion._replace(norm_weight=fusion.norm_weight[weight.order])
        weight = dataclasses.replace(weight, order=None)
    swiglu = fusion.gate is not None
    small_batch = small_batch_config(x, weight, swiglu)
    if small_batch is not None:
        into = fusion.into(x, len(weight))
        quantized_small_batch.launch(x, weight, bias, into, small_batch, fusion)
        return into
    if quantizes(x, weight):
        return _scaled_linear(x, weight, bias, fusion)
    config = weight_only_config(x, weight, swiglu)
    if config is not None:
        into = fusion.into(x, len(weight))
        x = weight_only.in_order(x, weight, fusion.norm_weight, fusion.eps)
        weight_only.launch(x, weight, bias, into, config, residual=fusion.residual, swiglu=swiglu)
        return into
    if fusion.norm_weight is not None:
        x = rms_norm(x, fusion.norm_weight, fusion.eps)
    if len(x) > CHOICE.portable_weight_only_tokens:
        result = F.linear(x, dequantize(weight.codes, weight, x.dtype), bias)
    else:
        result = weight_only_linear(x, weight, bias)
    return epilogue(result, fusion)


def _scaled_linear(x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None, fusion: Fusion) -> Tensor:
    """Compute as `_linear` with quantised activations, whose norm is already computed."""
    swiglu, residual = fusion.gate is not None, fusion.residual
    config = scaled_config(x, weight, bias, swiglu)
    x = _quantized(x, weight, bias, fusion)
    if config is not None:
        parts = scaled.multiply(x, weight, config, swiglu=swiglu)
        if len(parts) == 1 and bias is None and residual is None:
            return epilogue(parts[0], Fusion(out=fusion.out))
        out = torch.empty_like(parts[0]) if residual is None else residual
        return epilogue(sum_parts(parts, out, bias=bias, residual=residual), Fusion(out=fusion.out))
    gemm = _cublas if _by_cublas(x, weight) else scaled_linear
    return epilogue(gemm(x.codes, x.scale, weight, bias, x.dtype)[: len(x)], fusion)


def _unwritten(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, swiglu: bool) -> QuantizedRows:
    """Return memory for x [M, K], quantised as `_scaled_linear` takes it."""
    group = 0 if weight.scale.shape[1] == 1 else weight.group
    by_group = group > 0 and scaled_config(x, weight, bias, swiglu) is None and _by_cublas(x, weight)
    return QuantizedRows.empty(x, weight.codes.dtype, group, by_group)


def _quantized(
    x: Tensor | QuantizedRows,
    weight: QuantizedWeight,
    bias: Tensor | None,
    fusion: Fusion = NOTHING,
) -> QuantizedRows:
    if isinstance(x, QuantizedRows):
        assert fusion.norm_weight is None
        return x
    out = _unwritten(x, weight, bias, fusion.gate is not None)
    quantize_into(out, x, fusion.norm_weight, fusion.eps)
    return out


def _cublas(codes: Tensor, x_scale: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    by_row = weight.scale.shape[1] == 1
    out = torch._scaled_mm(
        codes, weight.codes.t(), x_scale, weight.scale.float().t(), bias if by_row else None, out_dtype=dtype,
        use_fast_accum=by_row,
    )  # fmt: skip
    return out if bias is None or by_row else out.add_(bias)


def _by_cublas(x: Tensor | QuantizedRows, weight: QuantizedWeight) -> bool:
    """Return whether cuBLAS multiplies these codes: e4m3, scaled by row, or on Hopper by block of 128 × 128."""
    n, k = len(weight), weight.num_channels
    by_row = weight.scale.shape == (n, 1)
    by_block = weight.group == weight.rows == 128 and n % 128 == k % 128 == 0 and is_hopper(x.device)
    return (
        x.is_cuda
        and weight.kind == "e4m3"
        and (by_row or by_block)
        and x.dtype == torch.bfloat16
        and n % 16 == k % 16 == 0
    )


def small_batch_config(x: Tensor, weight: QuantizedWeight, swiglu: bool) -> quantized_small_batch.Config | None:
    """Return how Gluon's small-batch kernel computes x [M, K] times the weight; None: it does not."""
    n = len(weight) // (2 if swiglu else 1)
    if GLUON and len(x) <= CHOICE.small_batch_tokens and n <= CHOICE.small_batch_outputs:
        return quantized_small_batch.config(x, weight, swiglu)
    return None


def weight_only_config(x: Tensor, weight: QuantizedWeight, swiglu: bool) -> weight_only.Config | None:
    """Return how Gluon's weight-only GEMM computes x [M, K] times the weight; None: it does not."""
    most = CHOICE.weight_only_swiglu_tokens if swiglu else CHOICE.weight_only_tokens
    if GLUON and len(x) <= most and weight_only.supports(x, weight):
        row = weight.codes.shape[1]
        n = len(weight) // (2 if swiglu else 1)
        return weight_only.config(len(x), n, row, weight.num_channels // row, swiglu)
    return None


def scaled_config(
    x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None, swiglu: bool
) -> scaled.Config | None:
    """Return how Gluon's GEMM computes tokens like x [M, K], quantised, times the weight; None: it does not."""
    if GLUON and len(x) <= CHOICE.scaled_tokens and not (swiglu and bias is not None) and scaled.supports(x, weight):
        return _scaled_config(len(x), len(weight), weight.num_channels, weight.rows > 1, swiglu)
    return None


@functools.cache
def _scaled_config(num_tokens: int, n: int, k: int, blocks: bool, swiglu: bool) -> scaled.Config | None:
    """Return tiles for at most one program on each of some 132 multiprocessors; None where cuBLAS is faster, as
    measured.

    The 128 × 128 tiles of cuBLAS are too few for so many multiprocessors where the weight has few rows. A GEMM with
    more outputs than channels is taken for one without a residual sum: without split-K, no other kernel follows it.
    blocks: scales are those of blocks.
    """
    rows, steps, halves = n // 256, k // 128, 2
    if swiglu:
        block_m, parts = (64 if num_tokens <= 64 else 128), 1
        if rows * cdiv(num_tokens, block_m) < CHOICE.scaled_min_tiles:
            return None
    elif blocks and steps < 64:
        tiles = cdiv(num_tokens, 64) * 2 * rows
        if tiles > (96 if n > k else 128):
            return None
        block_m, halves = 64, 1
        parts = max(64 // tiles, 2 if n <= k and tiles <= 64 else 1)
    elif num_tokens <= 64:
        block_m, parts = 64, 72 // rows
    elif num_tokens <= 128 and (rows <= 16 or steps >= 64):
        block_m, parts = 64, 66 // rows
    elif rows <= 33 and steps >= 64:
        block_m, parts = 128, 66 // rows
    elif rows == 8 and steps >= 32:
        block_m, parts = 64, 4
    else:
        return None
    return scaled.config(block_m, steps, parts, halves)
