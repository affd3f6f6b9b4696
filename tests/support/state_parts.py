"""`kernels.triton.scans` with several tokens computed by `kernels.triton.chunk_states`, as its functions are called.

In the interpreter factors of products are float32: it multiplies the bits of bfloat16 as if they were integers.
"""

from __future__ import annotations

from unittest import mock

import torch
import triton.language as tl
from torch import Tensor

from kernels.data.state import DeltaStates, StateContext, StateSpace
from kernels.triton import scans

TYPES = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), tl.float32)


def delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, states: DeltaStates, context: StateContext
) -> Tensor:
    with mock.patch.multiple(scans, IN_PARTS=True, TYPES=TYPES):
        return scans.delta_rule(qkv, gates, rate, bias, states, context)


def mamba2(xbc: Tensor, steps: Tensor, layer: StateSpace, states: DeltaStates, context: StateContext) -> Tensor:
    with mock.patch.multiple(scans, IN_PARTS=True, TYPES=TYPES):
        return scans.mamba2(xbc, steps, layer, states, context)
