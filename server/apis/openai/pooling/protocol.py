"""The request fields of /pooling, as in vLLM, and their conversion to the neutral request."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from server.apis.openai.fields import EngineFields, Prompt, prompts_of
from server.generation.request import EmbeddingRequest
from server.http.bodies import optional, wrong

Task = Literal["embed", "classify", "token_classify"]


class PoolingRequest(EngineFields):
    """Texts to compute outputs for."""

    input: Prompt = Field(description="A string, token ids, or a list of either.")
    task: Task | None = optional("What is expected of the model.", "what the model was published for")
    use_activation: bool | None = optional(
        "False: return a classifier's raw logits, or an embedding of its own length.", True
    )

    @model_validator(mode="after")
    def _check_input(self) -> PoolingRequest:
        if not self.input:
            raise wrong("must not be empty", "input")
        return self

    def neutral(self, pooling: str | None) -> EmbeddingRequest:
        """Return the neutral request. pooling: a classifier's; None: the model is none."""
        fields: dict[str, Any] = {} if self.use_activation is None else {"normalize": self.use_activation}
        return EmbeddingRequest(
            prompt=prompts_of(self.input),
            id_prefix="pool-",
            names={"prompt": "input"},
            add_special_tokens=self.add_special_tokens is not False,
            pooling=fields if pooling is None else {"pooling": pooling, "normalize": False},
            has_default_prompt=pooling is None,
            wants_logits=pooling is not None,
            **self.engine_fields(),
        )
