"""Mixture of experts (MoE). Each rank holds some of the experts completely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

import kernels
from engine.models.layers import Linear
from engine.models.matrix import CheckpointModule, CheckpointTensor, Matrix, Part, Scope, empty
from engine.models.mlp import MLP
from engine.models.norms import MakeNorm, RMSNorm
from engine.models.residual import (
    InputNorm,
    OutputSum,
    ResidualEpilogue,
    ResidualStream,
    SublayerInput,
    TokenContext,
)
from engine.models.shard import Span
from engine.models.spec import MoESpec


class MoE(nn.Module):
    """An MoE: the weighted sum of each token's experts, plus the shared expert if there is one."""

    def __init__(self, spec: MoESpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.spec, self.communicator, self.num_ranks = spec, scope.communicator, scope.shard.size
        experts = scope.shard.span("num_experts", spec.num_experts)
        size = spec.latent or hidden_size
        gate_up, down = expert_parts(spec, size, experts, scope)
        self.first, bias = experts.start, spec.bias
        # Expert ids of each eighth, in deterministic mode.
        self.eighths: tuple[slice, ...] = ()
        if kernels.FORMS.sums_in_eighths:
            own = scope.shard.eighths(spec.num_experts)
            self.eighths = tuple(slice(self.first + part.start, self.first + part.stop) for part in own)
        self.router = Router(spec, hidden_size, scope)
        self.gate_up = Matrix(
            scope, gate_up, Span.whole(size), bias_parts=gate_up if bias else (), num_stacked=len(experts)
        )
        self.down = Matrix(
            scope, down, Span.whole(spec.intermediate_size), bias_parts=down if bias else (), num_stacked=len(experts)
        )
        self.latent_in = self.latent_out = None
        if spec.latent:
            into, out = spec.names.latent
            self.latent_in = Linear(scope, hidden_size, {into: size})
            self.latent_out = Linear(scope, size, {out: hidden_size})
        # Its partial sums are added to the experts' first, then those of all ranks.
        self.shared = (
            MLP(spec.shared, hidden_size, scope / spec.names.shared, reduce_results=False) if spec.shared else None
        )
        self.shared_gate = Gate(hidden_size, scope / spec.names.shared_gate) if spec.shared_gate else None
        self.adapters: kernels.ExpertLora | None = None  # of all slots; None: the experts have none

    def forward(self, x: SublayerInput, epilogue: ResidualEpilogue) -> ResidualStream:
        """Add the experts' output for x [T, hidden] to the residual stream [T, hidden] in place."""
        normed, ids, weights = self.router(x)
        # Computed before the sum overwrites x.
        inner = None if self.shared is None else self.shared.activate(x.with_normed(normed))
        in_place = self.num_ranks == 1 and epilogue.is_sum and self.latent_in is None
        gate_up, down = self.gate_up, self.down
        stack = kernels.Experts(gate_up.weight, down.weight, gate_up.bias, down.bias, self.spec.activation, self.first)
        read = normed if self.latent_in is None else self.latent_in.run(SublayerInput(normed, context=x.context))
        chosen = read, ids, weights, stack
        if self.spec.scales_input:
            chosen = read * weights.to(read.dtype), ids, torch.ones_like(weights), stack
        if self.eighths:
            inner = inner if inner is None or self.shared_gate is None else inner * self.shared_gate(normed)
            return epilogue.add(self._total(chosen, inner, x.context))
        if in_place and self.shared is None and (norm := epilogue.next_norm()) is not None:
            hidden = epilogue.hidden
            return epilogue.done(hidden, kernels.experts_add_norm(hidden, norm, *chosen))
        add_to = epilogue.hidden if in_place else None
        if self.adapters is not None and x.context.adapters is not None:
            total = kernels.adapted_experts(*chosen, self.adapters, x.context.adapters, add_to)
        else:
            total = kernels.experts(*chosen, add_to)
        if self.latent_out is not None:
            total = self.latent_out.run(SublayerInput(total, context=x.context))
        if self.shared is not None and inner is not None:
            if self.shared_gate is not None:
                inner *= self.shared_gate(normed)
            partial = ResidualEpilogue(ResidualStream(total, context=x.context))
            stream = self.shared.down.run(inner, epilogue if in_place else partial)
        else:
            stream = epilogue.done(total)
        return stream if in_place else epilogue.add_partial(self.communicator, stream.hidden)

    def _total(
        self,
        chosen: tuple[Tensor, Tensor, Tensor, kernels.Experts],
        inner: Tensor | None,
        context: TokenContext,
    ) -> Tensor:
        """Compute the output [T, hidden] of all ranks' experts, whose sums have one order. inner: the shared one's."""
        dtype, adapters = chosen[0].dtype, None if context.adapters is None else self.adapters
        own = kernels.split_experts(*chosen, self.eighths, adapters, context.adapters)
        if self.latent_out is not None:
            total = self.communicator.add_pieces(own, dtype)
            total = self.latent_out.run(SublayerInput(total, context=context))
        else:
            total = self.communicator.add_pieces(own, dtype if inner is None else torch.float32)
        if inner is None or self.shared is None:
            return total
        return (total + self.shared.down.total(inner, context)).to(dtype)

    def pack(self) -> None:
        """Repack the router, the gate, and both stacks, already packed one by one, for `kernels.experts`."""
        if not self.gate_up.is_here:
            return
        self.router.pack()
        if self.shared_gate is not None:
            self.shared_gate.pack()
        gate_up, down = self.gate_up, self.down
        if gate_up.bias is None and down.bias is None and self.spec.activation != "relu2":
            gate_up.format.pack_experts(gate_up, down)

    def next_norm(self, norm: RMSNorm, hidden: Tensor) -> kernels.NextNorm | None:
        """See `Linear.next_norm`. The router reads the norm, and does not quantise it."""
        return kernels.NextNorm(norm.weight, norm.eps) if kernels.route_norms_apart(hidden) else None


class DenseAndExperts(nn.Module):
    """A dense MLP and experts in parallel (Gemma 4). Both read the residual stream; each has its own norms."""

    def __init__(self, spec: MoESpec, hidden_size: int, make_norm: MakeNorm, scope: Scope) -> None:
        super().__init__()
        assert spec.shared is not None
        assert spec.parallel_norms is not None
        before, *after = (
            make_norm(scope / name, hidden_size)
            for name in (
                spec.parallel_norms.before_experts,
                spec.parallel_norms.after_shared,
                spec.parallel_norms.after_experts,
            )
        )
        self.shared = MLP(spec.shared, hidden_size, scope / spec.names.shared)
        self.experts = MoE(replace(spec, shared=None, parallel_norms=None), hidden_size, scope)
        self.before_experts, self.after_shared, self.after_experts = InputNorm(before), *map(OutputSum, after)

    def forward(self, x: SublayerInput, epilogue: ResidualEpilogue) -> ResidualStream:
        """Add both outputs to the residual stream. x has the dense MLP's norm; the epilogue normalises the sum."""
        total = ResidualStream(torch.zeros_like(x.hidden), context=x.context)
        total = self.shared(x, self.after_shared.into(total))
        x = self.before_experts(ResidualStream(x.hidden, context=x.context))
        return epilogue.add(self.experts(x, self.after_experts.into(total)).hidden)

    def next_norm(self, norm: RMSNorm, hidden: Tensor) -> None:
        """See `Linear.next_norm`. Each part has its own norm, which it computes itself."""


def expert_parts(spec: MoESpec, hidden_size: int, own: Span, scope: Scope) -> tuple[list[Part], list[Part]]:
    """Return the parts of gate-up (gate first) and down for all experts. Parts of experts outside `own` are empty."""
    inner, names = spec.intermediate_size, spec.names
    gate_up, down = [], []
    for index in range(spec.num_experts):
        if names.stacked is None:
            gate, up = (Part(name=scope.name(n.format(index)), rows=Span.whole(inner)) for n in (names.gate, names.up))
            out = Part(name=scope.name(names.down.format(index)), rows=Span.whole(hidden_size))
        else:
            first, second = (Span(2 * inner, 0, inner), Span(2 * inner, inner, 2 * inner))
            if names.interleaved:
                first, second = (Span(2 * inner, start, 2 * inner, 2) for start in (0, 1))
            out = Part(
                name=scope.name(names.stacked[1]),
                rows=Span.whole(hidden_size),
                expert=Span(spec.num_experts, index, index + 1),
                transposed=names.transposed,
                suffix=names.suffix,
            )
            gate, up = (replace(out, name=scope.name(names.stacked[0]), rows=rows) for rows in (first, second))
        if not own.start <= index < own.stop:
            gate, up, out = (replace(part, rows=part.rows.nothing()) for part in (gate, up, out))
        gate_up += [up] if spec.activation == "relu2" else [gate, up]
        down.append(out)
    return gate_up, down


class Router(CheckpointModule):
    """Chooses the experts of each token and their weights. Not quantised, and replicated on all ranks."""

    weight: Tensor  # [E, hidden]

    def __init__(self, spec: MoESpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.rule = kernels.Router(**asdict(spec.router))
        self.num_experts = count = spec.num_experts
        self.margin = spec.margin
        device = scope.device
        # Families with a correction bias compute scores with float32 weights.
        dtype = torch.float32 if spec.correction else scope.dtype
        self.weight = empty(count, hidden_size, dtype=dtype, device=device)
        self.bias = empty(count, dtype=dtype, device=device) if spec.router_bias else None
        self.correction = empty(count, dtype=torch.float32, device=device) if spec.correction else None
        eps = spec.router_norm_eps
        self.norm = RouterNorm(scope, spec.names.router_norm, hidden_size, eps) if eps else None
        self.expert_scale = empty(count, dtype=torch.float32, device=device) if spec.expert_scale else None
        self._scope, self._names = scope, spec.names
        # [1 + E] int64: counts of padding and of each expert's tokens; None: not counted.
        self.counts: Tensor | None = None

    def forward(self, x: SublayerInput) -> tuple[Tensor, Tensor, Tensor]:
        """Route x [T, hidden]: normalised x, expert ids [T, k] int32 (-1 for padding), and weights [T, k] float32."""
        norm, slots = self.norm or x.norm, x.context.slots
        args = kernels.RouterArgs(self.weight, self.rule, self.bias, self.correction)
        if isinstance(norm, RMSNorm) and not self.margin:
            normed, ids, weights = kernels.norm_route(x.hidden, norm.weight, norm.eps, args, slots)
        elif self.margin:
            normed = x.value
            ids, weights = near_best(kernels.linear(normed, self.weight), self.margin, slots)
        else:
            normed = x.value
            ids, weights = kernels.route(normed, args, slots)
        if self.norm is not None:
            normed = x.value
        if self.expert_scale is not None:
            # While kernels are only compiled, nothing writes the ids, and they may be out of range.
            weights = weights * self.expert_scale[ids.clamp(0, len(self.expert_scale) - 1)]
        if self.counts is not None:
            chosen = ids.flatten().long() + 1
            self.counts.index_add_(0, chosen, torch.ones_like(chosen))
        return normed, ids, weights

    def pack(self) -> None:
        if self.margin:
            return
        weight = kernels.pack_router(self.weight)
        del self.weight  # a parameter's name accepts only parameters
        self.weight = weight

    def tensors(self) -> Iterator[CheckpointTensor]:
        names = self._names
        named = {f"{names.router}.weight": self.weight, f"{names.router}.bias": self.bias}
        for name, memory in (
            named | {names.correction: self.correction, names.expert_scale: self.expert_scale}
        ).items():
            if memory is not None:
                yield CheckpointTensor(self._scope.name(name), tuple(map(Span.whole, memory.shape)), memory)


def near_best(logits: Tensor, margin: float, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose two experts by logits [T, E], see `MoESpec.margin`: ids [T, 2] int32, weights [T, 2] float32."""
    logits, ids, weights = logits.float(), [], []
    left = logits
    for _ in range(2):
        best, index = left.max(-1, keepdim=True)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        gates = left.masked_fill(distance > margin, -torch.inf).softmax(-1)
        ids.append(index)
        weights.append(gates.gather(1, index))
        left = left.scatter(1, index, -torch.inf)
    chosen = torch.cat(ids, 1).int()
    if slots is not None:
        chosen = chosen.masked_fill(slots[:, None] < 0, -1)
    return chosen, torch.cat(weights, 1)


class RouterNorm(RMSNorm):
    """RMSNorm divided by √hidden, times a stored weight."""

    def __init__(self, scope: Scope, name: str, hidden_size: int, eps: float) -> None:
        super().__init__(replace(scope, dtype=torch.float32), hidden_size, eps)
        self._name = scope.name(name)

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, (Span.whole(len(self.weight)),), self.weight, take=self._take)

    def _take(self, stored: Tensor) -> None:
        self.weight.copy_(stored.float() * len(stored) ** -0.5)


class Gate(CheckpointModule):
    """sigmoid(x · w): [T, hidden] → [T, 1]."""

    weight: Tensor  # [1, hidden]

    def __init__(self, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.weight, self._name = scope.empty(1, hidden_size), scope.name("weight")

    def forward(self, x: Tensor) -> Tensor:
        return kernels.sigmoid(kernels.linear(x, self.weight))

    def pack(self) -> None:
        weight = kernels.pack_weight(self.weight)
        assert isinstance(weight, Tensor)
        del self.weight  # a parameter's name accepts only parameters
        self.weight = weight

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, tuple(map(Span.whole, self.weight.shape)), self.weight)
