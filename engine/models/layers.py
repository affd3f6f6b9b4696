"""The building blocks of a decoder that compute with one rank's part of a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias, overload

from torch import Tensor
from torch.nn import functional as F

import kernels
from engine.models.errors import ModelError
from engine.models.matrix import CheckpointModule, CheckpointTensor, Matrix, Part, Scope
from engine.models.norms import RMSNorm
from engine.models.residual import (
    Epilogue,
    GateEpilogue,
    ResidualEpilogue,
    ResidualStream,
    SublayerInput,
    TokenContext,
)
from engine.models.shard import EIGHTHS, Span
from engine.models.spec import LearntPositions

Division: TypeAlias = Literal["column", "row", "vocab"] | None
Operand: TypeAlias = Tensor | kernels.QuantizedRows | SublayerInput


class Linear(Matrix):
    """A linear layer: x [T, in] → x Wᵀ + b [T, out]. Several projections of the same input are stacked into one.

    `shard` selects what is divided among ranks. "column": the rows of W (columns of Wᵀ) in whole units of `width`; if
    there are fewer units than ranks, several ranks hold the same unit. "row": the input channels; each rank computes a
    partial sum, and a `ResidualEpilogue` adds these. "vocab": the rows, possibly unevenly.
    """

    weight: kernels.Weight
    adapters: kernels.LoraWeights | None = None  # of all slots; None: this layer has none
    # With "row" in deterministic mode: the packed weight, instead of `weight`, which is its first piece.
    split: kernels.SplitWeight | None = None

    def __init__(
        self,
        scope: Scope,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        shard: Division = None,
        width: int = 1,
        fused: str = "",
        grouped: bool = False,
        reduce_results: bool = True,
    ) -> None:
        """parts: name of each stacked projection in the checkpoint → its total number of rows, over all ranks.

        fused: name of a checkpoint tensor that contains all of them, one after the other.
        grouped: it contains for each KV head its queries, its key and its value, of `width` rows each.
        reduce_results: add the partial sums of all ranks; else the caller does.
        """
        columns = scope.shard.span("in_features", in_features) if shard == "row" else Span.whole(in_features)
        own, num_rows = _own_rows(scope, parts, shard, width)
        if fused:
            own = (_grouped if grouped else _fused)(scope.name(fused), own, width)
        is_partial = shard == "row" and scope.shard.size > 1  # the result is the sum over ranks
        bias_parts = own if bias else []
        if is_partial and scope.shard.rank:  # only rank 0 adds the bias
            bias_parts = [replace(part, rows=part.rows.nothing()) for part in bias_parts]
        eighths = _eighths(scope, in_features, parts) if shard == "row" and kernels.FORMS.sums_in_eighths else ()
        super().__init__(scope, own, columns, num_rows=num_rows, bias_parts=bias_parts, eighths=eighths)
        self.shard, self.communicator, self.is_partial = scope.shard, scope.communicator, is_partial and reduce_results

    def pack(self) -> None:
        if not self.eighths:
            super().pack()
            return
        self.format.pack(self)
        self.split = kernels.split_weight(self.uncompressed, self.eighths, self.bias)
        self.set_weight(self.split.pieces[0])

    @overload
    def run(self, x: Operand) -> Tensor: ...
    @overload
    def run(self, x: Operand, epilogue: GateEpilogue) -> Tensor: ...
    @overload
    def run(self, x: Operand, epilogue: ResidualEpilogue) -> ResidualStream: ...
    def run(self, x: Operand, epilogue: Epilogue | None = None) -> Tensor | ResidualStream:
        """Compute x Wᵀ + b [T, out] and the epilogue, fused where there are kernels for it.

        x [T, in]: with "row", this rank's channels; a `SublayerInput` is normalised first if it is not yet. The result
        of a `ResidualEpilogue` is summed over ranks, others are this rank's own.
        """
        if isinstance(epilogue, ResidualEpilogue):
            return self._add(x, epilogue)
        if isinstance(x, SublayerInput):
            if self._adapts(x.context):
                return self._adapted(x, epilogue)
            if x.normed is None and isinstance(x.norm, RMSNorm):
                norm = x.norm.weight, x.norm.eps
                if epilogue is None:
                    return kernels.norm_linear(x.hidden, *norm, self.weight, self.bias)
                return kernels.norm_gated(x.hidden, *norm, self.weight, self.bias, epilogue.gate)
            x = x.operand
        if epilogue is None:
            return kernels.linear(x, self.weight, self.bias)
        return kernels.linear_gated(x, self.weight, self.bias, epilogue.gate)

    def _add(self, x: Operand, epilogue: ResidualEpilogue) -> ResidualStream:
        """Add x Wᵀ + b, of all ranks, to the residual stream in place."""
        context = epilogue.stream.context
        adapts = self._adapts(context)
        if self.split is not None:
            is_own = epilogue.is_sum and self.shard.size == 1 and not adapts
            if is_own and isinstance(x, Tensor) and kernels.adds_split_sums(x, self.split):
                return epilogue.done(kernels.split_linear_add(epilogue.hidden, x, self.split))
            return epilogue.add(self.total(x, context))
        if adapts and not isinstance(x, SublayerInput):
            assert isinstance(x, Tensor), "activations are not quantised in steps with adapters"
            assert self.adapters is not None
            assert context.adapters is not None
            is_own = epilogue.is_sum and not self.is_partial
            if is_own and kernels.fuses_adapters(x, self.weight, self.adapters):
                weights = self.weight, self.bias, self.adapters, context.adapters
                return epilogue.done(kernels.adapted_linear(x, *weights, residual=epilogue.hidden))
            x = SublayerInput(x, context=context)
        if not epilogue.is_sum or (adapts and not self.is_partial):
            output = self.run(x)
            return epilogue.add(self.communicator.all_reduce(output) if self.is_partial else output)
        if self.is_partial:
            value = x.value if isinstance(x, SublayerInput) else x
            assert isinstance(value, Tensor), "see `quantized_input`"
            inputs: Tensor = value
            return epilogue.add_gemm(
                self.communicator, lambda rows: self.run(SublayerInput(inputs[rows], context=context.select(rows)))
            )
        assert not isinstance(x, SublayerInput), "no model has such a layer"
        hidden, norm = epilogue.hidden, epilogue.next_norm()
        if norm is None:
            return epilogue.done(kernels.linear_add(hidden, x, self.weight, self.bias))
        return epilogue.done(hidden, kernels.linear_add_norm(hidden, x, self.weight, self.bias, norm))

    def total(self, x: Operand, context: TokenContext) -> Tensor:
        """Compute x Wᵀ + b [T, out] of all ranks, whose sums have one order."""
        value = x.value if isinstance(x, SublayerInput) else x
        assert isinstance(value, Tensor), "see `quantized_input`"
        assert self.split is not None
        total = self.communicator.add_pieces(kernels.split_linear(value, self.split), value.dtype)
        if self.adapters is None or context.adapters is None:
            return total
        return kernels.lora_add(total, value, self.adapters, context.adapters)

    def product(self, x: Tensor) -> Tensor:
        """Return x [T, in] Wᵀ [T, out] of this rank's channels, without the bias."""
        if self.split is None:
            return kernels.linear(x, self.weight)
        return kernels.split_linear(x, replace(self.split, bias=None)).to(x.dtype)

    def _adapts(self, context: TokenContext) -> bool:
        """Return True if adapters change this layer's result in this step."""
        return self.adapters is not None and context.adapters is not None

    def _adapted(self, x: SublayerInput, epilogue: GateEpilogue | None) -> Tensor:
        """Compute `run` with each token's adapter."""
        assert self.adapters is not None
        assert x.context.adapters is not None
        norm = (x.norm.weight, x.norm.eps) if x.normed is None and isinstance(x.norm, RMSNorm) else None
        value, gate = x.value if norm is None else x.hidden, None if epilogue is None else epilogue.gate
        weights = self.weight, self.bias, self.adapters, x.context.adapters
        return kernels.adapted_linear(value, *weights, norm=norm, gate=gate)

    def quantized_input(self, x: Tensor) -> kernels.QuantizedRows | None:
        """Return memory for x [T, in], quantised as this layer reads it. None: it reads x as it is."""
        return None if self.is_partial else kernels.quantized_input(x, self.weight, self.bias)

    def next_norm(self, norm: RMSNorm, hidden: Tensor, epilogue: GateEpilogue | None = None) -> kernels.NextNorm | None:
        """Return `norm` if the kernel that adds to hidden [T, in] is to compute it for `run` with this epilogue.

        It has memory for quantised activations if `run` reads these. None: it is faster if `run` computes the norm.
        """
        gate = None if epilogue is None else epilogue.gate
        quantized = kernels.quantized_input(hidden, self.weight, self.bias, gate)
        if quantized is None and not kernels.norms_apart(hidden, self.weight, gate):
            return None
        return kernels.NextNorm(norm.weight, norm.eps, quantized)


