"""Engines with drafters in tests: their answers, and what was proposed on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams
from engine.core.drafts.policy import DraftPolicy
from engine.core.request import Request

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 160, "max_num_seqs": 4, "block_size": 8,
    "max_num_batched_tokens": 32, "debug_checks": True, "enforce_eager": True, "skip_tokenizer_init": True,
}  # fmt: skip
PROMPTS = [[5, 9, 77, 5, 9], [30, 31, 32], [200, 7, 7, 7], [4] * 20, list(range(40, 90)), [11]]


class Drafted:
    """An engine with a drafter that always proposes, and no lookup."""

    def __init__(
        self,
        model: Path,
        method: str,
        draft: Path | None = None,
        num: int = 3,
        given: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`given`: further settings of drafts. `settings`: of the engine."""
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": num, **(given or {})}
        config |= {"prompt_lookup_min": 16, "enable_adaptive_verification": False}
        if draft is not None:
            config["model"] = str(draft)
        self.num = num
        self.llm = LLM(str(model), **{**SETTINGS, **settings}, speculative_config=config)
        self._scheduler = self.llm._engine.scheduler
        policy = self._scheduler._planner.drafts
        assert policy is not None
        self.policy: DraftPolicy = policy
        self.proposed: list[tuple[list[int], list[int]]] = []  # known tokens, and what is to follow
        self._offer = policy.offer
        policy.offer = self._record  # type: ignore[method-assign]

    def _record(self, request: Request, token_ids: list[int]) -> None:
        self.proposed.append((list(request.token_ids), token_ids))
        self._offer(request, token_ids)

    def answers(
        self, params: SamplingParams, drafts: bool = True, prompts: Sequence[list[int]] = PROMPTS
    ) -> list[list[int]]:
        """Return the tokens of each answer. `drafts`: with the drafter."""
        self.use(drafts)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(each.token_ids) for output in outputs for each in output.outputs]

    def check(self, params: SamplingParams, propose: Callable[[list[int], int], list[int]], every: int) -> None:
        """Check that greedy texts are those without drafts, and of some drafts that they are those of a reference."""
        expected = self.answers(params, drafts=False)
        self.llm.reset_prefix_cache()
        assert self.answers(params) == expected
        compared = [(known, proposed) for known, proposed in self.proposed[::every] if proposed]
        assert len(compared) > 8
        for known, proposed in compared:
            assert proposed == propose(known, self.num)

    def use(self, drafts: bool) -> None:
        """Use the drafter from now on, or not."""
        policy = self.policy if drafts else None
        self._scheduler._planner.drafts = self._scheduler._steps._drafts = policy

    @property
    def counts(self) -> tuple[int, int]:
        """Drafts so far, and how many of these were accepted."""
        return self.policy.counts.num_draft_tokens, self.policy.counts.num_accepted_tokens
