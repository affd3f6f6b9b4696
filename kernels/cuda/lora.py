"""Linear layers with LoRA adapters on CUDA devices.

Few tokens and a float weight: one kernel, see `kernels.gluon.linear.adapters`. Otherwise one kernel computes
A · x, and one adds B times that to the GEMM's result. With `Choice.adapters_overlap` the first runs beside the GEMM, on
a second stream, and with `Choice.adapted_gate` the second computes the gated activation.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels.cuda.choice import CHOICE, GLUON
from kernels.cuda.linear import linear, small_batch_config
from kernels.data.activation import Gate
from kernels.data.lora import AdapterTokens, LoraWeights
from kernels.data.quantized_weight import Weight
from kernels.triton.activation import gate_and_mul
from kernels.triton.lora import expand, gates, shrink
from kernels.triton.norm import rms_norm

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
    if CHOICE.adapters_overlap:
        inner, y = _beside(value, weight, bias, lora, tokens)
    else:
        inner, y = shrink(value, lora, tokens), linear(value, weight, bias)
    if gate is not None and CHOICE.adapted_gate and gates(lora, tokens):
        return expand(y, inner, lora, tokens, gate, dependent=not CHOICE.adapters_overlap)
    y = expand(y, inner, lora, tokens, wide=CHOICE.adapted_gate, dependent=not CHOICE.adapters_overlap)
    if gate is not None:
        y = gate_and_mul(y, gate)
    return y if residual is None else residual.add_(y)


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
    n = len(weight) // (1 if gate is None else 2)
    config = small_batch_config(x, n, gate is not None)
    assert config is not None
    out = torch.empty(len(x), n, dtype=x.dtype, device=x.device) if residual is None else residual
    norm_weight, eps = norm or (None, 0.0)
    small_batch.launch(
        x, weight, bias, out, config, norm_weight=norm_weight, eps=eps, gate=gate or "", residual=residual,
        adapters=adapters.Adapters(lora, tokens),
    )  # fmt: skip
    return out


def _beside(
    x: Tensor, weight: Weight, bias: Tensor | None, lora: LoraWeights, tokens: AdapterTokens
) -> tuple[Tensor, Tensor]:
    """Return A · x and the layer's result, computed side by side.

    Both streams have met at the end: what one of them allocates is not reused before the other has read it.
    """
    _ = tokens.tiles  # computed in the stream that all layers wait for
    if x.device.type != "cuda":
        return shrink(x, lora, tokens, dependent=False), linear(x, weight, bias)
    main, side = torch.cuda.current_stream(x.device), _second_stream(x.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        inner = shrink(x, lora, tokens, dependent=False)
    y = linear(x, weight, bias)
    main.wait_stream(side)
    return inner, y


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
