"""Speed with drafts beside that without, by turns, in this process.

    python -m benchmarks.micro.drafts                        # the bundled model and a Llama of 100M parameters
    python -m benchmarks.micro.drafts --streams 1 8 64 --models qwen3-8b --kinds edit schema wrong

The policy is on: drafts that do not pay are not verified. The drafts are those of

    copy    lookup: prompts repeat a passage three times and begin it once more; those whose answers repeat most
    mixed   lookup: any such prompts, some of whose answers leave the passage
    edit    lookup: the answer is the prompt's passage, in which one token of twenty is another one
    schema  a grammar and lookup: a tool call, most of whose tokens are forced
    right   known answers; nine of ten of their tokens are right
    wrong   known answers, with no token right

Known shapes have random weights, whose text counts (`benchmarks.counting`), for edit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.counting import counting_dummies, counting_folder
from benchmarks.model_shapes import SHAPES, add_tokenizer
from benchmarks.workloads import MAX_TOKEN_ID, copying, editing
from engine import LLM, SamplingParams
from engine.core.drafts.policy import DraftPolicy
from engine.core.drafts.proposer import Guesses, Proposal, Proposer
from engine.core.engine_request import EngineRequest
from engine.core.params.structured import StructuredOutputs
from engine.worker.proposers.ngram import NgramLookup

# Of CPU time, with OMP_NUM_THREADS=1 and QUIRE_BENCH_CPU_TIME=1: for a busy machine.
CLOCK = time.process_time if os.environ.get("QUIRE_BENCH_CPU_TIME") else time.perf_counter
TRUTH = {"right": 0.9, "wrong": 0.0}  # of known answers
OF_WEIGHTS, OF_SHAPES = ("copy", "mixed", "right", "wrong"), ("edit", "schema", "right", "wrong")
CANDIDATES = 16  # passages at least, for `copy`
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "create_calendar_event"},
        "arguments": {
            "type": "object",
            "properties": {
                "title": {"type": "string", "maxLength": 8},
                "start_time": {"type": "string", "pattern": "^2027-0[1-9]-[0-2][1-9]T[01][0-9]:[0-5]0$"},
                "duration_minutes": {"type": "integer", "minimum": 10, "maximum": 90},
                "location": {"type": "string", "maxLength": 6},
                "visibility": {"enum": ["private", "public", "confidential"]},
                "send_notifications": {"type": "boolean"},
            },
        },
    },
}


def _closed(schema: Any) -> Any:
    """All properties of all objects, and no others."""
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    own = schema.get("properties")
    return closed | {"required": [*own], "additionalProperties": False} if isinstance(own, dict) else closed


class Work(NamedTuple):
    """Kind and size of a measurement."""

    kind: str
    num: int  # requests at once
    output_len: int  # tokens of an answer, at most

    def prompts(self, top: int) -> list[list[int]]:
        """Token ids up to `top`; of `copy`, more than are needed."""
        count = max(CANDIDATES, 4 * self.num) if self.kind == "copy" else self.num
        repeats = self.kind in ("copy", "mixed")
        requests = copying(count, 32, self.output_len, top) if repeats else editing(count, self.output_len, top)
        return [[*map(int, request.prompt)] for request in requests]

    @property
    def params(self) -> SamplingParams:
        guided = StructuredOutputs(json=_closed(CALL)) if self.kind == "schema" else None
        return SamplingParams(
            max_tokens=self.output_len, temperature=0, ignore_eos=guided is None, detokenize=False,
            structured_outputs=guided,
        )  # fmt: skip


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
        return Proposal([token if self._dice.random() < self._truth else token ^ 1 for token in right], basis=3)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.drafts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["configs/demo", "llama-100m"], help="folders, or known shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4], help="requests at once")
    parser.add_argument(
        "--kinds", nargs="+", choices=dict.fromkeys(OF_WEIGHTS + OF_SHAPES), metavar="KIND",
        help=f"of drafts (else {', '.join(OF_WEIGHTS)} of folders, {', '.join(OF_SHAPES)} of shapes)",
    )  # fmt: skip
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--output-len", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=12.0, help="for each measurement, at least three turns")
    args = parser.parse_args(argv)
    for model in args.models:
        is_shape = model in SHAPES
        start = time.perf_counter()
        with counting_dummies() if is_shape else contextlib.nullcontext():
            llm = LLM(
                model=str(_shape(model)) if is_shape else model, device=args.device, dtype=args.dtype,
                load_format="dummy" if is_shape else "auto", max_model_len=2048,
                max_num_seqs=max(64, *args.streams), enable_prefix_caching=False,
                speculative_config={"method": "ngram"}, gpu_memory_utilization=args.gpu_memory_utilization,
            )  # fmt: skip
        gc.collect()
        gc.freeze()
        print(f"{Path(model).name}: ready in {time.perf_counter() - start:.1f} s", flush=True)
        policy = llm._engine.scheduler._planner.drafts
        assert policy is not None
        lookup = policy._proposer
        for num in args.streams:
            for kind in args.kinds or (OF_SHAPES if is_shape else OF_WEIGHTS):
                print(_measured(llm, policy, lookup, Work(kind, num, args.output_len), args.seconds), flush=True)
        print(f"  milliseconds of steps: {policy.costs}", flush=True)
        llm.close()
    return 0


def _shape(name: str) -> Path:
    """The folder of a shape whose text counts. Its tokenizer gives what a grammar forces one form, a token a byte."""
    folder = counting_folder(name, Path("out/models"))
    add_tokenizer(folder)
    return folder


def _measured(llm: LLM, policy: DraftPolicy, lookup: Proposer, work: Work, seconds: float) -> str:
    """Return a line: the median of the turns' ratios, and what was accepted."""
    scheduler, (kind, num, _) = llm._engine.scheduler, work
    prompts = work.prompts(min(MAX_TOKEN_ID, llm._engine.spec.vocab_size - 1))
    _use(scheduler, None)
    _, answers = _timed(llm, prompts, work)
    if kind == "copy":
        repeated = [num_found(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        prompts = [prompts[i] for i in sorted(range(len(prompts)), key=repeated.__getitem__)[-num:]]
    known = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=kind != "copy")}
    policy._proposer = Known(known, TRUTH[kind]) if kind in TRUTH else lookup
    _use(scheduler, policy)
    _timed(llm, prompts, work)
    before = policy.counts.num_accepted_tokens, policy.counts.num_draft_tokens
    ratios, plain_seconds, end = list[float](), list[float](), time.perf_counter() + seconds
    num_equal = num_tokens = 0
    while len(ratios) < 3 or time.perf_counter() < end:
        _use(scheduler, None)
        plain, expected = _timed(llm, prompts, work)
        _use(scheduler, policy)
        drafted, got = _timed(llm, prompts, work)
        ratios.append(plain / drafted)
        plain_seconds.append(plain)
        num_equal += sum(a == b for a, b in zip(expected, got, strict=True))
        num_tokens += sum(map(len, got))
    accepted, tried = policy.counts.num_accepted_tokens - before[0], policy.counts.num_draft_tokens - before[1]
    rate = num_tokens / len(ratios) / statistics.median(plain_seconds)
    return (
        f"  {kind:<6} {num:>3} at once: {statistics.median(ratios):.2f} x {rate:,.0f} tokens/s ({len(ratios)} turns), "
        f"{accepted} of {tried} drafts accepted, {accepted / num_tokens:.0%} of the tokens, {num_equal} of "
        f"{num * len(ratios)} texts equal"
    )


def num_found(prompt: list[int], answer: list[int]) -> int:
    """Return how many tokens of an answer lookup finds, if each step verifies eight."""
    guesses, found, at = NgramLookup(3, 6), 0, 1
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


def _timed(llm: LLM, prompts: list[list[int]], work: Work) -> tuple[float, list[list[int]]]:
    start = CLOCK()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], work.params, use_tqdm=False)
    return CLOCK() - start, [list(each.outputs[0].token_ids) for each in outputs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
