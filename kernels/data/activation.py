"""The activations of MLPs and experts, and their constants."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Gate: TypeAlias = Literal["silu", "gelu_tanh"]
Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"]
ExpertActivation: TypeAlias = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
UNGATED: ExpertActivation = "relu2"  # relu(x)²: experts have no gate

CLAMP, SLOPE = 7.0, 1.702  # clamped_swiglu: (up + 1) · gate · sigmoid(SLOPE · gate), with |up| and gate at most CLAMP
# gelu_tanh: x / 2 · (1 + tanh(GELU_SCALE · (x + GELU_CUBE · x³)))
GELU_SCALE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715
