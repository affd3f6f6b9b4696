"""The residual stream: sublayers read it and add to it, fused with their GEMMs.

A sublayer reads the stream through a norm, which its first GEMM may compute in its prologue. Its last GEMM adds to the
stream in its epilogue, and may compute the next sublayer's norm of the sum there. The reader of a norm decides which of
the two GEMMs computes it: `InputNorm.fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

import kernels
from engine.models.norms import Norm, RMSNorm
from engine.models.shard import Communicator, WeightAndEps


class ImageSpan(NamedTuple):
    """Tokens of an image in a step, up to the image's last one. Each sees the later ones, too."""

    sequence: int  # of the step
    first: int  # index of the first token in the step
    start: int  # index of the first token in its sequence, and of the end
    stop: int
    only_windows: bool = False  # in layers with a sliding window only


class TokenContext(NamedTuple):
    """Facts about each of T tokens beside its hidden state. A field that no sublayer reads is None."""

    slots: Tensor | None = None  # [T] int64: -1 marks padding, which gets no experts
    vector: Tensor | None = None  # [T, P]: the token's embedding of this layer's own, see `per_layer`
    adapters: kernels.AdapterTokens | None = None  # which LoRA adapter each token uses; None: no token uses one
    query_scales: Tensor | None = None  # [T]: factors of queries, see `QueryScaling`
    image_spans: Sequence[ImageSpan] = ()  # of all tokens, for attention

    def select(self, rows: slice | Tensor) -> TokenContext:
        """Return the context of some of the tokens."""
        slots, vector, adapters, query_scales, _ = self
        return TokenContext(
            None if slots is None else slots[rows],
            None if vector is None else vector[rows],
            None if adapters is None else adapters[rows],
            None if query_scales is None else query_scales[rows],
        )


NO_CONTEXT = TokenContext()


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The residual stream between sublayers."""

    hidden: Tensor  # [T, hidden]
    normed: Tensor | kernels.QuantizedRows | None = None  # the next sublayer's norm of it, if computed already
    context: TokenContext = NO_CONTEXT


@dataclass(frozen=True, slots=True)
class SublayerInput:
    """The input of a sublayer: `normed` if that is computed already, else `norm` of `hidden`."""

    hidden: Tensor  # [T, hidden]
    norm: Norm | None = None  # still to be computed; a GEMM does so in its prologue where a kernel can
    normed: Tensor | kernels.QuantizedRows | None = None
    context: TokenContext = NO_CONTEXT

    def with_normed(self, normed: Tensor) -> SublayerInput:
        """Return the input with its norm [T, hidden], which has been computed."""
        return SublayerInput(self.hidden, normed=normed, context=self.context)

    @property
    def operand(self) -> Tensor | kernels.QuantizedRows:
        """The normalised hidden states [T, hidden], quantised if they have been computed so."""
        if self.normed is not None:
            return self.normed
        return self.hidden if self.norm is None else self.norm(self.hidden)  # type: ignore[no-any-return]

    @property
    def value(self) -> Tensor:
        """The normalised hidden states [T, hidden]."""
        operand = self.operand
        assert isinstance(operand, Tensor), "only a Linear gets quantised activations, see `Linear.next_norm`"
        return operand


class InputNorm(nn.Module):
    """The norm with which a sublayer reads the residual stream. None: it reads the stream as it is."""

    def __init__(self, norm: Norm | None) -> None:
        super().__init__()
        self.norm = norm
        self._next_norm: Callable[[RMSNorm, Tensor], kernels.NextNorm | None] = lambda norm, hidden: None

    def read_by(self, next_norm: Callable[[RMSNorm, Tensor], kernels.NextNorm | None]) -> None:
        """Set the sublayer's decision for a residual stream like hidden [T, hidden], see `Linear.next_norm`."""
        self._next_norm = next_norm

    def forward(self, stream: ResidualStream) -> SublayerInput:
        if stream.normed is not None:
            return SublayerInput(stream.hidden, normed=stream.normed, context=stream.context)
        return SublayerInput(stream.hidden, self.norm, context=stream.context)

    def fused(self, hidden: Tensor) -> kernels.NextNorm | None:
        """Return the norm if the kernel that adds to hidden [T, hidden] is to compute it. None: the sublayer does."""
        return self._next_norm(self.norm, hidden) if isinstance(self.norm, RMSNorm) else None


