"""Recurrent layers in Triton's interpreter, against the reference and against whole sequences in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from tests.oracles.state_steps import StateSteps

recurrent: Any = pytest.importorskip("kernels.triton.recurrent")
LENGTHS = [1, 5, 16, 17, 50, 133]


def whole_conv(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int]) -> Tensor:
    """The gated convolution of whole sequences [T, 3C], in float64."""
    outputs = []
    for part in x.double().split(lengths):
        before, after, values = part.chunk(3, 1)
        padded = F.pad((before * values).T, (weight.shape[1] - 1, 0))
        bias64 = None if bias is None else bias.double()
        outputs.append(after * F.conv1d(padded, weight.double()[:, None], bias64, groups=len(weight)).T)
    return torch.cat(outputs)


@pytest.mark.parametrize("module", [reference, recurrent], ids=["reference", "triton"])
@pytest.mark.parametrize(
    ("length", "block_size", "has_bias", "only_decodes"),
    [(3, 16, False, False), (3, 16, True, True), (4, 4, True, False), (7, 32, False, False), (2, 2, False, False)],
)
def test_short_conv_in_chunks_is_that_of_whole_sequences(
    module: Any, length: int, block_size: int, has_bias: bool, only_decodes: bool
) -> None:
    torch.manual_seed(length)
    channels, ring = 24, 1 << (length - 1).bit_length()
    lengths = [3, 17, 20] if only_decodes else LENGTHS
    steps = StateSteps(length, lengths, block_size, only_decodes=only_decodes)
    x, weight = torch.randn(sum(lengths), 3 * channels), torch.randn(channels, length)
    bias = torch.randn(channels) if has_bias else None
    expected = whole_conv(x, weight, bias, lengths)
    inputs = torch.full((steps.num_blocks, ring, channels), torch.nan)
    for indices, context in steps.steps():
        part = torch.where((indices >= 0)[:, None], x[indices.clamp(min=0)], 0.5)
        out = module.short_conv(part, weight, bias, inputs, context)
        assert out.isfinite().all()
        real = indices >= 0
        torch.testing.assert_close(out[real].double(), expected[indices[real]], atol=1e-5, rtol=1e-5)
