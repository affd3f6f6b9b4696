"""`kernels.gluon.common.weight_only` on torch tensors, for the kernels that use it; see `gluon_on_tensors`."""

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gluon.common import weight_only as quantized_steps
from tests.kernels.gluon.linear.test_quantized_small_batch import scale_of, values_of
from tests.support.gluon_on_tensors import run_on_tensors

HELPERS = (
    "_load_scales", "_operand", "_weights", "_packed", "_finished", "_scaled", "words_of_halves", "halves_of_sums",
)  # fmt: skip


def decode(words: Tensor, kind: str, *layouts: object) -> tuple[Tensor, ...]:
    """Stand-in for the kernel's PTX: see `test_bits` in `gluon/linear/test_quantized_small_batch.py`."""
    parts = values_of(words.contiguous().view(torch.uint8), kind)
    return tuple(part.reshape(-1, 4, 4, 2, 2).transpose(3, 4) for part in parts)


def decode_scaled(
    words: Tensor, zeros: Any, scales: Any, kind: str, zero: bool, *layouts: object
) -> tuple[Tensor, Tensor]:
    """Stand-in for the kernel's PTX: see `test_zero_points_in_bits` in `gluon/linear/test_weight_only.py`."""
    low, high = decode(words, kind)
    if kind == "e2m1":
        low, high = low.float() * 2.0**-126, high.float() * 2.0**-126
    if zero:
        low, high = low - zeros[0][:, :, None, None, None], high - zeros[-1][:, :, None, None, None]
    low, high = low * scales[0][:, :, None, None, None], high * scales[-1][:, :, None, None, None]
    return low.bfloat16(), high.bfloat16()


def decode_half_scaled(
    words: Tensor, zero_point: Tensor, scale: Tensor, half: int, kind: str, zero: bool, *layouts: object
) -> Tensor:
    return decode_scaled(words, [zero_point] * 2, [scale] * 2, kind, zero)[half]


def packed_scale(scale: Tensor, kind: str) -> Tensor:
    return (scale_of(scale) * (2.0**94 if kind == "e2m1" else 1.0)).bfloat16()


def steps_on_tensors(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel: str, helpers: tuple[str, ...]
) -> None:
    """`run_on_tensors` for a kernel that uses `quantized_steps`."""
    run_on_tensors(monkeypatch, module, kernel, helpers, quantized_steps)
    monkeypatch.setattr(quantized_steps, "gl", module.gl)  # type: ignore[attr-defined]
    bodies = {name: getattr(quantized_steps, name).fn for name in HELPERS}
    replacements = {
        **bodies,
        **dict.fromkeys(("_layout", "half_words", "half_sums"), lambda *shape: None),
        "decode_words_in_order": decode,
        "decode_scaled": decode_scaled,
        "decode_half_scaled": decode_half_scaled,
        "packed_scale": packed_scale,
        "packed_zero": lambda zero, kind: zero.bfloat16(),
        "scale_of": scale_of,
    }
    for where, (name, value) in itertools.product((quantized_steps, module), replacements.items()):
        if hasattr(where, name):
            monkeypatch.setattr(where, name, value)
