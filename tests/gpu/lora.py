"""Checks of LoRA: the kernels against merged matrices in float64, and whole engines against merged models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kernels
from engine import LLM, LoRARequest, SamplingParams
from tests.gpu.checks import BF16, F16, F32, LIMITS, Checks, captured, relative_error
from tests.oracles.random_adapters import (
    merge,
    merged,
    random_adapter,
    random_expert_slots,
    random_slots,
    write_adapter,
)
from tests.support.tiny_model import write_model

NUM_SLOTS = 32
NUM_TOKENS = (1, 8, 33, 256, 2000)
SHAPES = {"qkv": ((4096, 1024, 1024), 4096), "gate_up": ((12288, 12288), 4096), "down": ((4096,), 12288)}  # of 8B
NUM_ADAPTERS = 5  # of the small model
ANSWER = 40


def check_lora_kernels(
    checks: Checks,
    num_tokens: Sequence[int] = NUM_TOKENS,
    shapes: dict[str, tuple[tuple[int, ...], int]] = SHAPES,
    ranks: Sequence[int] = (16, 64),
) -> None:
    """One adapter for all tokens, an adapter for each, and some tokens without."""
    from kernels.triton.lora import both, is_one_launch

    for dtype, (name, (rows, channels)), rank in (
        (dtype, shape, rank) for dtype in (BF16, F16, F32) for shape in shapes.items() for rank in ranks
    ):
        if dtype != BF16 and (name, rank) != (next(iter(shapes)), ranks[0]):
            continue
        weights = random_slots(NUM_SLOTS, rank, channels, rows, dtype=dtype, device=checks.device)
        for count in num_tokens:
            x, y = checks.random(count, channels, dtype=dtype), checks.random(count, sum(rows), dtype=dtype)
            for kind, slots in _slots(checks, count).items():
                label = f"lora {name}, rank {rank}, {dtype}: {count} tokens, {kind}"
                if not checks.wants(label):
                    continue
                tokens = kernels.AdapterTokens(slots, NUM_SLOTS)
                want = merged(y, x, weights, slots)
                got = kernels.lora_add(y.clone(), x, weights, tokens)
                used = len(slots[slots >= 0].unique())
                num_bytes = used * (weights.down[0].nbytes + weights.up[0].nbytes) + x.nbytes + 2 * y.nbytes
                scratch = y.clone()
                if checks.device != "cpu" and is_one_launch(weights, tokens):
                    got_both = both(y.clone(), x, weights, tokens)
                    checks.add(f"{label}, one launch", relative_error(got_both, want), 2 * LIMITS[dtype])
                    if name == "gate_up":
                        gated = both(y.clone(), x, weights, tokens, "silu")
                        expected = kernels.reference.gate_and_mul(want, "silu")
                        checks.add(f"{label}, gated", relative_error(gated, expected), 2 * LIMITS[dtype])

                def call(x: Tensor = x, tokens: kernels.AdapterTokens = tokens, scratch: Tensor = scratch) -> object:
                    return kernels.lora_add(scratch, x, weights, tokens)  # noqa: B023 (called before the next turn)

                timed = call if kind != "some" else None
                checks.add(label, relative_error(got, want), 2 * LIMITS[dtype], timed, num_bytes, graph=True)


FUSED = {  # of 8B and 0.6B, with what is fused: rows of each projection, channels, before and after
    "qkv": ((4096, 1024, 1024), 4096, "norm"), "o": ((4096,), 4096, "sum"), "gate_up": ((12288, 12288), 4096, "gate"),
    "down": ((4096,), 12288, "sum"), "small qkv": ((2048, 1024, 1024), 1024, "norm"),
    "small o": ((1024,), 2048, "sum"), "small gate_up": ((3072, 3072), 1024, "gate"),
}  # fmt: skip
REPEATS = 200  # of one launch, in a graph: all results must be equal


def check_fused_adapters(checks: Checks) -> None:
    """GEMMs of few tokens with adapters in one launch, and how long they take beside those without."""
    if checks.device != "cpu":
        for name in FUSED:
            for count in (1, 2, 5, 8):
                _check_fused(checks, name, count)
            if name.startswith("small"):
                _check_fused(checks, name, 13)
                _check_fused(checks, name, 6, rank=64)


def _check_fused(checks: Checks, name: str, count: int, rank: int = 16) -> None:
    from kernels.cuda import linear, lora

    rows, channels, form = FUSED[name]
    weights = random_slots(NUM_SLOTS, rank, channels, rows, dtype=BF16, device=checks.device)
    weight = checks.random(sum(rows), channels, dtype=F32).mul_(channels**-0.5).bfloat16()
    scale, x, sums = checks.random(channels), checks.random(count, channels), checks.random(count, sum(rows))
    wide = x.double() if form == "sum" else kernels.reference.rms_norm(x.double(), scale.double(), 1e-6)
    y = wide @ weight.double().T
    plain: Callable[[], Tensor] = {
        "norm": lambda: linear.norm_linear(x, scale, 1e-6, weight),
        "gate": lambda: linear.norm_gated(x, scale, 1e-6, weight),
        "sum": lambda: linear.linear_add(sums.clone(), x, weight),
    }[form]
    label = f"lora fused {name}: {count} tokens{'' if rank == 16 else f', rank {rank}'}"
    checks.add(f"{label}, without", 0.0, 0.0, plain, weight.nbytes, graph=True)
    for kind, slots in _slots(checks, count).items():
        want = merged(y, wide, weights, slots)
        want = kernels.reference.gate_and_mul(want, "silu") if form == "gate" else want
        want = want + sums.double() if form == "sum" else want
        tokens = kernels.AdapterTokens(slots, NUM_SLOTS)

        def call(tokens: kernels.AdapterTokens = tokens) -> Tensor:
            return lora.small_batch_linear(
                x, weight, None, weights, tokens, norm=None if form == "sum" else (scale, 1e-6),
                gate="silu" if form == "gate" else None, residual=sums.clone() if form == "sum" else None,
            )  # fmt: skip

        timed = call if kind != "some" else None
        checks.add(f"{label}, {kind}", relative_error(call(), want), 2 * LIMITS[BF16], timed, weight.nbytes, graph=True)
        outputs: list[Tensor] = []
        graph = captured(lambda: outputs.extend(call() for _ in range(REPEATS)))  # noqa: B023 (called here)
        graph()
        torch.cuda.synchronize()
        same = all(torch.equal(each, outputs[-1]) for each in outputs[REPEATS:])
        checks.saw(f"{label}, {kind}, {REPEATS} launches", same, "equal" if same else "they differ")


def check_extended_weights(checks: Checks) -> None:
    """A of all slots after the rows of the weight: one GEMM, then B. Beside the GEMM alone."""
    if checks.device == "cpu":
        return
    for name, gate in (("qkv", None), ("gate_up", None), ("gate_up", "silu"), ("down", None)):
        for num_slots, rank in ((4, 16), (NUM_SLOTS, 16), (4, 64)):
            _check_extended(checks, name, gate, num_slots, rank)  # type: ignore[arg-type]


def _check_extended(checks: Checks, name: str, gate: kernels.Gate | None, num_slots: int, rank: int) -> None:
    from kernels.triton.extended_lora import expand_extended

    rows, channels = SHAPES[name]
    out = sum(rows)
    label = f"lora extended {name}{', gate' if gate else ''}: {num_slots} slots, rank {rank}"
    if not checks.wants(label):
        return
    weights = random_slots(num_slots, rank, channels, rows, dtype=BF16, device=checks.device)
    weight = checks.random(out, channels, dtype=F32).mul_(channels**-0.5).bfloat16()
    extended = torch.cat([weight, weights.down.flatten(0, 1)])
    for count in (9, 32, 256, 1023, 2000):
        x = checks.random(count, channels)
        y = x.double() @ weight.double().T
        generator = torch.Generator().manual_seed(count)
        some = torch.randint(-1, num_slots, (count,), dtype=torch.int32, generator=generator)
        for kind, slots in (("one adapter", torch.full_like(some, 3)), ("some", some)):
            slots = slots.to(checks.device)
            tokens = kernels.AdapterTokens(slots, num_slots)
            want = merged(y, x, weights, slots)
            want = want if gate is None else kernels.reference.gate_and_mul(want, gate)

            for size in (64, 256) if count < 1024 else (64,):

                def call(tokens: kernels.AdapterTokens = tokens, x: Tensor = x, size: int = size) -> Tensor:
                    return expand_extended(torch.nn.functional.linear(x, extended), weights, tokens, gate, rows=size)

                timed = call if count == 256 else None
                full = f"{label}, {count} tokens, {kind}{', wide' if size == 256 else ''}"
                checks.add(full, relative_error(call(), want), 2 * LIMITS[BF16], timed, extended.nbytes, graph=True)


def check_expert_adapters(checks: Checks) -> None:
    """Experts with adapters, of Qwen3-30B-A3B's shape and an eighth of its experts."""
    count, hidden, inner, chosen = 16, 2048, 768, 8
    lora = random_expert_slots(4, count, 16, hidden, (inner, inner), dtype=BF16, device=checks.device)
    gate_up = checks.random(count, 2 * inner, hidden, dtype=F32).mul_(hidden**-0.5).bfloat16()
    down = checks.random(count, hidden, inner, dtype=F32).mul_(inner**-0.5).bfloat16()
    stack = kernels.Experts(gate_up, down)
    for tokens in (1, 8, 200, 3000):
        label = f"lora experts: {tokens} tokens"
        if not checks.wants(label):
            continue
        x, generator = checks.random(tokens, hidden), torch.Generator().manual_seed(tokens)
        ids = torch.rand(tokens, 2 * count, generator=generator).argsort(1)[:, :chosen].int().to(checks.device)
        weights = torch.rand(tokens, chosen, generator=generator).to(checks.device)
        slots = torch.randint(-1, 4, (tokens,), dtype=torch.int32, generator=generator).to(checks.device)
        given = x, ids, weights, stack, lora, kernels.AdapterTokens(slots, 4)
        want = kernels.reference.adapted_experts(*given)
        timed = lambda given=given: kernels.adapted_experts(*given)  # noqa: E731
        checks.add(
            label,
            relative_error(kernels.adapted_experts(*given), want),
            3 * LIMITS[BF16],
            timed,
            gate_up.nbytes,
            graph=True,
        )


