"""Models with counting weights count, loaded from a checkpoint and as dummies."""

import json
from pathlib import Path

import pytest

from benchmarks import counting, workloads
from benchmarks.counting import counting_dummies, counting_folder
from benchmarks.random_weights import write_random_weights
from engine import LLM, SamplingParams
from engine.errors import ConfigError

SHAPES = {
    "dense": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640,
        "max_position_embeddings": 512, "tie_word_embeddings": True,
    },
    "conv": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 128, "intermediate_size": 256,
        "block_ff_dim": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3, "conv_bias": False,
        "block_auto_adjust_ff_dim": False, "vocab_size": 640, "max_position_embeddings": 512, "tie_embedding": True,
    },
}  # fmt: skip


def answers(folder: Path, load_format: str) -> list[list[int]]:
    llm = LLM(
        str(folder), device="cpu", dtype="float32", load_format=load_format, skip_tokenizer_init=True,
        max_num_seqs=2, max_model_len=128, enforce_eager=True,
    )  # fmt: skip
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5, 9, 300]}, {"prompt_token_ids": [7, 630]}]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.parametrize("name", SHAPES)
def test_the_text_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.model_shapes.SHAPES", SHAPES)
    monkeypatch.setattr(counting, "SHAPES", SHAPES)
    folder = counting_folder(name, tmp_path)
    assert folder == tmp_path / "counting" / name
    expected = [[*range(301, 321)], [*range(631, 640), *range(11)]]  # the last token's follower is 0
    with counting_dummies():
        assert answers(folder, "dummy") == expected
    assert answers(folder, "dummy") != expected
    write_random_weights(folder, counts=True)
    assert "lm_head.weight" in json.loads(next(folder.glob("*.index.json")).read_text())["weight_map"]
    assert answers(folder, "auto") == expected


def test_other_models_do_not_count(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has weights of its own"):
        counting_folder(str(tmp_path), tmp_path)


def test_answers_of_edits_are_the_passage_put_right() -> None:
    for request in workloads.named("edit8", 2000).requests:
        prompt = [int(token) for token in request.prompt]
        begun, passage = prompt[: workloads.BEGUN], prompt[workloads.BEGUN : -workloads.BEGUN]
        assert prompt[-workloads.BEGUN :] == begun == [*range(begun[0], begun[0] + workloads.BEGUN)]
        assert len(passage) == request.output_len
        answer = range(begun[-1] + 1, begun[-1] + 1 + request.output_len)
        assert max(answer) < 2000
        assert 0 < sum(a != b for a, b in zip(passage, answer, strict=True)) < len(passage) // 5
