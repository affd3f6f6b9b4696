"""Prompts of a dataset, as the bytes of requests that `bench serve` sends."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.serving.chat_lengths import chat_requests
from benchmarks.serving.client import Client, Failure
from benchmarks.serving.conversations import Conversation, ConversationShape
from benchmarks.serving.flags import DatasetFlags, TargetFlags
from benchmarks.serving.trace import read_trace, synthesize
from benchmarks.workloads import Request
from engine.errors import ConfigError
from engine.models.hub import resolve_model
from engine.text.tokenizer import Tokenizer


class Prompts:
    """The prompts of one dataset. `model` and `vocab_size` may change when the server has been asked."""

    def __init__(self, target: TargetFlags, dataset: DatasetFlags, client: Client) -> None:
        self._target, self._dataset, self._client = target, dataset, client
        self.model = target.served_model_name or target.model or ""
        self.vocab_size = dataset.random_vocab_size or workloads.MAX_TOKEN_ID
        self._file = self._read_file()
        self._trace = read_trace(Path(dataset.replay)) if dataset.replay is not None else None
        if self._trace is not None and target.chat:
            raise ConfigError("replay sends token ids: they need --endpoint /v1/completions")
        if dataset.images is not None and not target.chat:
            raise ConfigError("random-mm sends images: it needs --endpoint /v1/chat/completions")

    def __len__(self) -> int:
        """Number of requests in one pass."""
        if self._trace is not None:
            return min(self._dataset.num_prompts or len(self._trace), len(self._trace))
        return self._dataset.num_prompts or (len(self._file) if self._file else 1000)

    def arrivals(self) -> list[float] | None:
        """Seconds after the start at which a trace's requests came; None: there is no trace."""
        return None if self._trace is None else [traced.seconds for traced in self._trace[: len(self)]]

    def _read_file(self) -> list[Request] | None:
        """The prompts of the dataset's file."""
        dataset = self._dataset
        if dataset.dataset_path is None:
            return None
        path = Path(dataset.dataset_path)
        if dataset.dataset_name == "sharegpt":
            encode = self._tokenizer("a sharegpt dataset").encode
            length = dataset.output_len or dataset.sharegpt_output_len
            requests = workloads.read_sharegpt(path, length, lambda text: len(encode(text)))
        else:
            requests = workloads.read_prompts(path, dataset.output_len or dataset.custom_output_len)
            if dataset.output_len is not None:
                requests = [Request(request.prompt, dataset.output_len) for request in requests]
        for request in requests:
            kind = "messages" if isinstance(request.prompt, list) and isinstance(request.prompt[0], dict) else "prompt"
            if kind == "messages" and not self._target.chat:
                raise ConfigError(f"{path} has messages: they need --endpoint /v1/chat/completions")
            if isinstance(request.prompt, list) and kind == "prompt" and self._target.chat:
                raise ConfigError(f"{path} has token ids: they need --endpoint /v1/completions")
        return requests

    def _tokenizer(self, purpose: str) -> Tokenizer:
        if self._target.tokenizer is None:
            raise ConfigError(f"{purpose} needs --tokenizer")
        return Tokenizer.from_folder(resolve_model(self._target.tokenizer, weights=False))

    def requests(self, seed: int, count: int | None = None) -> list[Request]:
        """The prompts of one pass; others for another seed, but for those of files and named workloads."""
        data = self._dataset
        count = count or data.num_prompts
        if self._trace is not None:
            return synthesize(self._trace[:count], self.vocab_size, seed)
        if self._file is not None:
            order = list(self._file)
            if not data.disable_shuffle:
                random.Random(data.seed).shuffle(order)
            return workloads.repeated(order, count)
        if data.dataset_name in ("random", "random-mm"):
            requests = workloads.random_requests(
                count or 1000,
                input_len=data.input_len or data.random_input_len,
                output_len=data.output_len or data.random_output_len,
                range_ratio=data.random_range_ratio,
                prefix_len=data.random_prefix_len,
                vocab_size=self.vocab_size,
                seed=seed,
            )
            return requests if data.images is None else data.images.attach(requests, seed)
        if data.dataset_name == "chat":
            found = chat_requests(count or 1000, most=data.chat_max_input_len, vocab_size=self.vocab_size, seed=seed)
            return [replace(each, output_len=data.output_len or each.output_len) for each in found]
        if data.dataset_name == "conversations":
            shape = self.conversations(1, seed)
            return [Conversation(shape, number).next_turn() for number in range(count or 1000)]
        if data.dataset_name == "prefix_repetition":
            prefixes = min(data.prefix_repetition_num_prefixes, count or 1000)
            return workloads.prefix_repetition(
                count or 1000,
                num_prefixes=prefixes,
                prefix_len=data.prefix_repetition_prefix_len,
                suffix_len=data.prefix_repetition_suffix_len,
                output_len=data.output_len or data.prefix_repetition_output_len,
                vocab_size=self.vocab_size,
                seed=seed,
            )
        return workloads.repeated(workloads.named(data.dataset_name, self.vocab_size).requests, count)

    def conversations(self, num_at_once: int, seed: int) -> ConversationShape:
        """Shape of the conversations of a dataset."""
        data = self._dataset
        return ConversationShape(
            num_at_once,
            data.conversations_num_turns,
            data.conversations_num_system_prompts,
            data.conversations_system_len,
            data.conversations_turn_len,
            data.output_len or data.conversations_output_len,
            data.conversations_range_ratio,
            data.conversations_thinking_time,
            self.vocab_size,
            seed,
        )

    async def encode(self, requests: list[Request]) -> list[tuple[bytes, int]]:
        """(bytes to send, prompt length) of each."""
        common: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if getattr(self._target, name) is not None:
                common[name] = getattr(self._target, name)
        ignore_eos = self._target.ignore_eos
        if ignore_eos or (ignore_eos is None and self._dataset.is_random):
            common["ignore_eos"] = True
        if self._dataset.dataset_name == "conversations":
            common["return_token_ids"] = True
        common |= self._target.extra_body or {}
        if self._target.chat and self._dataset.is_random:
            requests = await self._as_texts(requests)
        encoded = []
        for request in requests:
            prompt = request.prompt
            if self._target.chat:
                messages = [{"role": "user", "content": _content(request)}] if isinstance(prompt, str) else prompt
                body = {**common, "messages": messages, "max_completion_tokens": request.output_len}
            else:
                body = {**common, "prompt": prompt, "max_tokens": request.output_len}
            num_tokens = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else 0
            encoded.append((self._client.request("POST", self._target.endpoint, body), num_tokens))
        return encoded

    async def _as_texts(self, requests: list[Request]) -> list[Request]:
        """Random token ids as texts, for chat. Lengths are then near to those wanted, and the server counts them."""
        if self._target.tokenizer is not None:
            decode = self._tokenizer("chat").decode
            return [replace(r, prompt=decode(r.prompt)) for r in requests if isinstance(r.prompt, list)]
        texts = []
        try:
            for request in requests:
                body = {"model": self.model, "tokens": request.prompt}
                texts.append((await self._client.json("POST", "/detokenize", body))["prompt"])
        except Failure as error:
            details = f"/detokenize, {error}; give --tokenizer, to make random texts here"
            raise Failure(error.cause, details) from None
        return [replace(request, prompt=text) for text, request in zip(texts, requests, strict=True)]


def _content(request: Request) -> str | list[dict[str, Any]]:
    """Return the content of a message, with images before the text."""
    assert isinstance(request.prompt, str)
    if not request.images:
        return request.prompt
    images = [{"type": "image_url", "image_url": {"url": url}} for url in request.images]
    return [*images, {"type": "text", "text": request.prompt}]
