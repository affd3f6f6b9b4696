"""Checks of whole models: every family against transformers, and the exact greedy text of a small trained model."""

from __future__ import annotations

import importlib.util
import itertools
import json
import multiprocessing
import random
import tempfile
from collections.abc import Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.models.families import read_spec
from engine.worker.parallel.cores import num_cores
from tests.gpu.checks import BF16, F32, Checks, relative_error
from tests.oracles.families import CASES, MAX_ERROR, MAX_RATIO, VOCAB, check_family, make_checkpoint
from tests.oracles.paged_runner import decode
from tests.oracles.phi3_small import VOCAB as PHI_VOCAB
from tests.oracles.phi3_small import make, plain_decoder
from tests.support.loaded import load as load_model
from tests.support.unwritten import unwritten_is_nan

FAMILIES_AT_ONCE = 8
# Attention of several kinds, experts, groups of layers: what graphs of steps that prefill may get wrong.
CAPTURED = (
    "llama-gqa4-llama3",
    "gemma3",
    "gemma3n",
    "gemma4_moe",
    "laguna",
    "mpt",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "lfm2",
    "qwen3_5_moe",
)
STORY = Path("shared", "models", "story")  # in the repository's folder or beside it


def check_families(checks: Checks, names: Iterable[str] = CASES) -> None:
    """Logits within the rounding of the dtype; in float32 the greedy tokens are equal, too."""
    if importlib.util.find_spec("transformers") is None:
        print("left out: model families (transformers is not installed)")
        return
    jobs = [
        (name, checks.device, dtype)
        for name, dtype in itertools.product(names, (BF16, F32))
        if any(checks.wants(f"family {name} {dtype}: {what}") for what in ("logits", "greedy tokens differ"))
    ]
    with _processes(checks.device) as pool:
        for (name, _, dtype), result in zip(jobs, pool.map(_family_result, jobs), strict=True):
            logits, tokens = f"family {name} {dtype}: logits", f"family {name} {dtype}: greedy tokens differ"
            if dtype == F32:
                checks.add(logits, result["max_error"], MAX_ERROR)
                checks.add(tokens, float(not result["greedy_equal"]), 0.0)
            else:
                checks.add(logits, result["error"], MAX_RATIO * result["transformers_error"])


def check_phi3_small(checks: Checks) -> None:
    """Phi-3-small, whose attention is block-sparse, against a plain decoder in float64; prompts whole and in chunks."""
    for dtype, chunk in itertools.product((BF16, F32), (10**9, 90)):
        name = f"family phi3_small {dtype}, chunks of {chunk}"
        if not checks.wants(name):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            make(folder)
            model = load_model(folder, read_spec(folder), dtype=dtype, device=checks.device, max_model_len=512)
            prompts = [torch.randint(PHI_VOCAB, (n,)).tolist() for n in (400, 3, 150)]
            found = decode(model, prompts, 20, chunk=chunk, block_size=64)
            pairs = zip(prompts, found, strict=True)
            want = torch.cat([plain_decoder(folder, prompt + each.token_ids[:-1]) for prompt, each in pairs])
        got = torch.cat([each.logits.cpu() for each in found])
        checks.add(name, relative_error(got, want), 1e-4 if dtype == F32 else 5e-2)


def _processes(device: str) -> Executor:
    """For a GPU several: nearly all of the time goes into compiling kernels, each on one core."""
    count = 1 if device == "cpu" else max(min(num_cores() // 2, FAMILIES_AT_ONCE), 1)
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))


def _family_result(job: tuple[str, str, torch.dtype]) -> dict[str, Any]:
    with unwritten_is_nan():
        return check_family(*job)


