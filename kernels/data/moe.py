"""Data types of MoE operations: the routing rule, the experts of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from kernels.data.activation import ExpertActivation
from kernels.data.compressed_weight import ExpertWeight


@dataclass(frozen=True, slots=True)
class Router:
    """A rule that chooses a token's experts by their logits: score each, choose the top k, weigh the chosen ones.

    scoring: softmax over all experts, softmax over the chosen ones alone, or a sigmoid of each. Experts lie in
    `num_groups` groups of neighbours; only those of the `num_chosen_groups` best groups can be chosen. Among equal
    experts (or groups) the lower index is chosen.
    """

    num_chosen: int
    scoring: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # its best expert's, or the sum of its two best ones'
    renormalise: bool = False  # divide the weights by their sum
    scale: float = 1.0  # of the weights, at last


@dataclass(frozen=True, slots=True)
class RouterArgs:
    """A layer's router of E experts."""

    weight: Tensor  # [E, hidden], or what `pack_router` makes of it
    rule: Router
    bias: Tensor | None = None  # [E], of the logits
    correction: Tensor | None = None  # [E] float32: added to the scores to choose by, not to the weights


@dataclass(frozen=True, slots=True)
class Experts:
    """The E experts of a rank, whose ids are [first, first + E). Other ids add nothing."""

    gate_up: ExpertWeight  # [E, 2I, hidden]: each expert's gate rows, then its up rows; UNGATED: up [E, I, hidden]
    down: ExpertWeight  # [E, hidden, I]
    gate_up_bias: Tensor | None = None  # [E, 2I]
    down_bias: Tensor | None = None  # [E, hidden]
    activation: ExpertActivation = "silu"
    first: int = 0

    def __len__(self) -> int:
        return len(self.gate_up)


class Tiles(NamedTuple):
    """Routed tokens in the order of their experts; see `kernels.triton.pairs`."""

    order: Tensor  # [pairs] int32
    entries: Tensor  # [tiles, 3] int32
    block_m: int
    # ids' shape, int32: where a routed token is in `order`; unwritten for those that are not local
    positions: Tensor | None = None
    one_tile: bool = False  # few routed tokens are computed as many are
