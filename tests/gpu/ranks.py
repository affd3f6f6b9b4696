"""The bundled model on several GPUs: what two and four ranks answer, beside one."""

from __future__ import annotations

import faulthandler
import random
import time
from pathlib import Path

import torch

from engine import LLM, SamplingParams
from tests.gpu.checks import Checks

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
WORDS = [
    "once",
    "upon",
    "a",
    "time",
    "the",
    "little",
    "fox",
    "saw",
    "old",
    "king",
    "castle",
    "river",
    "what",
    "is",
    "quire",
    "write",
    "story",
    "about",
    "why",
    "how",
    "many",
]
NUM_PROMPTS, NUM_TOKENS = 100, 48
STUCK_SECONDS = 60  # after which the stacks of all threads are printed
BF16_DIFFERING = 0.5  # of greedy texts: sums of bfloat16 in another order decide near-ties otherwise


def _answers(num_ranks: int, dtype: str, prompts: list[str], params: list[SamplingParams]) -> list[list[int]]:
    begin = time.perf_counter()
    llm = LLM(
        str(DEMO), dtype=dtype, tensor_parallel_size=num_ranks, max_num_seqs=64, max_num_batched_tokens=256,
        kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip
    ready = time.perf_counter()
    faulthandler.dump_traceback_later(STUCK_SECONDS)
    answers = llm.generate(prompts, params, use_tqdm=False)
    faulthandler.cancel_dump_traceback_later()
    done = time.perf_counter()
    llm.close()
    closed = time.perf_counter() - done
    print(
        f"{num_ranks} ranks, {dtype}: start {ready - begin:.1f} s, texts {done - ready:.1f} s, end {closed:.1f} s",
        flush=True,
    )
    return [answer.outputs[0].token_ids for answer in answers]


def check_ranks(checks: Checks) -> None:
    """Greedy and sampled texts in float32 must not depend on the number of ranks; those in bfloat16 rarely."""
    count = torch.cuda.device_count() if checks.device != "cpu" else 2
    if count < 2:
        print("left out: several ranks (there is one GPU)")
        return
    chance = random.Random(0)
    prompts = [" ".join(chance.choices(WORDS, k=chance.randint(2, 40))).capitalize() for _ in range(NUM_PROMPTS)]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    params = [
        greedy if i % 2 else greedy.clone(temperature=0.8, top_p=0.9, seed=i, logprobs=2) for i in range(NUM_PROMPTS)
    ]
    for dtype, limit in (("float32", 0.0), ("bfloat16", BF16_DIFFERING)):
        if not any(checks.wants(f"{num_ranks} ranks, {dtype}: texts differ") for num_ranks in (2, 4)):
            continue
        expected = _answers(1, dtype, prompts, params)
        for num_ranks in (2, 4):
            if num_ranks <= count:
                found = _answers(num_ranks, dtype, prompts, params)
                differing = sum(a != b for a, b in zip(found, expected, strict=True)) / NUM_PROMPTS
                checks.add(f"{num_ranks} ranks, {dtype}: texts differ", differing, limit)
