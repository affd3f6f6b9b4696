"""Norms and the activation, against Hugging Face's own modules."""

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kernels import reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Qwen3RMSNorm])
def test_norms_equal_hugging_face(norm: Any, dtype: torch.dtype) -> None:
    module = norm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x, residual = torch.randn(2, 3, 7, 96).to(dtype)
    with torch.no_grad():
        assert reference.rms_norm(x, module.weight, 1e-5).equal(module(x))
        total, other = residual.clone(), residual.clone()
        assert reference.add_rms_norm(total, x, module.weight, 1e-5).equal(module(residual + x))
        assert total.equal(residual + x)
        normed = reference.add_rms_norm(other, x, module.weight, 1e-5, module.weight, 1e-5)
        assert other.equal(residual + module(x))
        assert normed.equal(module(other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_equals_hugging_face(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 40).to(dtype)
    want = torch.nn.functional.silu(gate) * up
    # Equal but for the last bits of float32: exp's differ between rows with and without a stride.
    torch.testing.assert_close(reference.silu_and_mul(torch.cat((gate, up), -1)), want, rtol=1e-6, atol=1e-6)
