"""Drafts on the device: answers with and without them, and what they cost and gain."""

from __future__ import annotations

import importlib.util
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.model_shapes import model_folder
from engine import LLM, SamplingParams
from engine.core.drafts.acceptance import LOOKED_UP, PRIOR
from engine.core.drafts.policy import DraftPolicy
from engine.core.drafts.proposer import Guesses, Proposal
from engine.core.engine_request import EngineRequest
from engine.setup import options
from tests.gpu.checks import Checks
from tests.oracles.families import VOCAB, make_checkpoint
from tests.support.drafts import Answers

FAMILIES = ("qwen3", "mistral-window", "qwen3_moe", "glm4_moe_lite")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "filters": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "logprobs": 2},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.2},
}
SHAPE, STREAMS, NUM_TOKENS, ROUNDS = "qwen3-8b", (1, 8, 64), 200, 2
# How much of what is proposed is right; None: lookup in texts of dummy weights, some of which repeat themselves.
TRUTH = {"all wrong": 0.0, "lookup": None, "9 of 10 right": 0.9}
WARM_UPS = 2  # with drafts: they measure steps, and texts become known
LEAST_RATIO = 0.98  # of the speed without drafts


def policy_of(llm: LLM) -> DraftPolicy:
    policy = llm._engine.scheduler._planner.drafts
    assert policy is not None
    return policy


def use(llm: LLM, policy: DraftPolicy | None) -> None:
    """Let the engine have drafts by this policy, or none."""
    scheduler = llm._engine.scheduler
    scheduler._planner.drafts = scheduler._steps._drafts = policy


class Followed:
    """Proposes how a text goes on that began alike before, each token right with the probability `truth`.

    In bfloat16, steps of other sizes may decide between two nearly equal tokens otherwise, so a prompt has several
    texts, of plain steps and of steps with drafts.
    """

    def __init__(self) -> None:
        self.texts: dict[tuple[int, ...], list[list[int]]] = {}  # by prompt
        self.truth, self.rng = 1.0, random.Random(3)

    def add(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        for prompt, answer in zip(prompts, answers, strict=True):
            known = self.texts.setdefault(tuple(prompt), [])
            if answer not in known:
                known.append(answer)

    def start(self, request: EngineRequest) -> Guesses:
        prompt = tuple(request.prompt_token_ids)
        return _Following(self, len(prompt), self.texts.get(prompt, []))


class _Following:
    def __init__(self, texts: Followed, num_prompt: int, known: list[list[int]]) -> None:
        self._texts, self._num_prompt, self._known = texts, num_prompt, known

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        output, rng, truth = list(token_ids[self._num_prompt :]), self._texts.rng, self._texts.truth
        right = next((text for text in self._known if text[: len(output)] == output), [])
        follows = right[len(output) : len(output) + most]
        return Proposal([token if rng.random() < truth else token ^ 1 for token in follows], basis=3)


class Offered:
    """Counts what the policy is offered, and what it chooses of that, until `end`."""

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy, self._best = policy, policy._best
        self.num_asked = self.num_offers = self.num_tokens = self.num_chosen = 0
        policy._best = self._count  # type: ignore[method-assign]

    def _count(self, offers: list[Any], num_seqs: int, room: int) -> list[int]:
        numbers = self._best(offers, num_seqs, room)
        self.num_asked += 1
        self.num_offers += len(offers)
        self.num_tokens += sum(len(proposal.token_ids) for _, proposal, _ in offers)
        self.num_chosen += sum(numbers)
        return numbers

    def end(self) -> None:
        self._policy._best = self._best  # type: ignore[method-assign]

    def __str__(self) -> str:
        kinds = ", ".join(f"{self._policy._acceptance.of_kind(kind):.2f}" for kind in range(LOOKED_UP, len(PRIOR)))
        return (
            f"{self.num_asked} steps had offers, {self.num_offers} of {self.num_tokens} tokens, {self.num_chosen} "
            f"chosen; acceptance by kind {kinds}"
        )


def check_draft_texts(checks: Checks) -> None:
    """Float32: the same tokens with and without drafts, in graphs and kernel by kernel, several kinds of attention."""
    if importlib.util.find_spec("transformers") is None:
        print("left out: texts with drafts (transformers is not installed)")
        return
    rng = random.Random(5)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(2, 60))] for _ in range(12)]
    for name in FAMILIES:
        kinds = {eager: f"drafts of {name}, {'eager' if eager else 'graphs'}" for eager in (True, False)}
        wanted = [eager for eager, kind in kinds.items() if checks.wants(kind)]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(name, Path(folder))
            for eager in wanted:
                with mock.patch.object(options, "SPLIT_DRAFTS", True):
                    _check_texts(checks, kinds[eager], folder, prompts, eager)


