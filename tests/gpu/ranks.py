"""Trained models on several GPUs: what two and four ranks answer, beside one."""

from __future__ import annotations

import faulthandler
import random
import time
from pathlib import Path

import torch

from engine import LLM, SamplingParams
from tests.gpu.checks import Checks
from tests.gpu.models import story_folder

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
TEXT = "once upon a time the little fox saw old king castle river what is quire write story about why how many"
NUM_GREEDY, NUM_SAMPLED, NUM_TOKENS = 200, 50, 48
KINDS = {
    "greedy": slice(0, NUM_GREEDY),
    "sampled": slice(NUM_GREEDY, NUM_GREEDY + NUM_SAMPLED),
    "random": slice(NUM_GREEDY + NUM_SAMPLED, None),
}
STUCK_SECONDS = 60  # after which the stacks of all threads are printed
BF16_DIFFERING = 0.75  # of texts: sums of bfloat16 in another order decide near-ties otherwise; some half do so


def _answers(folder: Path, num_ranks: int, dtype: str, device: str) -> list[list[int]]:
    """Greedy texts, then sampled ones, with filters and without, after the same prompts for any number of ranks."""
    chance = random.Random(0)
    count = NUM_GREEDY + 2 * NUM_SAMPLED
    prompts = [" ".join(chance.choices(TEXT.split(), k=chance.randint(2, 40))).capitalize() for _ in range(count)]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sampled = [greedy.clone(temperature=0.8, top_p=0.9, seed=i, logprobs=2) for i in range(NUM_SAMPLED)]
    random_ones = [greedy.clone(temperature=0.8, seed=i) for i in range(NUM_SAMPLED)]
    begin = time.perf_counter()
    llm = LLM(
        str(folder), device=device, dtype=dtype, tensor_parallel_size=num_ranks, max_num_seqs=64,
        max_num_batched_tokens=256, kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip
    ready = time.perf_counter()
    faulthandler.dump_traceback_later(STUCK_SECONDS)
    answers = llm.generate(prompts, [greedy] * NUM_GREEDY + sampled + random_ones, use_tqdm=False)
    done = time.perf_counter()
    llm.close()
    faulthandler.cancel_dump_traceback_later()
    closed = time.perf_counter() - done
    times = f"start {ready - begin:.1f} s, texts {done - ready:.1f} s, end {closed:.1f} s"
    print(f"{folder.name} model, {num_ranks} ranks, {dtype}: {times}", flush=True)
    return [answer.outputs[0].token_ids for answer in answers]


def check_ranks(checks: Checks) -> None:
    """Texts in float32 must not depend on the number of ranks; those in bfloat16 rarely."""
    most = 4 if checks.device == "cpu" else torch.cuda.device_count()
    if most < 2:
        print("left out: several ranks (there is one GPU)")
        return
    sizes = [size for size in (2, 4) if size <= most]
    for folder in filter(None, (DEMO, story_folder())):
        for dtype, limit in (("float32", 0.0), ("bfloat16", BF16_DIFFERING)):
            names = {size: f"{folder.name} model, {size} ranks, {dtype}" for size in sizes}
            if not any(checks.wants(f"{name}: {what} texts differ") for name in names.values() for what in KINDS):
                continue
            expected = _answers(folder, 1, dtype, checks.device)
            for size, name in names.items():
                found = _answers(folder, size, dtype, checks.device)
                for what, part in KINDS.items():
                    pairs = list(zip(found[part], expected[part], strict=True))
                    checks.add(f"{name}: {what} texts differ", sum(a != b for a, b in pairs) / len(pairs), limit)
