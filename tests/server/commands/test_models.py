"""`quire models`: what it lists is what the tests compare with others."""

import pytest

from engine.models.catalog import families, quantizations
from server.cli.main import main
from tests.oracles import families as family_cases
from tests.oracles import quantised


def test_it_lists_every_family_and_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, about in (families() | quantizations()).items():
        assert about
        assert any(name in line.split() and line.endswith(about) for line in lines), name


# Architectures that other tests compare: of code that comes with models, multimodal ones, other spellings, encoders.
ELSEWHERE = {
    *("InternLMForCausalLM", "InternLM2ForCausalLM", "InternLM3ForCausalLM", "ExaoneForCausalLM", "ChatGLMModel"),
    *("BaichuanForCausalLM", "MiniCPMForCausalLM", "MiMoForCausalLM", "OrionForCausalLM", "InternVLChatModel"),
    *("KimiVLForConditionalGeneration", "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"),
    *("RWForCausalLM", "ChatGLMForConditionalGeneration", "KimiK25ForConditionalGeneration"),
    *("BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel", "DistilBertModel", "NomicBertModel"),
    *("ModernBertModel", "EuroBertModel", "Gemma3TextModel", "MPNetModel", "NewModel", "GteModel", "JinaBertModel"),
    *("AlbertModel", "ElectraModel", "DebertaV2Model", "LlamaBidirectionalModel", "JinaEmbeddingsV3Model"),
    *("Gemma3nForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
    *("Phi3SmallForCausalLM", "DeciLMForCausalLM"),
    *("Llama4ForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
}


def test_the_tests_compare_all_that_is_listed() -> None:
    cases = family_cases.CASES | family_cases.MORE_WITH_IMAGES
    compared = {name if name.endswith(("Generation", "Model")) else f"{name}ForCausalLM" for name, _ in cases.values()}
    assert {plain(name) for name in families()} == {plain(name) for name in compared | ELSEWHERE}
    configs = [config for config, _ in quantised.FORMATS.values()]
    configs += [config for _, _, config, _ in quantised.EXPERTS.values()]
    elsewhere = {"gguf", "bitsandbytes", "auto-round", "modelopt_fp4", "modelopt_mixed"}  # in tests/models
    assert set(quantizations()) == {config["quant_method"] for config in configs} | elsewhere


def plain(name: str) -> str:
    return name.lower().replace("_", "")
