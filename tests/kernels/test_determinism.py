"""In deterministic forms, what an operation computes for a token depends on that token alone: bit for bit.

`f(x)[i] == f(x[i:i+1])` for numbers of tokens up to 300, among them all up to 40 and those around multiples of 32,
in memory whose other tokens are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from engine.models.shard import Shard
from kernels import AttentionArgs, BlockSparse, PagedContext, QuantizedWeight, RouterArgs, SamplingRows
from kernels.cpu import library
from kernels.cpu.instruction_set import missing_features
from kernels.data.forms import FORMS
from kernels.data.quantized_weight import Weight
from tests.support.attention_calls import spread_rope

MOST = 300
SIZES = [n for n in range(1, MOST + 1) if n <= 40 or n % 32 in (31, 0, 1) or n == MOST]
FEW = (1, 2, 3, 7, 33, 130)
DTYPES, F64 = (torch.float32, torch.bfloat16), torch.float64
Outputs = Tensor | tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    if library.library() is None:
        pytest.skip("without the CPU's own kernels the mode is refused")
    FORMS.choose(True)
    yield
    FORMS.choose(False)


@pytest.fixture(params=[None, "x86-64-v3"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This CPU's instruction set, and one whose kernels have other tiles."""
    library.library.cache_clear()
    if request.param is not None:
        if missing_features(request.param):
            pytest.skip("this CPU is another one")
        monkeypatch.setenv("QUIRE_CPU_ISA", request.param)
    yield
    library.library.cache_clear()


def each_alone(f: Callable[[slice], Outputs], sizes: Any = SIZES, most: int = MOST) -> None:
    """f(some tokens) must be the same for a token whatever the others are."""
    whole = _tuple(f(slice(0, most)))
    for size in sizes:
        for got, want in zip(_tuple(f(slice(0, size))), whole, strict=True):
            assert torch.equal(got, want[:size]), f"{size} tokens"
    for i in range(0, most, 37):
        for got, want in zip(_tuple(f(slice(i, i + 1))), whole, strict=True):
            assert torch.equal(got, want[i : i + 1]), f"token {i} alone"


def _tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def own(x: Tensor, tokens: slice) -> Tensor:
    """Copy tokens into memory with random rows around them."""
    count = tokens.stop - tokens.start
    around = torch.randn(count + 5, *x.shape[1:]).to(x.dtype)
    around[2 : 2 + count] = x[tokens]
    return around[2 : 2 + count]


