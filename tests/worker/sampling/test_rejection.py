"""Rejection sampling with a drafter's probabilities: the distribution of tokens is the model's, and more are kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from engine import LLM, ConfigError, SamplingParams
from engine.worker.sampling.rejection import distribution, draw
from tests.support.drafters import SETTINGS, Drafted
from tests.support.tiny_model import write_model

NUM_ANSWERS, AT_ONCE, SEEDS = 1020, 60, 10_000
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, ignore_eos=True, detokenize=False)
KINDS = {
    "processed": PARAMS.clone(top_k=3, repetition_penalty=1.2, min_tokens=4),
    "filtered": PARAMS.clone(top_k=3, top_p=0.95),
}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights, not by much."""
    folder, generator = write_model(tmp_path_factory.mktemp("draft") / "other"), torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    other = {name: t + 0.02 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    save_file(other, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def drafted(tiny_model: Path, draft: Path) -> Drafted:
    return _drafted(tiny_model, draft, "standard")


def _drafted(model: Path, draft: Path, method: str) -> Drafted:
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "debug_checks": False}
    return Drafted(model, "draft_model", draft, 3, {"rejection_sample_method": method}, **settings)


def _counted(drafted: Drafted, params: SamplingParams, drafts: bool) -> Counter[tuple[int, ...]]:
    """Count the second to fourth tokens of answers to one prompt, with seeds of their own for each case."""
    drafted.use(drafts)
    counts = Counter[tuple[int, ...]]()
    for start in range(0, NUM_ANSWERS, AT_ONCE):  # with more requests that run or wait, there are no drafts
        each = [params.clone(seed=SEEDS * drafts + start + i) for i in range(AT_ONCE)]
        outputs = drafted.llm.generate([{"prompt_token_ids": [7, 9]}] * AT_ONCE, each, use_tqdm=False)
        counts.update(tuple(output.outputs[0].token_ids[1:4]) for output in outputs)
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_have_the_models_distribution(kind: str, drafted: Drafted) -> None:
    """χ² beside plain sampling, rare cells together."""
    before = drafted.counts
    plain, found = (_counted(drafted, KINDS[kind], drafts) for drafts in (False, True))
    tried, accepted = (after - earlier for after, earlier in zip(drafted.counts, before, strict=True))
    assert 100 < accepted < tried - 100
    common = [key for key in plain.keys() | found.keys() if plain[key] + found[key] >= 10]
    cells = [(plain[key], found[key]) for key in common]
    cells.append((NUM_ANSWERS - sum(a for a, _ in cells), NUM_ANSWERS - sum(b for _, b in cells)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    degrees = len(cells) - 1
    assert degrees > 8
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, "one in some ten thousand, if the distributions are equal"


def test_greedy_texts_stay(drafted: Drafted) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False, repetition_penalty=1.3)
    assert drafted.answers(params) == drafted.answers(params, drafts=False)


def test_the_residual_is_sampled_where_a_draft_is_rejected() -> None:
    """All in one: a draft from q, then accepted or replaced, has the distribution p."""
    generator, n = torch.Generator().manual_seed(1), 40_000
    p, q = torch.randn(2, 5, generator=generator).mul_(2).softmax(-1).unbind()
    seeds, positions = torch.arange(n), torch.full((n,), 7)
    drafts = draw(q.expand(n, -1), seeds, positions)
    ratio = (p / q).clamp(max=1)[drafts]
    is_accepted = draw(torch.stack((ratio, 1 - ratio), 1), seeds ^ 0x5DEECE66D, positions) == 0
    others = draw((p - q).clamp(min=0).expand(n, -1), seeds ^ 0x2545F4914F6CDD1D, positions)
    frequencies = torch.where(is_accepted, drafts, others).bincount(minlength=5) / n
    assert torch.allclose(frequencies, p, atol=0.015)
    assert float(is_accepted.float().mean()) == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.015)


def test_a_distribution_is_what_is_sampled_from() -> None:
    logits, n = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)).mul_(3), 30_000
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (7, 0.9, 0.05)):
        one = kernels.SamplingRows(
            torch.tensor([0.7]), torch.tensor([top_k]).int(), torch.tensor([top_p]), torch.tensor([min_p]),
            torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip
        many = kernels.SamplingRows(
            one.temperature.expand(n), one.top_k.expand(n), one.top_p.expand(n), one.min_p.expand(n),
            torch.arange(n), one.positions.expand(n),
        )  # fmt: skip
        frequencies = kernels.sample(logits.expand(n, -1), many).bincount(minlength=40) / n
        assert torch.allclose(frequencies, distribution(logits, one)[0], atol=0.015)


def test_what_has_no_probabilities_is_compared_and_what_does_not_go_together_is_refused(
    tiny_model: Path, draft: Path
) -> None:
    settings = {"num_speculative_tokens": 3, "prompt_lookup_min": 2, "enable_adaptive_verification": False}
    params, found = SamplingParams(max_tokens=30, seed=4, ignore_eos=True, detokenize=False), list[list[int]]()
    for method in ("exact", "standard"):
        llm = LLM(str(tiny_model), **SETTINGS, speculative_config=settings | {"rejection_sample_method": method})
        [output] = llm.generate([{"prompt_token_ids": [5, 9, 5, 9, 5]}], params, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
        llm.close()
    assert found[0] == found[1], "of a lookup"
    given = {"method": "draft_model", "model": str(draft), "rejection_sample_method": "standard"}
    with pytest.raises(ConfigError, match="standard cannot be used with deterministic"):
        LLM(str(tiny_model), **SETTINGS, deterministic=True, speculative_config=given)
