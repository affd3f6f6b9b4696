"""Checks of sparse attention over latents: the indexer's kernels at DeepSeek V3.2's sizes against float64, and whole
engines.
"""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import kernels
from engine import LLM, SamplingParams
from engine.models.indexer import TokenChoice
from kernels import reference
from tests.gpu.checks import BF16, F32, LIMITS, Checks, relative_error

HEADS, SIZE, LATENT, ROTARY, PAGE = 64, 128, 512, 64, 16
LENS = {"decode 64 x 8k": [8192] * 64, "decode 1 x 128k": [131072], "prompt 4k": list(range(1, 4097)), "ragged": [0, 1]}
SAME = 0.98  # of the tokens that bfloat16 chooses: two scores may be nearly equal


def check_index(checks: Checks) -> None:
    """Scores, choices, and attention over chosen tokens."""
    for what, lens in LENS.items():
        for dtype in (BF16, F32):
            title = f"sparse {what} {dtype}"
            if checks.wants(f"{title}: scores") or checks.wants(f"{title}: attention"):
                _check_choice(checks, title, lens, dtype)
    for interleaved in (False, True):
        _check_store(checks, interleaved)


def _check_choice(checks: Checks, title: str, lens: list[int], dtype: torch.dtype) -> None:
    """A token's scores, the tokens that it chooses, and 128 heads' attention over these."""
    device, num_tokens, longest = checks.device, len(lens), max(lens)
    num_blocks = -(-longest // PAGE)
    cache = checks.random(num_blocks, 1, PAGE, LATENT + ROTARY + SIZE, dtype=dtype)
    tables = torch.randperm(num_blocks, device=device).int().view(1, -1)
    rows, lengths = torch.zeros(num_tokens, dtype=torch.int32, device=device), torch.tensor(lens).int().to(device)
    choice = TokenChoice.of_decodes(num_tokens, rows, lengths, tables, longest)
    query, weights = checks.random(num_tokens, HEADS, SIZE, dtype=dtype), checks.random(num_tokens, HEADS, dtype=dtype)
    keys = kernels.PagedLatents(cache[..., -SIZE:], tables, rows, lengths)
    some = slice(-min(num_tokens, 64), None)  # float64 is slow
    of_some = replace(keys, rows=rows[some], lens=lengths[some])
    call = partial(kernels.index_scores, query[some], weights[some], of_some, choice.max_len)
    wide = replace(of_some, cache=keys.cache.double())
    want = reference.index_scores(query[some].double(), weights[some].double(), wide, choice.max_len)
    got, seen = call(), want.isfinite()
    checks.add(f"{title}: seen", float(not torch.equal(got.isfinite(), seen)), 0.0)
    checks.add(f"{title}: scores", relative_error(got[seen], want[seen]), LIMITS[dtype], call)
    choose = partial(choice.choose, query, weights, keys.cache, 2048)
    choose()
    assert choice.slots is not None
    assert choice.counts is not None
    best = want.topk(min(2048, choice.max_len)).indices
    slots = tables[0][(best // PAGE).clamp_(max=num_blocks - 1)] * PAGE + best % PAGE
    counts = choice.counts[some].tolist()
    found = [
        torch.isin(mine[:n], theirs[:n]).double().mean().item()
        for mine, theirs, n in zip(choice.slots[some], slots, counts, strict=True)
        if n
    ]
    checks.add(f"{title}: chosen otherwise", 1 - min(found), 1 - SAME if dtype == BF16 else 1e-3, choose)
    heads = checks.random(num_tokens, 128, LATENT + ROTARY, dtype=dtype)
    out, latents = heads.new_empty(num_tokens, 128, LATENT), cache[..., : LATENT + ROTARY]
    attend = partial(choice.attend, heads, latents, 0.05, out)
    attend()
    own = TokenChoice(0, len(counts), rows[some], lengths[some], tables, choice.max_len)
    own.slots, own.counts = choice.slots[some], choice.counts[some]
    pages = kernels.PagedLatents(
        latents.double().view(-1, 1, 1, LATENT + ROTARY), own.slots, torch.arange(len(counts)).int(), own.counts
    )
    exact = reference.latent_attention_decode(heads[some].double(), pages, scale=0.05, out=out[some].double())
    checks.add(f"{title}: attention", relative_error(out[some], exact), LIMITS[dtype], attend)


def _check_store(checks: Checks, interleaved: bool) -> None:
    title = f"sparse keys stored, {'interleaved' if interleaved else 'halves'}"
    if not checks.wants(title):
        return
    num_tokens, device = 999, checks.device
    positions, slots = torch.arange(num_tokens, device=device), torch.randperm(1024, device=device)[:num_tokens]
    slots[7] = -1
    angles = checks.random(num_tokens, ROTARY // 2, dtype=F32)
    new = kernels.NewIndexKeys(
        checks.random(num_tokens, SIZE, dtype=F32), checks.random(SIZE, dtype=F32), checks.random(SIZE, dtype=F32),
        1e-6, positions, torch.cat([angles.cos(), angles.sin()], 1),
        torch.zeros(64, 1, PAGE, LATENT + ROTARY + SIZE, dtype=F32, device=device)[..., -SIZE:], slots, interleaved,
    )  # fmt: skip
    query = checks.random(num_tokens, HEADS, SIZE, dtype=F32)
    wide, rotated = replace(new, cache=new.cache.double(), key=new.key.double()), query.double()
    reference.store_index_keys(rotated, wide)
    kernels.store_index_keys(query, new)
    checks.add(f"{title}: keys", relative_error(new.cache, wide.cache), 3e-6)
    checks.add(f"{title}: queries", relative_error(query, rotated), 3e-6)


def check_sparse_engines(checks: Checks) -> None:
    """Whole engines in float32: transformers' greedy text, token for token, from the prefix cache, too."""
    if importlib.util.find_spec("transformers") is None:
        print("left out: sparse models (transformers is not installed)")
        return
    from tests.oracles.families import make_checkpoint, make_prompts, transformers_tokens

    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for case in ("deepseek_v32", "glm_moe_dsa"):
        if not checks.wants(f"sparse engine {case}"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            oracle = make_checkpoint(case, Path(folder))
            prompts = make_prompts()
            prompts.append([*prompts[2][:40], 7, 8, 9])
            answers = transformers_tokens(oracle, Path(folder), prompts, 40)
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            for budget, settings in (
                (2048, {"enforce_eager": True}),
                (2048, {}),
                (24, {"num_gpu_blocks_override": 40}),
                (2048, {"deterministic": True}),
            ):
                llm = LLM(
                    model=folder, device=checks.device, dtype="float32", skip_tokenizer_init=True, max_model_len=160,
                    block_size=16, max_num_batched_tokens=budget, max_num_seqs=16, **settings,
                )  # fmt: skip
                for again in ("", " again"):  # then from the prefix cache
                    found = [a.outputs[0].token_ids for a in llm.generate(given, sampling, use_tqdm=False)]
                    differs = sum(a != b for a, b in zip(found, answers, strict=True)) / len(answers)
                    checks.add(f"sparse engine {case}, {budget}, {settings}{again}: texts differ", differs, 0.0)
                llm.close()
