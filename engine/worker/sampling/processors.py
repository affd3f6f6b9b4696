"""Logits processors: a class for each sampling parameter except temperature, top_k, top_p and min_p.

To add one, add a field to `SamplingParams`, a class here, and its position in `PROCESSORS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor

from engine.core.params.sampling import SamplingParams
from engine.worker.device import Device
from engine.worker.input_batch import Row
from engine.worker.sampling import filters
from engine.worker.sampling.token_history import TokenHistory

THINKING_START_TOKENS = 8  # reasoning begins within this many tokens of the output
FOREVER = 2**31 - 1  # longer than any context


@dataclass(slots=True, eq=False)
class ProcessedRow:
    """A device row with logits that some processor changes."""

    row: Row
    until: int  # a processor other than the grammar mask is needed while the context has fewer tokens than this
    guided: bool  # the row waits for a grammar mask in every step
    slot: int  # in the token history; -1: no processor reads it
    tensors: dict[type[Processor], Tensor] = field(default_factory=dict)  # cached for all groups that the row joins

    @property
    def sampling(self) -> SamplingParams:
        return self.row.sampling


@dataclass(frozen=True, slots=True)
class RowGroup:
    """n rows that are processed together, with the inputs from which processors build their tensors."""

    rows: list[ProcessedRow]
    history: TokenHistory
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: Device

    def where(self, wanted: Callable[[SamplingParams], bool]) -> list[int]:
        return [i for i, row in enumerate(self.rows) if wanted(row.sampling)]

    def ints(self, values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return self.device.upload(torch.tensor(list(values), dtype=dtype))

    def floats(self, values: Iterable[float]) -> Tensor:
        return self.device.upload(torch.tensor(list(values), dtype=torch.float32))

    def column(self, name: str, indices: Iterable[int]) -> Tensor:
        """Return a sampling parameter of some of the rows, [len(indices)] float32."""
        return self.floats(getattr(self.rows[i].sampling, name) for i in indices)

    def slots(self, indices: Iterable[int]) -> Tensor:
        return self.ints(self.rows[i].slot for i in indices)

    def prompt_lengths(self, indices: Iterable[int]) -> Tensor:
        return self.ints(self.rows[i].row.num_prompt_tokens for i in indices)


@dataclass(frozen=True, slots=True)
class KernelParams:
    """Parameters of n rows for the sampling kernel, in the order of its arguments."""

    temperature: Tensor  # [n] float32
    top_k: Tensor  # [n] int32; 0: all tokens
    top_p: Tensor  # [n] float32
    min_p: Tensor  # [n] float32

    @classmethod
    def of(cls, group: RowGroup, indices: Iterable[int], unfiltered: Iterable[int] = ()) -> KernelParams:
        """Return the parameters of the rows at `indices`. The `unfiltered` rows among them keep all tokens."""
        unfiltered = set(unfiltered)
        params = [(group.rows[i].sampling, i in unfiltered) for i in indices]
        return cls(
            group.floats(p.temperature for p, _ in params),
            group.ints((0 if off else max(p.top_k, 0) for p, off in params), torch.int32),
            group.floats(1 if off else p.top_p for p, off in params),
            group.floats(0 if off else p.min_p for p, off in params),
        )


@dataclass(frozen=True, slots=True)
class Context:
    """The n rows of a group in the current step."""

    lengths: Tensor  # [n] int64: tokens in the context, also the position of the token to sample
    longest: int  # the longest context
    seeds: Tensor  # [n] int64
    masks: Tensor | None  # [n, (V + 31) // 32] int32: one bit for each token that a grammar allows, lowest first
    raw: Callable[[], Tensor]  # returns a copy of the model's logits, [n, V] float32


class Processor(ABC):
    """Changes the logits of a group. Built together with the group, and used until the group changes."""

    reads_history: ClassVar[bool] = False  # the processor needs the row's tokens on the device
    filters_itself: ClassVar[bool] = False  # the processor, not the sampling kernel, applies top_k, top_p and min_p

    @staticmethod
    @abstractmethod
    def needed(params: SamplingParams) -> bool:
        """Return whether it changes the logits of a request with these parameters."""

    @classmethod
    def needed_until(cls, params: SamplingParams, num_prompt_tokens: int) -> int:
        """Return the context length from which on it has no effect any more."""
        return FOREVER if cls.needed(params) else 0

    @abstractmethod
    def __init__(self, group: RowGroup) -> None:
        """`group`: has at least one row that needs this processor."""

    @abstractmethod
    def apply(self, logits: Tensor, context: Context) -> None:
        """Change logits [n, V] float32 in place; -inf excludes a token. Must not wait for the device."""


class LogitBias(Processor):
    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def __init__(self, group: RowGroup) -> None:
        entries = [(i, t, b) for i, row in enumerate(group.rows) for t, b in (row.sampling.logit_bias or {}).items()]
        rows, tokens, values = zip(*entries, strict=True)
        self._at, self._values = (group.ints(rows), group.ints(tokens)), group.floats(values)

    def apply(self, logits: Tensor, context: Context) -> None:
        logits.index_put_(self._at, self._values, accumulate=True)


class BannedTokens(Processor):
    """Bans bad words of one token, and stop tokens before `min_tokens`."""

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return _has_single(params) or _has_minimum(params)

    @classmethod
    def needed_until(cls, params: SamplingParams, num_prompt_tokens: int) -> int:
        if _has_single(params):
            return FOREVER
        return num_prompt_tokens + params.min_tokens if _has_minimum(params) else 0

    def __init__(self, group: RowGroup) -> None:
        until: dict[tuple[int, int], int] = {}  # (row, token) → banned in contexts shorter than this
        for i, row in enumerate(group.rows):
            params = row.sampling
            for word in _bad_words(params):
                if len(word) == 1:
                    until[i, word[0]] = FOREVER
            if params.min_tokens:
                ends_of_text = () if params.ignore_eos else group.eos_token_ids
                for token in (*ends_of_text, *(params.stop_token_ids or ())):
                    until.setdefault((i, token), row.row.num_prompt_tokens + params.min_tokens)
        entries = [(i, token, limit) for (i, token), limit in until.items() if token < group.vocab_size]
        rows, tokens, limits = zip(*entries, strict=True) if entries else ((), (), ())
        self._rows, self._tokens, self._limits = group.ints(rows), group.ints(tokens), group.ints(limits)

    def apply(self, logits: Tensor, context: Context) -> None:
        _ban(logits, self._rows, self._tokens, context.lengths[self._rows] < self._limits)


def _has_single(params: SamplingParams) -> bool:
    return bool(params.bad_words) and any(len(word) == 1 for word in _bad_words(params))


def _has_minimum(params: SamplingParams) -> bool:
    return params.min_tokens > 0 and (not params.ignore_eos or bool(params.stop_token_ids))


def _bad_words(params: SamplingParams) -> list[list[int]]:
    words = params.bad_words or []
    assert not any(isinstance(word, str) for word in words), "the input processor makes token ids of bad words"
    return cast(list[list[int]], words)


class BadWords(Processor):
    """Bans bad words of several tokens: the last token is banned if the others have just been generated."""

    reads_history = True

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return bool(params.bad_words) and any(len(word) > 1 for word in _bad_words(params))

    def __init__(self, group: RowGroup) -> None:
        entries = [(i, word) for i, row in enumerate(group.rows) for word in _bad_words(row.sampling) if len(word) > 1]
        longest = max(len(word) for _, word in entries)
        rows = [i for i, _ in entries]
        padded = [token for _, word in entries for token in [-1] * (longest - len(word)) + word]
        self._rows, self._words = group.ints(rows), group.ints(padded).view(-1, longest)
        self._history, self._slots, self._prompt_lengths = group.history, group.slots(rows), group.prompt_lengths(rows)

    def apply(self, logits: Tensor, context: Context) -> None:
        lengths, words = context.lengths[self._rows], self._words
        recent = self._history.recent(self._slots, lengths, words.shape[1] - 1)
        banned = filters.completes(recent, lengths - self._prompt_lengths, words)
        _ban(logits, self._rows, words[:, -1], banned)


def _ban(logits: Tensor, rows: Tensor, tokens: Tensor, banned: Tensor) -> None:
    """Exclude tokens[i] of row rows[i] where banned[i]; all [n]."""
    values = torch.zeros(len(rows), device=logits.device).masked_fill_(banned, -torch.inf)
    logits.index_put_((rows, tokens), values, accumulate=True)


class Penalties(Processor):
    """Repetition, frequency and presence penalties."""

    reads_history = True

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    def __init__(self, group: RowGroup) -> None:
        indices = group.where(self.needed)
        self._rows, self._history, self._slots = group.ints(indices), group.history, group.slots(indices)
        self._prompt_lengths = group.prompt_lengths(indices)
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        self._params = [group.column(name, indices) for name in names]

    def apply(self, logits: Tensor, context: Context) -> None:
        own, lengths = logits[self._rows], context.lengths[self._rows]
        history = self._history.read(self._slots, context.longest)
        filters.penalize(own, history, lengths, self._prompt_lengths, *self._params)
        logits[self._rows] = own


class Dry(Processor):
    """The DRY ("don't repeat yourself") penalty."""

    reads_history = True

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return params.dry_multiplier > 0

    def __init__(self, group: RowGroup) -> None:
        indices = group.where(self.needed)
        self._rows, self._history, self._slots = group.ints(indices), group.history, group.slots(indices)
        self._params = [
            group.column(name, indices) for name in ("dry_multiplier", "dry_base", "dry_allowed_length")
        ]  # fmt: skip
        self._breakers = torch.zeros(len(indices), group.vocab_size, dtype=torch.bool, device=group.device.torch_device)
        entries = [(k, t) for k, i in enumerate(indices) for t in group.rows[i].sampling.dry_sequence_breakers or ()]
        if entries:
            rows, tokens = zip(*entries, strict=True)
            self._breakers[group.ints(rows), group.ints(tokens)] = True

    def apply(self, logits: Tensor, context: Context) -> None:
        own, lengths = logits[self._rows], context.lengths[self._rows]
        history = self._history.read(self._slots, context.longest)
        filters.dont_repeat(own, history, lengths, self._breakers, *self._params)
        logits[self._rows] = own


class AllowedTokenIds(Processor):
    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def __init__(self, group: RowGroup) -> None:
        every = torch.ones(group.vocab_size, dtype=torch.bool, device=group.device.torch_device)
        self._allowed = torch.stack([
            self._allowed_by(group, row) if self.needed(row.sampling) else every for row in group.rows
        ])  # fmt: skip

    @staticmethod
    def _allowed_by(group: RowGroup, row: ProcessedRow) -> Tensor:
        """[V] bool."""
        if (allowed := row.tensors.get(AllowedTokenIds)) is None:
            allowed = torch.zeros(group.vocab_size, dtype=torch.bool, device=group.device.torch_device)
            allowed[group.ints(row.sampling.allowed_token_ids or ())] = True
            row.tensors[AllowedTokenIds] = allowed
        return allowed

    def apply(self, logits: Tensor, context: Context) -> None:
        _restrict(logits, self._allowed, context.raw())


class ThinkingBudget(Processor):
    """Ends reasoning after `thinking_token_budget` tokens, if it began with the output and has not ended by itself."""

    reads_history = True

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return params.thinking_token_budget is not None and params.thinking_marks is not None

    @classmethod
    def needed_until(cls, params: SamplingParams, num_prompt_tokens: int) -> int:
        if not cls.needed(params):
            return 0
        return num_prompt_tokens + THINKING_START_TOKENS + (params.thinking_token_budget or 0) + 1

    def __init__(self, group: RowGroup) -> None:
        indices = group.where(self.needed)
        marks = [group.rows[i].sampling.thinking_marks or (-1, 0) for i in indices]
        self._rows, self._history, self._slots = group.ints(indices), group.history, group.slots(indices)
        self._prompt_lengths = group.prompt_lengths(indices)
        self._begins, self._ends = (group.ints(column) for column in zip(*marks, strict=True))
        self._budgets = group.ints(group.rows[i].sampling.thinking_token_budget or 0 for i in indices)

    def apply(self, logits: Tensor, context: Context) -> None:
        history = self._history.read(self._slots, context.longest)
        spent = filters.reasoning_lengths(
            history, context.lengths[self._rows], self._prompt_lengths, self._begins, self._ends
        )
        own = logits[self._rows]
        ended = torch.full_like(own, -torch.inf).scatter_(1, self._ends.unsqueeze(1), 0.0)
        logits[self._rows] = torch.where((spent >= self._budgets).unsqueeze(1), ended, own)


class GrammarMask(Processor):
    """Allows only the next tokens of the request's grammar."""

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return params.structured_outputs is not None

    def __init__(self, group: RowGroup) -> None:
        pass

    def apply(self, logits: Tensor, context: Context) -> None:
        assert context.masks is not None
        masks = context.masks.to(logits.device, non_blocking=True)
        _restrict(logits, filters.unpack_masks(masks, logits.shape[1]), context.raw())


