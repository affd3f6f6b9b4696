"""Sleep that keeps addresses, on the device: texts, seconds, and the memory that a sleeping engine holds."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.model_shapes import model_folder
from engine import LLM, SamplingParams
from tests.gpu.checks import Checks
from tests.oracles.families import VOCAB, make_checkpoint

FAMILIES = ("qwen3", "lfm2")
SHAPE = "qwen3-8b"
MOST_SECONDS, MOST_GIB = 1.5, 1.5
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)


def check_sleep_texts(checks: Checks) -> None:
    """Float32: the same tokens after each sleep, with graphs that were captured before."""
    if importlib.util.find_spec("transformers") is None:
        print("left out: texts after sleep (transformers is not installed)")
        return
    prompts = [{"prompt_token_ids": [(7 * i * i + n) % VOCAB for i in range(50 + n)]} for n in range(6)]
    for name in FAMILIES:
        if not checks.wants(f"sleep: {name}"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(name, Path(folder))
            llm = LLM(
                model=folder, device=checks.device, dtype="float32", skip_tokenizer_init=True, max_model_len=256,
                max_num_seqs=8, num_gpu_blocks_override=100, enable_sleep_mode=True,
            )  # fmt: skip
            expected = _texts(llm, prompts)
            for level in (1, 1, 2, 1):
                llm.sleep(level)
                llm.wake_up()
                got = _texts(llm, prompts)
                differing = sum(a != b for a, b in zip(expected, got, strict=True)) / len(expected)
                checks.add(f"sleep: {name}, level {level}: texts differ", differing, 0.0)
            llm.close()


def _texts(llm: LLM, prompts: list[dict[str, list[int]]]) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, GREEDY, use_tqdm=False)]


def check_sleep_speed(checks: Checks) -> None:
    """A model's shape in bfloat16, dummy weights, with all graphs."""
    if checks.device == "cpu" or not checks.wants("sleep: speed"):
        print("left out: speed of sleep")
        return
    torch.cuda.init()
    free_before = torch.cuda.mem_get_info()[0]
    prompts = [{"prompt_token_ids": list(range(n, n + 200))} for n in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=str(model_folder(SHAPE, Path(folder))), device=checks.device, load_format="dummy",
            skip_tokenizer_init=True, max_model_len=4096, enable_sleep_mode=True,
        )  # fmt: skip
        expected = _texts(llm, prompts)
        mapped = llm._engine.runner.mapped  # type: ignore[attr-defined]
        checks.saw(
            "sleep: speed: memory is mapped", mapped is not None, "" if mapped is None else _gib(mapped.num_bytes)
        )
        for turn in range(3):
            start = time.perf_counter()
            llm.sleep(1)
            slept = time.perf_counter() - start
            held = free_before - torch.cuda.mem_get_info()[0]
            by_torch = f"PyTorch {_gib(torch.cuda.memory_allocated())} of {_gib(torch.cuda.memory_reserved())}"
            if mapped is not None:
                by_torch += f", of them addresses {_gib(sum(each.size for each in mapped._segments))}"
            start = time.perf_counter()
            llm.wake_up()
            woken = time.perf_counter() - start
            same = _texts(llm, prompts) == expected
            what = f"sleep {slept:.2f} s, wake {woken:.2f} s, asleep {_gib(held)} beside the context ({by_torch})"
            is_good = same and woken <= MOST_SECONDS and held <= (MOST_GIB - 0.5) * 2**30
            checks.saw(f"sleep: speed, turn {turn}: same texts {same}", is_good, what)
        llm.close()


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
