"""The prefix cache's tier in host memory on the device: answers with and without it, and what it gains."""

from __future__ import annotations

import importlib.util
import random
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from benchmarks.model_shapes import model_folder
from engine import LLM, SamplingParams
from engine.core import tiers
from tests.gpu.checks import Checks
from tests.oracles.families import VOCAB, make_checkpoint

FAMILIES = ("qwen3", "mistral-window", "glm4_moe_lite", "lfm2")
SHAPE, CONVERSATIONS, CONTEXT, PART = "qwen3-8b", 32, 4000, 4  # the cache holds one part of all contexts
NEVER = 1 << 30  # tokens: so many are never loaded
LEAST_GAIN, MOST_DELAY = 2.0, 1.1


def check_host_texts(checks: Checks) -> None:
    """Float32: the same tokens with a small cache and the tier as with a large one and none."""
    if importlib.util.find_spec("transformers") is None:
        print("left out: texts with a host tier (transformers is not installed)")
        return
    rng = random.Random(5)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(60, 100))] for _ in range(12)]
    for name in FAMILIES:
        if checks.wants(f"host tier: {name}"):
            with tempfile.TemporaryDirectory() as folder, patch.object(tiers, "MIN_LOADED_TOKENS", 1):
                make_checkpoint(name, Path(folder))
                _check_texts(checks, name, folder, prompts)


def _check_texts(checks: Checks, name: str, folder: str, prompts: list[list[int]]) -> None:
    settings = {
        "device": checks.device, "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256,
        "max_num_seqs": 4, "max_num_batched_tokens": 128, "debug_checks": True, "num_gpu_blocks_override": 400,
    }  # fmt: skip
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    found: list[list[list[int]]] = []
    for more in ({}, {"kv_offloading_size": 0.1, "num_gpu_blocks_override": 40, "num_states_override": 24}):
        llm, texts, asked = LLM(model=folder, **settings | more), [], prompts
        for _ in range(3):
            given = [{"prompt_token_ids": prompt} for prompt in asked]
            answers = [list(a.outputs[0].token_ids) for a in llm.generate(given, params, use_tqdm=False)]
            texts += answers
            asked = [[*prompt, *answer, 7] for prompt, answer in zip(asked, answers, strict=True)]
        found.append(texts)
        stats = llm._engine.stats()
        llm.close()
    differing = sum(a != b for a, b in zip(*found, strict=True)) / len(found[0])
    checks.add(f"host tier: {name}: texts differ", differing, 0.0)
    checks.saw(f"host tier: {name}: tokens from the host", stats.external_hits > 500, str(stats.external_hits))


def check_file_texts(checks: Checks) -> None:
    """Float32: the same tokens with a small cache above a file as with a large one and none; and after a restart."""
    if importlib.util.find_spec("transformers") is None or not checks.wants("file tier: texts"):
        print("left out: texts with a file")
        return
    rng = random.Random(5)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(60, 100))] for _ in range(12)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder, patch.object(tiers, "MIN_LOADED_TOKENS", 1):
        make_checkpoint("qwen3", Path(folder))
        found: list[list[list[int]]] = []
        hits: list[int] = []
        file = {"prefix_cache_file": str(Path(folder, "cache")), "num_gpu_blocks_override": 64}
        for more in ({}, file, file | {"kv_offloading_size": 0.002}):
            llm = LLM(
                model=folder, device=checks.device, dtype="float32", skip_tokenizer_init=True, max_model_len=256,
                max_num_seqs=4, debug_checks=True, **{"num_gpu_blocks_override": 400} | more,
            )  # fmt: skip
            for _ in range(3):
                found.append([list(a.outputs[0].token_ids) for a in llm.generate(given, params, use_tqdm=False)])
            hits.append(llm._engine.stats().external_hits)
            llm.close()
    differing = sum(a != b for texts in found for a, b in zip(texts, found[0], strict=True)) / len(prompts)
    checks.add("file tier: texts differ", differing, 0.0)
    checks.saw("file tier: tokens from the file", min(hits[1:]) > 100, str(hits[1:]))


def check_host_speed(checks: Checks) -> None:
    """A model's shape in bfloat16, dummy weights: conversations that the cache holds in part go on."""
    if checks.device == "cpu" or not checks.wants("host tier: speed"):
        print("left out: speed with a host tier")
        return
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=str(model_folder(SHAPE, Path(folder))), device=checks.device, load_format="dummy",
            skip_tokenizer_init=True, max_model_len=CONTEXT + 1000, max_num_seqs=CONVERSATIONS,
            num_gpu_blocks_override=CONVERSATIONS * CONTEXT // 16 // PART, kv_offloading_size=28,
        )  # fmt: skip
        rng = random.Random(7)
        prompts = [[rng.randrange(1, 30_000) for _ in range(CONTEXT)] for _ in range(CONVERSATIONS)]
        first = _turn(llm, prompts, NEVER)[0]
        seconds: dict[int, list[float]] = {NEVER: [], tiers.MIN_LOADED_TOKENS: []}
        steps: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(2):
            for least, times in seconds.items():
                took, of_steps = _turn(llm, prompts, least)
                times.append(took)
                if least != NEVER:
                    for loading, each in of_steps.items():
                        steps[loading] += each
        computed, loaded = (statistics.median(times) for times in seconds.values())
        stats = llm._engine.stats()
        what = (
            f"{computed:.2f} s computed, {loaded:.2f} s loaded, the first turn {first:.2f} s; "
            f"{stats.external_hits:,} tokens loaded; {stats.num_used_host_blocks:,} of {stats.num_host_blocks:,} slots"
        )
        checks.saw(f"host tier: speed of {CONVERSATIONS} turns", computed / loaded >= LEAST_GAIN, what)
        if steps[True] and steps[False]:
            alone, beside = (statistics.median(steps[loading]) * 1e3 for loading in (False, True))
            what = f"{alone:.2f} ms alone, {beside:.2f} ms beside loads ({len(steps[True])} steps)"
            checks.saw("host tier: speed of steps that decode", beside <= MOST_DELAY * alone, what)
        llm.close()


def _turn(llm: LLM, prompts: list[list[int]], least: int) -> tuple[float, dict[bool, list[float]]]:
    """One turn of each conversation, whose prompts grow by its answer. `least`: tokens to load. Returns its seconds,
    and those of steps that only decode, while blocks were loaded and not.
    """
    engine = llm._engine
    tier, step = engine.scheduler.blocks.tier, engine.step
    assert tier is not None
    steps: dict[bool, list[float]] = {False: [], True: []}

    def timed() -> object:
        before, start, loading = engine.stats().prompt_tokens, time.perf_counter(), tier.has_loads
        outputs = step()
        if engine.stats().prompt_tokens == before and outputs:
            steps[loading].append(time.perf_counter() - start)
        return outputs

    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    with patch.object(tiers, "MIN_LOADED_TOKENS", least), patch.object(engine, "step", timed):
        start = time.perf_counter()
        answers = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    for prompt, answer in zip(prompts, answers, strict=True):
        prompt += [*answer.outputs[0].token_ids, *range(1, 33)]
    return seconds, steps
