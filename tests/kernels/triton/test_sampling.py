"""Sampling by the reference implementation and in Triton: exact filters, true distributions, reproducible noise."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

import kernels
from kernels import Part, SamplingRows, reference
from kernels.triton import sampling, thresholds

INF = float("inf")
# Weights of infinite logits are computed and not used; only numpy, which the interpreter computes with, warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
BOTH = pytest.mark.parametrize("module", [reference, sampling], ids=["reference", "triton"])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred tokens become a vocabulary of many pieces, and more survivors than can be set aside."""
    monkeypatch.setattr(sampling, "PIECE", 32)
    monkeypatch.setattr(thresholds, "PIECE", 32)
    monkeypatch.setattr(thresholds, "GROUP", 4)
    monkeypatch.setattr(thresholds, "FEW_ASIDE", 32)
    monkeypatch.setattr(thresholds, "MANY_ASIDE", 128)
    monkeypatch.setattr(thresholds, "SEARCH_BLOCK", 32)


def options(
    batch: Any,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seeds: Any = None,
    positions: Any = None,
) -> Any:
    """`sample`'s arguments after the logits, each one number for all rows or a list."""

    def column(value: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * batch, dtype=dtype)

    return SamplingRows(
        column(temperature, torch.float32), column(top_k, torch.int32), column(top_p, torch.float32),
        column(min_p, torch.float32), torch.arange(batch) if seeds is None else seeds,
        torch.zeros(batch, dtype=torch.int64) if positions is None else positions,
    )  # fmt: skip


def allowed(logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """The slow and sure way: sort, cut, add up. Returns what may be sampled, and whether top_p's cut is too close
    to call.
    """
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    kept = sorted((i for i, w in enumerate(weights) if w >= min_p), key=lambda i: -logits[i])
    if 0 < top_k < len(kept):
        kept = [i for i in kept if logits[i] >= logits[kept[top_k - 1]]]
    if top_p < 1:
        total, mass, last = sum(weights[i] for i in kept), 0.0, kept[-1]
        for rank, i in enumerate(kept):
            mass += weights[i]
            ties_on = rank + 1 < len(kept) and logits[kept[rank + 1]] == logits[i]
            if not ties_on and abs(mass / total - top_p) < 1e-5:
                return set(kept), True
            if mass >= top_p * total:
                last = i
                break
        kept = [i for i in kept if logits[i] >= logits[last]]
    return set(kept), False


FILTERS = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 9, "top_p": 0.5, "min_p": 0.1, "temperature": 2.0},
    {"top_p": 0.99, "min_p": 0.001, "temperature": 0.2},
    {"top_k": -1},
    {"top_k": 10**6},
]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_thresholds_are_exact(module: Any, filters: dict[str, Any], dtype: torch.dtype) -> None:
    shapes = [3 * torch.randn(300), torch.randint(0, 4, (300,)).float(), torch.randn(300) - 1000, torch.zeros(300)]
    logits = torch.stack([*shapes, torch.where(torch.rand(300) < 0.9, -INF, torch.randn(300))]).to(dtype)
    check_thresholds(module, logits, filters)


MANY_FILTERS = [{"top_k": 20}, {"top_p": 0.9}, *FILTERS[5:8], {"top_k": 200}, {"top_k": 290, "top_p": 0.99}]


@pytest.mark.parametrize(
    ("filters", "dtype"),
    [*((each, torch.float32) for each in MANY_FILTERS), (MANY_FILTERS[-1], torch.bfloat16)],
    ids=str,
)
def test_thresholds_of_a_vocabulary_of_many_blocks(filters: Any, dtype: torch.dtype, small_blocks: Any) -> None:
    check_thresholds(sampling, torch.randn(4, 333).mul(torch.tensor([[0.01], [1], [3], [10]])).to(dtype), filters)


