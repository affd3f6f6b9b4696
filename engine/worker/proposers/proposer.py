"""The interface of drafters that run a model on the device after each step of the target model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.worker.input_batch import BatchSamples, PackedStep, Row
from engine.worker.proposers.draft_graphs import DraftWork
from engine.worker.sampling.imposed import ImposedAcceptance
from engine.worker.sampling.rejection import DraftProbabilities
from kernels.data.layout import StepTensors


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Memory for the hidden states of a step's tokens, which every step overwrites, captured ones too."""

    last: Tensor  # [T, hidden]: of the last layer, before the final norm
    layers: dict[int, Tensor]  # layer → [T, hidden]: the residual stream after it

    @classmethod
    def allocate(
        cls, num_tokens: int, hidden_size: int, layers: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> HiddenStates:
        def new() -> Tensor:
            return torch.zeros(num_tokens, hidden_size, dtype=dtype, device=device)

        return cls(new(), {layer: new() for layer in layers})

    def pairs(self, other: HiddenStates) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that a drafter reads, each with that of `other`: of its layers, if it reads some."""
        return [(self.layers[i], other.layers[i]) for i in self.layers] or [(self.last, other.last)]

    def select(self, tokens: Tensor) -> HiddenStates:
        """Return a copy that has some tokens only, by their index [m] int64."""
        return HiddenStates(self.last[tokens], {layer: states[tokens] for layer, states in self.layers.items()})


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A sampled step of the target model: n requests, T tokens, S samples, without padding.

    A request's tokens follow each other; its newest one and its drafts are the last of them. Tensors are on the device,
    and the next step overwrites all but `tokens` and `counts`.
    """

    packed: PackedStep  # the CPU's record of the requests, their rows and upper bounds of their lengths
    step: StepTensors  # the first T of its tokens, the first n of its sequences
    hidden: HiddenStates | None  # of the T tokens first; None: the drafter reads none
    tokens: Tensor  # [S] int64: each request's sampled tokens, see `BatchSamples`; below 0: a fault
    counts: Tensor  # [n] int64: how many of its samples each request keeps; 0: none
    num_proposals: int
    # [G, n] int32: entries of each request's block tables. A drafter stores nothing beyond them.
    num_blocks: np.ndarray
    rows: Mapping[str, Row]  # of all requests that have rows, by id

    @property
    def samples(self) -> BatchSamples:
        return self.packed.members.samples


class DeviceProposer(Protocol):
    """Drafts tokens by a model on the device."""

    @property
    def layers(self) -> Sequence[int] | None:
        """Layers of the target after which the drafter reads the residual stream, beside the last layer's output. None:
        it reads no hidden states.
        """

    @property
    def probabilities(self) -> DraftProbabilities | None:
        """The distributions that its latest proposals were sampled from; None: it keeps none."""

    def allocate(self, num_blocks: int) -> None:
        """Allocate what it keeps beside so many KV blocks. Called once for each KV cache, after `release`."""

    def release(self) -> None:
        """Release what it keeps beside KV blocks."""

    def works(self) -> Sequence[DraftWork]:
        """Return what it runs in graphs, on a device that has these, once it has memory."""

    def capture(self) -> None:
        """Capture its `works`."""

    def propose(self, step: SampledStep) -> Tensor:
        """Return [n, num_proposals] int64 on the device: what may follow each request's newest kept token; -1: nothing.

        It is called after each step in which the drafter does not rest, on all ranks of the last stage, and must return
        the same on all of them. Most steps ask for none while drafts do not pay: what keeps up then should cost little.
        Nothing follows a request whose row `is_unknown`.
        """


def count_kept(
    step: StepTensors,
    samples: BatchSamples,
    tokens: Tensor,
    unsampled: Sequence[int],
    upload: Callable[[Tensor], Tensor],
    imposed: ImposedAcceptance | None = None,
) -> Tensor:
    """Return how many of its samples each request keeps: those up to the first that differs from its draft, [n] int64.

    tokens [S] int64. The `unsampled` ones have no token. `upload`: see `Device`. `imposed`: see `Verification`.
    """
    n, end = samples.num_requests, len(samples)
    valid = tokens >= 0
    if unsampled:
        valid[upload(torch.tensor(list(unsampled)))] = False
    if not samples.has_drafts:
        return valid.long()
    first = np.array(samples.first)
    index = first[:-1, None] + np.arange(np.diff(first).max())  # [n, width]
    next_first = first[1:, None]
    # The sample `end` is never right.
    indices = np.where(index < next_first, index, end), np.where(index + 1 < next_first, index + 1, end)
    at, after = upload(torch.from_numpy(np.stack(indices)))
    token_index = upload(torch.tensor([*samples.token_index, 0]))
    drafts = step.input_ids[token_index]  # [S + 1]: the token before each sample
    found = torch.cat([torch.where(valid, tokens, -1), tokens.new_full((1,), -1)])
    if imposed is None:
        is_accepted = found[at] == drafts[after]
    else:
        positions = torch.cat([step.samples.next_position[:end], tokens.new_zeros(1)])
        is_accepted = imposed.accepts(positions[at])
    is_right = is_accepted & (after < end) & (found[at] >= 0)
    before = torch.cat([is_right.new_ones(n, 1), is_right[:, :-1]], dim=1).long().cumprod(1)
    return (before * (found[at] >= 0)).sum(1)
