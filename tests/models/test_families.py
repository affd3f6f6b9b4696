"""config.json and generation_config.json: every spelling, and every way to be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.model_shapes import SHAPES
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.files import read_config
from engine.models.generation_config import read_generation_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 100,
}
ROPE = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """config.json's fields (None: left out) over LLAMA → its ModelSpec."""

    def read(generation_config: Any = None, **changes: Any) -> Any:
        config = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation_config is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
        return read_spec(tmp_path)

    return read


def family(name: Any) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"]}


def test_defaults(read: Any) -> None:
    spec = read()
    assert spec.architecture == "LlamaForCausalLM"
    mixer, mlp = spec.layers[0].mixer, spec.layers[0].mlp
    assert spec.layers == (spec.layers[0],) * 3
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (4, 4, 16)
    assert mixer.rope.scaling == "default"
    assert (mixer.rope.theta, mixer.rope.rotary_dim) == (10000, 16)
    assert spec.windows == (0, 0, 0)
    assert (mixer.scale, mixer.soft_cap) == (0.25, 0)
    assert mlp.intermediate_size == 96
    assert (spec.dtype, spec.bos_token_id, spec.eos_token_ids) == ("float32", None, ())
    assert not any((mixer.qkv_bias, mixer.o_bias, mlp.bias, mixer.qk_norm, spec.tie_word_embeddings))
    assert spec.context_length == 128


def test_null_is_the_default(read: Any) -> None:
    assert read(num_key_value_heads=None, head_dim=None, rope_scaling=None, quantization_config=None) == read()


def test_biases_of_each_family(read: Any) -> None:
    def flags(spec: Any) -> Any:
        mixer = spec.layers[0].mixer
        return mixer.qkv_bias, mixer.o_bias, spec.layers[0].mlp.bias, mixer.qk_norm

    assert flags(read(attention_bias=True)) == (True, True, False, False)
    assert flags(read(mlp_bias=True)) == (False, False, True, False)
    assert flags(read(**family("Mistral"))) == (False, False, False, False)
    assert flags(read(**family("Qwen2"))) == (True, False, False, False)
    assert flags(read(**family("Qwen3"))) == (False, False, False, True)
    assert flags(read(**family("Qwen3"), attention_bias=True)) == (True, True, False, True)
    assert read(**family("Qwen3")).layers[0].mixer.head_dim == 128


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({**family("Mistral"), "sliding_window": 32}, (32, 32, 32)),
        ({**family("Mistral"), "sliding_window": None}, (0, 0, 0)),
        (family("Mistral"), (4096, 4096, 4096)),
        ({**family("Qwen2"), "sliding_window": 32}, (0, 0, 0)),
        ({**family("Qwen2"), "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 1}, (0, 0, 0)),
        ({**family("Qwen2"), "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (0, 32, 32)),
        ({**family("Qwen2"), "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}, (32, 32, 32)),
        ({**family("Qwen2"), "sliding_window": None, "use_sliding_window": True}, (0, 0, 0)),
        (
            {
                **family("Qwen3"),
                "sliding_window": 32,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (32, 0, 32),
        ),
    ],
)
def test_sliding_windows(read: Any, changes: Any, windows: Any) -> None:
    assert read(**changes).windows == windows


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, {"type": "dynamic", "factor": 2}),
        (
            {"rope_theta": 5e5, "rope_scaling": {**ROPE, "original_max_position_embeddings": 32}},
            {**ROPE, "original_max_position_embeddings": 32},
        ),
        (
            {"rope_theta": 5e5, "original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4}},
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32}},
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_both_rope_spellings(read: Any, old: dict[str, Any], new: Any) -> None:
    assert read(**old) == read(rope_parameters={"rope_theta": 5e5, **new})


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"type": "linear", "factor": 2}, 256),
        ({"type": "dynamic", "factor": 3}, 384),
        ({**ROPE, "original_max_position_embeddings": 32}, 128),
        ({"type": "yarn", "factor": 4}, 512),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 32}, 128),
    ],
)
def test_context_length(read: Any, rope: Any, length: int) -> None:
    assert read(rope_scaling=rope).context_length == length


