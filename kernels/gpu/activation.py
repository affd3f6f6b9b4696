"""Constants of activations for device functions."""

from __future__ import annotations

import triton.language as tl

from kernels.data import activation

CLAMP, SLOPE = tl.constexpr(activation.CLAMP), tl.constexpr(activation.SLOPE)
GELU_SCALE, GELU_CUBE = tl.constexpr(activation.GELU_SCALE), tl.constexpr(activation.GELU_CUBE)
