"""/score, /rerank and /classify over HTTP: by embeddings, and by classifiers."""

import math
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.core.params.pooling import PoolingParams
from engine.models.classifier import Classifier
from engine.models.pooling_config import Prompts
from server.settings import ServerConfig
from tests.support.fake_engine import HIDDEN_SIZE, FakeEngine, embedding_of, make_tokenizer
from tests.support.live_server import Live, run_server, wait_until

WEIGHTS = [array("f", [math.cos(3 * label + i) for i in range(HIDDEN_SIZE)]) for label in range(3)]
RAW = PoolingParams(normalize=False)
SCORE, RERANK, CLASSIFY = (
    ("/score", "/v1/score"),
    ("/rerank", "/v1/rerank", "/v2/rerank"),
    ("/classify", "/v1/classify"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with run_server(FakeEngine()) as live:
        yield live


@pytest.fixture
def vectors(server: Live) -> Live:
    """An embedding model."""
    server.engine.__init__()  # type: ignore[misc]
    server.engine.generates = False
    return server


def classifier(live: Live, num_labels: int, activation: Any) -> Live:
    live.engine.classifier = Classifier(WEIGHTS[:num_labels], ["bad", "good", "fine"][:num_labels], activation)
    return live


def cosine(first: str, second: str) -> float:
    tokenizer = make_tokenizer()
    found = [embedding_of(tokenizer.encode(text), PoolingParams()) for text in (first, second)]
    return math.fsum(a * b for a, b in zip(*found, strict=True))


def logit(prompt: list[int], label: int = 0) -> float:
    return math.fsum(a * b for a, b in zip(embedding_of(prompt, RAW), WEIGHTS[label], strict=True))


@pytest.mark.parametrize("path", SCORE)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_scores_by_cosine(vectors: Live, path: str, names: tuple[str, str]) -> None:
    for first, second, pairs in (
        ("abc", "d", [("abc", "d")]),
        ("abc", ["d", "abc", "e"], [("abc", "d"), ("abc", "abc"), ("abc", "e")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
    ):
        body = vectors.post(path, model="toy", **{names[0]: first, names[1]: second}).json()
        assert [entry["score"] for entry in body["data"]] == pytest.approx([cosine(*pair) for pair in pairs], abs=1e-6)
        assert [entry["index"] for entry in body["data"]] == list(range(len(pairs)))
        assert {entry["object"] for entry in body["data"]} == {"score"}
        texts = {text for pair in pairs for text in pair}
        assert body["usage"]["prompt_tokens"] == sum(map(len, texts)), "each text is embedded once"
        assert "warnings" not in body


@pytest.mark.parametrize("path", RERANK)
def test_documents_in_order(vectors: Live, path: str) -> None:
    documents: list[Any] = ["x", {"text": "query"}, "other", "more"]
    texts = ["x", "query", "other", "more"]
    body = vectors.post(path, model="toy", query="query", documents=documents).json()
    expected = sorted(((cosine("query", text), index) for index, text in enumerate(texts)), reverse=True)
    assert [entry["index"] for entry in body["results"]] == [index for _, index in expected]
    assert [entry["relevance_score"] for entry in body["results"]] == pytest.approx([score for score, _ in expected])
    assert body["results"][0]["document"] == {"text": "query"}
    assert body["id"].startswith("rerank-")
    short = vectors.post(path, query="query", documents=documents, top_n=2, return_documents=False).json()
    assert [entry.keys() for entry in short["results"]] == [{"index", "relevance_score"}] * 2
    assert len(vectors.post(path, query="query", documents=documents, top_n=0).json()["results"]) == 4


@pytest.mark.parametrize("documents", [[{"text": "a", "colour": 1}, "b"], ["b", {"text": "a", "colour": 1}]])
def test_texts_and_objects_may_be_mixed(vectors: Live, documents: list[Any]) -> None:
    answer = vectors.post("/rerank", query="query", documents=documents)
    assert len(answer.json()["results"]) == 2
    assert "colour" in answer.text


def test_a_cross_encoder_reads_pairs(vectors: Live) -> None:
    classifier(vectors, 1, "sigmoid")
    body = vectors.post("/rerank", query="ab", documents=["c", "de"]).json()
    tokenizer = make_tokenizer()
    prompts = [tokenizer.encode_pair("ab", text) for text in ("c", "de")]
    assert (
        [prompt for prompt, *_ in vectors.engine.embedded]
        == prompts
        == [tokenizer.encode("abc"), tokenizer.encode("abde")]
    )
    found = {entry["index"]: entry["relevance_score"] for entry in body["results"]}
    for index, prompt in enumerate(prompts):
        assert found[index] == pytest.approx(1 / (1 + math.exp(-logit(prompt))), abs=1e-6)
    raw = vectors.post("/score", text_1="ab", text_2="c", use_activation=False).json()["data"][0]["score"]
    assert raw == pytest.approx(logit(prompts[0]), abs=1e-5)


def test_a_template_that_is_given_writes_the_pairs(serve: Callable[..., Live]) -> None:
    """Templates as in vLLM: messages of the roles query and document. The model's own is for chats."""
    template = (
        "{% if messages[1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}{{ system }}"
        "<{% for message in messages %}{{ message.role }}: {{ message.content }}|{% endfor %}>"
    )
    live = serve(FakeEngine(), ServerConfig(chat_template=template, default_chat_template_kwargs={"system": "S"}))
    live.engine.generates = False
    classifier(live, 1, "sigmoid")
    tokenizer = make_tokenizer()
    prompts = [tokenizer.encode(f"S<query: ab|document: {text}|>") for text in ("c", "de")]
    scores = [entry["score"] for entry in live.post("/score", text_1="ab", text_2=["c", "de"]).json()["data"]]
    assert [prompt for prompt, *_ in live.engine.embedded] == prompts
    assert scores == pytest.approx([1 / (1 + math.exp(-logit(prompt))) for prompt in prompts], abs=1e-6)
    refused = live.post("/rerank", query="ab", documents=["no"])
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the chat template rejected the texts: not that"
    live.post("/classify", input="plain")
    assert live.engine.embedded[-1][0] == tokenizer.encode("plain")


@pytest.mark.parametrize("path", CLASSIFY)
def test_labels(vectors: Live, path: str) -> None:
    classifier(vectors, 3, "softmax")
    body = vectors.post(path, model="toy", input=["abc", "xyz"]).json()
    for text, entry in zip(["abc", "xyz"], body["data"], strict=True):
        powers = [math.exp(logit(make_tokenizer().encode(text), label)) for label in range(3)]
        assert entry["probs"] == pytest.approx([power / sum(powers) for power in powers], abs=1e-6)
        assert entry["label"] == ["bad", "good", "fine"][powers.index(max(powers))]
        assert entry["num_classes"] == 3
    assert len(vectors.post(path, input=[[70, 71], [72]], activation=False).json()["data"]) == 2


@pytest.mark.parametrize(
    ("num_labels", "path", "body", "param", "message"),
    [
        (0, "/score", {"text_1": "a"}, "text_2", "is required"),
        (0, "/score", {"text_2": "a", "text_1": []}, "text_1", "is required"),
        (0, "/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1",
        "must be one text or as many as text_2"),
        (0, "/score", {"text_1": "a", "text_2": 5}, "text_2", "must be a string or a list of strings"),
        (0, "/rerank", {"query": "a", "documents": []}, "documents", "must not be empty"),
        (0, "/rerank", {"query": "a", "documents": ["b", 5]}, "documents[1]", "must be a string or an object"),
        (0, "/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal to 0"),
        (0, "/rerank", {"query": "a", "documents": ["b"] * 3000}, "documents", "must be at most 2048 texts, got 3000"),
        (0, "/rerank", {"query": "a", "documents": ["x" * 600]}, "documents", "maximum context length"),
        (0, "/classify", {"input": "a"}, "model", "is no classifier"),
        (3, "/rerank", {"query": "a", "documents": ["b"]}, "model", "has 3 labels"),
        (1, "/classify", {"input": []}, "input", "must not be empty"),
    ],
)  # fmt: skip
def test_errors(vectors: Live, num_labels: int, path: str, body: dict[str, Any], param: str, message: str) -> None:
    if num_labels:
        classifier(vectors, num_labels, "softmax")
    response = vectors.post(path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_model_that_generates_compares_nothing(vectors: Live) -> None:
    vectors.engine.generates = True
    for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        response = vectors.post(path, **body)
        assert (response.status_code, "generates text" in response.json()["error"]["message"]) == (400, True)
    assert not vectors.engine.embedded


def test_a_classifier_generates_nothing(vectors: Live) -> None:
    classifier(vectors, 1, "sigmoid")
    assert "is published for classification and generates no text. Use /v1/classify." in vectors.complete("a").text


def test_an_abort_is_told(vectors: Live) -> None:
    vectors.engine.holds = True
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(vectors.post("/score", text_1="a", text_2="b", request_id="mine"))
    )
    thread.start()
    wait_until(lambda: bool(vectors.engine.active))
    vectors.http.post("/v1/requests/score-mine/abort").raise_for_status()
    thread.join()
    assert answers[0].status_code == 409


@pytest.fixture
def encoder(server: Live) -> Live:
    server.engine.__init__()  # type: ignore[misc]
    server.engine.generates, server.engine.is_encoder = False, True
    return server


def test_logits_of_an_encoder_are_the_workers(encoder: Live) -> None:
    labels = [str(i) for i in range(HIDDEN_SIZE)]
    encoder.engine.classifier = Classifier([], labels, "softmax", "cls")
    prompt = make_tokenizer().encode("abc")
    logits = embedding_of(prompt, PoolingParams(pooling="cls", normalize=False))
    powers = [math.exp(each) for each in logits]
    expected = [each / math.fsum(powers) for each in powers]
    for path in CLASSIFY:
        assert encoder.post(path, input="abc").json()["data"][0]["probs"] == pytest.approx(expected)
    answer = encoder.post("/pooling", input="abc", task="classify").json()
    assert answer["data"][0] == {"index": 0, "object": "pooling", "data": pytest.approx(expected)}
    assert answer["labels"] == labels
    assert encoder.post("/pooling", input="abc", use_activation=False).json()["data"][0]["data"] == pytest.approx(
        logits
    )
    for path, reason in (
        ("/v1/embeddings", "The model `toy` is published for classification. Use /v1/classify."),
        ("/v1/completions", "The model `toy` is published for classification and generates no text. Use /v1/classify."),
    ):
        refused = encoder.post(path, input="abc", prompt="abc")
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, reason)


def test_labels_of_tokens(encoder: Live) -> None:
    encoder.engine.classifier = Classifier([], ["O", "NAME"], "none", "all")
    values = embedding_of(make_tokenizer().encode("abc"), PoolingParams(pooling="all", normalize=False))
    (found,) = encoder.post("/pooling", input="abc").json()["data"]
    assert found["data"] == [pytest.approx(values[at : at + 2]) for at in range(0, len(values), 2)]
    for path, fields, reason in (
        ("/v1/classify", {}, "The model `toy` labels tokens. Use /pooling."),
        ("/v1/embeddings", {}, "The model `toy` is published for classification. Use /pooling."),
        ("/pooling", {"task": "embed"}, "task must be token_classify for the model `toy`, got 'embed'"),
    ):
        refused = encoder.post(path, input="abc", **fields)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, reason)


def test_pooling_of_an_embedding_model_with_prompts(encoder: Live) -> None:
    encoder.engine.prompts = Prompts({"query": "ab: ", "document": "b: "}, "document")
    encode = make_tokenizer().encode
    for path, key in (("/pooling", "data"), ("/v1/embeddings", "embedding")):
        (found,) = encoder.post(path, input="abc").json()["data"]
        assert found[key] == pytest.approx(embedding_of(encode("b: abc"), PoolingParams()), rel=1e-6)
    (found,) = encoder.post("/v1/embeddings", input="abc", prompt_name="query").json()["data"]
    assert found["embedding"] == pytest.approx(embedding_of(encode("ab: abc"), PoolingParams()), rel=1e-6)
    refused = encoder.post("/v1/embeddings", input="abc", prompt_name="other")
    assert refused.status_code == 400
    assert "prompt_name must be one of query, document, got 'other'" in refused.json()["error"]["message"]


def test_a_truncated_text_of_an_encoder_keeps_its_last_token(encoder: Live) -> None:
    ids = make_tokenizer().encode("abcdef")
    (found,) = encoder.post("/v1/embeddings", input="abcdef", truncate_prompt_tokens=4).json()["data"]
    assert found["embedding"] == pytest.approx(embedding_of([*ids[:3], ids[-1]], PoolingParams()), rel=1e-6)
