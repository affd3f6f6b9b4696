"""The fields of /score, /rerank and /classify, as vLLM has them, and the neutral requests that they make."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from server.generation.request import EmbeddingRequest
from server.http.bodies import Body, one_message, optional, wrong
from server.openai.fields import EngineFields, Prompt, prompts_of

_RAW: dict[str, Any] = {"pooling": "last", "normalize": False}
Texts = Annotated[str | list[str], one_message("a text or a list of texts")]
Pair = tuple[str, str]


class _Scoring(EngineFields):
    """What all of them may say."""

    use_activation: bool | None = optional("False: a classifier's logits as they are.", True)
    activation: bool | None = optional("The older name of `use_activation`.")
    softmax: bool | None = optional("Another one.")

    @property
    def is_activated(self) -> bool:
        return False not in (self.use_activation, self.activation, self.softmax)

    def hidden_states(self, prompts: Any, names: dict[str, str], *, normalize: bool = False) -> EmbeddingRequest:
        """The request for the last token's hidden state of each prompt, or for the embedding."""
        return EmbeddingRequest(
            prompt=prompts,
            id_prefix="score-",
            names=names,
            add_special_tokens=self.add_special_tokens is not False,
            pooling={"normalize": True} if normalize else _RAW,
            **self.engine_fields(),
        )


class ScoreRequest(_Scoring):
    """Pairs of texts to be compared."""

    text_1: Texts | None = optional("A text, or a list of them.")
    text_2: Texts | None = optional("What each is compared with: as many texts, or many where `text_1` is one.")
    queries: Texts | None = optional("Another name of `text_1`.")
    documents: Texts | None = optional("Another name of `text_2`.")
    data_1: Texts | None = optional("Another name of `text_1`.")
    data_2: Texts | None = optional("Another name of `text_2`.")

    @model_validator(mode="after")
    def _check_texts(self) -> ScoreRequest:
        for name, given in (("text_1", self.first), ("text_2", self.second)):
            if not given:
                raise wrong("is required: a text or a list of texts", name)
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
    """Documents to be ordered by how well they fit a query."""

    query: str = Field(description="What is looked for.")
    documents: list[Annotated[str | Document, one_message("a text, or an object with a text")]] = Field(
        min_length=1, description='Texts, or objects `{"text": …}`.'
    )
    top_n: int | None = optional("Most results; 0 or left out: all.", ge=0)
    return_documents: bool | None = optional("False: results without their texts.", True)
    max_tokens_per_doc: int | None = optional("Accepted; documents are not cut, see `truncate_prompt_tokens`.")

    NO_EFFECT: ClassVar[Any] = {"max_tokens_per_doc": ()}

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def pairs(self) -> list[Pair]:
        return [(self.query, text) for text in self.texts]


class ClassifyRequest(_Scoring):
    """Texts to be classified."""

    input: Prompt = Field(description="A text, token ids, or a list of either.")

    @model_validator(mode="after")
    def _check_input(self) -> ClassifyRequest:
        if not self.input:
            raise wrong("must not be empty", "input")
        return self

    def neutral(self) -> EmbeddingRequest:
        return self.hidden_states(prompts_of(self.input), {"prompt": "input"})
