"""From a step's hidden states to its outputs, on the last stage of a pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.core.batch import SchedulerOutput
from engine.models.spec import ModelSpec
from engine.worker.executor import Computed, StepRequest, WholeLogits
from engine.worker.forward_pass import ForwardPass
from engine.worker.input_batch import InputBatch, PackedStep
from engine.worker.pooler import Pooler
from engine.worker.sampling.logprobs import PromptLogprobs
from engine.worker.sampling.sampler import Sampler
from engine.worker.step_handle import StepHandle
from engine.worker.step_sampling import StepSampling


class LastStage:
    """Completes what an executor has left of a step, up to its sampling: logits, prompt log-probabilities, embeddings.

    Executors that capture a step also capture its logits and its unfiltered sampling, if all requests only decode.
    """

    def __init__(
        self, forward: ForwardPass, batch: InputBatch, sampler: Sampler, sampling: StepSampling, spec: ModelSpec
    ) -> None:
        self._forward, self._batch, self._sampler, self._sampling = forward, batch, sampler, sampling
        self._model, self._vocab_size = forward.model, spec.vocab_size
        self._pooler = Pooler(batch, self._model.norm, spec.hidden_size, self._model.head)

    def request(self, output: SchedulerOutput) -> StepRequest:
        """Return the step with the requests whose outputs need all their tokens."""
        return StepRequest(output, PromptLogprobs.indices(output, self._batch), self._pooler.indices(output))

    def expand_samples(self, packed: PackedStep, has_reader: bool) -> None:
        """Give each sample of a step with drafts what its request's last one has."""
        is_plain = packed.members.greedy and not self._sampler.has_processed
        if has_reader or not is_plain:  # else nothing reads it
            self._batch.expand_samples(packed, self._forward.step, with_params=not is_plain)

    def complete(self, handle: StepHandle, step: StepRequest, packed: PackedStep, computed: Computed) -> None:
        """Begin to sample a step, whose hidden states, logits and tokens may have been computed."""
        logits, tokens, samples = computed.logits, computed.tokens, packed.members.samples
        if logits is None:
            hidden = computed.hidden
            assert hidden is not None
            self._use_every_token(handle, step, packed, hidden)
            if len(step.pooled) == len(samples):  # nothing to sample
                logits = WholeLogits(hidden[:0], self._sampler)
                tokens = hidden.new_full((len(samples),), -1, dtype=torch.int64)
            else:
                indices = None if len(hidden) == len(samples) else self._forward.sampled_tokens(packed)
                last = hidden if indices is None else hidden[indices]
                adapters = self._forward.sampled_adapters(step, packed)
                logits = WholeLogits(self._model.logits(last, adapters), self._sampler)
        if tokens is None:
            tokens = self._sampler.sample_unfiltered(logits.gathered(), packed.members.greedy, not samples.has_drafts)
            if samples.has_drafts and not samples.all_drafted:
                self._sampler.store_undrafted(tokens, samples)
        self._sampling.begin(handle, packed, logits, tokens, computed.is_graph)

    def _use_every_token(self, handle: StepHandle, step: StepRequest, packed: PackedStep, hidden: Tensor) -> None:
        """Compute what is wanted of the hidden states of all tokens [T, hidden]."""
        if step.scored:
            logits, upload = self._forward.logits_of(hidden, step.has_adapters), self._batch.device.upload
            handle.prompt_logprobs = PromptLogprobs.of(packed, step.scored, logits, self._vocab_size, upload)
        if step.pooled:
            handle.embeddings = self._pooler.pool(packed, step.pooled, hidden)
