"""Adapters with a classifier's head, as PEFT saves them for SEQ_CLS: the scores of merged transformers models."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("peft")

from engine import LLM, LoRARequest
from engine.models.classifier import Classifier, read_adapter_classifier
from engine.models.errors import ModelError
from engine.models.lora import ADAPTER_HEADS
from tests.oracles.peft_adapters import base_model, make_adapter

PROMPTS = [[7 * i % 380 + 1 for i in range(length)] for length in (30, 3, 17)]
LABELS = (3, 1, 5)  # of each adapter with a head
ADAPTER: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}


def scores_of(model: Any) -> list[list[float]]:
    """Return the probabilities of each prompt's labels, by transformers."""
    found = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0]
        found.append((logits.sigmoid() if len(logits) == 1 else logits.softmax(0)).tolist())
    return found


class Case:
    """A base model, its adapters (None: the base alone), and the scores of each by transformers."""

    def __init__(self, folder: Path, kind: str) -> None:
        from transformers import AutoModelForSequenceClassification

        self.model = folder / "model"
        base_model("qwen3", self.model)
        self.requests: list[LoRARequest | None] = []
        self.expected: list[list[list[float]]] = []
        classifier = AutoModelForSequenceClassification.from_pretrained
        if kind == "classifier":  # the base has three labels, and one adapter leaves its head as it is
            torch.manual_seed(0)
            base = classifier(self.model, num_labels=3, pad_token_id=0, id2label={0: "bad", 1: "fair", 2: "good"})
            base.score.weight.data.normal_()
            base.save_pretrained(self.model)
            self._add(None, base.eval())
            self._add("body", make_adapter(copy.deepcopy(base), folder / "body", 9, **ADAPTER))
        for seed, num_labels in enumerate(LABELS):
            torch.manual_seed(seed)
            own = classifier(self.model, num_labels=num_labels, pad_token_id=0, ignore_mismatched_sizes=True)
            name = f"labels-{num_labels}"
            self._add(name, make_adapter(own, folder / name, seed, task_type="SEQ_CLS", **ADAPTER))

    def _add(self, name: str | None, model: Any) -> None:
        path = str(self.model.parent / (name or ""))
        self.requests.append(None if name is None else LoRARequest(name, len(self.requests) + 1, path))
        self.expected.append(scores_of(model))


@pytest.fixture(scope="module", params=["classifier", "generates text"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Case, LLM]]:
    case = Case(tmp_path_factory.mktemp("adapters"), request.param)
    llm = LLM(
        str(case.model), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=128, block_size=8,
        num_gpu_blocks_override=200, enable_lora=True, max_loras=3, debug_checks=True,
    )  # fmt: skip
    yield case, llm
    llm.close()


def test_adapters_with_heads_share_a_batch(case: tuple[Case, LLM]) -> None:
    made, llm = case
    prompts, requests = PROMPTS * len(made.requests), [each for each in made.requests for _ in PROMPTS]
    expected = [scores for each in made.expected for scores in each]
    for order in (1, -1):
        found = llm.classify(prompts[::order], use_tqdm=False, lora_request=requests[::order])
        for got, want in zip(found, expected[::order], strict=True):
            assert got.outputs.probs == pytest.approx(want, abs=1e-5)


def test_labels_are_the_bases_if_it_has_as_many(case: tuple[Case, LLM]) -> None:
    made, llm = case
    own = next(each for each in made.requests if each is not None and each.lora_name == "labels-3")
    [found] = llm.classify(PROMPTS[:1], use_tqdm=False, lora_request=own)
    best = max(range(3), key=found.outputs.probs.__getitem__)
    names = ["bad", "fair", "good"] if made.requests[0] is None else ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert found.outputs.label == names[best]


