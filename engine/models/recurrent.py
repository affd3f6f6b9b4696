"""Recurrent layers: mixers that keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.models.attention import AttentionMetadata
from engine.models.errors import ModelError
from engine.models.layers import Linear, RowsLinear
from engine.models.matrix import CheckpointModule, CheckpointTensor, Part, Scope, empty
from engine.models.norms import RMSNorm
from engine.models.recurrent_spec import DeltaNetSpec, ShortConvSpec
from engine.models.residual import ResidualEpilogue, ResidualStream, SublayerInput
from engine.models.shard import Span


@dataclass(frozen=True, slots=True)
class StateMetadata(AttentionMetadata):
    """A step's tensors for recurrent layers.

    `slot_mapping` is that of an attention group: -1 marks padding, and no token whose state is not stored.
    """

    states: kernels.StateContext | None = None

    @property
    def context(self) -> kernels.StateContext:
        assert self.states is not None
        return self.states


class RecurrentMixer(CheckpointModule):
    """A layer that mixes tokens by a state of each request."""

    input: Linear | RowsLinear
    output: Linear

    def forward(
        self,
        x: SublayerInput,
        epilogue: ResidualEpilogue,
        positions: Tensor,
        state: Sequence[Tensor],
        metadata: AttentionMetadata,
    ) -> ResidualStream:
        """Add the layer's output for x [T, hidden] to the residual stream in place, and store the states in `state`.

        With `metadata.logits_indices`, the resulting stream has only these rows [N, hidden], otherwise [T, hidden].
        """
        assert isinstance(metadata, StateMetadata)
        return self.output.run(self.mix(x, state, metadata), epilogue.select(metadata.logits_indices))

    def mix(self, x: SublayerInput, state: Sequence[Tensor], metadata: StateMetadata) -> Tensor:
        """Return the inputs of `output` in the rows that `metadata` selects, [N, width], and store the states."""
        raise NotImplementedError

    def next_norm(self, norm: RMSNorm, hidden: Tensor) -> kernels.NextNorm | None:
        """See `Linear.next_norm`."""
        return self.input.next_norm(norm, hidden)


class ShortConv(RecurrentMixer):
    """Gated short convolution, see `ShortConvSpec`. Channels are divided among ranks."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.spec = spec.for_rank(scope.shard)
        channels, self._scope = spec.channels, scope
        parts = dict.fromkeys(("b", "c", "x"), channels)
        self.input = Linear(scope, hidden_size, parts, bias=spec.bias, shard="column", fused="in_proj")
        self.output = Linear(scope, channels, {"out_proj": hidden_size}, bias=spec.bias, shard="row")
        self._channels = scope.shard.span("hidden_size", channels)
        self.weight = scope.empty(self.spec.channels, spec.kernel_size)
        self.bias = scope.empty(self.spec.channels) if spec.bias else None

    def mix(self, x: SublayerInput, state: Sequence[Tensor], metadata: StateMetadata) -> Tensor:
        """See `RecurrentMixer.mix`."""
        [inputs] = state
        out = kernels.short_conv(self.input.run(x), self.weight, self.bias, inputs, metadata.context)
        return metadata.select(out)

    def tensors(self) -> Iterator[CheckpointTensor]:
        taps, one = Span.whole(self.spec.kernel_size), Span.whole(1)
        memory = self.weight.unsqueeze(1)
        yield CheckpointTensor(self._scope.name("conv.weight"), (self._channels, one, taps), memory)
        if self.bias is not None:
            yield CheckpointTensor(self._scope.name("conv.bias"), (self._channels,), self.bias)


