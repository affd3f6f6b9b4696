"""Mixtures of experts. Ranks divide the experts, each of which is whole on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

import kernels
from engine.models.layers import CheckpointModule, CheckpointTensor, Matrix, Part, Residual, RMSNorm, Scope, empty
from engine.models.mlp import MLP
from engine.models.shard import Span
from engine.models.spec import MoESpec


class MoE(nn.Module):
    """The sum of a token's chosen experts, each times its weight, and of the shared expert where there is one."""

    def __init__(self, spec: MoESpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.spec, self.communicator, self.num_ranks = spec, scope.communicator, scope.shard.size
        experts = scope.shard.span("num_experts", spec.num_experts)
        gate_up, down = expert_parts(spec, hidden_size, experts, scope)
        self.first, bias = experts.start, spec.bias
        self.router = Router(spec, hidden_size, scope)
        self.gate_up = Matrix(
            scope, gate_up, Span.whole(hidden_size), bias_parts=gate_up if bias else (), num_stacked=len(experts)
        )
        self.down = Matrix(
            scope, down, Span.whole(spec.intermediate_size), bias_parts=down if bias else (), num_stacked=len(experts)
        )
        self.shared = MLP(spec.shared, hidden_size, scope / spec.names.shared) if spec.shared else None
        self.shared_gate = Gate(hidden_size, scope / spec.names.shared_gate) if spec.shared_gate else None

    def forward(self, x: Tensor, hidden: Tensor, residual: Residual, slots: Tensor) -> Tensor:
        """hidden [T, hidden] + the experts of x [T, hidden], in hidden's memory. slots [T] int64: padding where it is -1."""
        normed, ids, weights = self.router(x, residual, slots)
        inner = None if self.shared is None else self.shared.activate(x, residual)  # before the sum overwrites x
        in_place = self.num_ranks == 1 and residual.is_sum
        total = kernels.experts(
            normed, ids, weights, self.gate_up.weight, self.down.weight, self.gate_up.bias, self.down.bias,
            self.spec.activation, add_to=hidden if in_place else None, first=self.first,
        )  # fmt: skip
        if self.shared is not None and inner is not None:
            if self.shared_gate is not None:
                inner *= self.shared_gate(normed)
            total = kernels.linear_add(total, inner, self.shared.down.weight, self.shared.down.bias)
        if in_place:
            return total
        return residual.add_output(hidden, self.communicator.all_reduce(total) if self.num_ranks > 1 else total)


def expert_parts(spec: MoESpec, hidden_size: int, own: Span, scope: Scope) -> tuple[list[Part], list[Part]]:
    """The rows of all experts' gate and up (of each the gate's first) and down. Of others than the `own` there are none."""
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
        gate_up += [gate, up]
        down.append(out)
    return gate_up, down


class Router(CheckpointModule):
    """Which experts each token goes to, and their weights. It stays unquantised, and every rank has all of it."""

    def __init__(self, spec: MoESpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.rule = kernels.Router(**asdict(spec.router))
        count, device = spec.num_experts, scope.device
        # Families whose choice has a correction compute their scores from float32 weights.
        dtype = torch.float32 if spec.correction else scope.dtype
        self.weight = empty(count, hidden_size, dtype=dtype, device=device)
        self.bias = empty(count, dtype=dtype, device=device) if spec.router_bias else None
        self.correction = empty(count, dtype=torch.float32, device=device) if spec.correction else None
        self._name, self._correction_name = scope.name(spec.names.router), scope.name(spec.names.correction)

    def forward(self, x: Tensor, residual: Residual, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] → the normed x, the experts' ids [T, k] int32, -1 for padding, and their weights [T, k] float32."""
        norm = residual.before
        if isinstance(norm, RMSNorm):
            return kernels.norm_route(
                x, norm.weight, norm.eps, self.weight, self.bias, self.correction, self.rule, slots
            )
        x = x if norm is None else norm(x)
        return x, *kernels.route(x, self.weight, self.bias, self.correction, self.rule, slots)

    def tensors(self) -> Iterator[CheckpointTensor]:
        named = {f"{self._name}.weight": self.weight, f"{self._name}.bias": self.bias}
        for name, memory in (named | {self._correction_name: self.correction}).items():
            if memory is not None:
                yield CheckpointTensor(name, tuple(map(Span.whole, memory.shape)), memory)


class Gate(CheckpointModule):
    """sigmoid(x · w): [T, hidden] → [T, 1]."""

    def __init__(self, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self.weight, self._name = scope.empty(1, hidden_size), scope.name("weight")

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight).sigmoid_()

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, tuple(map(Span.whole, self.weight.shape)), self.weight)
