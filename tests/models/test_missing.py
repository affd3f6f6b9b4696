"""The error about an unknown family: it says what Quire lacks."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.errors import ModelError
from engine.models.families import read_spec


@pytest.mark.parametrize(
    ("architecture", "fields", "need"),
    [
        ("MambaForCausalLM", {"state_size": 16}, "state-space (Mamba) layers"),
        ("Qwen9NextForCausalLM", {"linear_num_value_heads": 32}, "delta-net layers"),
        ("Lfm3ForCausalLM", {"conv_L_cache": 7}, "convolution layers"),
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "an encoder beside the decoder"),
        ("PaliGemmaForConditionalGeneration", {"vision_config": {"depth": 2}}, "images as input"),
        (
            "Kimi9ForConditionalGeneration",
            {"vision_config": {"x": 1}, "text_config": {"index_topk": 9}},
            "sparse attention",
        ),
        ("ApertusForCausalLM", {}, "an activation with learnt parameters"),
        ("DebertaForMaskedLM", {}, "attention by relative positions"),
        ("InternLM9ForCausalLM", {"auto_map": {"AutoModel": "x.Y"}}, "code that comes with the model"),
        ("Llama7ForCausalLM", {}, "a function of about ten lines in engine/models/families"),
    ],
)
def test_an_unknown_family_is_told_with_what_it_needs(
    architecture: str, fields: dict[str, Any], need: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    with pytest.raises(ModelError, match="is not supported: it needs ") as caught:
        read_spec(tmp_path)
    assert f"it needs {need}" in str(caught.value)
    assert str(caught.value).endswith("`quire models` lists all that are")