class GatedDeltaNet(RecurrentMixer):
    """Gated delta net, see `DeltaNetSpec`. Key heads are divided among ranks, with their value heads."""

    def __init__(self, spec: DeltaNetSpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.spec = own = spec.for_rank(scope.shard)
        self._scope = scope
        keys = scope.shard.span("linear_num_key_heads", spec.num_key_heads)
        values = scope.shard.span("linear_num_value_heads", spec.num_value_heads)
        if spec.parts == "tiled" and scope.shard.size > 1 and spec.num_value_heads > spec.num_key_heads:
            raise ModelError(
                "its GGUF file has value heads in an order that is not divided among ranks; use pipeline_parallel_size"
            )
        projections, gates = _parts(spec, keys, values, scope)
        if spec.parts in ("gates", "fused"):
            projections, gates = _fused_parts(spec, keys, projections, scope)
        self.qkvz = RowsLinear(scope, hidden_size, projections)
        self.gates = RowsLinear(scope, hidden_size, gates)
        inner = spec.num_value_heads * spec.value_dim
        self.output = Linear(scope, inner, {"out_proj": hidden_size}, shard="row")
        self.norm = RMSNorm(scope / "norm", spec.value_dim, spec.norm_eps)
        self.conv = scope.empty(own.conv_channels, spec.kernel_size)
        self.rate = empty(own.num_value_heads, dtype=torch.float32, device=scope.device)
        self.bias = empty(own.num_value_heads, dtype=torch.float32, device=scope.device)
        self._conv_rows = [part.rows for part in _qkv_parts(spec, keys, values, "")]
        self._values = _heads(spec, values)

    def mix(self, x: SublayerInput, state: Sequence[Tensor], metadata: StateMetadata) -> Tensor:
        """See `RecurrentMixer.mix`."""
        inputs, *states = state
        normed = x.with_normed(x.value)
        qkvz, gates = self.qkvz.run(normed), self.gates.run(normed)
        qkv, z = qkvz.split((self.spec.conv_channels, qkvz.shape[1] - self.spec.conv_channels), 1)
        qkv = kernels.causal_conv(qkv, self.conv, None, inputs, metadata.context)
        args = self.rate, self.bias, kernels.DeltaStates(*states), metadata.context
        out = kernels.delta_rule(qkv, gates, *args)  # [T, Hv, Dv]
        out = kernels.gated_rms_norm(metadata.select(out), metadata.select(z), self.norm.weight, self.norm.eps)
        if self.spec.parts == "tiled":  # the weight has the heads in another order
            out = out.unflatten(1, (self.spec.num_key_heads, -1, self.spec.value_dim)).transpose(1, 2).flatten(1)
        return out

    def next_norm(self, norm: RMSNorm, hidden: Tensor) -> kernels.NextNorm | None:
        """See `Linear.next_norm`. Two projections read the norm, one of them as it is."""
        return kernels.NextNorm(norm.weight, norm.eps) if kernels.norms_apart(hidden, self.qkvz.weight, None) else None

    def tensors(self) -> Iterator[CheckpointTensor]:
        name, one, taps = self._scope.name, Span.whole(1), Span.whole(self.spec.kernel_size)
        start = 0
        for rows in self._conv_rows:
            memory = self.conv[start : start + len(rows)].unsqueeze(1)
            yield CheckpointTensor(name("conv1d.weight"), (rows, one, taps), memory)
            start += len(rows)
        start = 0
        for heads in self._values:
            rate, bias = (each[start : start + len(heads)] for each in (self.rate, self.bias))
            yield CheckpointTensor(name("A_log"), (heads,), rate, take=partial(_take_rate, rate))
            yield CheckpointTensor(name("dt_bias"), (heads,), bias)
            start += len(heads)


def _take_rate(into: Tensor, stored: Tensor) -> None:
    into.copy_(stored.float().exp())


def _heads(spec: DeltaNetSpec, values: Span) -> list[Span]:
    """Return where the checkpoint has this rank's value heads, in our order."""
    if spec.parts != "tiled":
        return [values]
    count, total = spec.num_value_heads // spec.num_key_heads, spec.num_value_heads
    positions = (head % count * spec.num_key_heads + head // count for head in range(values.start, values.stop))
    return [Span(total, position, position + 1) for position in positions]


def _qkv_parts(spec: DeltaNetSpec, keys: Span, values: Span, name: str) -> list[Part]:
    """Return this rank's rows of all queries, keys and values in one tensor. keys, values: this rank's heads."""
    of_keys, of_values = spec.num_key_heads * spec.key_dim, spec.num_value_heads * spec.value_dim
    rows = (
        (0, keys, spec.key_dim),
        (of_keys, keys, spec.key_dim),
        *((2 * of_keys, heads, spec.value_dim) for heads in _heads(spec, values)),
    )
    total = 2 * of_keys + of_values
    return [
        Part(name=name, rows=Span(total, first + heads.start * size, first + heads.stop * size))
        for first, heads, size in rows
    ]


def _parts(spec: DeltaNetSpec, keys: Span, values: Span, scope: Scope) -> tuple[list[Part], list[Part]]:
    """Return the parts of queries, keys, values and z, and of b and a: this rank's heads of separate tensors."""
    size, own = spec.value_dim, _heads(spec, values)
    z = (Span(spec.num_value_heads * size, heads.start * size, heads.stop * size) for heads in own)
    projections = [
        *_qkv_parts(spec, keys, values, scope.name("in_proj_qkv")),
        *(Part(name=scope.name("in_proj_z"), rows=rows) for rows in z),
    ]
    return projections, [Part(name=scope.name(name), rows=rows) for name in ("in_proj_b", "in_proj_a") for rows in own]


def _fused_parts(
    spec: DeltaNetSpec, keys: Span, projections: list[Part], scope: Scope
) -> tuple[list[Part], list[Part]]:
    """Return the same where a tensor has b and a of each key head and its value heads; perhaps one has q, k, v, z."""
    count = spec.num_value_heads // spec.num_key_heads

    def parts(name: str, sizes: Sequence[int]) -> list[Part]:
        of_head = sum(sizes)
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Part(
                name=scope.name(name),
                rows=Span(spec.num_key_heads * of_head, head * of_head + first, head * of_head + first + size),
            )
            for first, size in zip(firsts, sizes, strict=True)
            for head in range(keys.start, keys.stop)
        ]

    inner = count * spec.value_dim
    if spec.parts == "fused":
        projections = parts("in_proj_qkvz", (spec.key_dim, spec.key_dim, inner, inner))
    return projections, parts("in_proj_ba", (count, count))