class OutputSum(nn.Module):
    """Adds a sublayer's output to the residual stream: stream += multiplier · after(output)."""

    def __init__(self, after: Norm | None = None, multiplier: float = 1.0) -> None:
        super().__init__()
        self.after, self.multiplier = after, multiplier
        self._following: tuple[InputNorm, ...] = ()  # in a tuple: it is no submodule

    def precede(self, following: InputNorm) -> None:
        """Set the norm with which the next sublayer reads the sum."""
        self._following = (following,)

    def into(self, stream: ResidualStream) -> ResidualEpilogue:
        """Return the epilogue that adds to `stream`."""
        return ResidualEpilogue(stream, self.after, self.multiplier, *self._following)


@dataclass(frozen=True, slots=True)
class GateEpilogue:
    """activation(gate) · up, of the two halves [T, n] of the GEMM's columns."""

    gate: kernels.Gate


@dataclass(frozen=True, slots=True)
class ResidualEpilogue:
    """stream += multiplier · after(the GEMM's result), in place, and the next sublayer's norm of the sum."""

    stream: ResidualStream
    after: Norm | None = None
    multiplier: float = 1.0
    following: InputNorm | None = None  # of the next sublayer

    @property
    def hidden(self) -> Tensor:
        """[T, hidden], to which is added in place."""
        return self.stream.hidden

    def select(self, indices: Tensor | None) -> ResidualEpilogue:
        """Return the epilogue that adds to these rows alone; None: to all."""
        if indices is None:
            return self
        return replace(self, stream=ResidualStream(self.hidden[indices], context=self.stream.context.select(indices)))

    @property
    def is_sum(self) -> bool:
        """True if the result is added unchanged."""
        return self.after is None and self.multiplier == 1

    def next_norm(self) -> kernels.NextNorm | None:
        """Return the next sublayer's norm, if it is to be computed with the sum; adapters read it themselves."""
        if self.following is None or self.stream.context.adapters is not None:
            return None
        return self.following.fused(self.hidden)

    def _unquantised_norm(self) -> WeightAndEps | None:
        """Return `next_norm` for kernels that cannot quantise it: None if it is to be quantised. With adapters, every
        sum is a kernel of its own, which may as well compute the norm.
        """
        if self.following is not None and self.stream.context.adapters is not None:
            own = self.following.norm
            return (own.weight, own.eps) if isinstance(own, RMSNorm) else None
        norm = self.next_norm()
        return None if norm is None or norm.rounded is not None else (norm.weight, norm.eps)

    def add(self, output: Tensor) -> ResidualStream:
        """Add a sublayer's finished output [T, hidden]: no GEMM is fused with the sum."""
        hidden, after, norm = self.hidden, self.after, self._unquantised_norm()
        if norm is not None:
            assert after is None or isinstance(after, RMSNorm), "a model has norms of one kind"
            weight, eps = (None, 0.0) if after is None else (after.weight, after.eps)
            return self.done(hidden, kernels.add_rms_norm(hidden, output, *norm, weight, eps, self.multiplier))
        if isinstance(after, RMSNorm):
            return self.done(kernels.rms_norm_add(hidden, output, after.weight, after.eps, self.multiplier))
        return self.done(kernels.add_scaled(hidden, output if after is None else after(output), self.multiplier))

    def add_partial(self, communicator: Communicator, partial: Tensor) -> ResidualStream:
        """Add the sum of all ranks' partial outputs [T, hidden]."""
        if not self.is_sum:
            return self.add(communicator.all_reduce(partial))
        return self.done(self.hidden, communicator.add_sum(self.hidden, partial, self._unquantised_norm()))

    def add_gemm(self, communicator: Communicator, gemm: Callable[[slice], Tensor]) -> ResidualStream:
        """Add the sum of all ranks' partial outputs: gemm(rows) computes this rank's for some of the T rows."""
        assert self.is_sum
        return self.done(self.hidden, communicator.add_gemm(self.hidden, gemm, self._unquantised_norm()))

    def done(self, hidden: Tensor, normed: Tensor | kernels.QuantizedRows | None = None) -> ResidualStream:
        """Return the stream after the sum, and its norm if that is computed already."""
        return ResidualStream(hidden, normed, self.stream.context)


Epilogue: TypeAlias = GateEpilogue | ResidualEpilogue
