"""Output heads of drafters: cut to the tokens that texts have most often, and quantised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.models.checkpoints import StoredTensor
from engine.models.drafters.spec import DraftSpec
from engine.models.errors import ModelError
from engine.models.formats import weight_formats
from engine.models.layers import LMHead
from engine.models.matrix import FLOAT_DTYPES, CheckpointTensor, Scope
from engine.models.quantization import ONLINE, Quantization
from engine.models.shard import Span
from engine.models.spec import ModelSpec
from engine.models.weights import EMBEDDING, LM_HEAD


def of_head(scope: Scope, spec: DraftSpec) -> Scope:
    """Return the scope of a drafter's output head, whose weights are floats or as `spec` says."""
    method = spec.head_quantization
    quantization = Quantization(method=method, schemes=((("Linear",), ONLINE[method]),)) if method else None
    return replace(scope, weight_formats=weight_formats(quantization))


class CutHead(LMHead):
    """The rows of a target's output head, or of the embedding that it is tied to, for some tokens."""

    def __init__(self, scope: Scope, token_ids: Sequence[int], target: ModelSpec) -> None:
        """`scope`: of the head, see `of_head`."""
        super().__init__(scope, len(token_ids), target.hidden_size, normed=target.head_normed)
        self._whole = Span.whole(target.vocab_size)
        self.register_buffer("token_ids", torch.tensor(token_ids).to(scope.device), persistent=False)  # [count] int64
        own = scope.shard.padded_span(len(token_ids))[0]
        self._own = torch.tensor(token_ids[own.start : own.stop], dtype=torch.int64)

    token_ids: Tensor

    def tensors(self) -> Iterator[CheckpointTensor]:
        for tensor in super().tensors():
            spans, take = (self._whole, *tensor.spans[1:]), partial(_take, tensor, self._own)
            yield replace(tensor, spans=spans, take=take, aliases=(EMBEDDING,))


def _take(tensor: CheckpointTensor, own: Tensor, rows: Tensor) -> None:
    """Fill the memory of `tensor` from its `own` rows of the whole matrix."""
    chosen = rows[own.to(rows.device)]
    if tensor.take is None:
        tensor.memory.copy_(chosen)
    else:
        tensor.take(chosen)


def check_head(target: ModelSpec, stored: dict[str, StoredTensor], origin: str) -> None:
    """Raise `ModelError` if no rows can be taken of a target's output head. `stored`: its checkpoint; {}: random."""
    found = stored.get(LM_HEAD, stored.get(EMBEDDING))
    if stored and (found is None or found.dtype not in FLOAT_DTYPES):
        raise ModelError(f"{origin}: a cut or quantised draft head needs an output head of floats")
    if target.head_bias:
        raise ModelError(f"{origin}: the output head has a bias, which a cut or quantised draft head may not have")
