"""Linear layers with LoRA adapters on CUDA devices: one kernel for few tokens and a float weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.choice import CHOICE, GLUON
from kernels.cuda.linear import small_batch_config
from kernels.data.activation import Gate
from kernels.data.lora import AdapterTokens, LoraWeights
from kernels.data.quantized_weight import Weight

if GLUON:
    from kernels.gluon.linear import adapters, small_batch


def fuses_adapters(x: Tensor, weight: Weight, lora: LoraWeights, gate: Gate | None = None) -> bool:
    """See `kernels.reference.fuses_adapters`."""
    if not isinstance(weight, Tensor) or len(x) > CHOICE.adapted_tokens:
        return False
    config = small_batch_config(x, len(weight) // (1 if gate is None else 2), gate is not None)
    return config is not None and adapters.supports(lora, config.block_n, gate is not None)


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
    assert isinstance(weight, Tensor)
    n = len(weight) // (1 if gate is None else 2)
    config = small_batch_config(x, n, gate is not None)
    assert config is not None
    out = torch.empty(len(x), n, dtype=x.dtype, device=x.device) if residual is None else residual
    norm_weight, eps = norm or (None, 0.0)
    small_batch.launch(
        x, weight, bias, out, config, norm_weight=norm_weight, eps=eps, gate=gate or "", residual=residual,
        adapters=adapters.Adapters(lora, tokens.slots),
    )  # fmt: skip
    return out
