"""Stop strings of an answer that has reasoning or tool calls: they count in its visible text only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from engine import RequestUpdate, SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.stop_strings import StopStrings, stop_tokens
from engine.text.tokenizer import Tokenizer
from server.parsing.answer import AnswerReader
from server.parsing.pieces import Content, Piece


class StoppingReader:
    """Reads an answer with another reader, and ends it at the first stop string in its content.

    Reasoning, tool calls, markup and the white space between them contain no stop strings. Push one token at a time, so
    that the answer ends at the token that completes the stop string.
    """

    def __init__(
        self,
        reader: AnswerReader,
        stop: Sequence[str],
        *,
        include: bool = False,
        min_tokens: int = 0,
        stop_tokens: Mapping[int, str] | None = None,
    ) -> None:
        """`include`: the content includes the stop string. Those that end in the first `min_tokens` tokens do not
        count. `stop_tokens`: the stop strings that are the text of a token which the text omits.
        """
        self._reader, self._stops = reader, StopStrings(stop, include=include)
        self._min_tokens, self._stop_tokens = min_tokens, stop_tokens or {}
        self._num_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.stopped_by

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def has_calls(self) -> bool:
        return self._reader.has_calls

    @property
    def is_cut(self) -> bool:
        return self._reader.is_cut

    @property
    def in_content(self) -> bool:
        return self._reader.in_content

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def push(self, text: str, token_ids: Iterable[int], finished: bool, cut: bool = False) -> list[Piece]:
        """Return the pieces now certain, as `AnswerReader.push`; none after the stop string."""
        token_ids = list(token_ids)
        self._num_tokens += len(token_ids)
        is_armed, found = self._num_tokens > self._min_tokens, list[Piece]()
        for piece in self._reader.push(text, token_ids, finished, cut):
            if isinstance(piece, Content):
                _add(found, self._stops.push(piece.text, is_armed))
                if self.stopped_by is not None:
                    return found
            else:
                _add(found, self._stops.flush())
                found.append(piece)
        ends = [self._stop_tokens[each] for each in token_ids if each in self._stop_tokens]
        if ends and is_armed and self._reader.in_content:
            _add(found, self._stops.stop_at(ends[0]))
        elif finished:
            _add(found, self._stops.flush())
        return found


def _add(pieces: list[Piece], text: str) -> None:
    if text:
        pieces.append(Content(text))


def at_visible_stops(
    tokenizer: Tokenizer,
    prompt: list[int],
    sampling: SamplingParams,
    updates: AsyncGenerator[RequestUpdate, None],
    reader: AnswerReader,
) -> tuple[AsyncGenerator[RequestUpdate, None], StoppingReader]:
    """Return updates of one token each, and a reader, that end an answer at a stop string in its visible text.

    `sampling`: the client's. `updates`: the engine's, without text.
    """
    stop, include = sampling.stop_strings, sampling.include_stop_str_in_output
    skips = sampling.skip_special_tokens
    stopping = StoppingReader(
        reader,
        stop,
        include=include,
        min_tokens=sampling.min_tokens,
        stop_tokens=stop_tokens(stop, tokenizer, tokenizer.special_ids) if skips else {},
    )
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skips)
    return _by_token(updates, detokenizer, shows_stop_token=include), stopping


async def _by_token(
    updates: AsyncGenerator[RequestUpdate, None], detokenizer: Detokenizer, *, shows_stop_token: bool
) -> AsyncGenerator[RequestUpdate, None]:
    """Yield updates without text as updates of one token each, with text. `shows_stop_token`: also that of the token
    that stopped the engine.
    """
    async with aclosing(updates):
        async for update in updates:
            token_ids = update.token_ids
            for index, token_id in enumerate(token_ids[:-1]):
                yield replace(
                    update,
                    text=detokenizer.push([token_id]),
                    token_ids=[token_id],
                    logprobs=update.logprobs[index : index + 1] if update.logprobs is not None else None,
                    finish_reason=None,
                    stop_reason=None,
                    prompt_logprobs=update.prompt_logprobs if index == 0 else None,
                )
            is_hidden = update.finish_reason == "stop" and not shows_stop_token
            yield replace(
                update,
                text=detokenizer.push([] if is_hidden else token_ids[-1:], update.finish_reason is not None),
                token_ids=token_ids[-1:],
                logprobs=update.logprobs[-1:] if update.logprobs is not None else None,
                prompt_logprobs=update.prompt_logprobs if len(token_ids) <= 1 else None,
            )
