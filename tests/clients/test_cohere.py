"""Cohere's client over a model that generates, served as a reranker: the scores are those of transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.clients.table import Client
from tests.support.served import serve

cohere = pytest.importorskip("cohere")

CLIENTS = (Client("Cohere", "cohere", "`rerank` of both versions, on a model with `--hf-overrides`"),)
pytestmark = pytest.mark.slow

RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
QUERY, DOCUMENTS = "Is it sunny?", ["Bread.", "It is sunny."]


def probabilities(folder: Path) -> list[float]:
    """Probabilities of "yes" beside "no" as the next token, behind the query and each document."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_tokens_to_ids(RERANKER["classifier_from_token"])
    found = []
    for document in DOCUMENTS:
        ids = tokenizer(QUERY).input_ids + tokenizer(document).input_ids
        with torch.inference_mode():
            found.append(model(torch.tensor([ids])).logits[0, -1, tokens].softmax(0)[1].item())
    return found


def test_rerank(demo_model: Path) -> None:
    expected = probabilities(demo_model)
    flags = ("--served-model-name", "demo", "--dtype", "float32", "--hf-overrides", json.dumps(RERANKER))
    with serve(demo_model, *flags) as url:
        for version in (cohere.Client, cohere.ClientV2):
            with version("none", base_url=url) as client:
                results = client.rerank(model="demo", query=QUERY, documents=DOCUMENTS).results
            assert [each.index for each in results] == [1, 0]
            scores = {each.index: each.relevance_score for each in results}
            assert [scores[0], scores[1]] == pytest.approx(expected, abs=1e-5)
