"""Deterministic mode's whole promise: requests alone, among 1 to 1,000 others, in small and large chunks, after hits,
preempted, with drafts, and beside adapters give the same texts and log-probabilities, bit for bit.

Run all of it by `pytest -m slow tests/engine/test_determinism_matrix.py -s`, which prints the counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, LoRARequest, SamplingParams
from tests.engine.test_determinism import ALONE, GROUPS, HYBRIDS, NGRAMS
from tests.oracles.families import make_checkpoint
from tests.oracles.hybrids import make_hybrid
from tests.oracles.random_adapters import write_random_adapter

SHARED = [11 * i % 250 + 1 for i in range(48)]
COMMON: dict[str, Any] = {
    "device": "cpu", "skip_tokenizer_init": True, "deterministic": True, "max_model_len": 96, "block_size": 8,
    "num_gpu_blocks_override": 12000, "max_num_batched_tokens": 8192, "max_num_seqs": 1024,
}  # fmt: skip
CROWDS = (1, 7, 44, 64, 256, 1000)
MOST_OTHERS = 256  # where steps are small
SMALL = {"max_num_batched_tokens": 64, "max_num_seqs": 64}
FEW = {"num_gpu_blocks_override": 16}
DRAFTS = {"speculative_config": NGRAMS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense bfloat16": ("gemma2", {"dtype": "bfloat16"}),
    "dense float32": ("llama", {"dtype": "float32"}),
    "experts bfloat16": ("qwen3_moe", {"dtype": "bfloat16"}),
    "experts int8": ("qwen3_moe", {"dtype": "float32", "quantization": "int8"}),
    "dense int4": ("qwen3", {"dtype": "bfloat16", "quantization": "int4"}),
    "fp8 cache": ("qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    "hybrid": ("qwen3_5", {"dtype": "bfloat16"}),
    "adapters": ("qwen3", {"dtype": "bfloat16", "enable_lora": True}),
    "latent attention": ("glm4_moe_lite", {"dtype": "float32"}),
}


pytestmark = pytest.mark.usefixtures("own_cpu_kernels")


def grows(i: int) -> bool:
    """Return True for a request with a short prompt and a long answer: several of these make an engine preempt."""
    return i % 5 == 3


def prompt(i: int) -> list[int]:
    if grows(i):
        return [i % 250 + 3]
    own = [(13 * i + 7 * j) % 200 + 3 for j in range(1 + 5 * i % 23)]
    return own if i % 3 else SHARED[: 8 + i % 41] + own


def sampling(i: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 1.1, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ]
    return SamplingParams(max_tokens=48 if grows(i) else 5, seed=i, logprobs=2, ignore_eos=True, **kinds[i % 4])


class Requests:
    """`count` requests whose bytes are compared; those from there on are others."""

    def __init__(self, count: int, adapter: LoRARequest | None) -> None:
        self.count, self.adapter, self.alone = count, adapter, list[Any]()

    def ask(self, llm: LLM, some: Sequence[int]) -> list[Any]:
        prompts = [{"prompt_token_ids": prompt(i)} for i in some]
        adapters = [self.adapter if i % 4 == 1 else None for i in some] if self.adapter else None
        results = llm.generate(prompts, [sampling(i) for i in some], use_tqdm=False, lora_request=adapters)
        outputs = [each.outputs[0] for each in results]
        return [(o.token_ids, [[(k, v.logprob) for k, v in at.items()] for at in o.logprobs or ()]) for o in outputs]

    def same(self, llm: LLM, crowd: int) -> int:
        """Return how many requests give the same bytes, each among `crowd` others."""
        found: dict[int, Any] = {}
        for first in range(0, self.count, crowd + 1):
            some = [*range(first, min(first + crowd + 1, self.count))]
            some += range(self.count, self.count + crowd + 1 - len(some))
            some = some[::2] + some[1::2][::-1]
            found |= zip(some, self.ask(llm, some), strict=True)
        return sum(found[i] == self.alone[i] for i in range(self.count))


def counts(case: str, folder: Path, count: int, crowds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield how many of `count` requests give the bytes that they give alone, for each way."""
    family, settings = CASES[case]
    (make_hybrid if family in HYBRIDS else make_checkpoint)(family, folder)
    adapter = None
    if "enable_lora" in settings:
        write_random_adapter(folder / "adapter", folder, 8, 0)
        adapter = LoRARequest("adapter", 1, str(folder / "adapter"))
    requests, settings = Requests(count, adapter), COMMON | settings
    llm = LLM(str(folder), **settings | ALONE)
    requests.alone = [requests.ask(llm, [i])[0] for i in range(count)]
    llm.close()
    llm = LLM(str(folder), **settings)
    for crowd in crowds:
        yield f"among {crowd}", requests.same(llm, crowd)
    yield "after hits", requests.same(llm, max(crowds))
    llm.close()
    most = min(max(crowds), MOST_OTHERS)
    for name, more in (("chunks of 64", SMALL), ("preempted", FEW), ("drafts", DRAFTS)):
        own = settings | more
        groups = GROUPS.get(family, 1)
        own["num_gpu_blocks_override"] = own["num_gpu_blocks_override"] * groups + 8 * (groups - 1)
        llm = LLM(str(folder), **own)
        yield name, requests.same(llm, most)
        stats = llm._engine.stats()
        assert name != "preempted" or stats.num_preemptions > 0
        assert name != "drafts" or stats.num_draft_tokens > 0
        llm.close()


def test_some_requests_in_every_way(tmp_path: Path) -> None:
    assert [same for _, same in counts("experts int8", tmp_path, 24, (1, 44))] == [24] * 6


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_hundred_requests_in_every_way(case: str, tmp_path: Path) -> None:
    found = dict(counts(case, tmp_path, 200, CROWDS))
    print(f"\n{case}: " + ", ".join(f"{way} {same} of 200" for way, same in found.items()))
    assert set(found.values()) == {200}