def _check_texts(checks: Checks, name: str, folder: str, prompts: list[list[int]], eager: bool) -> None:
    config = {"num_speculative_tokens": 5, "enable_adaptive_verification": False}
    llm = LLM(
        model=folder, device=checks.device, dtype="float32", skip_tokenizer_init=True, max_model_len=256,
        max_num_seqs=12, max_num_batched_tokens=256, num_gpu_blocks_override=400, enforce_eager=eager,
        debug_checks=True, speculative_config=config,
    )  # fmt: skip
    policy, answers = policy_of(llm), Answers()
    policy._proposer = answers
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    for kind, fields in KINDS.items():
        params = SamplingParams(max_tokens=40, seed=6, ignore_eos=True, detokenize=False, **fields)
        use(llm, None)
        expected = [a.outputs[0].token_ids for a in llm.generate(given, params, use_tqdm=False)]
        answers.answers = {(tuple(p), 6): list(tokens) for p, tokens in zip(prompts, expected, strict=True)}
        use(llm, policy)
        for answers.truth in (0.0, 0.8):
            llm.reset_prefix_cache()
            before = policy.counts.num_accepted_tokens
            got = [a.outputs[0].token_ids for a in llm.generate(given, params, use_tqdm=False)]
            differing = sum(a != b for a, b in zip(expected, got, strict=True)) / len(prompts)
            checks.add(f"{name}, {kind}, {answers.truth:.0%} right: texts differ", differing, 0.0)
            accepted = policy.counts.num_accepted_tokens - before
            checks.saw(f"{name}, {kind}: accepted", (accepted > 100) == (answers.truth > 0), str(accepted))
    llm.close()


def check_draft_speed(checks: Checks) -> None:
    """A model's shape in bfloat16, dummy weights: tokens per second with drafts beside without, by turns. First with
    drafts in graphs, then, for fewer streams, as tokens of their request's sequence, which graphs of decode steps lack.
    """
    if checks.device == "cpu":
        print("left out: speed with drafts (there is no GPU)")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(SHAPE, Path(folder))
        for splits, name, streams in ((True, "drafts: speed", STREAMS), (False, "drafts, eager: speed", STREAMS[:2])):
            if any(checks.wants(_case(name, num, kind)) for num in streams for kind in TRUTH):
                _check_speed(checks, name, model, streams, splits)


def _case(name: str, num: int, kind: str) -> str:
    return f"{name} of {num} streams, {kind}"


def _check_speed(checks: Checks, name: str, model: Path, streams: Sequence[int], splits: bool) -> None:
    start = time.perf_counter()
    with mock.patch.object(options, "SPLIT_DRAFTS", splits):
        llm = LLM(
            model=str(model), device=checks.device, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024,
            max_num_seqs=256, enable_prefix_caching=False, speculative_config={"num_speculative_tokens": 8},
        )  # fmt: skip
    policy = policy_of(llm)
    measured = ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in llm._engine.runner.step_seconds.items())
    print(f"{name}: start {time.perf_counter() - start:.1f} s; measured at start: {measured} ms", flush=True)
    lookup, rng = policy._proposer, random.Random(7)
    for num in streams:
        prompts = [[rng.randrange(1, 30_000) for _ in range(64)] for _ in range(num)]
        use(llm, None)
        _timed(llm, prompts)
        followed = Followed()
        followed.add(prompts, _timed(llm, prompts)[1])
        for kind, truth in TRUTH.items():
            if checks.wants(case := _case(name, num, kind)):
                policy._proposer = lookup if truth is None else followed
                followed.truth = truth or 0.0
                ratio, what = _compared(llm, policy, prompts, followed)
                checks.saw(case, ratio >= LEAST_RATIO, what)
    llm.close()


def _compared(llm: LLM, policy: DraftPolicy, prompts: list[list[int]], followed: Followed) -> tuple[float, str]:
    """Return the speed with drafts in times that without, and what else was seen. Texts become known to `followed`."""
    use(llm, policy)
    for _ in range(WARM_UPS):
        followed.add(prompts, _timed(llm, prompts)[1])
    offered, ratios, num_equal = Offered(policy), list[float](), 0
    before = policy.counts.num_accepted_tokens, policy.counts.num_draft_tokens
    for _ in range(ROUNDS):
        use(llm, None)
        plain, expected = _timed(llm, prompts)
        use(llm, policy)
        drafted, got = _timed(llm, prompts)
        followed.add(prompts, got)
        ratios.append(plain / drafted)
        num_equal += sum(a == b for a, b in zip(expected, got, strict=True))
    offered.end()
    accepted, tried = policy.counts.num_accepted_tokens - before[0], policy.counts.num_draft_tokens - before[1]
    ratio, speed = sorted(ratios)[ROUNDS // 2], len(prompts) * NUM_TOKENS / plain
    return ratio, (
        f"{ratio:.2f} of {speed:,.0f} tokens/s, {accepted} of {tried} accepted, {num_equal} of "
        f"{ROUNDS * len(prompts)} texts equal; {offered}; {policy.costs} ms"
    )


def _timed(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Return the seconds that all answers take, and their tokens."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, seed=6, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start, [list(each.outputs[0].token_ids) for each in answers]