def test_a_model_that_generates_text_is_no_classifier_without_an_adapter(case: tuple[Case, LLM]) -> None:
    made, llm = case
    if made.requests[0] is None:
        assert len(llm.classify(PROMPTS[:1], use_tqdm=False)[0].outputs.probs) == 3
    else:
        with pytest.raises(ValueError, match="the model is no classifier"):
            llm.classify(PROMPTS[:1], use_tqdm=False)


def changed(folder: Path, tmp_path: Path, name: str, value: torch.Tensor | None) -> LoRARequest:
    """Copy an adapter with its head replaced, or stored under another name."""
    tensors = load_file(folder / "adapter_model.safetensors")
    head = tensors.pop(ADAPTER_HEADS[0])
    tensors[name] = head if value is None else value
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    return LoRARequest("changed", 9, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (ADAPTER_HEADS[0], torch.ones(2, 9), r"score\.weight', the classifier's head, cannot be read \(its shape is"),
        (ADAPTER_HEADS[0], torch.ones(2, 128, dtype=torch.int32), "the classifier's head, cannot be read"),
        ("base_model.model.classifier.dense.weight", None, "the model is no classifier|must be one matrix"),
        ("base_model.model.score.bias", torch.ones(3), "the model is no classifier|must be one matrix"),
        (ADAPTER_HEADS[0], torch.full((2, 128), torch.nan), "holds NaN or infinity"),
    ],
)
def test_heads_that_cannot_be_used(
    case: tuple[Case, LLM], tmp_path: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    made, llm = case
    request = changed(made.model.parent / "labels-3", tmp_path, name, value)
    with pytest.raises(Exception, match=message) as caught:
        llm.classify(PROMPTS[:1], use_tqdm=False, lora_request=request)
    assert "\n" not in str(caught.value)


def test_heads_are_read_once(case: tuple[Case, LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter whose files have changed is another one."""
    made, llm = case
    read: list[Path] = []

    def reader(path: Path, *others: Any) -> Classifier | None:
        read.append(path)
        return read_adapter_classifier(path, *others)

    monkeypatch.setattr("engine.processing.model_info.read_adapter_classifier", reader)
    request = changed(made.model.parent / "labels-5", tmp_path, ADAPTER_HEADS[0], torch.ones(2, 128))
    for _ in range(2):
        [before] = llm.classify(PROMPTS[:1], use_tqdm=False, lora_request=request)
        assert before.outputs.probs == pytest.approx([0.5, 0.5])
    assert read == [tmp_path]
    changed(made.model.parent / "labels-5", tmp_path, ADAPTER_HEADS[0], torch.eye(3, 128) * 2)
    [after] = llm.classify(PROMPTS[:1], use_tqdm=False, lora_request=request)
    assert len(after.outputs.probs) == 3
    assert len(read) == 2


def test_a_name_that_peft_writes_for_several_adapters(case: tuple[Case, LLM], tmp_path: Path) -> None:
    made, llm = case
    request = changed(made.model.parent / "labels-5", tmp_path, ADAPTER_HEADS[1], None)
    found = llm.classify(PROMPTS, use_tqdm=False, lora_request=request)
    assert [each.outputs.probs for each in found] == [pytest.approx(each, abs=1e-5) for each in made.expected[-1]]


def test_labels_beside_the_adapter(tmp_path: Path) -> None:
    save_file({ADAPTER_HEADS[0]: torch.ones(2, 8)}, tmp_path / "adapter_model.safetensors")
    base = Classifier([], ["a", "b"], "softmax")
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "ham", "1": "spam"}}))
    found = read_adapter_classifier(tmp_path, 8, base)
    assert found is not None
    assert (found.labels, found.activation) == (["ham", "spam"], "softmax")
    with pytest.raises(ModelError, match="and the hidden size 16"):
        read_adapter_classifier(tmp_path, 16, base)


def test_an_adapter_without_a_head(tmp_path: Path) -> None:
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 8)}, tmp_path / "adapter_model.safetensors")
    assert read_adapter_classifier(tmp_path, 8, None) is None