class RowsLinear(Linear):
    """A linear layer of any rows of matrices in the checkpoint, in the order of `parts`: those of this rank."""

    def __init__(self, scope: Scope, in_features: int, parts: Sequence[Part], *, bias: bool = False) -> None:
        Matrix.__init__(self, scope, parts, Span.whole(in_features), bias_parts=parts if bias else ())
        self.shard, self.communicator, self.is_partial = scope.shard, scope.communicator, False


def _own_rows(scope: Scope, parts: Mapping[str, int], shard: Division, width: int) -> tuple[list[Part], int]:
    """Return this rank's part of each projection, and the rows of a whole one's largest part with "vocab", else 0."""
    own, num_rows = [], 0
    for name, rows in parts.items():
        span = Span.whole(rows)
        if shard == "column":
            span = scope.shard.span(scope.name(name), rows // width, width=width, replicate=width > 1)
        elif shard == "vocab":
            span, num_rows = scope.shard.padded_span(rows)
        own.append(Part(name=scope.name(name), rows=span, transposed=scope.transposed))
    return own, num_rows


def _eighths(scope: Scope, in_features: int, parts: Mapping[str, int]) -> tuple[slice, ...]:
    """Return this rank's eighths of the input channels, see `Shard.eighths`."""
    if in_features < EIGHTHS:
        raise ModelError(f"{', '.join(parts)}: sums of {in_features} channels cannot be divided in eighths")
    return scope.shard.eighths(in_features)


def _fused(name: str, parts: Sequence[Part], width: int) -> list[Part]:
    """Return the parts as rows of one fused matrix."""
    total, first, fused = sum(part.rows.total for part in parts), 0, []
    for part in parts:
        fused.append(replace(part, name=name, rows=Span(total, first + part.rows.start, first + part.rows.stop)))
        first += part.rows.total
    return fused


def _grouped(name: str, parts: Sequence[Part], width: int) -> list[Part]:
    """Return queries, keys and values as rows of one matrix: for each KV head its queries, its key, its value."""
    queries, keys = parts[0].rows.total, parts[1].rows.total
    total, each = queries + 2 * keys, queries // keys  # queries of a KV head
    fused = []
    for kind, part in enumerate(parts):
        for head in range(part.rows.start // width, part.rows.stop // width):
            group, index = divmod(head, each) if kind == 0 else (head, each + kind - 1)
            row = (group * (each + 2) + index) * width
            fused.append(replace(part, name=name, rows=Span(total, row, row + width)))
    return fused


class LMHead(Linear):
    """The output head. Each rank computes n = `num_rows` logits from token id `first_id` on; `gather` combines them.

    The last ranks have fewer tokens, or none: their columns beyond the vocabulary are arbitrary, possibly NaN.
    """

    def __init__(
        self, scope: Scope, vocab_size: int, hidden_size: int, *, bias: bool = False, normed: bool = False
    ) -> None:
        """normed: divide its rows by their norms when they are loaded."""
        super().__init__(scope, hidden_size, {"lm_head": vocab_size}, bias=bias, shard="vocab")
        self._normed = normed
        self.retrained: kernels.RetrainedRows | None = None  # by the adapters of all slots; None: they retrain none
        self.vocab_size, self.first_id = vocab_size, scope.shard.padded_span(vocab_size)[0].start

    def own_logits(self, x: SublayerInput, out: Tensor | None = None) -> Tensor:
        """Return this rank's logits [N, n], in `out` if given: with the adapters of x's context."""
        if self.has_adapters and x.context.adapters is not None:
            adapted = self._adapted_logits(x.value, x.context.adapters)
            return adapted if out is None else out.copy_(adapted)
        if out is None:
            return self.run(x)
        if isinstance(x.norm, RMSNorm):
            return kernels.norm_linear(x.hidden, x.norm.weight, x.norm.eps, self.weight, self.bias, out)
        return out.copy_(self.run(x))

    @property
    def has_adapters(self) -> bool:
        """True if adapters may change the head."""
        return self.adapters is not None or self.retrained is not None

    def _adapted_logits(self, x: Tensor, tokens: kernels.AdapterTokens) -> Tensor:
        """Return the logits [N, n] of normalised x [N, hidden] with each token's adapter."""
        logits = kernels.linear(x, self.weight, self.bias)
        if self.retrained is not None:
            kernels.retrained_logits(logits, x, self.retrained, tokens)
        return logits if self.adapters is None else kernels.lora_add(logits, x, self.adapters, tokens)

    def tensors(self) -> Iterator[CheckpointTensor]:
        for tensor in super().tensors():
            yield replace(tensor, take=partial(_fill_normed, tensor.memory)) if self._normed else tensor

    def gather(self, own: Tensor, out: Tensor | None = None) -> Tensor:
        """Gather all logits [N, vocab] from each rank's own [N, n], in `out` if given."""
        if self.shard.size == 1:
            return own if out is None else out.copy_(own)
        return self.communicator.all_gather(own, own.new_empty(len(own), self.vocab_size) if out is None else out)

    def gather_keys(self, keys: Tensor) -> Tensor:
        """Return the keys [N, size · K] of all ranks from each one's [N, K], see `kernels.best_keys`."""
        return self.communicator.all_gather(keys, keys.new_empty(len(keys), self.shard.size * keys.shape[1]))


def _fill_normed(memory: Tensor, rows: Tensor) -> None:
    memory.copy_(F.normalize(rows.float()))


class Embedding(CheckpointModule):
    """The embedding: token ids [T] → rows [T, hidden] of weight [vocab, hidden]. Rows are divided among ranks."""

    def __init__(self, scope: Scope, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.shard, self.communicator, self.name = scope.shard, scope.communicator, scope.name("weight")
        self.adapters: kernels.EmbeddingLora | None = None  # of all slots; None: it has none
        self.rows, num_rows = scope.shard.padded_span(vocab_size)
        self.weight = scope.empty(num_rows, hidden_size)

    def forward(self, input_ids: Tensor, tokens: kernels.AdapterTokens | None = None) -> Tensor:
        """`tokens`: their adapters; None: no token has one."""
        own = kernels.embedding(self.weight, input_ids, self.rows.start)
        if self.adapters is not None and tokens is not None:
            own = kernels.adapt_embedding(own, input_ids, self.adapters, tokens)
        return own if self.shard.size == 1 else self.communicator.all_reduce(own)

    def tensors(self) -> Iterator[CheckpointTensor]:
        columns = Span.whole(self.weight.shape[1])
        yield CheckpointTensor(self.name, (self.rows, columns), self.weight[: len(self.rows)])


class PositionEmbedding(CheckpointModule):
    """Learnt vectors of positions, added to embeddings [T, hidden] in place. All ranks hold the whole table."""

    def __init__(self, spec: LearntPositions, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.weight, self._offset, self._name = scope.empty(spec.count, hidden_size), spec.offset, scope.name("weight")

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        # While kernels are only compiled, nothing writes the positions, and they may be out of range.
        return hidden.add_(self.weight[(positions + self._offset).clamp(0, len(self.weight) - 1)])

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, tuple(map(Span.whole, self.weight.shape)), self.weight)


class TokenTypes(CheckpointModule):
    """Learnt vectors of token types, added to embeddings. An id beyond the vocabulary tells a token's type."""

    def __init__(self, num_types: int, vocab_size: int, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.weight, self._vocab_size = scope.empty(num_types, hidden_size), vocab_size
        self._name = scope.name("weight")

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Add to hidden [T, hidden], in place, the vectors of the types of ids [T]."""
        return hidden.add_(self.weight[(ids // self._vocab_size).clamp(0, len(self.weight) - 1)])

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, tuple(map(Span.whole, self.weight.shape)), self.weight)
