"""The model being served: its engine, its names, its chat template, and how text becomes token ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from engine import Classifier, ModelInfo, TokenizerError
from engine.core.fairness.tenants import group_of
from engine.text.chat_template import ChatTemplateError
from engine.text.tokenizer import Tokenizer, TooManyTokensError
from server.generation.adapters import ServedAdapters
from server.generation.caller import Caller
from server.generation.chat_format import ChatFormats
from server.generation.conversation import ConversationEncoder, Prompt
from server.generation.engine_client import EngineClient
from server.generation.errors import InvalidRequestError, NotFoundError
from server.generation.images import load_images
from server.generation.request import PromptRequest, TextPrompts
from server.generation.workers import Workers
from server.settings import ServerConfig

_SHORT_TEXT = 2000  # characters, tokenized in less than a millisecond
_PART_CHARS = 64 << 10  # of a list of texts, tokenized at a time
_MANY_CHARS = 128  # most characters per token of the context, where the tokenizer has no bound
_FEW_CHARS = 4  # characters per token that are tried first of a prompt that will be truncated
# Most tokens of a text, in contexts or at least `_MANY_TOKENS`: the list of more would hold up the event loop.
_MANY_CONTEXTS, _MANY_TOKENS = 4, 1 << 18
_MOST_NAMED = 20  # served names in an error message
_SPARE_TOKENS = 64  # beyond those that a truncated prompt keeps: where a text is cut, its tokens change
T = TypeVar("T")


class Model:
    """The served model: its names, its chat template and formats, and how text becomes token ids."""

    def __init__(
        self, engine: EngineClient, settings: ServerConfig, served_model_names: Sequence[str], workers: Workers
    ) -> None:
        """Raises `ConfigError` if the configured chat template does not compile."""
        self.engine, self._settings, self._workers = engine, settings, workers
        self.names = list(served_model_names)
        self.adapters = ServedAdapters(engine, settings, self.names)
        self.list_names: Callable[[Caller], list[str]] = self.names_for  # of all models of the server
        self.started = int(time.time())
        self.chats = ChatFormats(engine.model.tokenizer, settings, self.names[0])
        # For text pairs only a configured template is used: rerankers inherit the chat template of their base model.
        self._pair_format = self.chats.default if settings.chat_template is not None else None

    @property
    def info(self) -> ModelInfo:
        """The model as the engine describes it."""
        return self.engine.model

    def serves(self, name: str) -> bool:
        """Return whether this is a name of the model or of one of its adapters."""
        return name in self.names or self.adapters.find(name) is not None

    def names_for(self, caller: Caller) -> list[str]:
        """Return its names and those of the adapters that a caller may use."""
        return [*self.names, *(each.name for each in self.adapters.all if caller.may_use(each.name))]

    def check_name(self, name: str | None, caller: Caller) -> None:
        """Raise `RequestError` if the caller may not use a model of this name. None and "" stand for the served
        model.
        """
        if name and name not in self.names and not (self.serves(name) and caller.may_use(name)):
            names = self.list_names(caller)
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            reason = f"The model `{name}` does not exist. Served here: {', '.join(names[:_MOST_NAMED])}{more}."
            raise NotFoundError(reason, "model", lead=None)

    async def classifier(self, name: str | None, caller: Caller) -> Classifier | None:
        """Return the classifier of the model or adapter of this name; None: it has none. Raises `RequestError` as
        `check_name`.
        """
        await self.adapters.resolve(name, caller)
        self.check_name(name, caller)
        return self.adapters.classifier(name)

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
        processed on the event loop, which is faster than switching threads. A long text is one piece of work, since its
        tokens depend on all of it: meanwhile other tenants get other threads. Raises `RequestError` on
        `TokenizerError`.
        """
        try:
            if num_chars is not None and num_chars <= _SHORT_TEXT:
                return function(*args)
            return await self._workers.run(function, *args, tenant=tenant)
        except TooManyTokensError as error:
            raise self._too_long(f"{error.num_tokens} tokens") from None
        except TokenizerError as error:
            raise InvalidRequestError(str(error)) from None

    async def encode(self, request: PromptRequest) -> list[Prompt]:
        """Return the tokenized prompts; `truncated` shortens them.

        No more text is tokenized than the context can use: prompts with too many characters are rejected before, and
        those that will be truncated are cut. Long lists are tokenized in parts, between which others get the thread.
        """
        given = request.prompt
        if isinstance(given, list):
            prompts: list[Prompt] = []
            # All are checked before any is tokenized.
            for each in given:
                if isinstance(each, str):
                    self._check_length(request, each)
            for texts, num_chars in _in_parts(given):
                if self._pair_format is not None:
                    num_chars += len(texts) * len(self._pair_format.source)
                prompts += await self.in_thread(
                    self._encode_texts,
                    request,
                    texts,
                    tenant=request.tenant,
                    num_chars=num_chars,
                )
            return prompts
        if (chat := self.chats.of(request)) is None:
            raise InvalidRequestError(self.chats.missing)
        images = await load_images(self.info, given, self._workers, request.tenant)
        encode = ConversationEncoder(chat, self.info.images, group_of(request.tenant)).encode
        rendered = encode, given, partial(self._encode_text, request), images
        length = None if images else given.num_chars
        return [await self.in_thread(*rendered, tenant=request.tenant, num_chars=length)]

    def _encode_texts(self, request: PromptRequest, given: TextPrompts) -> list[Prompt]:
        prompts = [self._rendered(each) if isinstance(each, tuple) else each for each in given]
        return [Prompt(self._encode_prompt(request, each)) for each in prompts]

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

    def _encode_prompt(self, request: PromptRequest, given: str | list[int] | tuple[str, str]) -> list[int]:
        if isinstance(given, list):
            return given
        if isinstance(given, str):
            return self._encode_text(request, given)
        kept = self._num_kept(request)
        num_chars = None if kept is None else kept * self._chars_per_token
        for each in given:
            self._check_length(request, each)
        first, second = (_part(each, num_chars, self._keeps_first(request)) for each in given)
        return self.tokenizer.encode_pair(first, second, self.info.type_offset)

    def _encode_text(self, request: PromptRequest, text: str) -> list[int]:
        """Tokenize a text; of one that will be truncated, no more than needed, and some tokens to spare."""
        if (num_tokens := self._num_kept(request)) is None:
            self._check_length(request, text)
            most = max(_MANY_CONTEXTS * self.info.max_model_len, _MANY_TOKENS)
            return self.tokenizer.encode(text, request.add_special_tokens, most)
        chars = _FEW_CHARS
        while True:
            part = _part(text, num_tokens * min(chars, self._chars_per_token), self._keeps_first(request))
            token_ids = self.tokenizer.encode(part, request.add_special_tokens)
            if len(token_ids) >= num_tokens or len(part) == len(text) or chars >= self._chars_per_token:
                return token_ids
            chars *= _FEW_CHARS

    @property
    def _chars_per_token(self) -> int:
        """The most characters of a token."""
        return self.tokenizer.max_chars_per_token or _MANY_CHARS

    def _keeps_first(self, request: PromptRequest) -> bool:
        """Return True if truncation removes the end of a prompt: as asked for, and always of an encoder's."""
        return request.keep_first_tokens or self.info.is_encoder

    def _num_kept(self, request: PromptRequest) -> int | None:
        """Return the tokens of a prompt that will be truncated, and some to spare; None: it will not be."""
        if (kept := request.truncate_prompt_tokens) is None:
            return None
        most = self.info.max_model_len
        return (min(kept, most) if kept >= 0 else most) + _SPARE_TOKENS

    def _check_length(self, request: PromptRequest, text: str) -> None:
        """Raise `InvalidRequestError` for a text that is too long whatever its tokens are."""
        most = self.info.max_model_len
        if len(text) > most and request.truncate_prompt_tokens is None and len(text) > most * self._chars_per_token:
            raise self._too_long(f"{len(text)} characters, which need more tokens")

    def _too_long(self, length: str) -> InvalidRequestError:
        reason = (
            f"This model's maximum context length is {self.info.max_model_len} tokens. "
            f"However, your prompt has {length}. Please shorten it."
        )
        return InvalidRequestError(reason, "prompt", lead=None)

    def truncated(self, prompt: Prompt, request: PromptRequest, num_reserved: int) -> list[int]:
        """Return the prompt's tokens, truncated if requested. `num_reserved`: tokens to leave for the answer."""
        token_ids, most = prompt.token_ids, request.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most < 0:
            most = max(self.info.max_model_len - num_reserved, 1)
        if prompt.images is not None and most < len(token_ids):
            reason = f"a prompt with images cannot be truncated, and this one has {len(token_ids)} tokens"
            raise InvalidRequestError(reason, "truncate_prompt_tokens")
        if self.info.is_encoder and 1 < most < len(token_ids):  # as trained: with the special tokens at both ends
            return [*token_ids[: most - 1], token_ids[-1]]
        return token_ids[:most] if self._keeps_first(request) else token_ids[max(len(token_ids) - most, 0) :]


def _part(text: str, num_chars: int | None, keeps_first: bool) -> str:
    """Return the begin or the end of a text."""
    if num_chars is None or len(text) <= num_chars:
        return text
    return text[:num_chars] if keeps_first else text[-num_chars:]


def _in_parts(given: TextPrompts) -> Iterator[tuple[TextPrompts, int]]:
    """Split prompts into lists of about `_PART_CHARS` characters, or one longer prompt; yield each with its length."""
    part: list[Any] = []
    num_chars = 0
    for each in given:
        part.append(each)
        num_chars += sum(map(len, each)) if isinstance(each, tuple) else len(each)
        if num_chars >= _PART_CHARS:
            yield part, num_chars
            part, num_chars = [], 0
    if part:
        yield part, num_chars
