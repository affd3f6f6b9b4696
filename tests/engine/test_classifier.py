"""Sequence classifiers: the scores of transformers, whatever the head is stored as; broken heads are refused in one
line.
"""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, EngineConfig
from engine.core.params.pooling import PoolingParams
from engine.models.classifier import Classifier, read_classifier
from engine.models.errors import ModelError
from engine.processing.input_processor import InputProcessor
from tests.support import fake_engine
from tests.support.live_server import run_server

PROMPTS = [[(7 * i + k * k) % 250 for k in range(n)] for i, n in enumerate((1, 16, 33))]
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300, "max_position_embeddings": 256, "pad_token_id": 299,
}  # fmt: skip


def reference(folder: Path, family: str, num_labels: int) -> Any:
    """A random model of transformers, saved in `folder`."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SMALL, num_labels=num_labels, dtype="float32")
    torch.manual_seed(num_labels)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data.normal_()
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.heavy
@pytest.mark.parametrize(("family", "num_labels"), [("Llama", 1), ("Qwen3", 3)])
def test_scores_are_those_of_transformers(family: str, num_labels: int, tmp_path: Path) -> None:
    model = reference(tmp_path, family, num_labels)
    llm = LLM(model=str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64)
    config = EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)
    classifier = InputProcessor.load(config).classifier
    assert classifier is not None
    assert classifier.labels == [f"LABEL_{index}" for index in range(num_labels)]
    outputs = llm.embed(PROMPTS, normalize=False, use_tqdm=False)
    llm.close()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0]
        assert classifier.scores(output.outputs.embedding, activated=False) == pytest.approx(logits.tolist(), abs=1e-4)
        expected = logits.sigmoid() if num_labels == 1 else logits.softmax(0)
        assert classifier.scores(output.outputs.embedding) == pytest.approx(expected.tolist(), abs=1e-5)


def reranker(folder: Path, tied: bool) -> Any:
    """A random generating model of transformers, saved in `folder` with a tokenizer whose vocabulary has "yes" and
    "no".
    """
    import transformers

    config = transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=tied, dtype="float32")
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    model.lm_head.weight.data.normal_(std=0.1)  # scores are neither 0 nor 1
    model.save_pretrained(folder)
    vocabulary = {character: index for index, character in enumerate("abcdefghijklmnopqrstuvwxyz")}
    merges = [("e", "s"), ("y", "es"), ("n", "o")]
    vocabulary |= {"es": 26, "yes": 27, "no": 28}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges)).save(str(folder / "tokenizer.json"))
    return model.eval()


RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


@pytest.mark.heavy
@pytest.mark.parametrize("tied", [True, False])
def test_a_generating_model_scores_by_two_of_its_tokens(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/v1/score and /v1/rerank answer the probability of "yes" beside "no" as the next token."""
    model = reranker(tmp_path, tied)
    settings: dict[str, Any] = {"model": str(tmp_path), "hf_overrides": RERANKER, "dtype": "float32", "device": "cpu"}
    processor = InputProcessor.load(EngineConfig(**settings))
    llm = LLM(**settings, num_gpu_blocks_override=64)

    def embedding_of(prompt: list[int], pooling: PoolingParams) -> list[float]:
        (output,) = llm.embed([prompt], normalize=pooling.normalize, use_tqdm=False)
        return output.outputs.embedding

    monkeypatch.setattr(fake_engine, "embedding_of", embedding_of)
    engine = fake_engine.FakeEngine()
    engine.tokenizer, engine.classifier = processor.tokenizer, processor.classifier
    engine.generates = processor.spec.has_head
    query, documents = "whatisthis", ["anapple", "yesno", "z"]
    expected = []
    for document in documents:
        assert processor.tokenizer is not None
        ids = processor.tokenizer.encode(query) + processor.tokenizer.encode(document)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected.append(logits[[28, 27]].softmax(0)[1].item())
    with run_server(engine) as live:
        scored = live.post("/v1/score", text_1=query, text_2=documents).json()["data"]
        ranked = live.post("/v1/rerank", query=query, documents=documents).json()["results"]
    llm.close()
    assert [each["score"] for each in scored] == pytest.approx(expected, abs=1e-5)
    assert [each["index"] for each in ranked] == sorted(range(3), key=lambda index: -expected[index])
    assert [each["relevance_score"] for each in ranked] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classifier_from_token": "yes"}, "must be a list of tokens, got 'yes'"),
        ({"classifier_from_token": ["no"]}, "must be two tokens"),
        ({"classifier_from_token": ["no", "maybe"]}, "'maybe' is no token of the vocabulary"),
        (
            {"is_original_qwen3_reranker": False, "method": "other"},
            "from_2_way_softmax or no_post_processing, got 'other'",
        ),
        ({"classifier_from_token": ["no", "far"]}, "it has 3 rows, none for token 9"),
    ],
)
def test_tokens_that_make_no_classifier(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"lm_head.weight": torch.ones(3, 8)}, tmp_path / "model.safetensors")
    ids = {"no": 0, "yes": 1, "far": 9}
    with pytest.raises(ModelError, match=message):
        read_classifier(tmp_path, "Qwen3ForSequenceClassification", 8, RERANKER | changes, ids.get)


