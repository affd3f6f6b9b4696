"""The fields of /tokenize and /detokenize, and the neutral request that they make."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Tag

from server.generation.request import PromptRequest
from server.http.bodies import Body, one_message, optional
from server.openai.conversation import NAMES, ConversationFields


class TokenizeTextRequest(Body):
    """A text to be turned into token ids."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = optional("Begin the prompt with the tokenizer's special tokens.")
    return_token_strs: bool | None = optional("Give the vocabulary's spelling of each token too.")

    def neutral(self) -> PromptRequest:
        special = self.add_special_tokens is not False
        return PromptRequest(prompt=[self.prompt], id_prefix="", model=self.model, add_special_tokens=special)


class TokenizeChatRequest(ConversationFields):
    """A conversation to be turned into token ids."""

    model: str | None = None
    add_special_tokens: bool | None = optional("Begin the prompt with the tokenizer's special tokens.")
    return_token_strs: bool | None = optional("Give the vocabulary's spelling of each token too.")
    prompt: Annotated[None, one_message("left out where there are messages")] = None

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
    """Token ids to be turned into text."""

    model: str | None = None
    tokens: list[int]