def test_gemma_3_counts_its_scaling_in_its_context(tmp_path: Path) -> None:
    config = SHAPES["gemma-3-12b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).context_length == config["max_position_embeddings"]


def test_a_model_that_is_not_causal_is_an_encoder(read: Any) -> None:
    assert (read(is_causal=False).is_encoder, read(is_causal=False).has_head) == (True, False)
    assert (read().is_encoder, read().has_head) == (False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "'hidden_size' is missing"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"num_hidden_layers": "3"}, "'num_hidden_layers' must be an integer of at least 1, got '3'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be an integer of at least 1, got 0"),
        ({"num_attention_heads": True}, "'num_attention_heads' must be an integer"),
        ({"num_key_value_heads": 3}, "'num_attention_heads' (4) must be a multiple of 'num_key_value_heads' (3)"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "'hidden_size' (64) must be a multiple of"),
        ({"head_dim": 15}, "'head_dim' must be even, got 15"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' must be a positive number, got 0"),
        ({"hidden_act": "gelu"}, "'hidden_act' 'gelu' is not supported; supported: silu"),
        ({"torch_dtype": "int8"}, "'dtype' must be bfloat16, float16 or float32, got 'int8'"),
        ({"dtype": 16}, "'dtype' must be bfloat16, float16 or float32, got 16"),
        ({"attention_bias": "yes"}, "'attention_bias' must be true or false, got 'yes'"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false, got 1"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be a token id or a list of them, got '</s>'"),
        ({"architectures": ...}, "'architectures' must be a list of one name, got None"),
        ({"architectures": [["LlamaForCausalLM"]]}, "'architectures' must be a list of one name, got [["),
        ({"rope_scaling": {"type": ["linear"]}}, "RoPE scaling ['linear'] is not supported"),
        ({"architectures": []}, "'architectures' must be a list of one name, got []"),
        (
            family("Mamba"),
            "architecture 'MambaForCausalLM' is not supported: it needs state-space (Mamba) layers",
        ),
        (family("Qwen2Mo"), "; the nearest that are: Qwen2MoeForCausalLM"),
        ({"rope_scaling": {"type": "mrope"}}, "RoPE scaling 'mrope' is not supported; supported: default, lin"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "'short_factor' must be a list of 8 numbers, one for each pair of channels",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": -1}}, "'factor' must be a positive number, got -1"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1}}, "'high_freq_factor' is missing"),
        ({"rope_scaling": {**ROPE, "high_freq_factor": 0.5}}, "'high_freq_factor' (0.5) must not be below"),
        ({"rope_scaling": "linear"}, "'rope_scaling' must be an object, got 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'rope_parameters' per layer type are not supp"),
        ({"rope_theta": "big"}, "'rope_theta' must be a positive number, got 'big'"),
        ({"partial_rotary_factor": 0.2}, "'partial_rotary_factor' must make an even part of head_dim=16, got 3"),
        ({**family("Mistral"), "sliding_window": 0}, "'sliding_window' must be an integer of at least 1, got 0"),
        ({**family("Qwen2"), "layer_types": ["full_attention"]}, "'layer_types' must be a list of num_hidden_layers=3"),
        ({**family("Qwen2"), "layer_types": ["linear_attention"] * 3}, "may name full_attention and sliding_attention"),
        ({**family("Qwen3"), "layer_types": ["sliding_attention"] * 3}, "'sliding_window' is missing"),
    ],
)
def test_wrong_config_names_file_and_field(read: Any, tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ModelError) as error:
        read(**changes)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("\xff", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json_names_the_file(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    if content is not None:
        (tmp_path / name).write_text(content, encoding="latin-1")
    elif name == "config.json":
        (tmp_path / name).unlink()
    else:
        return  # generation_config.json may be absent
    with pytest.raises(ModelError, match=message) as error:
        read_spec(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / name}: ")


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        (2, None, (2,)),
        ([2, 3], {}, (2, 3)),
        (2, {"eos_token_id": [5, 2, 7]}, (5, 2, 7)),
        (2, {"eos_token_id": 5}, (5, 2)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_of_text_ids(
    read: Any, config: int | list[int] | None, generation: dict[str, Any] | None, eos: Any
) -> None:
    assert read(generation, eos_token_id=config).eos_token_ids == eos


def test_generation_defaults(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "min_p": null, "max_new_tokens": 99}')
    assert read_generation_config(tmp_path) == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    path.write_text('{"top_p": "high"}')
    with pytest.raises(ModelError, match=r"generation_config.json: 'top_p' must be a number, got 'high'"):
        read_generation_config(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("llama", "LlamaForCausalLM"), ("seed_oss", "SeedOssForCausalLM"), ("qwen3", "Qwen3ForCausalLM"),
     ("xlm-roberta", "XLMRobertaModel"), ("modernbert", "ModernBertModel")],
)  # fmt: skip
def test_an_architecture_by_its_model_type(read: Any, model_type: str, architecture: str) -> None:
    assert read(architectures=..., model_type=model_type, head_dim=16).architecture == architecture
    assert read(architectures=None, model_type=model_type, head_dim=16).architecture == architecture
    with pytest.raises(ModelError, match="'architectures' must be a list of one name, got None"):
        read(architectures=..., model_type="odd")


def test_modelopts_own_file_says_how_weights_are_quantised(read: Any, tmp_path: Path) -> None:
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    expected = read(quantization_config={"quant_method": "modelopt", **inner})
    assert expected.quantization is not None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    assert read() == expected


def test_an_old_spelling_of_an_architecture(read: Any) -> None:
    spec = read(architectures=["Ernie4_5_ForCausalLM"])
    assert (spec.layers, spec.has_head) == (read(**family("Ernie4_5")).layers, True)


def test_exaones_pattern_of_layers(read: Any) -> None:
    """Published files name local and global layers by letters."""
    exaone = {**family("Exaone4"), "num_hidden_layers": 4, "sliding_window": 32}
    spec = read(**exaone, sliding_window_pattern="LLG")
    assert spec.windows == (32, 32, 0, 32)
    assert [layer.mixer.rope is None for layer in spec.layers] == [False, False, True, False]
    assert spec == read(**exaone, sliding_window_pattern=3)
    with pytest.raises(ModelError, match="'sliding_window_pattern' must be an integer of at least 1, got 'GL'"):
        read(**exaone, sliding_window_pattern="GL")


def test_what_opt_may_not_have(read: Any) -> None:
    """The 350M model has norms after its sums, and embeddings of another size."""
    opt = {**family("OPT"), "ffn_dim": 96}
    assert read(**opt).positions.count == 130
    for changes in ({"do_layer_norm_before": False}, {"_remove_final_layer_norm": True}, {"word_embed_proj_dim": 32}):
        with pytest.raises(ModelError, match=f"'{next(iter(changes))}' must be"):
            read(**opt, **changes)


def test_llama_4_is_limited_to_one_chunk(read: Any) -> None:
    llama4 = {**family("Llama4"), "num_local_experts": 4, "intermediate_size_mlp": 64}
    assert read(**llama4, attention_chunk_size=32).context_length == 32
    with pytest.raises(ModelError, match="'num_experts_per_tok' must be 1"):
        read(**llama4, num_experts_per_tok=2)


def test_generation_config_eos_names_the_file(read: Any) -> None:
    with pytest.raises(ModelError, match=r"generation_config.json: 'eos_token_id' must be a token id"):
        read({"eos_token_id": "</s>"})


def test_what_mpt_may_not_have(read: Any) -> None:
    """Configurations whose attention or MLP is another one."""
    mpt = {**family("Mpt"), "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
    assert read(**mpt, attn_config={"alibi": True}).layers[0].mixer.alibi == (1 / 4, 1 / 16, 1 / 64, 1 / 256)
    assert read(**mpt).norm_eps == 1e-5, "PyTorch's own, which published configurations leave out"
    for changes, message in (
        ({"attn_config": {"alibi": False}}, "'attn_config': 'alibi' must be true, got False"),
        ({"attn_config": {"clip_qkv": 6}}, "'attn_config': 'clip_qkv' must be null, got 6"),
        ({"no_bias": False}, "'no_bias' must be true, got False"),
        ({"expansion_ratio": 2}, "'expansion_ratio' must be 4, got 2"),
    ):
        with pytest.raises(ModelError, match=message):
            read(**mpt, **changes)


def test_overrides_are_merged_over_the_file(tmp_path: Path) -> None:
    file = {"a": 1, "rope_parameters": {"factor": 2, "rope_type": "linear"}, "b": {"c": 1}}
    (tmp_path / "config.json").write_text(json.dumps(file))
    merged = read_config(tmp_path, {"rope_parameters": {"factor": 4}, "b": [2], "d": {"e": None}})
    assert merged == {
        "a": 1,
        "rope_parameters": {"factor": 4, "rope_type": "linear"},
        "b": [2],
        "d": {"e": None},
    }
    assert read_config(tmp_path, {"rope_scaling": {"factor": 4}})["rope_parameters"]["factor"] == 4, (
        "the other spelling"
    )
    with pytest.raises(ModelError, match=r"config\.json with hf_overrides: architecture 'X' is not supported"):
        read_spec(tmp_path, {"architectures": ["X"]})