def test_a_label_for_each_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"embed_tokens.weight": torch.arange(24.0).reshape(3, 8)}, tmp_path / "model.safetensors")
    changes = {"classifier_from_token": ["c", "a"], "method": "no_post_processing"}
    found = read_classifier(tmp_path, "GemmaForSequenceClassification", 8, changes, {"a": 0, "c": 2}.get)
    assert found is not None
    assert [list(row) for row in found.weights] == [[*range(16, 24)], [*range(8)]]


def write(folder: Path, head: torch.Tensor, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"score.weight": head, "other": torch.ones(3)}, folder / "model.safetensors")


def read(folder: Path, hidden_size: int = 8) -> Classifier:
    found = read_classifier(folder, "LlamaForSequenceClassification", hidden_size)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_kind_of_float(dtype: torch.dtype, tmp_path: Path) -> None:
    head = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    write(tmp_path, head)
    assert [list(row) for row in read(tmp_path).weights] == head.float().tolist()


def test_a_head_in_one_of_several_files(tmp_path: Path) -> None:
    write(tmp_path, torch.ones(1, 8), id2label={"0": "good"})
    (tmp_path / "model.safetensors").rename(tmp_path / "two.safetensors")
    index = {"weight_map": {"other": "one.safetensors", "score.weight": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (read(tmp_path).labels, len(read(tmp_path).weights)) == (["good"], 1)


@pytest.mark.parametrize(
    ("num_labels", "config", "expected"),
    [
        (1, {}, [1 / (1 + math.exp(-8))]),
        (2, {}, [0.5, 0.5]),
        (2, {"problem_type": "multi_label_classification"}, [1 / (1 + math.exp(-8))] * 2),
        (1, {"problem_type": "regression"}, [8]),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, [8]),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, [8]),
    ],
)
def test_what_is_made_of_logits(num_labels: int, config: dict[str, Any], expected: list[float], tmp_path: Path) -> None:
    write(tmp_path, torch.ones(num_labels, 8), **config)
    assert read(tmp_path).scores([1.0] * 8) == pytest.approx(expected)


def test_extreme_logits() -> None:
    for activation, expected in (("sigmoid", [0, 1]), ("softmax", [0, 1])):
        classifier = Classifier([array("f", [-1e4]), array("f", [1e4])], ["a", "b"], activation)  # type: ignore[arg-type]
        assert classifier.scores([1.0]) == pytest.approx(expected)


def test_other_models_have_none(tmp_path: Path) -> None:
    assert read_classifier(tmp_path, "LlamaForCausalLM", 8) is None


@pytest.mark.parametrize("kind", ["shape", "missing", "truncated", "integer", "header", "index"])
def test_broken_heads(kind: str, tmp_path: Path) -> None:
    write(tmp_path, torch.ones(2, 9 if kind == "shape" else 8))
    path = tmp_path / "model.safetensors"
    if kind == "missing":
        save_file({"other": torch.ones(3)}, path)
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-40])
    elif kind == "integer":
        save_file({"score.weight": torch.ones(2, 8, dtype=torch.int32)}, path)
    elif kind == "header":
        path.write_bytes(b"\xff" * 100)
    elif kind == "index":
        path.unlink()
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"score.weight": "../x"}}')
    with pytest.raises(ModelError, match=r"score\.weight', the classifier's head"):
        read(tmp_path)


def test_the_body_takes_no_head(tmp_path: Path) -> None:
    """Whose tensor belongs to nothing else, and is refused in any other model."""
    reference(tmp_path, "Llama", 1)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "stray.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds 'stray\.weight'"):
        LLM(model=str(tmp_path), device="cpu", skip_tokenizer_init=True)