def check_vocab_adapters(checks: Checks) -> None:
    """Embeddings and output heads with adapters, of 8B and for all tokens of a step, against the reference."""
    num_slots, vocab, hidden, count = 4, 32000, 4096, 256
    down, up, rows = (checks.random(num_slots, *shape) for shape in ((vocab, 16), (hidden, 16), (count, hidden)))
    ids = torch.stack([torch.randperm(vocab)[:count].int() + 1 for _ in range(num_slots)]).to(checks.device)
    indices = torch.zeros(num_slots, vocab, dtype=torch.int32, device=checks.device)
    indices[:, :count] = torch.arange(1, count + 1, dtype=torch.int32, device=checks.device)
    embedding = kernels.EmbeddingLora(down, (up / 4).bfloat16(), rows, indices, 0)
    head = kernels.RetrainedRows((rows / 64).bfloat16(), ids)
    for num_tokens in (1, 33, 256):
        label = f"lora vocabulary: {num_tokens} tokens"
        if not checks.wants(label):
            continue
        slots = (torch.arange(num_tokens, dtype=torch.int32) % (num_slots + 1) - 1).to(checks.device)
        tokens = kernels.AdapterTokens(slots + (num_tokens == 1), num_slots)
        x, y = checks.random(num_tokens, hidden), checks.random(num_tokens, vocab)
        chosen = (torch.arange(num_tokens) * 97 % 512).to(checks.device)
        want = kernels.reference.adapt_embedding(x.double(), chosen, embedding, tokens)
        got = kernels.adapt_embedding(x.clone(), chosen, embedding, tokens)
        checks.add(f"{label}, embedding", relative_error(got, want), 2 * LIMITS[BF16])
        want = kernels.reference.retrained_logits(y.double(), x, head, tokens)
        scratch = y.clone()

        def call(x: Tensor = x, tokens: kernels.AdapterTokens = tokens, scratch: Tensor = scratch) -> object:
            return kernels.retrained_logits(scratch, x, head, tokens)

        got = kernels.retrained_logits(y.clone(), x, head, tokens)
        checks.add(f"{label}, head", relative_error(got, want), 2 * LIMITS[BF16], call, head.rows.nbytes, graph=True)


