"""bitsandbytes' checkpoints: the matrices are those that its format defines, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.checkpoints import open_checkpoint
from engine.models.checkpoints.bitsandbytes import BitsAndBytesFolder
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.shard import Shard
from engine.models.weights import checkpoint_tensors
from tests.oracles.families import make_checkpoint
from tests.support.loaded import load as load_model

pytest.importorskip("transformers")

BLOCK, OUTER = 64, 256
MAP = torch.linspace(-1, 1, 16)  # nf4 and fp4 have tables of their own, which files hold


def nibbles(weight: Tensor, *, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Quantise a matrix to four bits: the tensors after its name, and the matrix they stand for."""
    flat = weight.flatten()
    blocks = [flat[i : i + BLOCK] for i in range(0, len(flat), BLOCK)]
    scales = torch.stack([block.abs().max() for block in blocks])
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": list(weight.shape)}
    more: dict[str, Tensor] = {}
    if nested:
        table, offset = torch.linspace(-1, 1, 256), float(scales.mean())
        of_outer = [(scales[i : i + OUTER] - offset).abs().max() for i in range(0, len(scales), OUTER)]
        codes = [int((table - (s - offset) / of_outer[i // OUTER]).abs().argmin()) for i, s in enumerate(scales)]
        scales = torch.stack([table[code] * of_outer[i // OUTER] + offset for i, code in enumerate(codes)])
        more = {".absmax": torch.tensor(codes, dtype=torch.uint8)}
        more |= {".nested_absmax": torch.stack(of_outer), ".nested_quant_map": table}
        state |= {"nested_blocksize": OUTER, "nested_dtype": "float32", "nested_offset": offset}
    codes4 = [int((MAP - value / scales[i // BLOCK]).abs().argmin()) for i, value in enumerate(flat)]
    decoded = torch.stack([MAP[code] * scales[i // BLOCK] for i, code in enumerate(codes4)]).view(weight.shape)
    packed = [first * 16 + second for first, second in zip(codes4[::2], codes4[1::2], strict=True)]
    settings = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors = {"": torch.tensor(packed, dtype=torch.uint8)[:, None], ".absmax": scales, ".quant_map": MAP.clone()}
    return tensors | more | {".quant_state.bitsandbytes__nf4": settings}, decoded


def save(folder: Path, kind: str) -> dict[str, Tensor]:
    """Quantise the matrices of a small model's layers. Returns the tensors that they stand for."""
    make_checkpoint("qwen2", folder, {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1})
    file, path = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    stored, expected = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if "proj.weight" not in name:
            continue
        if kind == "int8":
            scales = tensor.abs().amax(1)
            stored[name] = (tensor / scales[:, None] * 127).round().to(torch.int8)
            stored[name.removesuffix(".weight") + ".SCB"] = scales
            stored[name.removesuffix(".weight") + ".weight_format"] = torch.zeros((), dtype=torch.uint8)
            expected[name] = torch.stack([row.float() * s / 127 for row, s in zip(stored[name], scales, strict=True)])
        else:
            parts, expected[name] = nibbles(tensor, nested=kind == "nested")
            stored.update({name + part: value for part, value in parts.items()})
    save_file(stored, file)
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    return expected


@pytest.mark.parametrize("kind", ["plain", "nested", "int8"])
def test_matrices_are_decoded(kind: str, tmp_path: Path) -> None:
    expected = save(tmp_path, kind)
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        model = load_model(tmp_path, read_spec(tmp_path), dtype=torch.float32, device="cpu", shard=shard)
        for name, tensor in checkpoint_tensors(model).items():
            if name != "lm_head.weight":  # tied
                want = expected[name][tensor.index]
                torch.testing.assert_close(tensor.memory, want, rtol=1e-5, atol=1e-6, msg=name)


def test_a_malformed_file(tmp_path: Path) -> None:
    save(tmp_path, "plain")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name + ".absmax": torch.ones(3)}, file)
    with pytest.raises(ModelError, match=f"'{name}' cannot be decoded"):
        load_model(tmp_path, read_spec(tmp_path), dtype=torch.float32, device="cpu")
    save_file(tensors | {name + ".quant_state.bitsandbytes__nf4": torch.ones(3, dtype=torch.uint8)}, file)
    with pytest.raises(ModelError, match=r"bitsandbytes__nf4' is malformed; download it again"):
        load_model(tmp_path, read_spec(tmp_path), dtype=torch.float32, device="cpu")


def test_what_the_library_writes(tmp_path: Path) -> None:
    """Its own codes, if it is installed."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    for quant_type in ("nf4", "fp4"):
        for nested in (False, True):
            codes, state = bitsandbytes.functional.quantize_4bit(
                weight, quant_type=quant_type, compress_statistics=nested
            )
            tensors = {f"a.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
            save_file(tensors | {"a.weight": codes}, tmp_path / "model.safetensors")
            (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
            checkpoint = open_checkpoint(tmp_path)
            assert isinstance(checkpoint, BitsAndBytesFolder)
            assert checkpoint.tensors()["a.weight"].shape == [96, 128]
            ((_, got),) = checkpoint.read(["a.weight"])
            torch.testing.assert_close(got, bitsandbytes.functional.dequantize_4bit(codes, state))