def check_windows(checks: Checks) -> None:
    """Models with sliding windows through the whole engine, in float32: transformers' greedy text, token for token."""
    if importlib.util.find_spec("transformers") is None:
        print("left out: models with windows (transformers is not installed)")
        return
    from tests.oracles.windowed import LENGTH, MODELS, make_windowed

    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            prompts, answers = make_windowed(name, Path(folder))
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            for budget, blocks in ((2048, 1000), (16, 60)):
                llm = LLM(
                    model=folder, device=checks.device, dtype="float32", skip_tokenizer_init=True, max_model_len=200,
                    block_size=16, max_num_batched_tokens=budget, num_gpu_blocks_override=blocks, max_num_seqs=8,
                )  # fmt: skip
                for again in ("", " again"):  # then from the prefix cache
                    found = [a.outputs[0].token_ids for a in llm.generate(given, sampling, use_tqdm=False)]
                    differs = sum(a != b for a, b in zip(found, answers, strict=True)) / len(answers)
                    checks.add(f"window in {name}, {budget} tokens a step{again}: texts differ", differs, 0.0)
                llm.close()


def story_folder() -> Path | None:
    """The trained model that texts are checked with, if it is on this machine."""
    root = Path(__file__).resolve().parents[2]
    return next((base / STORY for base in (root, root.parent) if (base / STORY).is_dir()), None)


def check_story(checks: Checks) -> None:
    """A trained Llama in float32: its greedy text, token for token, in chunks of several sizes and by the whole
    engine.
    """
    folder = story_folder()
    if folder is None:
        print("left out: the story model (it is not on this machine)")
        return
    entries = json.loads((folder / "expected_greedy.json").read_text(encoding="utf-8"))
    prompts = [entry["prompt_ids"] for entry in entries]
    expected = [entry["output_ids"] for entry in entries]
    lengths = [len(tokens) for tokens in expected]

    def differing(found: list[list[int]]) -> float:
        """The fraction of answers that are not as expected."""
        pairs = zip(found, expected, strict=True)
        return sum(tokens[: len(wanted)] != wanted for tokens, wanted in pairs) / len(expected)

    model = load_model(folder, read_spec(folder), dtype=torch.float32, device=checks.device)
    for chunk in (1, 7, 512):
        found = [answer.token_ids for answer in decode(model, prompts, max(lengths), chunk=chunk)]
        checks.add(f"story model, chunks of {chunk}: texts differ", differing(found), 0.0)
    llm = LLM(model=str(folder), device=checks.device, dtype="float32", max_num_batched_tokens=100)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    checks.add("story model, engine: texts differ", differing([a.outputs[0].token_ids for a in answers]), 0.0)


def check_graphs(checks: Checks) -> None:
    """Steps that prefill and decode at once, in graphs beside eagerly: equal texts in float32, prompt log-probabilities
    else.
    """
    if importlib.util.find_spec("transformers") is None:
        print("left out: graphs (transformers is not installed)")
        return
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 150))] for _ in range(40)]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randint(1, 30), ignore_eos=True, detokenize=False) for _ in prompts
    ]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    for name in CAPTURED:
        if not checks.wants(f"graphs of {name}"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(name, Path(folder))
            for dtype in ("float32", "bfloat16"):
                texts, logprobs = [], []
                for eager in (True, False):
                    llm = LLM(
                        model=folder, device=checks.device, dtype=dtype, skip_tokenizer_init=True, max_model_len=256,
                        max_num_seqs=12, max_num_batched_tokens=256, num_gpu_blocks_override=400, enforce_eager=eager,
                    )  # fmt: skip
                    texts.append([a.outputs[0].token_ids for a in llm.generate(given, params, use_tqdm=False)])
                    llm.reset_prefix_cache()
                    answers = llm.generate(given, scored, use_tqdm=False)
                    found = [
                        next(iter(of_token.values())).logprob
                        for answer in answers
                        for of_token in answer.prompt_logprobs or []
                        if of_token
                    ]
                    logprobs.append(torch.tensor(found))
                    llm.close()
                differs = sum(a != b for a, b in zip(*texts, strict=True)) / len(prompts)
                checks.add(f"graphs of {name}, {dtype}: texts differ", differs, 0.0 if dtype == "float32" else 0.5)
                error = (logprobs[0] - logprobs[1]).abs().mean().item()
                checks.add(f"graphs of {name}, {dtype}: log-probabilities", error, 1e-5 if dtype == "float32" else 2e-2)