def _slots(checks: Checks, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    some = torch.randint(-1, NUM_SLOTS, (count,), dtype=torch.int32, generator=generator)
    several = torch.arange(count, dtype=torch.int32) % NUM_SLOTS
    each = {"one adapter": torch.full((count,), 3, dtype=torch.int32), "32 adapters": several, "some": some}
    return {kind: slots.to(checks.device) for kind, slots in each.items()}


def check_lora_engine(checks: Checks) -> None:
    """A small model with five adapters, one of them DoRA, and none: texts equal those of merged models alone."""
    if not checks.wants("lora engine"):
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        base = write_model(root / "base")
        stored = load_file(base / "model.safetensors")
        shapes: dict[str, Any] = {
            name.removesuffix(".weight"): tuple(tensor.shape) for name, tensor in stored.items() if "proj" in name
        }
        requests: list[LoRARequest | None] = [None]
        expected = [_texts(checks, base)]
        for number in range(NUM_ADAPTERS):
            generator = torch.Generator().manual_seed(number)
            tensors = random_adapter(shapes, 4 + 3 * number, generator, dora=number == 2)
            config = {"r": 4 + 3 * number, "lora_alpha": 8}
            folder = write_adapter(root / f"adapter {number}", config, tensors)
            requests.append(LoRARequest(folder.name, number + 1, str(folder)))
            whole = write_model(root / f"merged {number}")
            save_file(merge(stored, tensors, 8 / (4 + 3 * number)), whole / "model.safetensors")
            expected.append(_texts(checks, whole))
        wanted = [text for each in expected for text in each]
        for settings in ({"enforce_eager": True}, {}, {"max_loras": 2}, {"max_num_batched_tokens": 64}):
            _compare_texts(checks, base, settings, requests, wanted)
        _check_vocab_engine(checks, root, base, stored)
        if checks.device != "cpu":
            from kernels.cuda import lora
            from kernels.cuda.choice import CHOICE

            try:
                for wide in (False, True):
                    form = replace(CHOICE, extended_tokens=1023, extended_share=8.0, extended_wide=wide)
                    vars(lora)["CHOICE"] = form
                    note = f", extended weights{', wide' if wide else ''}"
                    _compare_texts(checks, base, {"max_loras": 2}, requests, wanted, note)
            finally:
                vars(lora)["CHOICE"] = CHOICE


def _check_vocab_engine(checks: Checks, root: Path, base: Path, stored: dict[str, Tensor]) -> None:
    """One adapter with retrained tokens of the tied embedding and head."""
    generator, tokens = torch.Generator().manual_seed(9), [8, 15, 64]
    lora = random_adapter({"model.layers.0.self_attn.q_proj": (64, 64)}, 8, generator)
    rows = torch.randn(len(tokens), 64, generator=generator) * 0.3
    name = "model.embed_tokens"
    config = {"r": 8, "lora_alpha": 8, "trainable_token_indices": tokens}
    folder = write_adapter(root / "vocabulary", config, lora | {f"{name}.token_adapter.trainable_tokens_delta": rows})
    changed = merge(stored, lora, 1.0)
    changed[f"{name}.weight"] = changed[f"{name}.weight"].clone()
    changed[f"{name}.weight"][tokens] = rows
    whole = write_model(root / "merged vocabulary")
    save_file(changed, whole / "model.safetensors")
    wanted = [*_texts(checks, base), *_texts(checks, whole)]
    requests = [None, LoRARequest("vocabulary", 1, str(folder))]
    for settings in ({"enforce_eager": True}, {}, {"max_num_batched_tokens": 64}):
        own = {**settings, "lora_embeddings": True}
        _compare_texts(checks, base, own, requests, wanted)


def _compare_texts(
    checks: Checks,
    base: Path,
    settings: dict[str, Any],
    requests: list[LoRARequest | None],
    wanted: list[list[int]],
    note: str = "",
) -> None:
    llm = _start(checks, base, enable_lora=True, max_lora_rank=16, **{"max_loras": NUM_ADAPTERS, **settings})
    for again in ("", " again"):  # then from the prefix cache
        given = [each for each in requests for _ in PROMPTS]
        answers = llm.generate(PROMPTS * len(requests), SAMPLING, use_tqdm=False, lora_request=given)
        texts = [answer.outputs[0].token_ids for answer in answers]
        differs = sum(a != b for a, b in zip(texts, wanted, strict=True)) / len(wanted)
        checks.add(f"lora engine, {settings or 'graphs'}{note}{again}: texts differ", differs, 0.0)
    llm.close()


PROMPTS: list[Any] = [{"prompt_token_ids": [7 * i % 250 + 1 for i in range(length)]} for length in (60, 5, 17)]
SAMPLING = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


def _start(checks: Checks, folder: Path, **settings: Any) -> LLM:
    common = {"device": checks.device, "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 400}
    return LLM(str(folder), **{**common, "max_num_seqs": 20, "skip_tokenizer_init": True, **settings})


def _texts(checks: Checks, folder: Path) -> list[list[int]]:
    llm = _start(checks, folder)
    texts = [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, SAMPLING, use_tqdm=False)]
    llm.close()
    return texts