def check_thresholds(module: Any, logits: Any, filters: Any) -> None:
    every = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    temperature, top_k, top_p, min_p = options(len(logits), **filters)[:4]
    wide = logits.float()
    find = reference.sampling_thresholds if module is reference else thresholds.sampling_thresholds
    found = find(wide if module is reference else logits, temperature, top_k, top_p, min_p)
    exact = [float(x[0]) for x in (temperature, top_k, top_p, min_p)]  # as float32 has them
    for row, threshold in zip(wide, found.tolist(), strict=True):
        want, unsure = allowed(row.tolist(), exact[0], int(every["top_k"]), exact[2], exact[3])
        got = set((row >= threshold).nonzero().flatten().tolist())
        assert unsure or got - want <= set((row == -INF).nonzero().flatten().tolist()), filters
        assert unsure or want <= got, filters


@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize(
    ("module", "draws", "filters"),
    [
        (sampling, 120, {"temperature": 0.5}),
        (reference, 20_000, {}),
        (reference, 20_000, {"top_k": 5}),
        (reference, 20_000, {"temperature": 2.0, "top_p": 0.7, "min_p": 0.02}),
    ],
)
def test_samples_follow_the_softmax(
    module: Any, draws: int, filters: dict[str, Any], vary: str, small_blocks: Any
) -> None:
    logits = torch.tensor([1.5, -0.5, 2.0, 0.0, 1.0, -2.0, 1.9, 0.3])
    # A seed's low bits, its high bits, or the position alone must be enough to make draws independent.
    varied = {vary: torch.arange(draws) << (33 if vary == "seeds" else 0)}
    chosen = module.sample(logits.expand(draws, -1).contiguous(), options(draws, **filters, **varied))
    every = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    keep = sorted(allowed(logits.tolist(), **every)[0])
    expected = torch.zeros(8).index_copy(0, torch.tensor(keep), (logits[keep] / every["temperature"]).softmax(0))
    counts = chosen.bincount(minlength=8)
    assert not counts[expected == 0].any()
    chi_square = float(((counts - draws * expected) ** 2 / (draws * expected))[keep].sum())
    assert chi_square < 30  # 7 degrees of freedom: 1 in 10,000


def test_noise_reaches_far_into_the_tail() -> None:
    """A token of probability 1e-6 is drawn about as often as that: the noise is not cut off."""
    draws = 1 << 22
    noise = reference.gumbel(reference.random_bits(torch.tensor(7), torch.tensor(0), torch.arange(draws)))
    for threshold in (0.0, 5.0, 9.0, 12.0):
        expected = draws * -math.expm1(-math.exp(-threshold))
        assert abs(int((noise > threshold).sum()) - expected) < 5 * math.sqrt(expected)
    assert noise.isfinite().all()
    assert abs(float(noise.double().mean()) - 0.5772156649) < 0.003


def test_noise_is_finite_at_the_ends() -> None:
    ends = torch.tensor([0, 1, -1, -2, -(2**31), 2**31 - 1], dtype=torch.int32)
    assert reference.gumbel(ends).isfinite().all()
    assert float(reference.gumbel(ends[:1])) == pytest.approx(33 * math.log(2))


@triton.jit
def _noise_kernel(seeds, positions, bits, noise, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tokens = tl.arange(0, BLOCK)
    random = sampling._random_bits(tl.load(seeds + row), tl.load(positions + row), tokens)
    tl.store(bits + row * BLOCK + tokens, random.to(tl.int32, bitcast=True))
    tl.store(noise + row * BLOCK + tokens, sampling._gumbel(random, False))


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_kernel_and_twin_draw_the_same_bits(position_dtype: torch.dtype) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32, 1 << 31, 123456789123456789])
    positions = torch.tensor([0, 1, 2**31 - 1, 77, 5, 0, 1 << 20, 3], dtype=position_dtype)
    bits, noise = torch.empty(8, 512, dtype=torch.int32), torch.empty(8, 512)
    _noise_kernel[(8,)](seeds, positions, bits, noise, BLOCK=512)
    assert bits.equal(reference.random_bits(seeds[:, None], positions[:, None], torch.arange(512)))
    torch.testing.assert_close(noise, reference.gumbel(bits), rtol=1e-5, atol=1e-5)


