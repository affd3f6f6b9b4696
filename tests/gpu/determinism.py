"""The deterministic mode on a GPU: each operation, and a whole engine whose requests run alone and among others."""

from __future__ import annotations

import importlib.util
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import kernels
from benchmarks.model_shapes import model_folder
from engine import LLM, LoRARequest, SamplingParams
from engine.models.families import read_spec
from engine.setup import deterministic as refusals
from kernels import (
    FORMS,
    AttentionArgs,
    Experts,
    KVSlots,
    PagedContext,
    QuantizedWeight,
    RopeArgs,
    Router,
    RouterArgs,
)
from kernels.cuda import deterministic
from tests.gpu.checks import BF16, E4M3, F16, F32, Checks
from tests.gpu.deterministic_layers import (
    check_deterministic_adapters,
    check_deterministic_latents,
    check_deterministic_states,
)
from tests.gpu.deterministic_speed import FORMS_BY_NAME, chosen
from tests.oracles.families import VOCAB, make_checkpoint
from tests.oracles.random_adapters import write_random_adapter
from tests.support.loaded import load
from tests.support.parting import parting

MOST, CROWDS, COUNT = 300, (1, 7, 44, 256), 60
HYBRIDS = ("qwen3_5", "nemotron_h", "kimi_linear", "lfm2")
# Tiny engines: name, family and settings.
ENGINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("qwen3_moe", "qwen3_moe", {}),
    ("gemma2", "gemma2", {}),
    ("fp8 cache", "qwen3", {"kv_cache_dtype": "fp8"}),
    ("fp8", "qwen3_moe", {"quantization": "fp8"}),
    ("int4", "qwen3_moe", {"quantization": "int4"}),
    ("latent", "deepseek_v3", {}),
    ("adapters", "qwen3", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}),
    ("adapters of experts", "qwen3_moe", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}),
    *((family, family, {}) for family in HYBRIDS),
)
NGRAMS = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    "enable_adaptive_verification": False,
}  # fmt: skip
Forms = Callable[[slice], Sequence[Tensor]]


def check_forms(checks: Checks) -> None:
    """f(x)[i] == f(x[i:i+1]), bit for bit: the error is the number of sizes and tokens that differ."""
    for dtype in (BF16, F16, F32):
        for n, k in ((1024, 1024), (6144, 4096), (4096, 12288), (151936, 1024)):
            name = f"deterministic linear {n} x {k} {dtype}"
            if not checks.wants(name.replace("torch.", "")) or (dtype != BF16 and n > 6144):
                continue
            x, weight = checks.random(MOST, k, dtype=dtype), checks.random(n, k, dtype=dtype) / k**0.5
            _compare(checks, name, lambda at: [deterministic.linear(x[at].clone(), weight)])  # noqa: B023
    for kind in ("int4", "e4m3", "int8"):
        weight_of = _codes(checks, kind, 4096, 4096)
        x, norm = checks.random(MOST, 4096, dtype=BF16), checks.random(4096, dtype=BF16)
        call: Forms = lambda at: [deterministic.norm_gated(x[at].clone(), norm, 1e-6, weight_of)]  # noqa: B023, E731
        _compare(checks, f"deterministic norm_gated {kind}", call)
    _check_attention(checks)
    with chosen(fixed_ranges=False):
        _check_attention(checks, "deterministic attention in one loop")
    check_deterministic_latents(checks, _compare)
    check_deterministic_states(checks)
    check_deterministic_adapters(checks, _compare)
    _check_experts(checks)
    FORMS.choose(True)
    try:
        _check_rows(checks)
        check_deterministic_layers(checks)
    finally:
        FORMS.choose(False)
    logits, ids = checks.random(MOST, 151936, dtype=BF16), torch.arange(MOST, device=checks.device)
    _compare(checks, "deterministic token_logprobs", lambda at: deterministic.token_logprobs(logits[at], ids[at], 3))


