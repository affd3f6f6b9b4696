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


def test_the_tests_compare_all_that_is_listed() -> None:
    compared = {f"{name}ForCausalLM" for name, _ in family_cases.CASES.values()}
    assert {name for name in families() if not name.endswith("ForConditionalGeneration")} == compared
    assert {name.replace("ForConditionalGeneration", "ForCausalLM") for name in families()} == compared
    configs = [config for config, _ in quantised.FORMATS.values()]
    configs += [config for _, _, config, _ in quantised.EXPERTS.values()]
    assert set(quantizations()) == {config["quant_method"] for config in configs} | {"gguf"}  # see test_gguf_models