def test_every_input_bit_moves_every_output_bit() -> None:
    def bits(seed: Any, position: Any, token: Any) -> Any:
        return reference.random_bits(torch.tensor(seed), torch.tensor(position), token)

    tokens = torch.arange(20_000)
    seed, position, base = 1234567890123456789, 1000, bits(1234567890123456789, 1000, tokens)
    changed = [bits(seed ^ (1 << i), position, tokens) for i in range(63)]
    changed += [bits(seed, position ^ (1 << i), tokens) for i in range(31)]
    changed += [bits(seed, position, tokens ^ (1 << i)) for i in range(18)]
    for other in changed:
        for out in range(32):
            flips = float((((base ^ other) >> out) & 1).float().mean())
            assert 0.45 < flips < 0.55


@BOTH
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(module: Any) -> None:
    logits = torch.randn(7, 5000)
    seeds, positions = torch.arange(7) + 100, torch.arange(7) * 3
    filters = {"temperature": [1.0, 0.7, 0.0, 1.0, 1.2, 1.0, 0.9], "top_k": [0, 20, 0, 0, 40, 0, 0]}
    filters |= {"top_p": [1, 0.9, 1, 0.95, 1, 1, 0.9], "min_p": [0, 0, 0.1, 0, 0, 0.05, 0]}
    arguments = options(7, **filters, seeds=seeds, positions=positions)
    together = module.sample(logits, arguments)
    assert together.dtype == torch.int64
    for order in (torch.randperm(7), torch.tensor([4, 4, 1])):
        assert module.sample(logits[order], SamplingRows(*(x[order] for x in arguments))).equal(together[order])
    for i in range(7):
        alone = SamplingRows(*(x[i : i + 1] for x in arguments))
        assert int(module.sample(logits[i : i + 1], alone)) == int(together[i])
    assert not module.sample(logits, options(7, **filters, seeds=seeds, positions=positions + 1)).equal(together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_and_twin_choose_the_same_tokens(dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(16, 2 * sampling.PIECE + 100)).to(dtype)
    random = torch.rand(4, 16)
    arguments = options(
        16,
        temperature=(random[0] * 1.5).where(random[0] > 0.2, 0).tolist(),
        top_k=(random[1] * 60).int().tolist(),
        top_p=(random[2] * 1.5 + 0.05).clamp(max=1).tolist(),
        min_p=(random[3] - 0.7).clamp(min=0).tolist(),
        seeds=torch.randint(-(2**63), 2**63 - 1, (16,)),
        positions=torch.randint(0, 2**20, (16,)).int(),
    )
    # Noise differs in its last bits, and sums near top_p do: one row may.
    assert int((sampling.sample(logits, arguments) != reference.sample(logits, arguments)).sum()) <= 1


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equals(module: Any, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 9000).to(dtype)
    logits[1, 77], logits[1, 8000] = 3, 3
    logits[2, 8999] = 1
    arguments = options(3, temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)
    assert module.sample(logits, arguments).tolist() == [0, 77, 8999]


@BOTH
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str)
def test_infinities_and_nans(module: Any, filters: dict[str, Any]) -> None:
    """-inf is never taken; a row with NaN or inf in any piece, or with nothing but -inf, gives no token."""
    logits = torch.full((10, 9000), -INF)
    logits[:, 41:43] = torch.randn(10, 2)
    logits[4, 7] = INF
    logits[5] = float("nan")
    logits[6, 8999] = float("nan")
    logits[7, 0], logits[7, 8000] = INF, float("nan")
    logits[8:] = -INF
    logits[9, 5000] = float("nan")
    chosen = module.sample(logits, options(10, **filters)).tolist()
    assert set(chosen[:4]) <= {41, 42}
    assert chosen[4:] == [kernels.NOT_FINITE] * 4 + [kernels.NOTHING_ALLOWED, kernels.NOT_FINITE]


@BOTH
def test_a_temperature_that_overflows_is_no_fault(module: Any) -> None:
    logits = torch.randn(3, 300)
    logits[1] *= -1e30
    chosen = module.sample(logits, options(3, temperature=[1e-40, 1e-40, 1e-30]))
    assert ((chosen >= 0) & (chosen < 300)).all()


