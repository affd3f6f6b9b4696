"""The work of a plain decode step, from packed tokens to sampled ones, as CUDA graphs capture it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.worker.forward_pass import ForwardPass, StepSize
from engine.worker.options import RunnerOptions
from engine.worker.sampling.sampler import Sampler


class DecodeStep:
    """Decodes `size` sequences, and samples them without filters; then, if need be, with filters.

    Owns the logits of all graphs: those of one step are read before the next one runs.
    """

    def __init__(self, forward: ForwardPass, sampler: Sampler, options: RunnerOptions, max_size: int) -> None:
        self._forward, self._sampler, self._model = forward, sampler, forward.model
        self.is_last = self._model.stage.is_last
        if options.device.is_accelerator and self.is_last:
            device, head = options.device.torch_device, self._model.lm_head
            new_logits = partial(torch.empty, max_size, dtype=options.dtype, device=device)
            self._logits = new_logits(self._model.spec.vocab_size)  # [size, V]
            self._own_logits = (
                self._logits if head.shard.size == 1 else new_logits(head.num_rows)
            )  # of this rank's tokens

    @torch.inference_mode()
    def run(
        self, packed: Tensor, size: int, has_adapters: bool = False, has_common_prefix: bool = False
    ) -> tuple[Tensor, ...]:
        """Return this rank's logits [size, n] and the tokens [size] of unfiltered sampling. A stage before the last one
        returns hidden states [size, hidden] alone. `has_adapters`, `has_common_prefix`: see `StepSize`.
        """
        hidden = self._hidden(packed, size, has_adapters, has_common_prefix=has_common_prefix)
        if not self.is_last:
            return (hidden,)
        head = self._model.lm_head
        own_logits = self._logits_of(hidden, self._own_logits[:size], has_adapters)
        if head.shard.size == 1:
            return own_logits, self._sampler.sample_unfiltered(own_logits)
        return own_logits, self._sampler.sample_own(own_logits, head.first_id, head.gather_keys)

    @torch.inference_mode()
    def logits(
        self, packed: Tensor, size: int, num_tokens: int = 0, out: Tensor | None = None, has_adapters: bool = False
    ) -> Tensor:
        """Return this rank's logits [size, n], in `out` if given. A single rank's are all.

        `num_tokens`: with drafts, the number of tokens of the `size` sequences. The logits are of all of them.
        """
        return self._logits_of(self._hidden(packed, size, has_adapters, num_tokens), out, has_adapters)

    def _logits_of(self, hidden: Tensor, out: Tensor | None, has_adapters: bool) -> Tensor:
        return self._model.own_logits(hidden, out, self._forward.head_adapters(has_adapters, slice(len(hidden))))

    @torch.inference_mode()
    def sample_filtered(self, own_logits: Tensor, tokens: Tensor) -> None:
        """Sample filtered sequences after `run`, given its results. Leaves masked logits in `all_logits`."""
        self._sampler.sample_filtered(self.gathered(own_logits), tokens)

    def gathered(self, own_logits: Tensor) -> Tensor:
        """Return all logits [size, V] of what `run` has left of them on each rank."""
        head = self._model.lm_head
        return own_logits if head.shard.size == 1 else head.gather(own_logits, self.all_logits(len(own_logits)))

    def all_logits(self, size: int) -> Tensor:
        """Return the memory of all ranks' logits: [size, V]."""
        return self._logits[:size]

    def _hidden(
        self, packed: Tensor, size: int, has_adapters: bool, num_tokens: int = 0, has_common_prefix: bool = False
    ) -> Tensor:
        num_decodes = 0 if num_tokens > size else size
        step_size = StepSize(size, max(num_tokens, size), num_decodes, False, has_adapters, has_common_prefix)
        return self._forward.run(packed, step_size)
