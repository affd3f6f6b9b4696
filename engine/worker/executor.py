"""The common form of the ways to run a step: eagerly, as a CUDA graph, or replayed on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.core.batch import ScheduledBatch, SchedulerOutput
from engine.worker.input_batch import PackedStep
from engine.worker.sampling.sampler import Sampler


class StepRequest(NamedTuple):
    """A step to run, and what it must give besides tokens."""

    output: SchedulerOutput
    scored: Sequence[int] = ()  # indices of requests that get log-probabilities of their prompts
    pooled: Sequence[int] = ()  # indices of pooling requests
    counts_experts: bool = False
    has_adapters: bool = False  # some requests use LoRA adapters
    has_images: bool = False  # some requests compute tokens up to their last image

    @property
    def batch(self) -> ScheduledBatch:
        return self.output.batch

    @property
    def only_decodes(self) -> bool:
        return self.batch.num_decodes == len(self.batch)

    @property
    def samples_every_token(self) -> bool:
        """Return whether all requests decode, with or without drafts."""
        batch = self.batch
        return batch.total_num_tokens == len(batch) + sum(batch.num_drafts) and not batch.partial

    @property
    def needs_every_token(self) -> bool:
        """Return whether the hidden states of all tokens are needed, not only those of each request's last token."""
        return bool(self.scored or self.pooled or self.counts_experts)


class Padding(NamedTuple):
    """The size for which a step is packed, see `InputBatch.pack`; 0: none."""

    num_seqs: int = 0
    num_tokens: int = 0
    splits: bool = False  # each token is a sequence, drafts too


class Logits(Protocol):
    """The logits of a step's sequences [B, V], which several ranks may have in parts."""

    def gathered(self) -> Tensor:
        """Return the logits of all tokens, as the model computed them."""

    def sample_filtered(self, tokens: Tensor) -> Tensor:
        """Sample filtered and masked sequences into tokens [B]. Returns all logits, with masks applied."""


class WholeLogits(NamedTuple):
    """Logits that this rank has as a whole."""

    logits: Tensor  # [B, V]
    sampler: Sampler

    def gathered(self) -> Tensor:
        return self.logits

    def sample_filtered(self, tokens: Tensor) -> Tensor:
        self.sampler.sample_filtered(self.logits, tokens)
        return self.logits


class Computed(NamedTuple):
    """The part of a step that an executor has computed: hidden states, or logits, or logits and tokens.

    A stage before the last one always returns hidden states of all tokens, with padding. The last stage returns those
    of each sequence's last token, or of every token if the step needs them, without padding.
    """

    hidden: Tensor | None = None
    logits: Logits | None = None
    tokens: Tensor | None = None  # [B] int64, of unfiltered sampling
    is_graph: bool = False  # a CUDA graph of the whole step: the device may wait for the CPU's next launch


class Executor(Protocol):
    """A way to run some kinds of steps."""

    @property
    def max_words(self) -> int:
        """Maximum length of a packed step."""

    def fits(self, step: StepRequest) -> Padding | None:
        """Return the size for which the step is packed to be run; None: it does not run such steps."""

    def run(self, step: StepRequest, packed: PackedStep) -> Computed:
        """Queue a step that fits, as it is packed now."""