def _restrict(logits: Tensor, allowed: Tensor, raw: Tensor) -> None:
    """Exclude all tokens except `allowed` [n, V] bool.

    If all allowed tokens of a row are excluded already, they get their `raw` logits [n, V] back. A row with all tokens
    allowed is unchanged: it is in the group because of other rows.
    """
    logits.masked_fill_(~allowed, -torch.inf)
    stuck = (logits.amax(1, keepdim=True) == -torch.inf) & ~allowed.all(1, keepdim=True)
    torch.where(stuck & allowed, raw, logits, out=logits)


class TopNSigma(Processor):
    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return params.top_n_sigma > 0 and params.temperature > 0

    def __init__(self, group: RowGroup) -> None:
        params = [row.sampling for row in group.rows]
        self._sigmas = group.floats(p.top_n_sigma if self.needed(p) else 0 for p in params)

    def apply(self, logits: Tensor, context: Context) -> None:
        filters.keep_top_n_sigma(logits, self._sigmas)


class TypicalAndXtc(Processor):
    """Applies typical_p, then XTC. Both come after top_p, so this processor applies top_p instead of the kernel."""

    filters_itself = True

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return params.temperature > 0 and (params.typical_p < 1 or params.xtc_probability > 0)

    def __init__(self, group: RowGroup) -> None:
        indices = group.where(self.needed)
        self._rows, self._kernel_params = group.ints(indices), KernelParams.of(group, indices)
        self._typical_p = group.column("typical_p", indices)
        self._xtc = group.column("xtc_threshold", indices), group.column("xtc_probability", indices)

    def apply(self, logits: Tensor, context: Context) -> None:
        own, params = logits[self._rows], self._kernel_params
        seeds, lengths = context.seeds[self._rows], context.lengths[self._rows]
        filters.keep_nucleus(own, params.temperature, params.top_k, params.top_p, params.min_p)
        filters.keep_typical(own, params.temperature, self._typical_p)
        filters.exclude_top_choices(own, params.temperature, *self._xtc, seeds, lengths)
        logits[self._rows] = own


PROCESSORS: tuple[type[Processor], ...] = (  # in order of application
    LogitBias,
    BannedTokens,
    BadWords,
    Penalties,
    Dry,
    AllowedTokenIds,
    ThinkingBudget,
    GrammarMask,
    TopNSigma,
    TypicalAndXtc,
)
