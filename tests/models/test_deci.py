"""Models whose layers lack attention or an MLP: as Llama where these add nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.shard import Shard
from tests.models.test_shard import on_ranks
from tests.oracles.families import make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode
from tests.support.loaded import load as load_model

HEAD_DIM, HEADS, SIZE = 32, 4, 512
# Of each layer: heads in a group (0: no attention), and the size of the MLP (0: none).
LAYERS = [(1, 512), (2, 256), (0, 512), (0, 0), (4, 0), (0, 512), (0, 256), (1, 512)]


def block(group: int, size: int) -> dict[str, Any]:
    return {
        "attention": {"n_heads_in_group": group or None, "no_op": not group, "replace_with_linear": False},
        "ffn": {"ffn_mult": size * 3 / 2 / 128 or None, "no_op": not size, "replace_with_linear": False},
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama that adds nothing where the other model has nothing, and that model."""
    llama, folder = tmp_path_factory.mktemp("llama"), tmp_path_factory.mktemp("deci")
    make_checkpoint("llama", llama, {"num_hidden_layers": len(LAYERS), "intermediate_size": SIZE})
    tensors = load_file(llama / "model.safetensors")
    stored = dict(tensors)
    for i, (group, size) in enumerate(LAYERS):
        at = f"model.layers.{i}."
        for name in ("k_proj", "v_proj"):
            heads = tensors[f"{at}self_attn.{name}.weight"].unflatten(0, (-1, HEAD_DIM))[:: group or 1]
            stored[f"{at}self_attn.{name}.weight"] = heads.flatten(0, 1)
            tensors[f"{at}self_attn.{name}.weight"] = heads.repeat_interleave(group or 1, 0).flatten(0, 1)
        for name in ("gate_proj", "up_proj"):
            stored[f"{at}mlp.{name}.weight"] = tensors[f"{at}mlp.{name}.weight"][:size]
        stored[f"{at}mlp.down_proj.weight"] = tensors[f"{at}mlp.down_proj.weight"][:, :size]
        tensors[f"{at}mlp.down_proj.weight"][:, size:] = 0
        if not group:
            tensors[f"{at}self_attn.o_proj.weight"].zero_()
        gone: tuple[str, ...] = ("self_attn", "input_layernorm") if not group else ()
        gone += ("mlp", "post_attention_layernorm") if not size else ()
        stored = {
            name: value for name, value in stored.items() if not name.startswith(tuple(at + each for each in gone))
        }
    save_file({name: value.contiguous() for name, value in tensors.items()}, llama / "model.safetensors")
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    config = json.loads((llama / "config.json").read_text())
    changes: dict[str, Any] = {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": "x.Y"},
    }
    changes |= {"num_key_value_heads": None, "intermediate_size": None, "block_configs": [block(*of) for of in LAYERS]}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return llama, folder


def test_layers_without_attention_or_mlp(folders: tuple[Path, Path]) -> None:
    want, got = (
        decode(load_model(each, read_spec(each), max_model_len=256), make_prompts(), 8, chunk=40) for each in folders
    )
    spec = read_spec(folders[1])
    assert [len(layer.mlps) for layer in spec.layers] == [1, 2, 2, 1], "four layers have attention, six an MLP"
    assert [layer.mixer.num_kv_heads for layer in spec.layers] == [4, 2, 1, 4]  # type: ignore[union-attr]
    for one, other in zip(got, want, strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-5)


def test_two_ranks(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((folders[1] / "config.json").read_text())
    config["block_configs"][4]["attention"]["n_heads_in_group"] = 2
    tensors = load_file(folders[1] / "model.safetensors")
    for name in ("k_proj", "v_proj"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = tensors[f"model.layers.1.self_attn.{name}.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    one = decode(load_model(tmp_path, spec, max_model_len=256), make_prompts(), 4)

    def on_rank(shard: Shard, communicator: Any) -> list[Any]:
        return decode(
            load_model(tmp_path, spec, shard=shard, communicator=communicator, max_model_len=256), make_prompts(), 4
        )

    for found in on_ranks(2, on_rank):
        for got, want in zip(found, one, strict=True):
            torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "attention",
            {"replace_with_linear": True},
            "attention.replace_with_linear' is not supported",
        ),
        ("attention", {"window_length": 64}, "'block_configs.1.attention.window_length' is not supported"),
        ("attention", {"n_heads_in_group": 3}, "must divide the number of heads, 4"),
        ("ffn", {"ffn_mult": None}, "'ffn_mult' is missing"),
    ],
)
def test_what_is_refused(
    folders: tuple[Path, Path], part: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = json.loads((folders[1] / "config.json").read_text())
    config["block_configs"][1][part] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        read_spec(tmp_path)


def test_deci_of_2023(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((folders[0] / "config.json").read_text())
    config |= {"architectures": ["DeciLMForCausalLM"], "num_key_value_heads_per_layer": [4, 2] * 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = [layer.mixer.num_kv_heads for layer in read_spec(tmp_path).layers]  # type: ignore[union-attr]
    assert heads == [4, 2] * 4
