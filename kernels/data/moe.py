"""What all backends' operations on mixtures of experts are told by data: the router's rule, the experts' activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

ExpertActivation: TypeAlias = Literal["silu", "gelu_tanh", "clamped_swiglu"]
CLAMP, SLOPE = 7.0, 1.702  # of clamped_swiglu: (up + 1) · gate · sigmoid(SLOPE · gate), |up| and gate at most CLAMP


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts follow from their logits: score each, choose the best, weigh the chosen ones.

    scoring: softmax over all experts, softmax over the chosen ones alone, or a sigmoid of each. Experts lie in `num_groups`
    groups of neighbours; only those of the `num_chosen_groups` best groups can be chosen. Of equal experts (or groups) the
    one of the lower index is chosen.
    """

    num_chosen: int
    scoring: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # its best expert's, or the sum of its two best ones'
    renormalise: bool = False  # divide the weights by their sum
    scale: float = 1.0  # of the weights, at last
