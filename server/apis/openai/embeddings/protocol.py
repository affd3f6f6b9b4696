"""The request fields of /v1/embeddings, and their conversion to the neutral request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from server.apis.openai.conversation import NAMES, ConversationFields
from server.apis.openai.fields import NO_EFFECT, EngineFields, Prompt, body_class, prompts_of
from server.apis.parameters import pooling_fields
from server.generation.request import EmbeddingRequest
from server.http.bodies import Body, one_message, optional, wrong

NOT_YET_IN_EMBEDDINGS: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
_EmbeddingBase: Any = body_class("EmbeddingBase", NOT_YET_IN_EMBEDDINGS)
_PoolingBase: Any = create_model("PoolingBase", __base__=Body, **pooling_fields())


class _Embedding(EngineFields, _PoolingBase, _EmbeddingBase):  # type: ignore[misc]
    """The fields of an embeddings request except its input."""

    encoding_format: Literal["float", "base64"] | None = optional(
        "`base64`: little-endian float32 values in base64; a fifth of the bytes, and what OpenAI's clients request.",
        "float",
    )
    use_activation: bool | None = optional("vLLM's newer name for `normalize`.")

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    @model_validator(mode="after")
    def _check_names(self) -> _Embedding:
        if self.normalize is not None and self.use_activation not in (None, self.normalize):
            raise wrong("is another name for normalize and must have the same value", "use_activation")
        return self

    def _neutral(self, **prompt: Any) -> EmbeddingRequest:
        normalize = self.use_activation if self.normalize is None else self.normalize
        pooling = {"pooling": self.pooling, "dimensions": self.dimensions, "normalize": normalize}
        return EmbeddingRequest(
            id_prefix="embd-",
            pooling={name: value for name, value in pooling.items() if value is not None},
            **prompt,
            **self.engine_fields(),
        )


class EmbeddingTextRequest(_Embedding):
    """Texts to embed."""

    input: Prompt = Field(description="A string, a list of token ids, or a list of either.")
    prompt_name: str | None = optional(
        "Name of a prompt of the model's `config_sentence_transformers.json`, such as `query`, put before texts.",
        "the model's own",
    )

    @model_validator(mode="after")
    def _check_input(self) -> EmbeddingTextRequest:
        if self.input in ("", []) or (isinstance(self.input, list) and any(item in ("", []) for item in self.input)):
            raise wrong("must not be empty", "input")
        return self

    def neutral(self) -> EmbeddingRequest:
        special = self.add_special_tokens is not False
        return self._neutral(
            prompt=prompts_of(self.input),
            add_special_tokens=special,
            names={"prompt": "input"},
            prompt_name=self.prompt_name,
            has_default_prompt=True,
        )


class EmbeddingChatRequest(ConversationFields, _Embedding):
    """A conversation to embed."""

    input: Annotated[None, one_message("omitted when messages is given")] = None

    def neutral(self) -> EmbeddingRequest:
        conversation = self.conversation(add_generation_prompt=bool(self.add_generation_prompt))  # no answer follows
        return self._neutral(prompt=conversation, add_special_tokens=bool(self.add_special_tokens), names=NAMES)


EmbeddingBody = Annotated[
    Annotated[EmbeddingTextRequest, Tag("<text>")] | Annotated[EmbeddingChatRequest, Tag("<chat>")],
    Discriminator(lambda body: "<chat>" if isinstance(body, dict) and "messages" in body else "<text>"),
]
