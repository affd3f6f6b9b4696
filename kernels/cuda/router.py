"""Routers on CUDA devices: chooses the kernel that computes the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.choice import CHOICE
from kernels.data.moe import RouterArgs
from kernels.triton.norm import rms_norm
from kernels.triton.router import cuda_core_logits, logits_in_parts, top_k


def route(x: Tensor, router: RouterArgs, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.route`. Tokens must be contiguous, their stride is free."""
    weight, bias = router.weight, router.bias
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    logits = _logits(x, weight, bias) if route_norms_apart(x) else cuda_core_logits(x, weight, bias)[1].unsqueeze(0)
    return top_k(logits, router.correction, router.rule, slots)


def route_norms_apart(x: Tensor) -> bool:
    """See `kernels.reference.route_norms_apart`."""
    return not 0 < len(x) <= CHOICE.router_cuda_core_tokens


def norm_route(
    x: Tensor, norm_weight: Tensor, eps: float, router: RouterArgs, slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.reference.norm_route`. Tokens must be contiguous, their stride is free."""
    if route_norms_apart(x):
        normed = rms_norm(x, norm_weight, eps)
        return normed, *route(normed, router, slots)
    assert x.stride(1) == 1
    assert router.weight.is_contiguous()
    normed, logits = cuda_core_logits(x, router.weight, router.bias, norm_weight, eps)
    return normed, *top_k(logits.unsqueeze(0), router.correction, router.rule, slots)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return partial logits [parts, M, E] float32."""
    if x.is_cuda and torch.float32 not in (x.dtype, weight.dtype) and len(x) > CHOICE.router_triton_tokens:
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return (logits if bias is None else logits.add_(bias)).unsqueeze(0)
    return logits_in_parts(x, weight, bias)
