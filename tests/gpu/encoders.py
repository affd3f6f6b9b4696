"""Checks of encoders: attention in both directions, and whole models against transformers."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from engine import LLM
from tests.gpu.checks import BF16, F32, LIMITS, Checks, relative_error
from tests.oracles.attention import Paged

LENGTHS = [1, 300, 64, 150, 20, 513, 129]
HEADS = {"bge-large": (16, 64), "EmbeddingGemma": (3, 256)}  # heads, channels
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 600, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "XLMRoberta": {"max_position_embeddings": 602},
    "Roberta": {"max_position_embeddings": 602, "type_vocab_size": 1},
    "DistilBert": {"dim": 256, "hidden_dim": 512, "n_layers": 4, "n_heads": 4},
    "Albert": {"embedding_size": 64},
    "Electra": {"embedding_size": 64},
    "NomicBert": {},
    "JinaEmbeddingsV3": {},
    "EuroBert": {"mask_token_id": 2},
    "Gemma3Text": {
        "use_bidirectional_attention": True, "sliding_window": 64, "head_dim": 64, "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "DebertaV2": {
        "relative_attention": True, "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
        "position_buckets": 64, "position_biased_input": False, "tie_word_embeddings": False,
    },
    "ModernBert": {"local_attention": 64, "cls_token_id": None, "sep_token_id": None},
}  # fmt: skip
BGE_LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "vocab_size": 30522, "max_position_embeddings": 512,
}  # fmt: skip
NUM_TEXTS = 4096


def check_bidirectional(checks: Checks) -> None:
    """Attention of whole texts, with and without a window; and the time of a step of 16k tokens."""
    kinds = itertools.product(HEADS.items(), (BF16, F32), (0, 65))
    for (model, (num_heads, head_dim)), dtype, window in kinds:
        lens = LENGTHS
        name = f"both directions, {model} {dtype} window {window}"
        if not checks.wants(name.replace("torch.", "")):
            continue
        attend, query, paged = _step(lens, num_heads, head_dim, dtype, window, checks.device)
        parts = [_exact(query, paged, i, lens, window) for i in range(len(lens))]
        checks.add(name, relative_error(attend(), torch.cat(parts)), LIMITS[dtype])
    name = "both directions, a step of bge-large"
    if checks.device != "cpu" and checks.wants(name):
        lens = [160] * 100
        attend, query, paged = _step(lens, 16, 64, BF16, 0, checks.device)
        error = relative_error(attend()[:160], _exact(query, paged, 0, lens, 0))
        checks.add(name, error, LIMITS[BF16], attend, num_flops=4 * 100 * 160 * 160 * 16 * 64)


def _step(lens: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, window: int, device: str) -> Any:
    """Return a call that computes the attention, the queries, and the keys and values."""
    paged = Paged.make(lens, 16, head_dim, dtype, device, num_kv_heads=num_heads)
    query = torch.randn(sum(lens), num_heads, head_dim, device=device).to(dtype)
    starts = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)
    context = kernels.PagedContext(paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, paged.context_lens)
    args, out = kernels.AttentionArgs(head_dim**-0.5, window, causal=False), torch.empty_like(query)
    step = kernels.prefill_tile_queries(num_heads, num_heads, head_dim, dtype)
    tiles = torch.tensor(kernels.make_prefill_tiles(lens, lens, step), dtype=torch.int32, device=device)
    return partial(kernels.paged_attention_prefill, query, starts, context, args, tiles=tiles, out=out), query, paged


def _exact(query: Tensor, paged: Paged, index: int, lens: list[int], window: int) -> Tensor:
    """Return the attention of a sequence's tokens in float64: [n, H, D]."""
    start = sum(lens[:index])
    own = query[start : start + lens[index]].double().transpose(0, 1)
    key, value = (each.double() for each in paged.context(index))  # [H, n, D]
    positions = torch.arange(lens[index], device=query.device)
    seen = (positions[:, None] - positions).abs() < (window or lens[index])
    scale = query.shape[2] ** -0.5
    return F.scaled_dot_product_attention(own, key, value, attn_mask=seen, scale=scale).transpose(0, 1)


def check_encoder_models(checks: Checks) -> None:
    """Embeddings of small random models beside transformers' in float32, and the speed of bge-large's shape."""
    for (family, changes), dtype in itertools.product(FAMILIES.items(), ("float32", "bfloat16")):
        if checks.wants(f"encoder {family} {dtype}"):
            _compare(checks, family, changes, dtype)
    if checks.device != "cpu" and checks.wants("encoder speed"):
        _time_bge_large(checks)


def _prompts(lens: list[int], vocab_size: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(3, vocab_size) for _ in range(n)] for n in lens]


def _compare(checks: Checks, family: str, changes: dict[str, Any], dtype: str) -> None:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**SMALL | changes))
    prompts = _prompts(LENGTHS, SMALL["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(model=folder, device=checks.device, dtype=dtype, skip_tokenizer_init=True, max_num_seqs=64)
        found = llm.embed(prompts, pooling="mean", normalize=False, use_tqdm=False)
        llm.close()
    model = model.eval().double()
    with torch.inference_mode():
        want = torch.stack([model(torch.tensor([prompt])).last_hidden_state[0].mean(0) for prompt in prompts])
    got = torch.tensor([each.outputs.embedding for each in found])
    checks.add(f"encoder {family} {dtype}", relative_error(got, want), 1e-4 if dtype == "float32" else 2e-2)


def _time_bge_large(checks: Checks) -> None:
    import transformers

    config = transformers.BertConfig(**BGE_LARGE, architectures=["BertModel"])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(Path(folder))
        llm = LLM(
            model=folder, device=checks.device, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True,
            max_num_batched_tokens=16384,
        )  # fmt: skip
        generator = random.Random(1)
        prompts = _prompts([generator.randint(20, 300) for _ in range(NUM_TEXTS)], 30522)
        llm.embed(prompts[:256], use_tqdm=False)
        begin = time.perf_counter()
        found = llm.embed(prompts, use_tqdm=False)
        seconds = time.perf_counter() - begin
        llm.close()
    tokens = sum(map(len, prompts))
    rate = f"{NUM_TEXTS / seconds:.0f} texts/s, {tokens / seconds:.0f} tokens/s"
    checks.saw("encoder speed: bge-large's shape, bfloat16", len(found) == NUM_TEXTS, rate)
