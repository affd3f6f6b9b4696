"""quantization_config → schemes: what each method's keys mean, which modules it leaves out, what is refused and how."""

from dataclasses import replace
from typing import Any

import pytest

from engine.models.errors import ModelError
from engine.models.quantization import choose_quantization, read_quantization
from tests.oracles.quantised import compressed, of_torchao

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def scheme_of(config: dict[str, Any], name: str) -> Any:
    quantization = read_quantization(config)
    assert quantization is not None
    return quantization.scheme(name)


@pytest.mark.parametrize(
    "ignored",
    [
        DOWN,  # its whole name
        "model.layers.1",  # what is above it
        "down_proj",  # its own name
        "mlp.down_proj",
        "model.layers.1.*",
        r"re:.*down_proj$",
        r"re:model\.layers\.[1-9]\.mlp",
    ],
)
def test_excluded_modules(ignored: str) -> None:
    for config in (
        {"quant_method": "fp8", "modules_to_not_convert": [ignored]},
        {"quant_method": "fp8", "ignored_layers": [ignored]},
        {"quant_method": "awq", "modules_to_not_convert": [ignored]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [ignored]},
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}) | {"ignore": [ignored]},
    ):
        assert scheme_of(config, DOWN) is None
        assert scheme_of(config, Q) is not None


