"""Loading weights: each tensor is used once and cast; an error names what is damaged, missing or left over."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.weights import checkpoint_tensors
from tests.support.loaded import load as load_model

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 50,
}
EMBEDDING, LM_HEAD, K_BIAS = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.k_proj.bias"


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def tensors(folder: Path) -> Any:
    """Every tensor of the checkpoint, by name, with its own random values."""
    model = load(folder, load_format="dummy")
    return {name: torch.randn(tensor.shape) for name, tensor in checkpoint_tensors(model).items()}


def tie(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return load_model(folder, read_spec(folder), dtype=dtype, device="cpu", **options)


def memory(model: Any) -> Any:
    """Memory that each of the checkpoint's tensors fills, by its name."""
    return {name: tensor.memory for name, tensor in checkpoint_tensors(model).items()}


def save_shards(folder: Path, tensors: Any, num_shards: Any = 3) -> None:
    names = sorted(tensors)
    weight_map = {name: f"model-{i % num_shards}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def check_error(folder: Path, *parts: Any, **options: Any) -> None:
    with pytest.raises(ModelError) as error:
        load(folder, **options)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_fills_its_own_memory(folder: Path, tensors: Any, dtype: torch.dtype) -> None:
    save_file(tensors, folder / "model.safetensors")
    model = load(folder, dtype)
    assert model.layers[0].attention.cos_sin.dtype == torch.float32
    filled = memory(model)
    assert sum(tensor.numel() for tensor in filled.values()) == sum(p.numel() for p in model.parameters())
    for name, tensor in tensors.items():
        assert torch.equal(filled[name], tensor.to(dtype)), name
    qkv = model.layers[1].attention.qkv
    assert torch.equal(qkv.bias[32:48], tensors[K_BIAS].to(dtype))


def test_shards_and_loose_files(folder: Path, tensors: Any) -> None:
    save_shards(folder, tensors)
    by_index = memory(load(folder))
    (folder / "model.safetensors.index.json").unlink()
    save_file({"tok_embeddings.weight": torch.zeros(1)}, folder / "consolidated.safetensors")  # Mistral's second copy
    for found in (by_index, memory(load(folder))):
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_max_model_len_limits_the_table(folder: Path) -> None:
    def tables(**options: Any) -> Any:
        return [layer.attention.cos_sin for layer in load(folder, load_format="dummy", **options).layers]

    assert [table.shape for table in tables(max_model_len=10)] == [(10, 8)] * 2
    assert [table.shape for table in tables()] == [(64, 8)] * 2
    assert len(set(map(id, tables()))) == 1  # one for all layers


NEEDLESS = [
    "model.layers.1.self_attn.rotary_emb.inv_freq",
    "model.layers.0.self_attn.rotary_emb.cos_cached",
    "model.layers.0.attn.masked_bias",
    "v_head.summary.weight",
    "score.weight",
]


@pytest.mark.parametrize("name", NEEDLESS)
def test_tensors_that_are_not_needed_are_skipped(
    folder: Path, tensors: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(tensors | {name: torch.zeros(4)}, folder / "model.safetensors")
    with caplog.at_level("INFO"):
        load(folder)
    (line,) = caplog.messages
    assert line == f"{folder}: 1 tensors that are not needed are skipped: {name!r}"


@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "num_mtp_modules"])
def test_layers_of_drafts_are_skipped(folder: Path, tensors: Any, field: str) -> None:
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, field: 1}))
    load(folder)


