"""Alternating updates (Gemma 3n): several residual streams. A layer computes one and predicts the others.

Shapes: T tokens of the step, N streams, H the hidden size. Between layers the streams of a token lie side by side:
[T, N · H].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.attention import AttentionMetadata
from engine.models.layers import Linear
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope
from engine.models.mixers import LayerCache, Mixer
from engine.models.norms import MakeNorm, Norm
from engine.models.per_layer import PerLayerInput
from engine.models.residual import InputNorm, OutputSum, ResidualEpilogue, ResidualStream, SublayerInput
from engine.models.shard import Span
from engine.models.spec import AltUpSpec

LEAST = 1e-5  # mean square by which a stream is divided


class SomeMLP(Protocol):
    """A layer's MLP."""

    def __call__(self, x: SublayerInput, epilogue: ResidualEpilogue) -> ResidualStream: ...


class Sublayers(Protocol):
    """The parts of a layer whose order alternating updates change."""

    attention_norm: InputNorm
    attention: Mixer
    attention_sum: OutputSum
    mlp_norm: InputNorm
    mlp: SomeMLP
    mlp_sum: OutputSum
    per_layer: PerLayerInput


class Streams(nn.Module):
    """Makes the streams of embeddings, and one hidden state of the streams after the last layer."""

    def __init__(self, spec: AltUpSpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        names = [f"altup_projections.{i}" for i in range(spec.num_streams - 1)]
        self.projections = Linear(scope, hidden_size, dict.fromkeys(names, hidden_size))
        self.back = nn.ModuleList(
            Linear(scope, hidden_size, {f"altup_unembed_projections.{i}": hidden_size})
            for i in range(spec.num_streams - 1)
        )

    def expand(self, hidden: Tensor) -> Tensor:
        """Embeddings [T, H] → streams [T, N · H]."""
        others = self.projections.run(hidden).unflatten(1, (-1, hidden.shape[1]))
        return torch.cat((hidden, _with_magnitude(others, hidden.unsqueeze(1)).flatten(1)), 1)

    def merge(self, streams: Tensor) -> Tensor:
        """Streams [T, N · H] → hidden states [T, H]."""
        first, *others = streams.chunk(len(self.back) + 1, 1)
        found = [first]
        for layer, stream in zip(self.back, others, strict=True):
            found.append(_with_magnitude(cast(Linear, layer).run(stream.contiguous()), first))
        return torch.stack(found).mean(0)


def _with_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Scale x [..., H] to the root mean square of `like` [..., H]."""
    wanted = like.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()


class AltUp(CheckpointModule):
    """Predicts the streams before a layer, and corrects them by what the layer makes of one."""

    def __init__(self, spec: AltUpSpec, hidden_size: int, make_norm: MakeNorm, scope: Scope) -> None:
        super().__init__()
        count, self.spec, self._scope = spec.num_streams, spec, scope / "altup"
        self.router_norm = make_norm(self._scope / "router_norm", hidden_size)
        self.router = scope.empty(count, hidden_size)
        self.prediction = scope.empty(count * count, count)
        self.correction = scope.empty(count, count)
        self.scale = scope.empty(hidden_size) if spec.scales_output else None
        laurel = scope / "laurel"
        self.left = Linear(laurel, hidden_size, {"linear_left": spec.laurel_rank})
        self.right = Linear(laurel, spec.laurel_rank, {"linear_right": hidden_size})
        self.laurel_norm: Norm = make_norm(laurel / "post_laurel_norm", hidden_size)

    def forward(
        self,
        layer: Sublayers,
        stream: ResidualStream,
        positions: Tensor,
        kv: LayerCache,
        metadata: AttentionMetadata,
    ) -> ResidualStream:
        """Compute a layer: the stream's `hidden` are streams [T, N · H], or become [len(logits_indices), N · H]."""
        active = self.spec.active
        predictions = self.predict(stream.hidden.unflatten(1, (self.spec.num_streams, -1)))
        own = ResidualStream(predictions[:, active].clone(), context=stream.context)  # to which attention adds
        x = layer.attention_norm(own)
        x = x.with_normed(x.value)
        learnt = x.value + self.laurel_norm(self.right.run(self.left.run(x)))
        inner = layer.attention(x, layer.attention_sum.into(own), positions, kv, metadata)
        inner = ResidualStream((inner.hidden + metadata.select(learnt)) * 2**-0.5, context=inner.context)
        inner = layer.mlp(layer.mlp_norm(inner), layer.mlp_sum.into(inner))
        corrected = self.correct(metadata.select(predictions), inner.hidden)
        first = corrected[:, active]
        first = first.contiguous() if self.scale is None else first * self.scale
        corrected[:, 1:] += self._of_layer(layer.per_layer, SublayerInput(first, context=inner.context)).unsqueeze(1)
        return ResidualStream(corrected.flatten(1), context=inner.context)

    def _of_layer(self, part: PerLayerInput, x: SublayerInput) -> Tensor:
        """Return the projection of the tokens' own vectors of this layer, gated by x [T, H]: [T, H]."""
        assert x.context.vector is not None
        gated = kernels.activation(part.gate.run(x), "gelu_tanh") * x.context.vector
        projected = part.projection.run(SublayerInput(gated, context=x.context))
        return projected if part.after.after is None else part.after.after(projected)  # type: ignore[no-any-return]

    def predict(self, streams: Tensor) -> Tensor:
        """Streams [T, N, H] → the same, each with a combination of all added."""
        count = self.spec.num_streams
        factors = F.linear(self._route(streams[:, self.spec.active]), self.prediction).unflatten(1, (count, count))
        return torch.bmm(factors, streams) + streams

    def correct(self, predictions: Tensor, computed: Tensor) -> Tensor:
        """Add to each of the predictions [T, N, H] its part of the error of the computed stream [T, H]."""
        factors = F.linear(self._route(computed), self.correction) + 1
        error = computed - predictions[:, self.spec.active]
        return factors.unsqueeze(2) * error.unsqueeze(1) + predictions

    def _route(self, x: Tensor) -> Tensor:
        """x [T, H] → weights of the streams [T, N], from -1 to 1."""
        normed = self.router_norm(x.contiguous()) * x.shape[1] ** -1.0
        return F.linear(normed, self.router).float().tanh().to(x.dtype)

    def tensors(self) -> Iterator[CheckpointTensor]:
        named = {
            "modality_router.weight": self.router,
            "prediction_coefs.weight": self.prediction,
            "correction_coefs.weight": self.correction,
            "correct_output_scale": self.scale,
        }
        for name, memory in named.items():
            if memory is not None:
                yield CheckpointTensor(self._scope.name(name), tuple(map(Span.whole, memory.shape)), memory)