def test_modelopts_nested_and_mixed_forms() -> None:
    """hf_quant_config.json has the nested form."""
    inner = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    flat = read_quantization({"quant_method": "modelopt", **inner})
    assert read_quantization({"quant_method": "modelopt", "quantization": inner}) == flat
    assert read_quantization({"producer": {"name": "modelopt", "version": "0.31.0"}, **inner}) == flat
    layers = {DOWN: {"quant_algo": "W4A16_NVFP4", "group_size": 16}, Q: {"quant_algo": "FP8"}}
    mixed = {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert (scheme_of(mixed, DOWN).kind, scheme_of(mixed, Q).kind) == ("e2m1", "e4m3")
    assert scheme_of(mixed, Q.replace("q_proj", "k_proj")) is None
    blocks = scheme_of({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, Q)
    assert (blocks.rows, blocks.group, blocks.activations) == (128, 128, False)


def test_auto_round_is_packed_as_gptq_or_awq() -> None:
    settings = {"bits": 4, "group_size": 128, "sym": True}
    auto_round = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", **settings}
    assert scheme_of(auto_round, Q) == scheme_of({"quant_method": "gptq", **settings}, Q)
    assert scheme_of(auto_round | {"extra_config": {"model.layers.1": {"bits": 16}}}, DOWN) is None
    awq = scheme_of(auto_round | {"packing_format": "auto_round:auto_awq", "sym": False}, Q)
    assert awq == scheme_of({"quant_method": "awq", "group_size": 128}, Q)


def test_transforms_that_are_part_of_the_weights() -> None:
    config = compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"})
    apply = [{"location": "weight_output", "targets": ["re:.*o_proj$"]}, {"location": "weight_input"}]
    rotated = config | {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": apply}}}}
    assert read_quantization(rotated) == read_quantization(config)


def test_a_part_of_a_name_excludes_nothing() -> None:
    config = {"quant_method": "awq", "modules_to_not_convert": ["down", "layers.1.ml", "odel.layers.1"]}
    assert scheme_of(config, DOWN) is not None


def test_the_output_head() -> None:
    for config in ({"quant_method": "fp8"}, {"quant_method": "awq"}, {"quant_method": "gptq"}):
        assert scheme_of(config, "lm_head") is None
    assert scheme_of({"quant_method": "gptq", "lm_head": True}, "lm_head") is not None


def test_the_first_group_whose_target_matches() -> None:
    config = compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"})
    groups = config["config_groups"]
    packed = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config["config_groups"] = {
        "group_1": {"targets": ["re:.*mlp.*"], "weights": packed, "format": "pack-quantized"},
    } | groups
    config["ignore"] = []
    assert scheme_of(config, DOWN).kind == "int4"
    assert scheme_of(config, Q).kind == "e4m3"


def test_only_activations_that_the_checkpoint_rounds_are_rounded() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    assert scheme_of(compressed("float-quantized", weights, True), Q).activations
    assert not scheme_of(compressed("naive-quantized", weights), Q).activations


def group(weights: Any, file_format: str = "pack-quantized") -> dict[str, Any]:
    return compressed(file_format, {"type": "int", "strategy": "group", "group_size": 128, "num_bits": 4} | weights)


AT = "'config_groups.group_0.weights."


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "'quantization_config' must be an object, got 'fp8'"),
        (
            {},
            "'quant_method' None is not supported; supported: fp8, fbgemm_fp8, compressed-tensors, awq, gptq, modelopt",
        ),
        ({"quant_method": "hqq"}, "'quant_method' 'hqq' is not supported; supported: fp8"),
        ({"quant_method": "awq", "bits": 3}, "'bits' 3 is not supported; supported: 4"),
        ({"quant_method": "awq", "version": "marlin"}, "'version' 'marlin' is not supported; supported: gemm"),
        ({"quant_method": "gptq", "bits": 2}, "'bits' 2 is not supported; supported: 3, 4, 8"),
        ({"quant_method": "gptq", "group_size": 48}, "'group_size' 48 is not supported; supported: -1, 32, 64, 128"),
        (
            {"quant_method": "awq", "version": "gemv", "zero_point": False},
            "'version' 'gemv' is not supported; with 'zero_point' false or groups of no such size; supported: gemm",
        ),
        ({"quant_method": "torchao", "quant_type": "int4wo"}, "'quant_type' 'int4wo' is not supported; supported: an"),
        (
            of_torchao("Int4WeightOnly", int4_packing_format="preshuffled"),
            "int4_packing_format' 'preshuffled' is not supported; supported: plain, tile_packed_to_4d",
        ),
        (
            of_torchao("Int8WeightOnly", granularity={"_type": "PerBlock"}),
            "granularity' 'PerBlock' is not supported; supported: PerRow, PerTensor, PerGroup",
        ),
        (of_torchao("MXFP8"), "quant_type.default._type' 'MXFP8Config' is not supported; supported: Int8WeightOnly"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'checkpoint_format' 'marlin' is not supported"),
        (
            {"quant_method": "gptq", "dynamic": {"+:.*": {"bits": 2}}},
            "'bits' 2 is not supported; supported: 3, 4, 8",
        ),
        (
            {"quant_method": "gptq", "dynamic": {".*": {"damp": 8}}},
            "'dynamic..*' 'damp' is not supported; supported: bits, desc_act, group_size, sym",
        ),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "supported: [128, 128], or none"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'fmt' 'e5m2' is not supported; supported: e4m3"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "must be a list of names, got 'lm_head'"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "'quant_algo' 'W4A8_AWQ' is not supported; supported: FP8",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
            | {"quantized_layers": {"a": {"quant_algo": "X"}}},
            "'quantized_layers.a.quant_algo' 'X' is not supported; supported: FP8",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:exllamav2"},
            "'packing_format' 'auto_round:exllamav2' is not supported; supported: auto_round:auto_gptq",
        ),
        (
            {
                "quant_method": "auto-round",
                "packing_format": "auto_round:auto_gptq",
                "bits": 4,
                "extra_config": {"model.layers.1": {"bits": 8}},
            },
            "'extra_config.model.layers.1' {'bits': 8} is not supported; supported: modules of 16 bits",
        ),
        (
            group({}) | {"transform_config": {"config_groups": {"u": {"apply": [{"location": "input"}]}}}},
            "'transform_config.config_groups.u.location' 'input' is not supported; supported: weight_input",
        ),
        (group({"num_bits": 3}), AT + "num_bits' 3 is not supported; of type 'int'; supported: 4 and 8"),
        (group({}, "marlin-24"), "'format' 'marlin-24' is not supported; supported: pack-quantized"),
        (
            group({"strategy": "tensor", "group_size": None}),
            AT + "strategy' 'tensor' is not supported; supported: channel",
        ),
        (group({"type": "float", "group_size": 64}), AT + "group_size' 64 is not supported; supported: 16 (nvfp4)"),
        (
            group({"num_bits": 8, "type": "float", "strategy": "block"}, "float-quantized"),
            AT + "block_structure' None is",
        ),
        (
            group({}) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "'sparsity_config' 'sparse-24-bitmask' is not",
        ),
        (group({}) | {"config_groups": [1]}, "'config_groups' must be an object of objects, got [1]"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_key_and_what_works(config: Any, message: str) -> None:
    with pytest.raises(ModelError) as error:
        read_quantization(config)
    assert str(error.value).startswith("'quantization_config'")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_was_asked_for() -> None:
    stored = read_quantization({"quant_method": "awq"})
    assert choose_quantization(stored, None) is choose_quantization(stored, "awq") is stored
    assert choose_quantization(None, None) is None
    online = choose_quantization(None, "fp8")
    assert online is not None
    assert online.scheme(Q).kind == "e4m3"  # type: ignore[union-attr]
    assert online.scheme("lm_head") is None
    with pytest.raises(ModelError, match=r"quantised by 'awq': quantization must be that or none, got 'fp8'"):
        choose_quantization(stored, "fp8")
    with pytest.raises(ModelError, match=r"not quantised: quantization must be fp8, int8, int4, got 'awq'"):
        choose_quantization(None, "awq")


def test_gptq_settings_of_some_modules() -> None:
    config = {
        "quant_method": "gptq",
        "dynamic": {
            "-:.*\\.q_proj": {},
            "+:.*\\.0\\..*down_proj": {"bits": 8, "group_size": 32},
            ".*k_proj": {"desc_act": True},
        },
    }
    whole = scheme_of({"quant_method": "gptq"}, Q)
    assert whole is not None
    assert scheme_of(config, "model.layers.0.self_attn.q_proj") is None
    assert scheme_of(config, "model.layers.1.mlp.down_proj") == whole
    assert scheme_of(config, "model.layers.0.mlp.down_proj") == replace(whole, kind="int8", group=32)
    assert scheme_of(config, "model.layers.3.self_attn.k_proj") == replace(whole, reordered=True)


def test_gguf_blocks_can_be_decoded() -> None:
    config = {"quant_method": "gguf", "types": {"Q8_0": [Q], "MXFP4": ["model.layers.0.mlp.experts.*.up_proj"]}}
    stored = read_quantization(config)
    assert stored is not None
    assert choose_quantization(stored, None) is choose_quantization(stored, "gguf") is stored
    assert choose_quantization(stored, None, decodes=True) is None
    assert choose_quantization(stored, "int8") == choose_quantization(None, "int8")
    with pytest.raises(ModelError, match="quantised by 'gguf': quantization must be that or none, got 'awq'"):
        choose_quantization(stored, "awq")
    assert stored.scheme(Q).block == "Q8_0"  # type: ignore[union-attr]
    assert stored.scheme("model.layers.0.mlp.experts.17.up_proj").block == "MXFP4"  # type: ignore[union-attr]
    assert stored.scheme(DOWN) is None
    with pytest.raises(ModelError, match="'types' 'Q9' is not supported; supported: Q8_0"):
        read_quantization({"quant_method": "gguf", "types": {"Q9": []}})


@pytest.mark.parametrize(("method", "head"), [("fp8", None), ("int8", "int8"), ("int4", "int8")])
def test_the_output_head_is_rounded_where_the_device_gains_by_it(method: str, head: str | None) -> None:
    for rounds_head, kind in ((False, None), (True, head)):
        online = choose_quantization(None, method, rounds_head=rounds_head)
        assert online is not None
        scheme = online.scheme("lm_head")
        assert (scheme and scheme.kind) == kind
        assert online.scheme(Q) is not None
        assert online.scheme("model.layers.0.self_attn.kv_b_proj") is None
