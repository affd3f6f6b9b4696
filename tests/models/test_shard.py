"""Tensor parallelism: ranks that each hold a part of the model compute what one rank computes."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.formats.floats import FLOATS
from engine.models.layers import Embedding, LMHead
from engine.models.matrix import Scope
from engine.models.norms import RMSNorm
from engine.models.residual import SublayerInput
from engine.models.shard import Shard, Span, Stage
from engine.models.spec import AttentionSpec, SparseSpec
from engine.models.weights import checkpoint_tensors
from tests.oracles.families import CASES, make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode
from tests.support.loaded import load as load_model

NUM_TOKENS = 8


class Meeting:
    """Exchange of tensors between ranks in threads of one process."""

    def __init__(self, size: Any) -> None:
        self.barrier = threading.Barrier(size)
        self.tensors = [None] * size

    def exchange(self, rank: Any, x: Any) -> Any:
        self.tensors[rank] = x.clone()
        self.barrier.wait()
        tensors = list(self.tensors)
        self.barrier.wait()  # no rank writes the next one before all have read
        return tensors


class ThreadCommunicator:
    def __init__(self, rank: Any, meeting: Any) -> None:
        self.rank, self.meeting = rank, meeting

    def all_reduce(self, x: Any) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def add_sum(self, residual: Any, x: Any, norm: Any = None) -> Tensor | None:
        residual.add_(self.all_reduce(x))
        return None if norm is None else kernels.rms_norm(residual, *norm)

    def add_gemm(self, residual: Any, gemm: Any, norm: Any = None) -> Tensor | None:
        return self.add_sum(residual, gemm(slice(None)), norm)

    def add_pieces(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        return kernels.add_pieces(torch.stack(self.meeting.exchange(self.rank, own)), dtype)

    def all_gather(self, x: Any, out: Any) -> Any:
        return out.copy_(torch.cat(self.meeting.exchange(self.rank, x), dim=-1)[:, : out.shape[1]])

    def least(self, number: int) -> int:
        return number


def on_ranks(size: Any, work: Any) -> Any:
    """work(shard, communicator) of every rank, in threads → their results."""
    meeting = Meeting(size)

    def run(rank: Any) -> Any:
        try:
            return work(Shard(rank, size), ThreadCommunicator(rank, meeting))
        except BaseException:
            meeting.barrier.abort()  # or the others would wait for ever
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def load(folder: Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, "device": "cpu", "max_model_len": 256, **options}
    return load_model(folder, options.pop("spec", None) or read_spec(folder), **options)


def logits(decoded: Any) -> Tensor:
    return torch.cat([each.logits for each in decoded])


# KV heads on several ranks each; of the last three, queries and keys of all heads are normed together.
ON_FOUR = ["mistral-window", "qwen2-window", "qwen3", "qwen3_moe", "gemma4_small", "olmo2", "olmoe", "minimax_m2"]


@pytest.mark.parametrize(("name", "size"), [(name, 2) for name in sorted(CASES)] + [(name, 4) for name in ON_FOUR])
def test_ranks_equal_one_rank(tmp_path: Path, name: str, size: int) -> None:
    make_checkpoint(name, tmp_path)
    prompts = make_prompts()[:2]
    expected = decode(load(tmp_path), prompts, 4, chunk=11)
    forced = [each.token_ids for each in expected]

    def work(shard: Any, communicator: Any) -> Any:
        model = load(tmp_path, shard=shard, communicator=communicator)
        model.pack_weights()
        return logits(decode(model, prompts, 4, chunk=11, forced=forced))

    tolerance = 1e-5 * max(1.0, float(logits(expected).abs().max()))
    for got in on_ranks(size, work):
        assert (got - logits(expected)).abs().max() <= tolerance
        assert torch.equal(got.argmax(-1), logits(expected).argmax(-1)), "the same greedy tokens"


def test_a_rank_holds_its_part_only(tmp_path: Path) -> None:
    """Half of the matrices, at least one of the KV heads, all of everything else."""
    make_checkpoint("qwen2", tmp_path)
    whole, half = load(tmp_path), load(tmp_path, shard=Shard(1, 2))
    attention = half.layers[0].attention
    assert (attention.spec.num_heads, attention.spec.num_kv_heads) == (2, 1)
    assert half.spec.layers[0].mixer == attention.spec
    assert half.spec.layers[0].mlp.intermediate_size == whole.spec.layers[0].mlp.intermediate_size // 2
    assert half.lm_head.weight is half.embed_tokens.weight
    matrices = [sum(p.numel() for p in model.parameters() if p.dim() == 2) for model in (whole, half)]
    assert matrices[0] == 2 * matrices[1]
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in checkpoint_tensors(half).items():
        if name != "lm_head.weight":  # tied
            assert torch.equal(tensor.memory, stored[name][tensor.index]), name


def test_ranks_divide_every_tensor_without_a_gap(tmp_path: Path) -> None:
    make_checkpoint("llama-biases", tmp_path)
    ranks = [checkpoint_tensors(load(tmp_path, shard=Shard(rank, 4))) for rank in range(4)]
    names = set(load_file(tmp_path / "model.safetensors"))
    assert all(set(rank) == names for rank in ranks)
    for name in names:
        read = torch.zeros(ranks[0][name].shape, dtype=torch.int32)
        for rank in ranks:
            read[rank[name].index] += 1
        copies = {"norm": 4, "k_proj": 2, "v_proj": 2}  # two KV heads on four ranks
        assert read.eq(next((n for part, n in copies.items() if part in name), 1)).all(), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_vocabulary_that_ranks_cannot_divide(size: int) -> None:
    """Nine tokens on four ranks: three, three, three and none."""
    table, head, norm = torch.randn(9, 8), torch.randn(9, 8), torch.randn(8)
    ids, hidden = torch.tensor([0, 8, 3, 5, 3]), torch.randn(5, 8)

    def work(shard: Any, communicator: Any) -> Any:
        scope = Scope(torch.float32, torch.device("cpu"), FLOATS, shard, communicator)
        modules = Embedding(scope / "in", 9, 8), LMHead(scope, 9, 8), RMSNorm(scope / "norm", 8, 1e-6)
        for module, value in zip(modules, (table, head, norm), strict=True):
            module.weight.fill_(torch.nan)  # type: ignore[operator]  # what memory may hold where no row is
            for tensor in module.tensors():
                tensor.memory.copy_(value[tensor.index])
        own, buffer, row = modules[1].own_logits(SublayerInput(hidden, modules[2])), torch.empty(5, 9), torch.zeros(5)
        assert modules[1].gather(own, buffer) is buffer
        assert torch.equal(modules[1].gather(own), buffer)
        params = kernels.SamplingRows(row, row.int(), row + 1, row, row.long(), row.int())
        keys = kernels.best_keys(own, params, modules[1].first_id, 9)
        return modules[0](ids), buffer, kernels.best_tokens(modules[1].gather_keys(keys))

    want = torch.nn.functional.rms_norm(hidden, (8,), norm, 1e-6) @ head.T
    for embedded, got, best in on_ranks(size, work):
        assert torch.equal(embedded, table[ids])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        assert torch.equal(best, want.argmax(-1))


def test_kv_scales_of_a_ranks_heads(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor([2.0, 3.0]),
        "layers.1.self_attn.v_scale": torch.tensor(4.0),
    }
    save_file(load_file(file) | scales, file)
    first, second = (load(tmp_path, shard=Shard(rank, 2)) for rank in range(2))
    assert [model.layers[0].attention.kv_scale.tolist() for model in (first, second)] == [[[2], [1]], [[3], [1]]]
    assert second.layers[1].attention.kv_scale.tolist() == [[1], [4]]


def test_sinks_of_a_ranks_heads(tmp_path: Path) -> None:
    """Scores so low that they take nothing, then some that do: of each head its own."""
    make_checkpoint("qwen2", tmp_path)
    file, prompts, spec = tmp_path / "model.safetensors", make_prompts(), read_spec(tmp_path)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, learnt=("sinks",)))
        for layer in spec.layers
        if isinstance(layer.mixer, AttentionSpec)
    )
    without, stored = decode(load(tmp_path), prompts, NUM_TOKENS), load_file(file)
    forced = [each.token_ids for each in without]

    def store(*sinks: float) -> None:
        names = [f"model.layers.{i}.self_attn.sinks" for i in range(len(layers))]
        save_file(stored | {name: torch.tensor(sinks) for name in names}, file)

    def with_sinks(**options: Any) -> Any:
        model = load_model(tmp_path, replace(spec, layers=layers), dtype=torch.float32, device="cpu", **options)
        return logits(decode(model, prompts, NUM_TOKENS, forced=forced))

    store(-1e4, -1e4, -1e4, -1e4)
    assert (with_sinks() - logits(without)).abs().max() <= 1e-5
    store(0.0, 3.0, 0.5, -1.0)
    other = with_sinks()
    store(-1.0, 0.5, 3.0, 0.0)
    whole = with_sinks()
    assert (whole - logits(without)).abs().max() > 0.01
    assert (whole - other).abs().max() > 0.01
    for got in on_ranks(2, lambda shard, meet: with_sinks(shard=shard, communicator=meet)):
        assert (got - whole).abs().max() <= 3e-5


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, r"'num_attention_heads' \(4\) cannot be divided among 3 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}, 4, r"'num_key_value_heads' \(6\)"),
        ({"intermediate_size": 191}, 2, r"'intermediate_size' \(191\) cannot be divided among 2 ranks"),
    ],
)
def test_what_cannot_be_divided(tmp_path: Path, changes: dict[str, Any], size: int, message: str) -> None:
    make_checkpoint("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        load(tmp_path, shard=Shard(0, size))


def test_spans() -> None:
    assert [Shard(rank, 2).span("heads", 4, width=3) for rank in range(2)] == [Span(12, 0, 6), Span(12, 6, 12)]
    copies = [Shard(rank, 4).span("heads", 2, width=3, replicate=True) for rank in range(4)]
    assert copies == [Span(6, 0, 3), Span(6, 0, 3), Span(6, 3, 6), Span(6, 3, 6)]
    assert [Shard(rank, 3).padded_span(7) for rank in range(3)] == [
        (Span(7, 0, 3), 3),
        (Span(7, 3, 6), 3),
        (Span(7, 6, 7), 3),
    ]


def test_which_blocks_a_ranks_heads_see(tmp_path: Path) -> None:
    """Block-sparse attention counts heads over all ranks."""
    make_checkpoint("qwen2", tmp_path)
    sparse, prompts, spec = SparseSpec(block=8, local=2, stride=3, head_step=1), make_prompts(), read_spec(tmp_path)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    layers = tuple(replace(layer, mixer=replace(mixer, sparse=sparse)) for layer in spec.layers)
    forced = [each.token_ids for each in decode(load(tmp_path), prompts, NUM_TOKENS)]

    def some_blocks(**options: Any) -> Any:
        model = load_model(tmp_path, replace(spec, layers=layers), dtype=torch.float32, device="cpu", **options)
        return logits(decode(model, prompts, NUM_TOKENS, chunk=11, forced=forced))

    whole = some_blocks()
    assert (whole - logits(decode(load(tmp_path), prompts, NUM_TOKENS, forced=forced))).abs().max() > 0.01
    for got in on_ranks(2, lambda shard, meet: some_blocks(shard=shard, communicator=meet)):
        assert (got - whole).abs().max() <= 3e-5


class CopiedBytes(TorchDispatchMode):
    """Counts what is copied: of a file that is mapped into memory, only that is read."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy, torch.ops.aten.clone):
            self.count += args[-1].nbytes
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["phi3", "gpt_oss"])  # several matrices, or all experts, in one tensor
def test_a_rank_and_a_stage_read_only_their_part(tmp_path: Path, name: str) -> None:
    make_checkpoint(name, tmp_path)

    def copied(**part: Any) -> int:
        with CopiedBytes() as copied:  # type: ignore[no-untyped-call]
            load(tmp_path, **part)
        return copied.count

    whole = copied()
    for rank in range(2):
        assert 0 < copied(shard=Shard(rank, 2)) < 0.6 * whole
    assert sum(copied(stage=Stage(index, 2)) for index in range(2)) == pytest.approx(whole, rel=0.001)
