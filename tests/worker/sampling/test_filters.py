"""Processors' filters with many rows and hard cases, against plain loops."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import kernels
from engine.core.params.sampling import SamplingParams
from engine.worker.sampling import filters
from tests.support.slow_sampler import coin_of, edited_logits, filtered_logits, repetitions

VOCAB = 60


def rows_of(rng: random.Random, n: int) -> list[list[float]]:
    return torch.tensor([[rng.gauss(0, 2) for _ in range(VOCAB)] for _ in range(n)]).tolist()


def test_penalties() -> None:
    rng = random.Random(1)
    lengths = [1, 2, 17, 40, 40]
    prompts = [1, 1, 5, 39, 40]
    history = [[rng.randrange(20) for _ in range(40)] for _ in lengths]
    each = [
        SamplingParams(
            repetition_penalty=rng.uniform(0.5, 2), frequency_penalty=rng.uniform(-2, 2), presence_penalty=0.5
        )
        for _ in lengths
    ]
    rows = rows_of(rng, len(lengths))
    logits = torch.tensor(rows)
    columns = [
        torch.tensor([getattr(p, name) for p in each])
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    ]
    filters.penalize(logits, torch.tensor(history), torch.tensor(lengths), torch.tensor(prompts), *columns)
    for i, params in enumerate(each):
        want = edited_logits(rows[i], history[i][: lengths[i]], prompts[i], params, ())
        assert logits[i].tolist() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("elements", [1 << 26, 50 * 120])
def test_dry(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "DRY_ELEMENTS", elements)
    rng = random.Random(2)
    texts = [[3], [3, 3], [1] * 120, [1, 2, 3, 4] * 30, [5, 1, 2, 9, 5, 1, 2], [1, 2, 0, 1, 2, 0, 1, 2]]
    texts += [[rng.randrange(3) for _ in range(rng.randrange(2, 120))] for _ in range(40)]
    lengths = [len(text) for text in texts]
    history = torch.tensor([text + [rng.randrange(3) for _ in range(120 - len(text))] for text in texts])
    breakers = torch.zeros(len(texts), VOCAB, dtype=torch.bool)
    sets: list[set[int]] = [set(rng.sample(range(4), rng.randrange(3))) for _ in texts]
    for i, tokens in enumerate(sets):
        breakers[i, list(tokens)] = True
    longest = filters._longest_repetitions(history, torch.tensor(lengths), breakers)
    for i, text in enumerate(texts):
        found = {t: int(x) for t, x in enumerate(longest[i]) if x}
        assert found == repetitions(text, sets[i])
    rows = rows_of(rng, len(texts))
    logits = torch.tensor(rows)
    ones = torch.ones(len(texts))
    filters.dont_repeat(logits, history, torch.tensor(lengths), breakers, ones * 0.8, ones * 1.2, ones * 2)
    for i, text in enumerate(texts):
        params = SamplingParams(
            dry_multiplier=0.8, dry_base=1.2, dry_allowed_length=2, dry_sequence_breakers=list(sets[i])
        )
        assert logits[i].tolist() == pytest.approx(edited_logits(rows[i], text, len(text), params, ()), rel=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_n_sigma=1.0),
        SamplingParams(typical_p=0.3),
        SamplingParams(typical_p=0.9, temperature=2.0),
        SamplingParams(xtc_probability=1.0, xtc_threshold=0.05),
        SamplingParams(xtc_probability=1.0, xtc_threshold=0.6),
        SamplingParams(xtc_probability=1.0, xtc_threshold=0.1, top_p=0.6, min_p=0.1, temperature=0.8),
        SamplingParams(typical_p=0.5, xtc_probability=0.5, xtc_threshold=0.1, top_k=20),
    ],
)
@pytest.mark.parametrize("banned", [0, VOCAB - 3, VOCAB - 1])
def test_filters_keep_the_same_tokens(params: SamplingParams, banned: int) -> None:
    """With most tokens banned too, and down to a single one."""
    rng = random.Random(3)
    for row in rows_of(rng, 20):
        for t in rng.sample(range(VOCAB), banned):
            row[t] = -float("inf")
        seed, position = rng.getrandbits(63), rng.randrange(1000)
        logits = torch.tensor([row])
        column = {name: torch.tensor([float(getattr(params, name))]) for name in SamplingParams.__slots__ if name in (
            "temperature", "top_p", "min_p", "top_n_sigma", "typical_p", "xtc_threshold",
            "xtc_probability")}  # fmt: skip
        if params.top_n_sigma:
            filters.keep_top_n_sigma(logits, column["top_n_sigma"])
        temperature = column["temperature"]
        top_k = torch.tensor([params.top_k], dtype=torch.int32)
        filters.keep_nucleus(logits, temperature, top_k, column["top_p"], column["min_p"])
        filters.keep_typical(logits, temperature, column["typical_p"])
        filters.exclude_top_choices(
            logits, temperature, column["xtc_threshold"], column["xtc_probability"], torch.tensor([seed]),
            torch.tensor([position]),
        )  # fmt: skip
        assert logits[0].tolist() == filtered_logits(row, params, coin_of(seed, position))


def test_xtc_tosses_its_coin_as_often_as_asked() -> None:
    n = 4000
    logits = torch.zeros(n, 4)
    logits[:, 0] = 1.0
    ones = torch.ones(n)
    filters.exclude_top_choices(logits, ones, ones * 0.1, ones * 0.3, torch.full((n,), 7), torch.arange(n))
    assert (logits[:, 0] == -float("inf")).float().mean() == pytest.approx(0.3, abs=0.03)


def test_xtc_leaves_a_token_where_others_were_excluded_before() -> None:
    logits, one = torch.tensor([[0.0, 1.0, 2.0, -float("inf")]]), torch.ones(1)
    filters.exclude_top_choices(logits, one, one * 0, one, torch.tensor([7]), torch.tensor([0]))
    assert logits.isfinite().tolist() == [[True, False, False, False]]


def test_dry_punishes_and_never_excludes() -> None:
    history, one = torch.zeros(1, 60, dtype=torch.long), torch.ones(1)
    logits = torch.zeros(1, 4)
    no_breakers = torch.zeros(1, 4, dtype=torch.bool)
    filters.dont_repeat(logits, history, torch.tensor([60]), no_breakers, one * 2, one * 50, one * 2)
    assert logits.isfinite().all()
    assert logits[0, 0] < -1e20


def test_top_p_of_nothing_keeps_the_most_likely_token() -> None:
    top_p = SamplingParams(top_p=0).top_p
    logits = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0)) / 100  # nearly alike
    kept = logits.clone()
    filters.keep_nucleus(
        kept, torch.ones(4), torch.zeros(4, dtype=torch.int32), torch.full((4,), top_p), torch.zeros(4)
    )
    assert kept.isfinite().sum(-1).tolist() == [1, 1, 1, 1]
    assert torch.equal(kept.argmax(-1), logits.argmax(-1))


def test_in_deterministic_mode_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    n, vocab_size = 5, 40_003
    logits, temperature = torch.randn(n, vocab_size) * 3, torch.rand(n) + 0.5
    history, breakers = torch.randint(9, (n, 60)), torch.zeros(n, vocab_size, dtype=torch.bool)
    lengths, of_rows = torch.full((n,), 60), torch.linspace(0.3, 0.9, n)
    calls: dict[Callable[..., None], tuple[torch.Tensor, ...]] = {
        filters.keep_top_n_sigma: (of_rows,),
        filters.keep_typical: (temperature, of_rows),
        filters.exclude_top_choices: (temperature, of_rows / 100, torch.ones(n), lengths, lengths),
        filters.dont_repeat: (history, lengths, breakers, of_rows, 1 + of_rows, torch.ones(n)),
    }
    kernels.FORMS.choose(True)
    try:
        for change, params in calls.items():
            together = logits.clone()
            change(together, *params)
            assert not torch.equal(together, logits)
            for i in range(n):
                alone = logits[i : i + 1].clone()
                change(alone, *(each[i : i + 1].clone() for each in params))
                assert torch.equal(alone[0], together[i]), (change, i)
    finally:
        kernels.FORMS.choose(False)
