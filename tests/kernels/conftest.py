"""Triton's interpreter converts float8 without rounding and without NaN; where a test asks for it, PyTorch converts."""

import numpy as np
import pytest
import torch


@pytest.fixture
def exact_float8(monkeypatch):
    tl = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    theirs = interpreter._convert_float
    dtypes = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
    }

    def convert(array, source, target, rounding):
        if tl.float8e4nv not in (source, target):
            return theirs(array, source, target, rounding)
        raw = torch.from_numpy(np.ascontiguousarray(array).view(f"i{source.primitive_bitwidth // 8}").copy())
        to = raw.view(dtypes[source]).float().to(dtypes[target])
        bits = getattr(torch, f"int{target.primitive_bitwidth}")
        return to.view(bits).numpy().view(f"u{target.primitive_bitwidth // 8}").reshape(array.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
