"""The request fields of /tokenize and /detokenize, and their conversion to the neutral request."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Tag

from server.apis.openai.conversation import NAMES, ConversationFields
from server.generation.request import PromptRequest
from server.http.bodies import Body, one_message, optional


class TokenizeTextRequest(Body):
    """A text to tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = optional("Add the tokenizer's special tokens to the prompt.")
    return_token_strs: bool | None = optional("Also return each token as the vocabulary spells it.")

    def neutral(self) -> PromptRequest:
        special = self.add_special_tokens is not False
        return PromptRequest(prompt=[self.prompt], id_prefix="", model=self.model, add_special_tokens=special)


class TokenizeChatRequest(ConversationFields):
    """A conversation to tokenize."""

    model: str | None = None
    add_special_tokens: bool | None = optional("Add the tokenizer's special tokens to the prompt.")
    return_token_strs: bool | None = optional("Also return each token as the vocabulary spells it.")
    prompt: Annotated[None, one_message("omitted when messages is given")] = None

    def neutral(self) -> PromptRequest:
        special = bool(self.add_special_tokens)
        return PromptRequest(
            prompt=self.conversation(), id_prefix="", names=NAMES, model=self.model, add_special_tokens=special
        )


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("<text>")] | Annotated[TokenizeChatRequest, Tag("<chat>")],
    Discriminator(lambda body: "<chat>" if isinstance(body, dict) and "messages" in body else "<text>"),
]


class DetokenizeRequest(Body):
    """Token ids to convert to text."""

    model: str | None = None
    tokens: list[int]
