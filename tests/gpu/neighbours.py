"""Texts of processes that take turns on one GPU, the same in each round: a turn may interrupt any kernel."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.model_shapes import model_folder
from tests.gpu.checks import Checks

PROCESSES, ROUNDS, REQUESTS = 6, 8, 256


def check_neighbours(checks: Checks) -> None:
    """Each process computes 256 prompts of up to 180 tokens in three steps, of which two also decode, then answers."""
    for portable in ("0", "1"):
        name = f"texts beside {PROCESSES - 1} processes, portable {portable}"
        if checks.device == "cpu" or not checks.wants(name):
            continue
        with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(_differing, [portable] * PROCESSES))
        wrong, failed = map(sum, zip(*found, strict=True))
        checks.saw(name, not wrong, f"{wrong} of {PROCESSES * ROUNDS * REQUESTS} differ, {failed} of them saw NaN")


def _differing(portable: str) -> tuple[int, int]:
    """Return how many texts are not those of most rounds, and how many ended because logits were not finite."""
    os.environ["QUIRE_PORTABLE"] = portable
    from engine import LLM, SamplingParams

    draw = random.Random(7)
    prompts = [[draw.randrange(151000) for _ in range(draw.randint(1, 180))] for _ in range(REQUESTS)]
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(model_folder("qwen3-0.6b", Path(folder))), load_format="dummy", max_model_len=512,
            skip_tokenizer_init=True, num_gpu_blocks_override=4000, max_num_batched_tokens=8192,
        )  # fmt: skip
        rounds = []
        for _ in range(ROUNDS):
            llm.reset_prefix_cache()
            answers = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
            rounds.append([tuple(answer.outputs[0].token_ids) for answer in answers])
        llm.close()
    texts = list(zip(*rounds, strict=True))
    usual = [max(set(each), key=each.count) for each in texts]
    differ = sum(text != most for each, most in zip(texts, usual, strict=True) for text in each)
    return differ, sum(len(text) < 16 for each in texts for text in each)
