"""Rejection sampling of drafts with the probabilities that their drafter gave them.

Leviathan et al. 2022, arXiv 2211.17192: a draft x that was sampled from q is accepted with probability
min(1, p(x) / q(x)), else a token is sampled from max(p - q, 0), normalised. So tokens have the model's distribution p.
They are not those of plain decoding with the same seed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from engine.worker.input_batch import PackedStep, Row
from engine.worker.sampling.sampler import Processed, Sampler
from kernels.data.layout import Samples

MAX_ROWS = 128  # whose latest proposals are kept
ACCEPTING, RESIDUAL = 0x5DEECE66D, 0x2545F4914F6CDD1D  # of a seed, so that random numbers are independent


class _Proposed(NamedTuple):
    row: Row
    first: int  # position of the first token
    token_ids: list[int]
    probabilities: Tensor  # [k, V] float32


class DraftProbabilities:
    """The distributions from which a drafter sampled the latest tokens that it proposed for each row."""

    def __init__(self) -> None:
        self._latest: OrderedDict[int, _Proposed] = OrderedDict()  # by index of the row

    def keep(self, rows: Sequence[Row], newest: Tensor, tokens: Tensor, probabilities: Tensor) -> None:
        """`newest` [n] int64: position of the token before the proposed ones. tokens [n, k] int64.
        probabilities [n, k, V].
        """
        for i, (row, position, token_ids) in enumerate(zip(rows, newest.tolist(), tokens.tolist(), strict=True)):
            self._latest[row.index] = _Proposed(row, position + 1, token_ids, probabilities[i])
            self._latest.move_to_end(row.index)
        while len(self._latest) > MAX_ROWS:
            self._latest.popitem(last=False)

    def find(self, row: Row, first: int, drafts: Sequence[int]) -> Tensor | None:
        """Return the distributions of the drafts of a row, [n, V]; None: they are not what was proposed last."""
        found = self._latest.get(row.index)
        if found is None or found.row is not row or found.first != first:
            return None
        return found.probabilities[: len(drafts)] if found.token_ids[: len(drafts)] == list(drafts) else None


def distribution(logits: Tensor, params: kernels.SamplingRows) -> Tensor:
    """Return the probabilities with which `kernels.sample` draws: logits [n, V] → [n, V] float32. A row with a NaN or
    without any token has NaN.
    """
    temperature = params.temperature.clamp(min=1e-6).float()
    wide = logits.float().nan_to_num(nan=-torch.inf)
    lowest = kernels.sampling_thresholds(wide, temperature, params.top_k, params.top_p, params.min_p)
    kept = wide.masked_fill(wide < lowest.unsqueeze(1), -torch.inf)
    return ((kept - kept.amax(-1, keepdim=True)) / temperature.unsqueeze(1)).softmax(-1)


def draw(probabilities: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token of each row of [n, V]: [n] int64, below 0 if there is none."""
    ones = torch.ones(len(probabilities), device=probabilities.device)
    none = torch.zeros(len(probabilities), dtype=torch.int32, device=probabilities.device)
    return kernels.sample(probabilities.log(), kernels.SamplingRows(ones, none, ones, 0 * ones, seeds, positions))


def reject(
    kept: DraftProbabilities,
    packed: PackedStep,
    drafts: Mapping[str, Sequence[int]],
    sampler: Sampler,
    logits: Callable[[], Tensor],
    tokens: Tensor,
) -> None:
    """Replace the tokens [S] of samples with drafts: by the draft if it is accepted, else by a token of the residual.

    A sample keeps its token if its draft was not sampled from known probabilities: a lookup's has none, and comparing
    it with a sample of the model is rejection sampling already. So does a sample that takes the argmax.
    `logits`: returns those of all samples, [S, V], filled with masks but not processed.
    """
    members, samples = packed.members, packed.members.samples
    at, given, proposed = list[int](), list[int](), list[Tensor]()
    for request_id, token_ids in drafts.items():
        index = members.indices[request_id]
        row, own = members.rows[index], samples.of_request(index)
        if row.sampling.temperature == 0:
            continue
        found = kept.find(row, int(packed.positions[own.start]), token_ids)
        if found is not None:
            at += own[: len(token_ids)]
            given += token_ids
            proposed.append(found)
    if not at:
        return
    indices, draft = (torch.tensor(each, device=tokens.device) for each in (at, given))
    wide, params = _inputs(indices, logits(), sampler.step_samples, sampler.processed)
    p, q = distribution(wide, params), torch.cat(proposed)
    ratio = (p.gather(1, draft.unsqueeze(1)) / q.gather(1, draft.unsqueeze(1))).clamp(0, 1)
    is_accepted = draw(torch.cat((ratio, 1 - ratio), 1), params.seeds ^ ACCEPTING, params.positions) == 0
    others = draw((p - q).clamp(min=0), params.seeds ^ RESIDUAL, params.positions)
    new = torch.where(is_accepted | (others < 0), draft, others)
    tokens[indices] = torch.where(tokens[indices] >= 0, new, tokens[indices])
    sampler.store_again(tokens)


def _inputs(
    indices: Tensor, logits: Tensor, of: Samples, processed: Sequence[Processed]
) -> tuple[Tensor, kernels.SamplingRows]:
    """Return the logits and the parameters of these samples, [n, V] and [n], after processors."""
    wide = logits[indices].float()
    params = [each[indices] for each in (of.temperature, of.top_k, of.top_p, of.min_p, of.seed, of.next_position)]
    for each in processed:
        mine, theirs = (indices.unsqueeze(1) == each.at).nonzero(as_tuple=True)
        wide[mine] = each.logits[theirs].float()
        for column, other in zip(params[:4], each.params[:4], strict=True):
            column[mine] = other[theirs].to(column.dtype)
    return wide, kernels.SamplingRows(*params)