@BOTH
def test_rows_may_have_a_stride(module: Any) -> None:
    logits = torch.randn(4, 300)[:, 10:210]
    arguments = options(4, top_k=20, top_p=0.9)
    assert module.sample(logits, arguments).equal(module.sample(logits.contiguous(), arguments))


@BOTH
def test_an_empty_batch(module: Any) -> None:
    assert module.sample(torch.empty(0, 50), options(0)).shape == (0,)


def test_the_package_picks_the_twin_on_a_cpu() -> None:
    logits = torch.randn(3, 50)
    assert kernels.sample(logits, options(3)).equal(reference.sample(logits, options(3)))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(module: Any, dtype: torch.dtype, small_blocks: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (1, 31, 32, 33, 300):
        logits = torch.randn(5, vocab_size + 3, generator=generator).to(dtype)
        bits = torch.rand(3, -(-vocab_size // 32) * 32, generator=generator) < 0.5
        positions = torch.arange(32)
        words = (bits.view(3, -1, 32).long() << positions).sum(-1)
        masks = torch.where(words >= 2**31, words - 2**32, words).int()
        expected = logits.clone()
        for mask, row in enumerate((4, 0, 2)):
            expected[row, :vocab_size][~bits[mask, :vocab_size]] = -INF
        module.mask_logits(logits[:, :vocab_size], masks, torch.tensor([1, -1, 2, -1, 0], dtype=torch.int32))
        assert torch.equal(logits, expected)
    module.mask_logits(logits[:0], masks, torch.empty(0, dtype=torch.int32))


@BOTH
def test_parts(module: Any, small_blocks: Any) -> None:
    """Rows that nothing filters first, then the rest of them: those with filters, and those with a mask."""
    logits = torch.randn(7, 300)
    arguments = options(7, temperature=[1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0], top_k=[0, 5, 300, 0, 5, 0, 0],
                        top_p=[1.0, 1.0, 1.0, 0.9, 0.9, 1.0, 1.0],
                        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0])  # fmt: skip
    everywhere = module.sample(logits, arguments).tolist()
    out = torch.arange(-1, -8, -1)
    assert module.sample(logits, arguments, out=out.clone()).tolist() == everywhere
    filtered = {1, 3, 5}
    plain = module.sample(logits, arguments, part=Part.PLAIN)
    assert plain.tolist() == [0 if i in filtered else token for i, token in enumerate(everywhere)]
    mask_of = torch.tensor([-1, -1, 4, -1, -1, 0, 2], dtype=torch.int32)
    rest = module.sample(logits, arguments, part=Part.REST, mask_of=mask_of, out=out)
    assert rest is out
    assert rest.tolist() == [token if i in filtered | {2, 6} else -1 - i for i, token in enumerate(everywhere)]


def sample_on_ranks(module: Any, logits: Tensor, arguments: Any, size: int) -> Tensor:
    """`sample` with `Part.PLAIN`, with the columns divided among ranks as `Shard.padded_span` does."""
    vocab_size = logits.shape[1]
    n = -(-vocab_size // size)
    padded = torch.full((len(logits), n * size), INF, dtype=logits.dtype)  # with what no row may see
    padded[:, :vocab_size] = logits
    firsts = [min(rank * n, vocab_size) for rank in range(size)]
    parts = zip(padded.split(n, 1), firsts, strict=True)
    keys = [module.best_keys(own.contiguous(), arguments, first, vocab_size) for own, first in parts]
    assert all(each.dtype == torch.int64 for each in keys)
    return torch.as_tensor(module.best_tokens(torch.cat(keys, 1)))


def mixed(batch: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Logits with equals, greedy rows and random ones, some of which are filtered."""
    logits = (3 * torch.randn(batch, vocab_size)).to(dtype)
    logits[: batch // 4] = torch.randint(-1, 2, (batch // 4, vocab_size)).to(dtype)
    logits[0] = torch.where(torch.rand(vocab_size) < 0.5, 0.0, -0.0)  # which are equal, too
    kinds, random = torch.arange(batch) % 8, torch.rand(2, batch)
    arguments = options(
        batch,
        temperature=(random[0] + 0.3).where(kinds % 2 > 0, 0).tolist(),
        top_k=torch.tensor([0, 0, 3, vocab_size, vocab_size + 1, vocab_size - 1, 0, 0])[kinds].tolist(),
        top_p=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5])[kinds].tolist(),
        min_p=torch.where(random[1] < 0.1, 0.1, 0.0).tolist(),
        seeds=torch.randint(-(2**63), 2**63 - 1, (batch,)),
        positions=torch.randint(0, 2**20, (batch,)).int(),
    )
    return logits, arguments


@BOTH
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, torch.float16), (2, torch.bfloat16), (3, torch.float32), (3, torch.bfloat16), (4, torch.float16)],
)
def test_ranks_with_parts_of_the_logits(module: Any, size: int, dtype: torch.dtype, small_blocks: Any) -> None:
    """Parts of several pieces or one, uneven ones, and ranks without any token: they choose what one rank does."""
    for vocab_size in (1, 2, 9, 129, 333):
        logits, arguments = mixed(32, vocab_size, dtype)
        expected = module.sample(logits, arguments, part=Part.PLAIN)
        assert sample_on_ranks(module, logits, arguments, size).equal(expected), vocab_size
        assert vocab_size == 1 or expected.any()


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ranks_see_each_others_infinities_and_nans(module: Any, temperature: float, small_blocks: Any) -> None:
    logits = torch.full((9, 130), -INF)
    logits[:5, 41] = 0
    for row, (token, fault) in enumerate([(7, INF), (129, INF), (0, math.nan), (100, -math.nan)]):
        logits[1 + row, token] = fault
    logits[5, 7], logits[5, 129] = math.nan, INF
    logits[7:] = torch.randn(2, 130)
    logits[7, 3], logits[8, 128] = math.nan, -math.nan  # of rows that are filtered
    arguments = options(9, temperature=temperature, top_k=[0] * 7 + [5 if temperature else 0] * 2)
    faults = [kernels.NOT_FINITE] * 5 + [kernels.NOTHING_ALLOWED]
    expected = [41, *faults, *([0, 0] if temperature else [kernels.NOT_FINITE] * 2)]
    assert module.sample(logits, arguments, part=Part.PLAIN).tolist() == expected
    for size in (1, 2, 3, 4):
        assert sample_on_ranks(module, logits, arguments, size).tolist() == expected


@BOTH
def test_a_rank_whose_best_value_overflows(module: Any) -> None:
    """It is as large as finite numbers are: no fault, and the lowest of such tokens is chosen."""
    logits = torch.full((2, 100), 1e30)
    logits[0, :70] = -1.0
    arguments = options(2, temperature=1e-30)
    expected = [70, 0]
    assert module.sample(logits, arguments, part=Part.PLAIN).tolist() == expected
    assert sample_on_ranks(module, logits, arguments, 4).tolist() == expected


def test_kernel_and_reference_choose_the_same_tokens_from_parts() -> None:
    """Compare ranks whose parts have the size that they have on a GPU."""
    logits, arguments = mixed(16, 2 * sampling.PIECE + 101, torch.bfloat16)
    expected = sample_on_ranks(reference, logits, arguments, 2)
    # Noise differs in its last bits: one row may.
    assert int((sample_on_ranks(sampling, logits, arguments, 2) != expected).sum()) <= 1


@BOTH
def test_keys_order_tokens_by_value_then_id(module: Any) -> None:
    values = torch.tensor([[-INF, -1e30, -1.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 3.4e38, INF]])
    keys = torch.stack(
        [module.best_keys(values[:, i : i + 1], options(1, temperature=0.0), i, 10)[0, 0] for i in range(10)]
    )
    assert keys.diff().gt(0).tolist() == [True, True, True, True, False, True, True, True, True]
    last = module.best_keys(values[:, 8:9], options(1, temperature=0.0), 2**31 - 2, 2**31 - 1)
    assert module.best_tokens(torch.stack([keys[7:8], last[0]], 1)).tolist() == [2**31 - 2]


@BOTH
def test_keys_of_an_empty_batch(module: Any) -> None:
    assert sample_on_ranks(module, torch.empty(0, 50), options(0), 2).shape == (0,)
