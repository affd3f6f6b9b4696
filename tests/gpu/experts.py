"""Checks of mixtures of experts as whole models: a GPU computes what a CPU does with the same weights."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.model_shapes import SHAPES
from engine.models.decoder import Decoder
from engine.models.families import read_spec
from engine.models.formats import weight_formats
from engine.models.matrix import Scope
from engine.models.weights import checkpoint_tensors
from tests.gpu.checks import BF16, F32, Checks, relative_error
from tests.oracles.families import MAX_ERROR, MAX_RATIO
from tests.oracles.paged_runner import PagedRunner
from tests.support.loaded import load as load_model

SMALL = {"num_hidden_layers": 2, "vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FEWER = {"num_experts": 32}  # where a CPU decodes them all in each step
MODELS: dict[str, dict[str, Any]] = {  # layers as wide as those of the models, but two of them
    "glm": GLM,
    "glm-4.7-flash": SHAPES["glm-4.7-flash"] | {"n_routed_experts": 16},
    "gpt-oss-20b mxfp4": SHAPES["gpt-oss-20b"]
    | {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 8},
    "qwen3-30b-a3b": SHAPES["qwen3-30b-a3b"],
    "qwen3-30b-a3b fp8": SHAPES["qwen3-30b-a3b-fp8-block"] | FEWER,
    "qwen3-30b-a3b int4": SHAPES["qwen3-30b-a3b"] | FEWER | {"quantization_config": AWQ},
}
PROMPTS = (1, 20, 7, 60)
STEPS = 3  # the prompts, then one token of each
MAX_ACTIVATIONS_ERROR = 0.06  # where activations are rounded to e4m3, too, which a CPU does not do


def check_experts(checks: Checks) -> None:
    """bfloat16: at most `MAX_RATIO` times the error of a CPU's bfloat16; float32 where weights are floats; twice the
    same.
    """
    for name, config in MODELS.items():
        if not checks.wants(f"experts {name}"):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            (Path(temporary) / "config.json").write_text(json.dumps(config | SMALL))
            spec = read_spec(Path(temporary))
            ours = load_model(
                Path(temporary), spec, dtype=BF16, device=checks.device, load_format="dummy", max_model_len=512
            )
        theirs, exact = _copy(ours, BF16, "cpu"), _logits(_packed(_copy(ours, F32, "cpu")))
        wide = None if spec.quantization else _copy(ours, F32, checks.device)
        got, rounding = _logits(_packed(ours)), _error(_logits(_packed(theirs)), exact)
        limit = MAX_ACTIVATIONS_ERROR if "fp8" in name else MAX_RATIO * rounding
        checks.add(f"experts {name}: logits in bfloat16", _error(got, exact), limit)
        checks.add(f"experts {name}: another time", float(not torch.equal(got, _logits(ours))), 0.0)
        if wide is not None:
            error = (_logits(_packed(wide)) - exact).abs().max().item()
            checks.add(f"experts {name}: logits in float32", error, MAX_ERROR)


def _error(logits: Tensor, exact: Tensor) -> float:
    """The median of the rows': of experts as good as equal, a few rows have another one, which is no error."""
    rows = [
        relative_error(row, wanted) for row, wanted in zip(logits.flatten(0, -2), exact.flatten(0, -2), strict=True)
    ]
    return sorted(rows)[len(rows) // 2]


def _copy(model: Decoder, dtype: torch.dtype, device: str) -> Decoder:
    scope = Scope(dtype, torch.device(device), weight_formats(model.spec.quantization))
    copy = Decoder(model.spec, scope, max_model_len=512)
    for source, target in zip(_memory(model), _memory(copy), strict=True):
        target.copy_(source)
    return copy


def _memory(model: Decoder) -> list[Tensor]:
    return [part.memory for tensor in checkpoint_tensors(model).values() for part in (tensor, *tensor.others)]


def _packed(model: Decoder) -> Decoder:
    model.pack_weights()
    return model


def _logits(model: Decoder) -> Tensor:
    """[tokens, vocab] on the CPU, of prompts and a few more tokens, the same for all models."""
    pick = random.Random(2)
    runner = PagedRunner(model, len(PROMPTS), max_len=max(PROMPTS) + STEPS)
    sequences = [runner.start([pick.randrange(2048) for _ in range(length + STEPS)]) for length in PROMPTS]
    steps = [PROMPTS, *([(1,) * len(PROMPTS)] * (STEPS - 1))]
    rows = [row for counts in steps for row in runner.step(list(zip(sequences, counts, strict=True)))]
    return torch.cat(rows).float().cpu()
