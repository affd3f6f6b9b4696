"""Labels of texts and scores of pairs of texts, from the outputs of `LLM.embed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.engine_request import Adapter
from engine.models.classifier import Classifier
from engine.processing.input_processor import InputProcessor
from engine.processing.output_collector import EmbeddingRequestOutput


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Labels of a text."""

    probs: list[float]  # of each label; bare scores of a regression
    label: str  # the most likely one


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """A prompt and its labels."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """A pair's score: the more alike the texts, the higher."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # of both texts
    finished: bool = True


def classifier_of(processor: InputProcessor, adapter: Adapter | None) -> Classifier:
    """Return the classifier of texts of the model, with an adapter if given. Raises `ValueError` if it has none."""
    found = processor.info.classifier_with(adapter)
    if found is None:
        raise ValueError("the model is no classifier: it must be published as …ForSequenceClassification")
    if found.labels_tokens:
        raise ValueError("the model labels tokens, not texts: `embed` returns its logits")
    return found


def classifiers_of(processor: InputProcessor, adapters: Sequence[Adapter | None]) -> list[Classifier]:
    """Return the classifier of each adapter, None for the model alone. Raises `ValueError` as `classifier_of`."""
    found = {adapter: classifier_of(processor, adapter) for adapter in dict.fromkeys(adapters)}
    return [found[adapter] for adapter in adapters]


def read_by(classifiers: Sequence[Classifier]) -> dict[str, Any]:
    """Return what `LLM.embed` is to return for a model's classifiers, which all read the same."""
    return {"pooling": classifiers[0].pooling if classifiers else None, "normalize": False}


def classified(
    classifiers: Sequence[Classifier], embedded: Sequence[EmbeddingRequestOutput]
) -> list[ClassificationRequestOutput]:
    """Return the labels of texts from their hidden states, or from logits that the worker computed. `classifiers`: of
    each text.
    """
    found = []
    for classifier, each in zip(classifiers, embedded, strict=True):
        probs = classifier.scores(each.outputs.embedding)
        output = ClassificationOutput(probs, classifier.best(probs))
        found.append(ClassificationRequestOutput(each.request_id, output, each.prompt_token_ids))
    return found


def pairs_of(texts: str | Sequence[str], others: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs to score: one text with each of the others, or texts one by one. Raises `ValueError`."""
    first, second = ([each] if isinstance(each, str) else list(each) for each in (texts, others))
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise ValueError(f"there must be one first text, or as many as second ones ({len(second)}), got {len(first)}")
    return list(zip(first, second, strict=True))


def what_scores(
    processor: InputProcessor, adapter: Adapter | None, pairs: Sequence[tuple[str, str]]
) -> tuple[list[Any], Classifier | None]:
    """Return the prompts for scores of pairs, and the classifier with one label that reads both texts of each. None: an
    embedding model gets the texts one by one. Raises `ValueError` if the model does neither.
    """
    if processor.info.classifier_with(adapter) is None:
        if processor.info.generates:  # the cosine of its hidden states says nothing
            raise ValueError("the model generates text: scores need an embedding model, or a classifier with one label")
        return [text for pair in pairs for text in pair], None
    classifier = classifier_of(processor, adapter)
    if (count := len(classifier.labels)) != 1:
        raise ValueError(f"scores need a classifier with one label, and the model has {count}: use `classify`")
    if processor.tokenizer is None:
        raise ValueError("scores need the tokenizer (skip_tokenizer_init)")
    return [processor.tokenizer.encode_pair(*pair, processor.info.type_offset) for pair in pairs], classifier


def scored(classifier: Classifier, embedded: Sequence[EmbeddingRequestOutput]) -> list[ScoringRequestOutput]:
    """Return the scores of pairs from their hidden states or logits."""
    return [
        ScoringRequestOutput(each.request_id, ScoringOutput(each.outputs.probs[0]), each.prompt_token_ids)
        for each in classified([classifier] * len(embedded), embedded)
    ]


def similarities(embedded: Sequence[EmbeddingRequestOutput]) -> list[ScoringRequestOutput]:
    """Return the cosine similarity of each two embeddings, which have length 1."""
    return [
        ScoringRequestOutput(
            first.request_id,
            ScoringOutput(first.outputs.similarity(second.outputs)),
            [*first.prompt_token_ids, *second.prompt_token_ids],
        )
        for first, second in zip(embedded[::2], embedded[1::2], strict=True)
    ]
