"""Speed with drafts beside that without, by turns, in this process.

    python -m benchmarks.micro.drafts                        # the bundled model and a Llama of 100M parameters
    python -m benchmarks.micro.drafts --streams 1 8 64 --models qwen3-8b

Prompts repeat a passage three times and begin it once more, and guesses come from lookup: `copy` has the prompts whose
answers repeat most, `mixed` has any, some of whose answers leave the passage. Or guesses come from known answers, with
nine of ten tokens right (`right`) or none (`wrong`). The policy is on: drafts that do not pay are not verified.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import SHAPES, model_folder
from benchmarks.workloads import MAX_TOKEN_ID, copying
from engine import LLM, SamplingParams
from engine.core.drafts.policy import DraftPolicy
from engine.core.drafts.proposer import Guesses, Proposal, Proposer
from engine.core.engine_request import EngineRequest
from engine.worker.proposers.ngram import NgramGuesses

# Of CPU time, with OMP_NUM_THREADS=1 and QUIRE_BENCH_CPU_TIME=1: for a busy machine.
CLOCK = time.process_time if os.environ.get("QUIRE_BENCH_CPU_TIME") else time.perf_counter
TRUTH = {"copy": 0.0, "mixed": 0.0, "right": 0.9, "wrong": 0.0}  # of known answers
BY_LOOKUP = ("copy", "mixed")
CANDIDATES = 16  # passages at least, for `copy`


class Known:
    """Guesses known answers, each token right with a probability."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], truth: float) -> None:
        self._answers, self._truth, self._dice = answers, truth, random.Random(1)

    def start(self, request: EngineRequest) -> Guesses:
        prompt = tuple(request.prompt_token_ids)
        return _KnownAnswer(self._answers.get(prompt, []), len(prompt), self._truth, self._dice)


class _KnownAnswer:
    def __init__(self, answer: list[int], num_prompt: int, truth: float, dice: random.Random) -> None:
        self._answer, self._num_prompt, self._truth, self._dice = answer, num_prompt, truth, dice

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        first = len(token_ids) - self._num_prompt
        right = self._answer[first : first + most]
        return Proposal([token if self._dice.random() < self._truth else token ^ 1 for token in right])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.drafts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["configs/demo", "llama-100m"], help="folders, or known shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4], help="requests at once")
    parser.add_argument("--output-len", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=12.0, help="for each measurement, at least three turns")
    args = parser.parse_args(argv)
    for model in args.models:
        folder = str(model_folder(model, Path("out/models"))) if model in SHAPES else model
        start = time.perf_counter()
        llm = LLM(
            model=folder, device=args.device, dtype=args.dtype, load_format="dummy" if model in SHAPES else "auto",
            skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False,
            speculative_config={"method": "ngram"},
        )  # fmt: skip
        gc.collect()
        gc.freeze()
        print(f"{Path(model).name}: ready in {time.perf_counter() - start:.1f} s", flush=True)
        policy = llm._engine.scheduler._planner.drafts
        assert policy is not None
        lookup = policy._proposer
        for num in args.streams:
            for kind in TRUTH:
                print(_measured(llm, policy, lookup, (kind, num, args.output_len), args.seconds), flush=True)
        llm.close()
    return 0


def _measured(llm: LLM, policy: DraftPolicy, lookup: Proposer, work: tuple[str, int, int], seconds: float) -> str:
    """Return a line: the median of the turns' ratios, and what was accepted. `work`: kind, requests, tokens of each."""
    kind, num, output_len = work
    scheduler = llm._engine.scheduler
    top = min(MAX_TOKEN_ID, llm._engine.spec.vocab_size - 1)
    passages = copying(max(CANDIDATES, 4 * num) if kind == "copy" else num, 32, output_len, top)
    prompts = [list(request.prompt) for request in passages]
    _use(scheduler, None)
    _, answers = _timed(llm, prompts, output_len)
    if kind == "copy":
        repeated = [num_found(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        prompts = [prompts[i] for i in sorted(range(len(prompts)), key=repeated.__getitem__)[-num:]]
    known = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=kind != "copy")}
    policy._proposer = lookup if kind in BY_LOOKUP else Known(known, TRUTH[kind])
    _use(scheduler, policy)
    _timed(llm, prompts, output_len)
    before = policy.counts.num_accepted_tokens, policy.counts.num_draft_tokens
    ratios, plain_seconds, end = list[float](), list[float](), time.perf_counter() + seconds
    num_equal = 0
    while len(ratios) < 3 or time.perf_counter() < end:
        _use(scheduler, None)
        plain, expected = _timed(llm, prompts, output_len)
        _use(scheduler, policy)
        drafted, got = _timed(llm, prompts, output_len)
        ratios.append(plain / drafted)
        plain_seconds.append(plain)
        num_equal += sum(a == b for a, b in zip(expected, got, strict=True))
    accepted, tried = policy.counts.num_accepted_tokens - before[0], policy.counts.num_draft_tokens - before[1]
    rate = num * output_len / statistics.median(plain_seconds)
    return (
        f"  {kind:<6} {num:>3} at once: {statistics.median(ratios):.2f} x {rate:,.0f} tokens/s ({len(ratios)} turns), "
        f"{accepted} of {tried} drafts accepted, {num_equal} of {num * len(ratios)} texts equal"
    )


def num_found(prompt: list[int], answer: list[int]) -> int:
    """Return how many tokens of an answer lookup finds, if each step verifies eight."""
    guesses, found, at = NgramGuesses(3, 6), 0, 1
    while at < len(answer):
        guessed = guesses.propose(prompt + answer[:at], 8).token_ids
        came = answer[at : at + len(guessed)]
        right = 0
        while right < len(came) and guessed[right] == came[right]:
            right += 1
        found, at = found + right, at + right + 1
    return found


def _use(scheduler: Any, policy: DraftPolicy | None) -> None:
    scheduler._planner.drafts = scheduler._steps._drafts = policy


def _timed(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[float, list[list[int]]]:
    params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True, detokenize=False)
    start = CLOCK()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return CLOCK() - start, [list(each.outputs[0].token_ids) for each in outputs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
