"""Log-probabilities of sampled tokens and of prompts, on their way from the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import kernels
from engine.core.batch import PromptScores, SchedulerOutput, TokenLogprobs
from engine.worker.input_batch import InputBatch, Members, PackedStep

MAX_ELEMENTS = 1 << 24  # logits of prompt tokens held at once


@dataclass(slots=True)
class SampledLogprobs:
    """Those of a step's sampled tokens: indices of the batch, and tensors as `kernels.token_logprobs` gives."""

    indices: list[int]
    num_top: list[int]
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    named_ids: list[list[int]]  # the tokens that each asks for by name
    named: Tensor | None  # their log-probabilities, those of all in a row; None: there are none

    @classmethod
    def of(
        cls,
        members: Members,
        indices: list[int],
        logits: Tensor,
        tokens: Tensor,
        to_device: Callable[[Tensor], Tensor],
    ) -> SampledLogprobs:
        """For the sequences at `indices`, which asked for them; logits [B, V], tokens [B] of the step. Waits for nothing."""
        asked = [members.rows[i].sampling for i in indices]
        named_ids = [each.logprob_token_ids or [] for each in asked]
        num_top = [0 if ids else each.logprobs or 0 for each, ids in zip(asked, named_ids, strict=True)]
        at = to_device(torch.tensor(indices))
        own, sampled = logits[at], tokens[at].clamp(min=0)
        tensors = kernels.token_logprobs(own, sampled, max(num_top))
        named = None
        if pairs := [(row, token_id) for row, ids in enumerate(named_ids) for token_id in ids]:
            rows, columns = to_device(torch.tensor(pairs)).unbind(1)
            totals = own.gather(1, sampled.unsqueeze(1)).squeeze(1).float() - tensors[0]
            named = (own[rows, columns].float() - totals[rows]).to("cpu", non_blocking=True)
        return cls(indices, num_top, _to_cpu(tensors), named_ids, named)

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """After the device is done: index → one for each of its tokens."""
        records, values = _records(self.tensors, self.num_top), iter(() if self.named is None else self.named.tolist())
        for row, ids in enumerate(self.named_ids):
            if ids:
                ordered = sorted(((next(values), token_id) for token_id in ids), key=lambda pair: -pair[0])
                logprobs, top_ids = map(list, zip(*ordered, strict=True))
                records[row] = replace(records[row], top_ids=top_ids, top_logprobs=logprobs)
        return {index: [record] for index, record in zip(self.indices, records, strict=True)}


@dataclass(slots=True)
class PromptLogprobs:
    """Those of a step's prompt tokens, in parts: index of the batch, first token, how many most likely ones, the tensors."""

    parts: list[tuple[int, int, int, tuple[Tensor, Tensor, Tensor, Tensor]]] = field(default_factory=list)

    @staticmethod
    def indices(output: SchedulerOutput, batch: InputBatch) -> list[int]:
        """The sequences of a step, not packed yet, that compute a token before one whose log-probability is wanted."""
        if not batch.num_scored:
            return []
        return [
            i
            for i, request_id in enumerate(output.batch.request_ids)
            if (row := batch.rows[request_id]).sampling.prompt_logprobs is not None
            and batch.num_computed(row) + 1 < row.num_prompt_tokens
        ]

    @classmethod
    def of(
        cls, packed: PackedStep, indices: list[int], hidden: Tensor, to_logits: Callable[[Tensor], Tensor],
        vocab_size: int, to_device: Callable[[Tensor], Tensor],
    ) -> PromptLogprobs:  # fmt: skip
        """For the sequences at `indices`; hidden [T, hidden]: of all the step's tokens."""
        scores, members = cls(), packed.members
        num_rows = max(MAX_ELEMENTS // vocab_size, 1)
        for i in indices:
            row, end = members.rows[i], int(packed.context_lens[i])
            own = hidden[members.query_start[i] : members.query_start[i + 1]]
            first, num_top = end - len(own) + 1, row.sampling.prompt_logprobs
            assert num_top is not None
            following = row.token_ids[first : min(end + 1, row.num_prompt_tokens)]
            tokens = to_device(torch.from_numpy(following)).long()
            for start in range(0, len(tokens), num_rows):
                part = tokens[start : start + num_rows]
                logits = to_logits(own[start : start + len(part)])
                found = kernels.token_logprobs(logits, part, max(num_top, 1))  # the likeliest shows NaN and infinity
                scores.parts.append((i, first, num_top, _to_cpu(found)))
        return scores

    def read(self) -> dict[int, PromptScores]:
        """After the device is done: index → log-probabilities of the tokens that follow its own."""
        found: dict[int, PromptScores] = {}
        corrupted = {index for index, _, _, (*_, top) in self.parts if not top[:, 0].isfinite().all()}
        for index, first, num_top, tensors in self.parts:
            records = _records(tensors, [num_top] * len(tensors[0]))
            scores = found.setdefault(index, PromptScores(first, []))
            if index not in corrupted:
                scores.logprobs.extend(records)
        return found


def _to_cpu(tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nothing waits: they are there when the device is done."""
    return tuple(t.to("cpu", non_blocking=True) for t in tensors)  # type: ignore[return-value]


def _records(tensors: tuple[Tensor, Tensor, Tensor, Tensor], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs, ranks, top_ids, top_logprobs = (t.tolist() for t in tensors)
    return [
        TokenLogprobs(logprobs[i], ranks[i], top_ids[i][:top], top_logprobs[i][:top]) for i, top in enumerate(num_top)
    ]
