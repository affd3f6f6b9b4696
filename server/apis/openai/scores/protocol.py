"""The request fields of /score, /rerank and /classify, as in vLLM, and their conversion to neutral requests."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from server.apis.openai.fields import EngineFields, Prompt, prompts_of
from server.generation.request import EmbeddingRequest
from server.http.bodies import Body, one_message, optional, wrong

Texts = Annotated[str | list[str], one_message("a string or a list of strings")]
Pair = tuple[str, str]


class _Scoring(EngineFields):
    """Fields of all three endpoints."""

    use_activation: bool | None = optional("False: return a classifier's raw logits.", True)
    activation: bool | None = optional("Older name for `use_activation`.")
    softmax: bool | None = optional("Older name for `use_activation`.")

    @property
    def is_activated(self) -> bool:
        return False not in (self.use_activation, self.activation, self.softmax)

    def hidden_states(self, prompts: Any, names: dict[str, str], pooling: str | None) -> EmbeddingRequest:
        """Return a request for what a classifier reads by `pooling`; None: for embeddings of length 1."""
        return EmbeddingRequest(
            prompt=prompts,
            id_prefix="score-",
            names=names,
            add_special_tokens=self.add_special_tokens is not False,
            pooling={"normalize": True} if pooling is None else {"pooling": pooling, "normalize": False},
            wants_logits=pooling is not None,
            **self.engine_fields(),
        )


class ScoreRequest(_Scoring):
    """Pairs of texts to score."""

    text_1: Texts | None = optional("A string or a list of strings.")
    text_2: Texts | None = optional("The texts to compare with: as many as `text_1`, or any number for one.")
    queries: Texts | None = optional("Another name for `text_1`.")
    documents: Texts | None = optional("Another name for `text_2`.")
    data_1: Texts | None = optional("Another name for `text_1`.")
    data_2: Texts | None = optional("Another name for `text_2`.")

    @model_validator(mode="after")
    def _check_texts(self) -> ScoreRequest:
        for name, given in (("text_1", self.first), ("text_2", self.second)):
            if not given:
                raise wrong("is required: a string or a list of strings", name)
        if len(self.first) not in (1, len(self.second)):
            raise wrong(f"must be one text or as many as text_2 ({len(self.second)}), got {len(self.first)}", "text_1")
        return self

    @property
    def first(self) -> list[str]:
        return _texts(self.text_1, self.queries, self.data_1)

    @property
    def second(self) -> list[str]:
        return _texts(self.text_2, self.documents, self.data_2)

    @property
    def pairs(self) -> list[Pair]:
        first = self.first * len(self.second) if len(self.first) == 1 else self.first
        return list(zip(first, self.second, strict=True))


def _texts(*given: str | list[str] | None) -> list[str]:
    found = next((each for each in given if each is not None), [])
    return [found] if isinstance(found, str) else found


class Document(Body):
    text: str


class RerankRequest(_Scoring):
    """Documents to rank by relevance to a query."""

    query: str = Field(description="The query.")
    documents: list[Annotated[str | Document, one_message('a string or an object {"text": …}')]] = Field(
        min_length=1, description='Strings or objects `{"text": …}`.'
    )
    top_n: int | None = optional("Return at most this many results; 0: all.", ge=0)
    return_documents: bool | None = optional("False: omit the documents' texts from the results.", True)
    max_tokens_per_doc: int | None = optional("Accepted; has no effect. Use `truncate_prompt_tokens` instead.")

    NO_EFFECT: ClassVar[Any] = {"max_tokens_per_doc": ()}

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def pairs(self) -> list[Pair]:
        return [(self.query, text) for text in self.texts]


class ClassifyRequest(_Scoring):
    """Texts to classify."""

    input: Prompt = Field(description="A string, token ids, or a list of either.")

    @model_validator(mode="after")
    def _check_input(self) -> ClassifyRequest:
        if not self.input:
            raise wrong("must not be empty", "input")
        return self

    def neutral(self, pooling: str) -> EmbeddingRequest:
        return self.hidden_states(prompts_of(self.input), {"prompt": "input"}, pooling)