def quantized(kind: str, n: int, k: int, group: int, experts: int = 0) -> QuantizedWeight:
    stack = (experts,) if experts else ()
    width = k // 2 if kind == "int4" else k
    codes = torch.randint(-120, 120, (*stack, n, width)).to(torch.int8)
    codes = codes.view(torch.uint8) if kind == "int4" else codes
    codes = (torch.randn(*stack, n, k)).to(torch.float8_e4m3fn) if kind == "e4m3" else codes
    return QuantizedWeight(kind, codes, torch.rand(*stack, n, -(-k // group)) / 100, group)  # type: ignore[arg-type]


def weights(dtype: torch.dtype, n: int, k: int) -> dict[str, Weight]:
    group = 32 if k % 32 == 0 else k
    found: dict[str, Weight] = {
        "float": torch.randn(n, k).to(dtype),
        "int8": quantized("int8", n, k, k),
        "int8 groups": quantized("int8", n, k, group),
        "int4": quantized("int4", n, k, group),
        "e4m3": quantized("e4m3", n, k, group),
    }
    found["zeros"] = replace(quantized("int4", n, k, group), zero=torch.randint(-8, 8, (n, k // group)).to(torch.int8))
    order = torch.randperm(k)
    found["permuted"] = replace(quantized("int4", n, k, group), order=order)
    return found


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(72, 40), (256, 96)])
def test_products(dtype: torch.dtype, n: int, k: int) -> None:
    x, residual, norm = torch.randn(MOST, k).to(dtype), torch.randn(MOST, n).to(dtype), torch.rand(k).to(dtype)
    bias = torch.randn(n).to(dtype)
    for name, weight in weights(dtype, n, k).items():
        sizes = SIZES if n == 72 else FEW
        packed = kernels.pack_weight(weight)
        each_alone(lambda at: kernels.linear(own(x, at), packed, bias), sizes)  # noqa: B023
        each_alone(lambda at: kernels.linear_add(own(residual, at), own(x, at), packed), FEW)  # noqa: B023
        if name not in ("float", "int4"):
            continue
        each_alone(lambda at: kernels.norm_linear(own(x, at), norm, 1e-5, packed), FEW)  # noqa: B023
        for gate in ("silu", "gelu_tanh"):
            each_alone(lambda at: kernels.norm_gated(own(x, at), norm, 1e-5, packed, bias, gate), FEW)  # noqa: B023


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [256, 512, 44])
def test_sums_that_ranks_share(dtype: torch.dtype, k: int) -> None:
    """A token's sums are the same on 1, 2, 4 and 8 ranks, and right."""
    x, n = torch.randn(130, k).to(dtype), 72
    bias = torch.randn(n).to(dtype)
    for name, weight in weights(dtype, n, k).items():
        if k == 44 and name != "float":
            continue
        whole = kernels.split_weight(weight, Shard().eighths(k), bias)
        total = kernels.add_pieces(kernels.split_linear(x, whole)[None], dtype)
        each_alone(lambda at: kernels.split_linear(own(x, at), whole), FEW, 130)  # noqa: B023
        exact = weight if isinstance(weight, Tensor) else kernels.reference.dequantize(weight.codes, weight, F64)
        want = x.double() @ exact.double().T + bias.double()
        assert ((total.double() - want).abs() <= 0.02 * want.abs().max()).all(), name
        for size in (2, 4, 8) if k % 8 == 0 and name != "permuted" else (2, 4) if name == "float" else ():
            sums = []
            for rank in range(size):
                part = slice(rank * k // size, (rank + 1) * k // size)
                piece = columns(weight, part)
                if piece is not None:
                    split = kernels.split_weight(piece, Shard(rank, size).eighths(k), None if rank else bias)
                    sums.append(kernels.split_linear(x[:, part], split))
            assert len(sums) in (0, size)
            assert not sums or torch.equal(kernels.add_pieces(torch.stack(sums), dtype), total), (name, size)


def columns(weight: Weight, part: slice) -> Weight | None:
    """Return a rank's columns; None: a group of channels would be cut, which is refused."""
    if isinstance(weight, Tensor):
        return weight[:, part].contiguous()
    width, group = part.stop - part.start, weight.group
    if group < weight.num_channels and width % group:
        return None
    codes = weight.codes
    if weight.kind == "int4":
        codes = kernels.pack_nibbles(torch.cat([codes & 15, codes >> 4], 1)[:, part])
    else:
        codes = codes[:, part].contiguous()
    if group >= weight.num_channels:
        return replace(weight, codes=codes, group=width)
    groups = slice(part.start // group, part.stop // group)
    zero = None if weight.zero is None else weight.zero[:, groups]
    return replace(weight, codes=codes, scale=weight.scale[:, groups], zero=zero)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_over_experts_that_ranks_share(dtype: torch.dtype) -> None:
    hidden, inner, count = 64, 32, 12
    x = torch.randn(40, hidden).to(dtype)
    gate_up, down = (torch.randn(count, n, k).to(dtype) / 8 for n, k in ((2 * inner, hidden), (hidden, inner)))
    ids = torch.stack([torch.randperm(count)[:5] for _ in range(40)]).int()
    chosen = torch.rand(40, 5)

    def sums(rank: int, size: int) -> Tensor:
        at = slice(rank * count // size, (rank + 1) * count // size)
        stack = kernels.Experts(*(kernels.pack_weight(each[at].clone()) for each in (gate_up, down)), first=at.start)
        pieces = [slice(p.start + at.start, p.stop + at.start) for p in Shard(rank, size).eighths(count)]
        return kernels.split_experts(x, ids, chosen, stack, tuple(pieces))

    total = kernels.add_pieces(sums(0, 1)[None], dtype)
    want = kernels.reference.experts(x, ids, chosen, kernels.Experts(gate_up, down))
    torch.testing.assert_close(total, want, atol=0.05 if dtype == torch.bfloat16 else 1e-4, rtol=0.05)
    for size in (2, 4):
        assert torch.equal(kernels.add_pieces(torch.stack([sums(rank, size) for rank in range(size)]), dtype), total), (
            size
        )


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu2", "sigmoid"])
def test_an_activation_does_not_depend_on_the_rest_of_its_row(kind: Any) -> None:
    x = torch.randn(3, 20_000)
    whole = kernels.activation(x.clone(), kind)
    for width in (1, 7, 33, 16_391):
        assert torch.equal(kernels.activation(x[:, :width].contiguous(), kind), whole[:, :width])


@pytest.mark.parametrize("name", ["plain", "sinks"])
def test_a_heads_attention_does_not_depend_on_the_other_heads(name: str) -> None:
    """PyTorch computes attention with this head size, and over latents."""
    args, length = ATTENTION[name], 90
    cache, tables = torch.randn(2, 6, 4, 16, 20), torch.randperm(6).view(1, -1).int()
    query, rows = torch.randn(1, 8, 20), torch.zeros(1, dtype=torch.int32)
    lens = torch.tensor([length], dtype=torch.int32)
    whole = kernels.paged_attention_decode(query, PagedContext(cache[0], cache[1], tables, rows, lens), args)
    for first, last in ((0, 2), (4, 8), (6, 7)):
        own_cache = cache[:, :, first // 2 : -(-last // 2)]
        sinks = None if args.sinks is None else args.sinks[first:last]
        context = PagedContext(own_cache[0], own_cache[1], tables, rows, lens)
        got = kernels.paged_attention_decode(query[:, first:last].clone(), context, replace(args, sinks=sinks))
        assert torch.equal(got, whole[:, first:last])
    latents, absorbed = torch.randn(6, 1, 16, 32), torch.randn(1, 8, 32)

    def attended(heads: slice) -> Tensor:
        some = absorbed[:, heads].clone()
        paged = kernels.PagedLatents(latents, tables, rows, lens)
        return kernels.latent_attention_decode(some, paged, scale=0.2, out=torch.empty(1, some.shape[1], 24))

    assert torch.equal(attended(slice(2, 5)), attended(slice(0, 8))[:, 2:5])
    up = torch.randn(8, 12, 24)
    projected = kernels.head_linear(absorbed[..., :24], up)
    assert torch.equal(kernels.head_linear(absorbed[:, 3:5, :24], up[3:5]), projected[:, 3:5])


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activations(dtype: torch.dtype) -> None:
    x, more, norm = torch.randn(MOST, 88).to(dtype), torch.randn(MOST, 88).to(dtype), torch.rand(88).to(dtype)
    each_alone(lambda at: kernels.rms_norm(own(x, at), norm, 1e-5))
    each_alone(lambda at: kernels.rms_norm(own(x, at).view(-1, 2, 44), norm[:44], 1e-5))
    each_alone(lambda at: kernels.add_rms_norm(own(x, at), own(more, at), norm, 1e-5, norm, 1e-6, 0.3))
    each_alone(lambda at: kernels.scale(own(x, at), 0.7, 30.0))
    each_alone(lambda at: kernels.sigmoid(own(x, at)))
    for gate in ("silu", "gelu_tanh"):
        each_alone(lambda at: kernels.gate_and_mul(own(x, at), gate))  # noqa: B023
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"):
        each_alone(lambda at: kernels.activation(own(x, at), kind), FEW)  # type: ignore[arg-type] # noqa: B023
    each_alone(lambda at: torch.nn.functional.layer_norm(own(x, at), (88,), norm))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding(dtype: torch.dtype) -> None:
    qkv, cos_sin = torch.randn(MOST, 4 * 16 + 2 * 2 * 16).to(dtype), torch.randn(1024, 16)
    positions, slots, norm = torch.randint(1024, (MOST,)), torch.arange(MOST), torch.rand(16).to(dtype)
    for cache_dtype in (dtype, torch.float8_e4m3fn):
        scale = torch.rand(2, 2) + 0.5 if cache_dtype != dtype else None

        def stored(at: slice) -> Outputs:
            cache = torch.zeros(2, 20, 2, 16, 16, dtype=cache_dtype)  # noqa: B023
            query = spread_rope(kernels.rope_and_store)(
                own(qkv, at), positions[at], cos_sin, cache[0], cache[1], slots[at], num_heads=4, num_kv_heads=2,
                q_norm=norm, k_norm=norm, kv_scale=scale,  # noqa: B023
            )  # fmt: skip
            rows = cache.view(torch.uint8).transpose(2, 3).flatten(1, 2).flatten(2)[:, slots[at]]
            return query, rows.transpose(0, 1)

        each_alone(stored, FEW)


ATTENTION = {
    "plain": AttentionArgs(0.25),
    "window": AttentionArgs(0.25, window=70),
    "capped": AttentionArgs(0.25, soft_cap=20.0),
    "alibi": AttentionArgs(0.25, alibi_slopes=torch.rand(8)),
    "sinks": AttentionArgs(0.25, sinks=torch.rand(8)),
    "sparse": AttentionArgs(0.25, sparse=BlockSparse(block=16, local=2, stride=4, head_step=1)),
}


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 16), (torch.float32, 20)])
def test_attention(dtype: torch.dtype, head_dim: int, name: str) -> None:
    """A token's attention is the same decoded or prefilled, in whatever chunk, alone or among sequences that share a
    prefix with it.
    """
    args, length, size = ATTENTION[name], 700 if head_dim == 16 else 140, 16  # PyTorch computes each head apart
    blocks = -(-length // size)
    cache = torch.randn(2, 3 * blocks, 2, size, head_dim).to(dtype)
    tables = torch.randperm(3 * blocks).view(3, blocks).int()
    tables[1:, : 4 * length // 5 // size] = tables[0, : 4 * length // 5 // size]
    query = torch.randn(length, 8, head_dim).to(dtype)

    def prefilled(first: int, last: int) -> Tensor:
        own_cache = cache.clone()
        for position in range(last, blocks * size):  # nothing later than the last query is written
            own_cache[:, tables[0, position // size], :, position % size] = torch.nan
        context = PagedContext(
            own_cache[0], own_cache[1], tables, torch.zeros(1, dtype=torch.int32), torch.tensor([last]).int()
        )
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        return kernels.paged_attention_prefill(own(query, slice(first, last)), starts, context, args)

    whole = prefilled(0, length)
    cuts = [(0, 1), (0, 129), (64, 300), (257, 258), (255, 321), (640, length), (length - 1, length)]
    for first, last in [cut for cut in cuts if cut[0] < cut[1] <= length]:
        assert torch.equal(prefilled(first, last), whole[first:last]), (first, last)
    rows = torch.tensor([0, 1, 2, 0, 2], dtype=torch.int32)
    lens = torch.tensor([length, length - 20, length - 30, 99, length], dtype=torch.int32)
    newest = torch.randn(5, 8, head_dim).to(dtype)
    newest[0], newest[3] = query[length - 1], query[98]
    context = PagedContext(cache[0], cache[1], tables, rows, lens)
    decoded = kernels.paged_attention_decode(newest, context, args)
    assert torch.equal(decoded[0], whole[-1])
    assert torch.equal(decoded[3], whole[98])
    for i in range(5):
        alone = kernels.paged_attention_decode(
            newest[i : i + 1].clone(), replace(context, rows=rows[i : i + 1], lens=lens[i : i + 1]), args
        )
        assert torch.equal(alone[0], decoded[i]), i


def test_attention_over_latents() -> None:
    length, size, blocks = 150, 16, 10
    cache, tables = torch.randn(blocks, 1, size, 24 + 8), torch.randperm(blocks).view(1, -1).int()
    query, up = torch.randn(length, 6, 12 + 8), torch.randn(6, 12, 24)
    rows = torch.zeros(1, dtype=torch.int32)

    def attended(first: int, last: int) -> Tensor:
        own_cache = cache.clone()
        own_query = own(query, slice(first, last))
        absorbed = torch.cat([kernels.head_linear(own_query[..., :12], up.mT), own_query[..., 12:]], 2)
        latents = kernels.PagedLatents(own_cache, tables, rows, torch.tensor([last], dtype=torch.int32))
        out, starts = torch.empty(last - first, 6, 24), torch.tensor([0, last - first], dtype=torch.int32)
        if last - first == 1:
            return kernels.latent_attention_decode(absorbed, latents, scale=0.2, out=out)
        return kernels.latent_attention_prefill(absorbed, starts, latents, scale=0.2, out=out)

    whole = attended(0, length)
    for first, last in [(0, 1), (3, 4), (16, 80), (100, 103), (149, 150)]:
        assert torch.equal(attended(first, last), whole[first:last])


@pytest.mark.parametrize("kind", ["float", "int4", "e4m3"])
def test_experts(kind: str) -> None:
    hidden, inner, count = 64, 32, 6
    x = torch.randn(MOST, hidden).bfloat16()
    router = kernels.pack_router(torch.randn(count, hidden))
    if kind == "float":
        stacks = [torch.randn(count, 2 * inner, hidden).bfloat16(), torch.randn(count, hidden, inner).bfloat16()]
        packed = [kernels.pack_weight(each) for each in stacks]
    else:
        packed = [
            kernels.pack_weight(quantized(kind, n, k, 32, count)) for n, k in ((2 * inner, hidden), (hidden, inner))
        ]
    stack = kernels.Experts(*packed)
    for scoring in ("softmax", "softmax_chosen", "sigmoid"):
        rule = kernels.Router(3, scoring, renormalise=True, scale=1.5)  # type: ignore[arg-type]

        def routed(at: slice) -> Outputs:
            tokens = own(x, at)
            ids, chosen = kernels.route(tokens, RouterArgs(router, rule))  # noqa: B023
            return ids, chosen, kernels.experts(tokens, ids, chosen, stack)

        each_alone(routed, FEW)


def test_sampling_and_log_probabilities() -> None:
    logits = torch.randn(40, 1003) * 4
    rows = SamplingRows(
        torch.linspace(0, 2, 40), torch.arange(40).int() * 3, torch.linspace(0.5, 1, 40), torch.linspace(0, 0.1, 40),
        torch.arange(40), torch.arange(40).int(),
    )  # fmt: skip
    each_alone(
        lambda at: kernels.sample(own(logits, at), SamplingRows(*(row[at] for row in rows))), (1, 2, 17), most=40
    )
    ids = torch.randint(1003, (40,))
    each_alone(lambda at: kernels.token_logprobs(own(logits, at), ids[at], 5), (1, 2, 17), most=40)


def test_log_probabilities_of_a_large_vocabulary_with_threads() -> None:
    """PyTorch divides the sum over a single row among threads."""
    logits, ids = torch.randn(12, 50257) * 3, torch.randint(50257, (12,))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        several = kernels.token_logprobs(logits, ids, 2)
        alone = [kernels.token_logprobs(logits[i : i + 1], ids[i : i + 1], 2) for i in range(12)]
        torch.set_num_threads(1)
        by_one = kernels.token_logprobs(logits, ids, 2)
    finally:
        torch.set_num_threads(threads)
    for which in range(4):
        assert torch.equal(several[which], torch.cat([each[which] for each in alone]))
        assert torch.equal(several[which], by_one[which])


def recurrent_states(num_blocks: int, size: int) -> kernels.DeltaStates:
    return kernels.DeltaStates(
        torch.randn(num_blocks, 4, 8, 12), torch.randn(num_blocks, size, 2, 8), torch.randn(num_blocks, size, 4, 12),
        -torch.rand(num_blocks, size, 4),
    )  # fmt: skip


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_delta_rule(state_dtype: torch.dtype) -> None:
    """The same outputs and states in one step, in chunks, and one by one; intermediate blocks are not held."""
    length, size = 45, 8
    qkv, gates = torch.randn(length, 2 * 2 * 8 + 4 * 12), torch.randn(length, 8)
    rate, bias = torch.rand(4), torch.randn(4)

    def run(cuts: list[int]) -> tuple[Tensor, Tensor]:
        states = recurrent_states(8, size)
        states = replace(states, before=states.before.to(state_dtype))
        outputs = []
        for first, last in zip([0, *cuts], [*cuts, length], strict=True):
            held = {(first - 1) // size, (last - 1) // size}
            table = torch.tensor([[i if i in held else -1 for i in range(6)], [-1] * 6], dtype=torch.int32)
            context = kernels.StateContext(
                table, torch.tensor([0]).int(), torch.tensor([0, last - first]).int(), torch.tensor([last]).int(),
                None, size,
            )  # fmt: skip
            at = slice(first, last)
            outputs.append(kernels.delta_rule(own(qkv, at), own(gates, at), rate, bias, states, context))
        slots = (length - 1) % size + 1
        return torch.cat(outputs), states.updates[(length - 1) // size, :slots]

    want = run([])
    for cuts in ([8], [3, 4, 17], [40], list(range(1, length))):
        for got, expected in zip(run(cuts), want, strict=True):
            assert torch.equal(got, expected), cuts


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norms_and_adapters(dtype: torch.dtype) -> None:
    x, gate, norm = torch.randn(MOST, 4, 12).to(dtype), torch.randn(MOST, 48).to(dtype), torch.rand(12).to(dtype)
    each_alone(lambda at: kernels.gated_rms_norm(own(x, at), own(gate, at), norm, 1e-5), FEW)
    wide = torch.rand(48).to(dtype)
    each_alone(lambda at: kernels.grouped_rms_norm(own(gate, at), own(gate, at), wide, 1e-5, 2, True), FEW)
    y, slots, groups = (
        torch.randn(MOST, 20).to(dtype),
        torch.randint(-1, 3, (MOST,)).int(),
        (kernels.RowGroup(0, 20, 0),),
    )
    blocks = kernels.LoraWeights.blocks_of(groups, torch.device("cpu"))
    lora = kernels.LoraWeights(
        torch.randn(3, 8, 48).to(dtype), torch.randn(3, 20, 8).to(dtype), torch.ones(3, 20), torch.zeros(3, 20),
        groups, *blocks,
    )  # fmt: skip
    each_alone(
        lambda at: kernels.lora_add(own(y, at), own(gate, at), lora, kernels.AdapterTokens(slots[at].int(), 3)), FEW
    )


def test_forms_in_use_do_not_change() -> None:
    class User:
        pass

    user = User()
    FORMS.hold(user)
    FORMS.choose(True)
    with pytest.raises(RuntimeError, match="another engine of this process runs with deterministic"):
        FORMS.choose(False)
    FORMS.release(user)
    FORMS.choose(False)
    FORMS.hold(other := User())
    with pytest.raises(RuntimeError, match="runs without deterministic"):
        FORMS.choose(True)
    del other
    FORMS.choose(True)
