"""Labels of texts and scores of pairs of texts, from the outputs of `LLM.embed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def classifier_of(processor: InputProcessor) -> Classifier:
    """Return the model's classifier of texts. Raises `ValueError` if it has none."""
    found = processor.classifier
    if found is None:
        raise ValueError("the model is no classifier: it must be published as …ForSequenceClassification")
    if found.labels_tokens:
        raise ValueError("the model labels tokens, not texts: `embed` returns its logits")
    return found


def check_embeds(processor: InputProcessor) -> None:
    """Raise `ValueError` for a model that generates text: the cosine of its hidden states says nothing."""
    if processor.info.generates:
        raise ValueError("the model generates text: scores need an embedding model, or a classifier with one label")


def classified(classifier: Classifier, embedded: Sequence[EmbeddingRequestOutput]) -> list[ClassificationRequestOutput]:
    """Return the labels of texts from their hidden states, or from logits that the worker computed."""
    found = []
    for each in embedded:
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


def pair_prompts(processor: InputProcessor, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Return the prompts of a classifier with one label, which reads both texts. Raises `ValueError`."""
    if (count := len(classifier_of(processor).labels)) != 1:
        raise ValueError(f"scores need a classifier with one label, and the model has {count}: use `classify`")
    if processor.tokenizer is None:
        raise ValueError("scores need the tokenizer (skip_tokenizer_init)")
    return [processor.tokenizer.encode_pair(*pair, processor.info.type_offset) for pair in pairs]


def scored(classifier: Classifier, embedded: Sequence[EmbeddingRequestOutput]) -> list[ScoringRequestOutput]:
    """Return the scores of pairs from their hidden states or logits."""
    return [
        ScoringRequestOutput(each.request_id, ScoringOutput(each.outputs.probs[0]), each.prompt_token_ids)
        for each in classified(classifier, embedded)
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
