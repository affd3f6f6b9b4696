"""Samples launched steps, and copies their tokens to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.worker.device import Event
from engine.worker.executor import Logits
from engine.worker.input_batch import InputBatch, Members, PackedStep
from engine.worker.options import RunnerOptions
from engine.worker.proposers.proposer import DeviceProposer, HiddenStates, SampledStep, count_kept
from engine.worker.sampling.logprobs import SampledLogprobs
from engine.worker.sampling.rejection import DraftProbabilities, reject
from engine.worker.sampling.sampler import Sampler, SamplingPlan
from engine.worker.sampling.verification import Verification
from engine.worker.step_handle import StepHandle
from kernels.data.layout import StepTensors


class StepSampling:
    """The part of a step after its forward pass, which waits for grammar masks if the step has guided requests.

    Owns the CPU's memory for sampled tokens.
    """

    def __init__(self, batch: InputBatch, step: StepTensors, sampler: Sampler, options: RunnerOptions) -> None:
        self._batch, self._step, self._sampler, self._device = batch, step, sampler, options.device
        self._host_tokens: list[Tensor] = []  # a ring, on an accelerator
        if self._device.is_accelerator:
            new_buffer = partial(self._device.pinned, batch.max_samples, dtype=torch.int64)
            self._host_tokens = [new_buffer() for _ in range(options.num_step_buffers)]
        self._num_launched, self._imposed = 0, options.imposed_acceptance
        self._proposer: tuple[DeviceProposer, HiddenStates | None] | None = None
        self._probabilities: DraftProbabilities | None = None  # of the drafter's proposals, with rejection sampling
        self._host_proposals: list[Tensor] = []  # as `_host_tokens`
        self._left_out: Members | None = None  # the latest requests whose step the drafter did not see
        self._last_guided: Event | None = None  # end of the last step, if it ran a graph and had guided requests

    def use(self, proposer: DeviceProposer, hidden: HiddenStates | None, max_proposals: int) -> None:
        """Show a drafter each step, so that it proposes if asked to. `hidden`: where steps leave hidden states."""
        self._proposer, self._probabilities = (proposer, hidden), proposer.probabilities
        self._sampler.keeps_processed = proposer.probabilities is not None
        if self._device.is_accelerator:
            new_buffer = partial(self._device.pinned, self._batch.num_rows * max_proposals, dtype=torch.int64)
            self._host_proposals = [new_buffer() for _ in self._host_tokens]

    def clear(self) -> None:
        """Forget the last step."""
        self._last_guided = None

    @property
    def device_waits(self) -> bool:
        """Return whether the last step had guided requests, ran a graph and has ended."""
        return self._last_guided is not None and self._last_guided.query()

    def begin(self, handle: StepHandle, packed: PackedStep, logits: Logits, tokens: Tensor, is_graph: bool) -> None:
        """Sample a step now, or with `handle.sample` if it has guided requests. tokens [B]: of unfiltered sampling.

        The plan is the same on all ranks, so all gather logits or none does.
        """
        plan = self._sampler.plan(packed)
        handle.num_sampled, handle.unsampled = plan.num_sampled, plan.unsampled
        masks = self._sampler.masks(plan) if plan.guided else None
        inputs = logits, tokens, masks
        if masks is None:
            self._finish(handle, packed, plan, inputs, is_graph)
        else:
            handle.guided, handle.masks = plan.guided, masks.numpy()
            handle.finish = partial(self._finish, handle, packed, plan, inputs, is_graph)

    @torch.inference_mode()
    def _finish(
        self,
        handle: StepHandle,
        packed: PackedStep,
        plan: SamplingPlan,
        inputs: tuple[Logits, Tensor, Tensor | None],
        is_graph: bool,
        deferred: Sequence[int] = (),
    ) -> None:
        """Sample the requests that need more than unfiltered sampling, and copy all tokens to the CPU."""
        logits, tokens, masks = inputs
        output = handle.output
        if output.drafts:
            members = packed.members
            handle.verification = Verification(
                members.samples, members.indices, output.drafts, packed.positions, self._imposed
            )
            if plan.groups:
                self._sampler.add_drafts(packed, output.drafts)
        found: Tensor | None = None
        if plan.filtered or plan.groups or plan.with_logprobs:
            found = logits.sample_filtered(tokens) if plan.filtered else logits.gathered()
            self._sampler.sample_groups(plan, masks, found, tokens)
        if self._probabilities is not None and output.drafts:
            reject(self._probabilities, packed, output.drafts, self._sampler, logits.gathered, tokens)
        if plan.with_logprobs:
            assert found is not None
            handle.logprobs = SampledLogprobs.of(packed.members, plan.with_logprobs, found, tokens, self._device.upload)
        self.defer(handle, packed, deferred)
        n = len(packed.members.samples)
        handle.tokens = tokens[:n]
        self._num_launched += 1
        if self._proposer is not None and output.drafter_rests:
            self._leave_out(packed.members)
        elif self._proposer is not None:
            proposed = self._propose(self._proposer, handle, packed, tokens[:n])
            handle.proposals = proposed if output.num_proposals else None
        if self._device.is_accelerator:
            handle.tokens = self._host_tokens[self._num_launched % len(self._host_tokens)][:n]
            handle.tokens.copy_(tokens[:n], non_blocking=True)
            handle.done = self._device.record_event()
        self._last_guided = handle.done if is_graph and plan.guided else None

    def _leave_out(self, members: Members) -> None:
        """Note that the drafter does not see a step of these requests."""
        if members is not self._left_out:  # most steps are of the same requests as the one before
            self._left_out = members
            for row in members.rows:
                row.is_unknown = True

    def _propose(
        self,
        proposer: tuple[DeviceProposer, HiddenStates | None],
        handle: StepHandle,
        packed: PackedStep,
        tokens: Tensor,
    ) -> Tensor:
        """Return the drafter's proposals after a sampled step, in the CPU's memory: [n, k] int64."""
        counts = count_kept(
            self._step, packed.members.samples, tokens, handle.unsampled, self._device.upload, self._imposed
        )
        drafter, hidden = proposer
        num_proposals, num_blocks = handle.output.num_proposals, self._batch.num_blocks(packed)
        found = drafter.propose(
            SampledStep(packed, self._step, hidden, tokens, counts, num_proposals, num_blocks, self._batch.rows)
        )
        if not self._device.is_accelerator:
            return found
        ring = self._host_proposals
        on_cpu = ring[self._num_launched % len(ring)][: found.numel()].view(found.shape)
        return on_cpu.copy_(found, non_blocking=True)

    def skip(self, handle: StepHandle, packed: PackedStep) -> None:
        """Complete the handle of a step whose tokens another stage, the last one, samples."""
        handle.tokens, handle.num_sampled = torch.empty(0, dtype=torch.int64), [1] * len(handle.output.batch)
        handle.finish = partial(self.defer, handle, packed)

    def defer(self, handle: StepHandle, packed: PackedStep, indices: Sequence[int]) -> None:
        """Drop these samples. The row of a request without any keeps the token before; with drafts, it is rewound."""
        if not indices:
            return
        samples = packed.members.samples
        handle.unsampled = sorted({*handle.unsampled, *indices}, reverse=True)
        requests = [samples.request_of(i) for i in indices]
        handle.num_sampled = handle.num_sampled.copy()  # the plan's
        for i in requests:
            handle.num_sampled[i] -= 1
        if whole := [i for i in requests if len(samples.of_request(i)) == 1]:
            self._batch.defer(packed, self._step, whole)