def _compare(checks: Checks, name: str, f: Forms, sizes: Sequence[int] = range(1, MOST + 1), most: int = MOST) -> None:
    if not checks.wants(name.replace("torch.", "")):
        return
    whole, wrong = f(slice(0, most)), 0
    for size in sizes:
        wrong += any(not torch.equal(got, want[:size]) for got, want in zip(f(slice(0, size)), whole, strict=True))
    singles = range(0, most, max(most // 43, 1))
    for i in singles:
        at = slice(i, i + 1)
        wrong += any(not torch.equal(got, want[at]) for got, want in zip(f(at), whole, strict=True))
    count = len(sizes) + len(singles)
    checks.add(f"{name}: {count - wrong} of {count} the same bytes", wrong, 0)


def _codes(checks: Checks, kind: str, n: int, k: int) -> QuantizedWeight:
    scale = torch.rand(n, k // 128, device=checks.device) / 50
    if kind == "int4":
        codes = torch.randint(256, (n, k // 2), dtype=torch.uint8, device=checks.device)
    elif kind == "int8":
        codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=checks.device)
    else:
        codes = checks.random(n, k, dtype=F32).to(torch.float8_e4m3fn)
    return QuantizedWeight(kind, codes, scale, 128)  # type: ignore[arg-type]


def _check_attention(checks: Checks, what: str = "deterministic attention") -> None:
    """The newest tokens decoded, among 300 sequences and alone, and prefilled in chunks."""
    device, size, length = checks.device, 16, 1500
    blocks = length // size + 1
    for heads, kv_heads, head_dim, dtype, kept in (
        (16, 8, 128, BF16, BF16),
        (32, 4, 128, BF16, BF16),
        (8, 8, 64, F16, F16),
        (8, 2, 256, BF16, BF16),
        (32, 8, 128, BF16, E4M3),
        (8, 2, 256, F16, E4M3),
    ):
        for window in (0, 300):
            name = f"{what} {heads}/{kv_heads} {head_dim} window {window} {dtype}, cache {kept}"
            if not checks.wants(name.replace("torch.", "")):
                continue
            scales = torch.rand(2, kv_heads, device=device) + 0.5 if kept == E4M3 else None
            args = AttentionArgs(head_dim**-0.5, window=window, kv_scale=scales)
            cache = checks.random(2, blocks, kv_heads, size, head_dim, dtype=dtype).to(kept)
            tables = torch.randperm(blocks, device=device).view(1, -1).int()
            query = checks.random(length, heads, head_dim, dtype=dtype)

            def prefilled(first: int, last: int) -> Tensor:
                rows, lens = torch.zeros(1, dtype=torch.int32), torch.tensor([last], dtype=torch.int32)
                context = PagedContext(cache[0], cache[1], tables, rows.to(device), lens.to(device))  # noqa: B023
                starts = torch.tensor([0, last - first], dtype=torch.int32, device=device)
                return deterministic.paged_attention_prefill(query[first:last], starts, context, args)  # noqa: B023

            whole = prefilled(0, length)
            lens = torch.randint(1, length + 1, (MOST,), device=device).int()
            newest, rows = query[lens.long() - 1], torch.zeros(MOST, dtype=torch.int32, device=device)
            decoded = deterministic.paged_attention_decode(
                newest, PagedContext(cache[0], cache[1], tables, rows, lens), args
            )
            wrong = int((decoded != whole[lens.long() - 1]).flatten(1).any(1).sum())
            for i in range(0, MOST, 11):
                context = PagedContext(cache[0], cache[1], tables, rows[:1], lens[i : i + 1])
                alone = deterministic.paged_attention_decode(newest[i : i + 1].clone(), context, args)
                wrong += not torch.equal(alone[0], decoded[i])
            cuts = [0, *sorted(random.Random(3).sample(range(1, length), 12)), length]
            for first, last in itertools.pairwise(cuts):
                wrong += not torch.equal(prefilled(first, last), whole[first:last])
            checks.add(f"{name}: {wrong} differ", wrong, 0)


def _check_experts(checks: Checks) -> None:
    hidden, inner, count = 2048, 768, 64
    x, router = checks.random(MOST, hidden, dtype=BF16), checks.random(count, hidden, dtype=BF16)
    norm, rule = checks.random(hidden, dtype=BF16), Router(8, renormalise=True)
    shapes = ((2 * inner, hidden), (hidden, inner))
    gate_up, down = (checks.random(count, n, k, dtype=BF16) / k**0.5 for n, k in shapes)
    floats = Experts(gate_up, down)
    first, second = (QuantizedWeight.stack([_codes(checks, "int4", n, k) for _ in range(count)]) for n, k in shapes)
    codes = Experts(first, second)
    for name, stack in (("float", floats), ("int4", codes)):

        def routed(at: slice) -> Sequence[Tensor]:
            normed, ids, weights = deterministic.norm_route(x[at].clone(), norm, 1e-6, RouterArgs(router, rule))
            return ids, weights, deterministic.experts(normed, ids, weights, stack)  # noqa: B023

        _compare(checks, f"deterministic experts {name}", routed, range(1, MOST + 1, 7))


def _check_rows(checks: Checks) -> None:
    """Norms, activations and rotary embeddings of up to 4,096 tokens."""
    sizes, most = (1, 2, 65, 257, 512, 1023, 1024, 1025, 2049, 4095), 4096
    heads, kv_heads, size = 16, 8, 128
    for dtype in (BF16, F32):
        x, more = checks.random(most, 1024, dtype=dtype), checks.random(most, 1024, dtype=dtype)
        norm, of_head = checks.random(1024, dtype=dtype), checks.random(size, dtype=dtype)
        qkv, table = (
            checks.random(most, (heads + 2 * kv_heads) * size, dtype=dtype),
            checks.random(most, size, dtype=F32),
        )
        positions = torch.arange(most, device=checks.device, dtype=torch.int32)

        def rotated(at: slice) -> Sequence[Tensor]:
            cache = torch.zeros(2, most // 16, kv_heads, 16, size, dtype=dtype, device=checks.device)  # noqa: B023
            slots = positions[at].long()  # noqa: B023
            args = RopeArgs(heads, kv_heads, table, of_head, of_head)  # noqa: B023
            query = kernels.rope_and_store(qkv[at].clone(), positions[at], args, KVSlots(cache[0], cache[1], slots))  # noqa: B023
            stored = cache.transpose(2, 3).flatten(1, 2)[:, slots]
            return query, stored[0], stored[1]

        def normed(at: slice) -> Sequence[Tensor]:
            total = x[at].clone()  # noqa: B023
            return kernels.rms_norm(x[at], norm, 1e-6), kernels.add_rms_norm(total, more[at], norm, 1e-6), total  # noqa: B023

        def gated(at: slice) -> Sequence[Tensor]:
            return [kernels.gate_and_mul(x[at].clone(), "silu")]  # noqa: B023

        name = str(dtype).removeprefix("torch.")
        for what, call in (("rope_and_store", rotated), ("norms", normed), ("gate_and_mul", gated)):
            if checks.wants(f"deterministic {what} {name}"):
                _compare(checks, f"deterministic {what} {name}", call, sizes, most)


def check_deterministic_layers(checks: Checks) -> None:
    """Name the first operation whose rows depend on the other sequences of a step, in steps of 500 to 8,000 tokens."""
    if not checks.wants("deterministic layers 0.6B"):
        return
    draw = random.Random(5)
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder("qwen3-0.6b", Path(root))
        model = load(folder, read_spec(folder), dtype=BF16, device=checks.device, load_format="dummy")
        model.pack_weights()
    for count in (7, 20, 67, 130):
        prompts = [[draw.randrange(151000) for _ in range(draw.randint(1, 120))] for _ in range(count)]
        parted = [found for i in range(0, count, 7) if (found := parting(model, prompts, i))]
        where = f": first {parted[0]}" if parted else ""
        total = sum(map(len, prompts))
        checks.add(f"deterministic layers 0.6B, {total} tokens: {len(parted)} part{where}", len(parted), 0)


def check_deterministic_engine(checks: Checks) -> None:
    """60 requests alone, among others, in chunks, after hits, preempted: tokens and log-probabilities, bit for bit."""
    if checks.wants("deterministic engine 0.6B"):
        with tempfile.TemporaryDirectory() as root:
            folder = str(model_folder("qwen3-0.6b", Path(root)))
            _check_engine(checks, "deterministic engine 0.6B", folder, 151000, load_format="dummy")
    for form, forms in FORMS_BY_NAME.items():
        name = f"deterministic engine by {form}"
        if checks.wants(name):
            with tempfile.TemporaryDirectory() as root, chosen(**forms):
                folder = str(model_folder("qwen3-0.6b", Path(root)))
                _check_engine(checks, name, folder, 151000, load_format="dummy")
    for what, family, settings in ENGINES:
        name = f"deterministic engine {what}"
        if not checks.wants(name):
            continue
        if importlib.util.find_spec("transformers") is None:
            print(f"left out: {name} (transformers is not installed)")
            continue
        with tempfile.TemporaryDirectory() as own:
            make_checkpoint(family, Path(own), {"max_position_embeddings": 512} if family in HYBRIDS else {})
            _check_engine(checks, name, own, VOCAB, max_model_len=256, **settings)


def _check_engine(checks: Checks, name: str, folder: str, vocab: int, **settings: Any) -> None:
    draw = random.Random(7)
    shared = [draw.randrange(vocab) for _ in range(60)]
    prompts = [
        (shared if i % 3 == 0 else []) + [draw.randrange(vocab) for _ in range(draw.randint(1, 120))]
        for i in range(COUNT + max(CROWDS))
    ]
    params = [
        SamplingParams(
            max_tokens=24, temperature=(0.0, 0.9)[i % 2], top_p=(1.0, 0.9)[i % 4 == 3], seed=i, logprobs=2,
            ignore_eos=True, detokenize=False,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    others = range(COUNT, COUNT + max(CROWDS))
    settings = {
        "max_model_len": 512, "device": checks.device, "skip_tokenizer_init": True, "num_gpu_blocks_override": 6000,
        **settings,
    }  # fmt: skip

    adapters: list[LoRARequest | None] = [None] * len(prompts)
    if settings.get("enable_lora"):
        for number in (1, 2):
            written = write_random_adapter(Path(folder) / f"adapter {number}", Path(folder), 8 * number, number)
            adapters[number::3] = [LoRARequest(written.name, number, str(written))] * len(adapters[number::3])

    def ask(llm: LLM, some: Sequence[int]) -> list[Any]:
        given = [{"prompt_token_ids": prompts[i]} for i in some]
        own = [adapters[i] for i in some] if settings.get("enable_lora") else None
        results = llm.generate(given, [params[i] for i in some], use_tqdm=False, lora_request=own)
        return [
            (
                r.outputs[0].token_ids,
                [sorted((k, v.logprob) for k, v in at.items()) for at in r.outputs[0].logprobs or ()],
            )
            for r in results
        ]

    def compare(llm: LLM, way: str, crowd: int = 0) -> None:
        order = [*range(COUNT), *range(COUNT, COUNT + crowd)]
        draw.shuffle(order)
        found = dict(zip(order, ask(llm, order), strict=True))
        wrong = sum(found[i] != alone[i] for i in range(COUNT))
        checks.add(f"{name}, {way}: {COUNT - wrong} of {COUNT} the same bytes", wrong, 0)

    with mock.patch.object(refusals, "UNCHECKED", frozenset()):
        llm = LLM(folder, deterministic=True, max_num_batched_tokens=8192, **settings)
        alone = [ask(llm, [i])[0] for i in range(COUNT)]
        for crowd in CROWDS:
            compare(llm, f"after hits, all at once, with {crowd} others", crowd)
            llm.reset_prefix_cache()
        start = time.perf_counter()
        ask(llm, others)
        seconds = time.perf_counter() - start
        llm.close()
        ways: dict[str, dict[str, Any]] = {
            "in chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 64, "enforce_eager": True},
            "preempted": {"num_gpu_blocks_override": 300, "enforce_eager": True},
            "with drafts": {"speculative_config": NGRAMS},
        }
        for way, more in ways.items():
            llm = LLM(folder, deterministic=True, **settings | more)
            compare(llm, way, 44)
            llm.close()
    llm = LLM(folder, max_num_batched_tokens=8192, **settings)
    ask(llm, others)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    ask(llm, others)
    ratio = (time.perf_counter() - start) / seconds
    print(f"{name}: {len(others)} requests at once, speed with the mode / without: {ratio:.2f}")
    llm.close()