def test_a_byte_order_mark(folder: Path, tensors: Any) -> None:
    save_shards(folder, tensors)
    for name in ("config.json", "model.safetensors.index.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    load(folder)


def test_a_single_file_beside_an_index_and_its_shards(
    folder: Path, tensors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The file of an earlier upload: the index's shards are read. Without one of these, the index is the older."""
    save_shards(folder, tensors)
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(memory(load(folder))[K_BIAS], tensors[K_BIAS])
    assert "not model.safetensors" in caplog.messages[-1]
    (folder / "model-0.safetensors").unlink()
    assert not memory(load(folder))[K_BIAS].any()
    assert "model-0.safetensors is absent" in caplog.messages[-1]


def test_a_tensor_that_the_index_does_not_name(folder: Path, tensors: Any, caplog: pytest.LogCaptureFixture) -> None:
    save_shards(folder, tensors)
    first = {name: tensors[name] for i, name in enumerate(sorted(tensors)) if i % 3 == 0}
    save_file(first | {"model.mtp.0.weight": torch.zeros(1)}, folder / "model-0.safetensors")
    with caplog.at_level("INFO"):
        load(folder)
    assert caplog.messages == [f"{folder}: skips 1 tensors that model.safetensors.index.json does not name"]


@pytest.mark.parametrize("stored", [[EMBEDDING], [LM_HEAD], [EMBEDDING, LM_HEAD]])
def test_tied_embeddings_under_either_name(folder: Path, tensors: Any, stored: list[Any]) -> None:
    tie(folder)
    table = tensors[EMBEDDING]
    others = {name: tensor for name, tensor in tensors.items() if name not in (EMBEDDING, LM_HEAD)}
    save_file(others | {name: table.clone() for name in stored}, folder / "model.safetensors")
    model = load(folder, torch.bfloat16)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, table.bfloat16())


def test_tied_but_different(folder: Path, tensors: Any) -> None:
    tie(folder)
    save_file(tensors, folder / "model.safetensors")
    check_error(folder, folder / "model.safetensors", "'lm_head.weight' differs", "set 'tie_word_embeddings' to false")


def test_tied_and_neither_stored(folder: Path, tensors: Any) -> None:
    tie(folder)
    del tensors[EMBEDDING], tensors[LM_HEAD]
    save_file(tensors, folder / "model.safetensors")
    check_error(folder, folder, "lack 'lm_head.weight', 'model.embed_tokens.weight'")


def test_missing_tensor(folder: Path, tensors: Any) -> None:
    del tensors[K_BIAS]
    save_file(tensors, folder / "model.safetensors")
    check_error(folder, folder, f"the weights lack '{K_BIAS}'", "of the same model?")


def test_many_missing_tensors_make_one_line(folder: Path, tensors: Any) -> None:
    save_file({EMBEDDING: tensors[EMBEDDING]}, folder / "model.safetensors")
    check_error(
        folder, "lack 'lm_head.weight', 'model.layers.0.input_layernorm.weight', ", f"and {len(tensors) - 4} more"
    )


def test_extra_tensor(folder: Path, tensors: Any) -> None:
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
    save_shards(folder, tensors)
    check_error(folder, folder / "model-", "'model.layers.0.self_attn.o_proj.bias'", "config.json has no place for")


def test_wrong_shape(folder: Path, tensors: Any) -> None:
    tensors[K_BIAS] = torch.zeros(17)
    save_file(tensors, folder / "model.safetensors")
    check_error(folder, folder / "model.safetensors", f"'{K_BIAS}' has shape [17], config.json says [16]")


def test_quantised_tensor(folder: Path, tensors: Any) -> None:
    tensors[K_BIAS] = torch.zeros(16, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    check_error(folder, folder / "model.safetensors", f"'{K_BIAS}' is stored as I8")


def test_tensor_in_two_files(folder: Path, tensors: Any) -> None:
    save_file(tensors, folder / "a.safetensors")
    save_file({K_BIAS: tensors[K_BIAS]}, folder / "b.safetensors")
    check_error(folder, folder / "b.safetensors", K_BIAS, "a.safetensors", "remove one")


@pytest.mark.parametrize("damage", ["truncated", "header", "empty", "pointer"])
def test_damaged_file(folder: Path, tensors: Any, damage: str) -> None:
    save_shards(folder, tensors)
    file = folder / "model-1.safetensors"
    content = file.read_bytes()
    file.write_bytes(
        {
            "truncated": content[:-100],
            "header": content[:8] + b"#" + content[9:],
            "empty": b"",
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        }[damage]
    )
    check_error(folder, file, "corrupt or truncated", "download it again")


def test_shard_missing_from_disk(folder: Path, tensors: Any) -> None:
    save_shards(folder, tensors)
    (folder / "model-2.safetensors").unlink()
    check_error(folder, folder / "model.safetensors.index.json", "names model-2.safetensors", "download the rest")


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_bad_index(folder: Path, tensors: Any, content: str) -> None:
    save_shards(folder, tensors)
    index = folder / "model.safetensors.index.json"
    index.write_text(content)
    check_error(folder, index, "download it again")


def test_index_lists_a_tensor_that_its_file_lacks(folder: Path, tensors: Any) -> None:
    save_shards(folder, tensors)
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][K_BIAS]
    names = [name for i, name in enumerate(sorted(tensors)) if file.name == f"model-{i % 3}.safetensors"]
    save_file({name: tensors[name] for name in names if name != K_BIAS}, file)
    check_error(folder, f"lack '{K_BIAS}'")


def test_no_safetensors(folder: Path) -> None:
    (folder / "model.pt").write_bytes(b"x")
    check_error(folder, folder, "no .safetensors weights", "model.pt", "convert")


def test_unknown_load_format(folder: Path) -> None:
    check_error(folder, "load_format must be auto, safetensors or dummy, got 'gguf'", load_format="gguf")


def test_out_of_memory_says_how_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("engine.models.weights.fill_randomly", full)
    check_error(folder, folder, "0.0 GiB of weights do not fit on cpu", load_format="dummy")
