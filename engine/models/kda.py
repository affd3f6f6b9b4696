"""Kimi delta attention: recurrent layers with a decay for each channel of keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import kernels
from engine.models.layers import Linear, RowsLinear
from engine.models.matrix import CheckpointTensor, Part, Scope, empty
from engine.models.norms import RMSNorm
from engine.models.recurrent import RecurrentMixer, StateMetadata
from engine.models.recurrent_spec import KdaSpec
from engine.models.residual import SublayerInput
from engine.models.shard import Span


class KimiDeltaAttention(RecurrentMixer):
    """Kimi delta attention, see `KdaSpec`. Heads are divided among ranks."""

    def __init__(self, spec: KdaSpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.spec = own = spec.for_rank(scope.shard)
        self._scope, size = scope, spec.head_dim
        self._heads = scope.shard.span("linear_num_heads", spec.num_heads)
        self._inner = scope.shard.span("linear_num_heads", spec.num_heads, width=size)
        rows = dict.fromkeys(("q_proj", "k_proj", "v_proj"), self._inner)
        rows |= {"f_a_proj": Span.whole(size), "g_a_proj": Span.whole(size), "b_proj": self._heads}
        parts = [Part(name=scope.name(name), rows=span) for name, span in rows.items()]
        self.input = RowsLinear(scope, hidden_size, parts)
        self.forget, self.gate = (
            Linear(scope, size, {name: spec.num_heads * size}, shard="column", width=size)
            for name in ("f_b_proj", "g_b_proj")
        )
        self.output = Linear(scope, spec.num_heads * size, {"o_proj": hidden_size}, shard="row")
        self.norm = RMSNorm(scope / "o_norm", size, spec.norm_eps)
        self.conv = scope.empty(own.conv_channels, spec.kernel_size)
        self.rate = empty(own.num_heads, dtype=torch.float32, device=scope.device)
        self.bias = empty(own.num_heads * size, dtype=torch.float32, device=scope.device)

    def mix(self, x: SublayerInput, state: Sequence[Tensor], metadata: StateMetadata) -> Tensor:
        """See `RecurrentMixer.mix`."""
        inputs, *states = state
        spec, context = self.spec, metadata.context
        widths = spec.conv_channels, spec.head_dim, spec.head_dim, spec.num_heads
        qkv, forget, gate, beta = self.input.run(x).split(widths, 1)
        qkv = kernels.causal_conv(qkv, self.conv, None, inputs, context)
        forget = self.forget.run(SublayerInput(forget.contiguous(), context=x.context))
        args = self.rate, self.bias, kernels.DeltaStates(*states), context
        out = metadata.select(kernels.kda(qkv, beta, forget, *args))  # [N, H, D]
        chosen = x.context if metadata.logits_indices is None else x.context.select(metadata.logits_indices)
        gate = self.gate.run(SublayerInput(metadata.select(gate).contiguous(), context=chosen))
        return kernels.gated(self.norm(out).flatten(1), gate, "sigmoid")

    def tensors(self) -> Iterator[CheckpointTensor]:
        name, one, taps = self._scope.name, Span.whole(1), Span.whole(self.spec.kernel_size)
        for i, part in enumerate(("q", "k", "v")):
            memory = self.conv.unflatten(0, (3, -1))[i].unsqueeze(1)
            yield CheckpointTensor(name(f"{part}_conv1d.weight"), (self._inner, one, taps), memory)
        rate = self.rate.view(1, 1, -1, 1)
        yield CheckpointTensor(name("A_log"), (one, one, self._heads, one), rate, take=self._take_rate)
        yield CheckpointTensor(name("dt_bias"), (self._inner,), self.bias)

    def _take_rate(self, stored: Tensor) -> None:
        self.rate.copy_(stored.float().exp().flatten())
