"""The model being served: its engine, its names, its chat template, and how text becomes token ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine import ModelInfo, TokenizerError
from engine.text.chat_template import ChatTemplateError
from engine.text.tokenizer import Tokenizer
from server.generation.chat_format import ChatFormats
from server.generation.conversation import CheckText, ConversationEncoder, Prompt
from server.generation.engine_client import EngineClient
from server.generation.errors import InvalidRequestError, NotFoundError
from server.generation.request import PromptRequest, TextPrompts
from server.generation.workers import Workers
from server.settings import ServerConfig

_SHORT_TEXT = 2000  # characters, tokenized in less than a millisecond
T = TypeVar("T")


class Model:
    """The served model: its names, its chat template and formats, and how text becomes token ids."""

    def __init__(
        self, engine: EngineClient, settings: ServerConfig, served_model_names: Sequence[str], workers: Workers
    ) -> None:
        """Raises `ConfigError` if the configured chat template does not compile."""
        self.engine, self._settings, self._workers = engine, settings, workers
        self.names = list(served_model_names)
        self.started = int(time.time())
        self.chats = ChatFormats(engine.model.tokenizer, settings, self.names[0])
        # For text pairs only a configured template is used: rerankers inherit the chat template of their base model.
        self._pair_format = self.chats.default if settings.chat_template is not None else None

    @property
    def info(self) -> ModelInfo:
        """The model as the engine describes it."""
        return self.engine.model

    def check_name(self, name: str | None) -> None:
        """Raise `RequestError` if `name` is not a served name. None and "" stand for the served model."""
        if name and name not in self.names:
            reason = f"The model `{name}` does not exist. Served here: {', '.join(self.names)}."
            raise NotFoundError(reason, "model", lead=None)

    # ---- text ----

    @property
    def tokenizer(self) -> Tokenizer:
        if self.info.tokenizer is None:
            raise InvalidRequestError(
                "the server has no tokenizer (--skip-tokenizer-init): send the prompt as token ids"
            )
        return self.info.tokenizer

    async def in_thread(self, function: Callable[..., T], *args: Any, tenant: str, num_chars: int | None = None) -> T:
        """Run text processing in a worker thread, so that long prompts and slow templates do not delay other requests.

        The threads are divided fairly between tenants. `num_chars`: length of the text, if known. Short text is
        processed on the event loop, which is faster than switching threads. Raises `RequestError` on `TokenizerError`.
        """
        try:
            if num_chars is not None and num_chars <= _SHORT_TEXT:
                return function(*args)
            return await self._workers.run(function, *args, tenant=tenant)
        except TokenizerError as error:
            raise InvalidRequestError(str(error)) from None

    async def encode(self, request: PromptRequest, *, is_to_fit: bool = False) -> list[Prompt]:
        """Return the tokenized prompts, not truncated.

        `is_to_fit`: reject prompts with too many characters for the context before tokenizing them.
        """
        given = request.prompt
        check = self._check_length if is_to_fit and request.truncate_prompt_tokens is None else None
        if isinstance(given, list):
            num_chars = sum(sum(map(len, each)) if isinstance(each, tuple) else len(each) for each in given)
            if self._pair_format is not None:
                num_chars += len(given) * len(self._pair_format.source)
            return await self.in_thread(
                self._encode_texts,
                given,
                request.add_special_tokens,
                check,
                tenant=request.tenant,
                num_chars=num_chars,
            )
        if (chat := self.chats.of(request)) is None:
            raise InvalidRequestError(self.chats.missing)
        encoder = ConversationEncoder(chat, self.tokenizer)
        return [
            await self.in_thread(
                encoder.encode,
                given,
                request.add_special_tokens,
                check,
                tenant=request.tenant,
                num_chars=given.num_chars,
            )
        ]

    def _encode_texts(self, given: TextPrompts, add_special_tokens: bool, check: CheckText | None) -> list[Prompt]:
        prompts = [self._rendered(each) if isinstance(each, tuple) else each for each in given]
        for each in prompts:
            if check is not None and not isinstance(each, list):
                check(each if isinstance(each, str) else "".join(each))
        return [Prompt(self._encode_text(each, add_special_tokens)) for each in prompts]

    def _rendered(self, pair: tuple[str, str]) -> str | tuple[str, str]:
        """Render a pair of texts for a reranker with the configured template, if there is one."""
        if self._pair_format is None:
            return pair
        messages = [{"role": "query", "content": pair[0]}, {"role": "document", "content": pair[1]}]
        variables = self._settings.default_chat_template_kwargs
        try:
            return self._pair_format.renderer.template.render(messages, add_generation_prompt=False, **variables)
        except ChatTemplateError as error:
            raise InvalidRequestError(f"the chat template rejected the texts: {error}", lead=None) from None

    def _encode_text(self, given: str | list[int] | tuple[str, str], add_special_tokens: bool) -> list[int]:
        if isinstance(given, list):
            return given
        if isinstance(given, tuple):
            return self.tokenizer.encode_pair(*given)
        return self.tokenizer.encode(given, add_special_tokens)

    def _check_length(self, text: str) -> None:
        most = self.info.max_model_len
        if len(text) > most and (per_token := self.tokenizer.max_chars_per_token) and len(text) > most * per_token:
            reason = (
                f"This model's maximum context length is {most} tokens. "
                f"However, your prompt has {len(text)} characters, which need more tokens. Please shorten it."
            )
            raise InvalidRequestError(reason, "prompt", lead=None)

    def truncated(self, prompt: Prompt, request: PromptRequest, num_reserved: int) -> list[int]:
        """Return the prompt's tokens, truncated if requested. `num_reserved`: tokens to leave for the answer."""
        token_ids, most = prompt.token_ids, request.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most < 0:
            most = max(self.info.max_model_len - num_reserved, 1)
        return token_ids[:most] if request.keep_first_tokens else token_ids[max(len(token_ids) - most, 0) :]
