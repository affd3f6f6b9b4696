"""Sampling for sequences that ask for more than the sampling kernel does. Knows rows and parameters; no text, no grammar.

A step samples all its sequences by the kernel alone, in a CUDA graph where it can. The few that this module is for are
then sampled again, from an edited copy of their logits: the counter RNG does not mind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor

import kernels
from engine.core.sampling_params import SamplingParams
from engine.worker import filters
from engine.worker.input_batch import InputBatch, Members, PackedStep, Row
from engine.worker.token_history import TokenHistory
from kernels.layout import StepTensors

MAX_ELEMENTS = 1 << 24  # logits edited at once
FOREVER = 2**31 - 1


@dataclass(slots=True)
class Now:
    """Where the n sequences of a group stand."""

    lengths: Tensor  # [n] int64: tokens in the context; the position of the token to be sampled
    longest: int  # the highest of them
    seeds: Tensor  # [n] int64


Edit = Callable[[Tensor, Now], None]  # of logits [n, V] float32, in place
KernelParams = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # temperature, top_k, top_p, min_p of the sampling kernel, [n] each


@dataclass(slots=True)
class Group:
    """Sequences that are sampled together, and all that stays the same while they are in the batch. On the device."""

    places: list[int]  # in the step
    members: list[Row]
    longest: int  # tokens of the longest context in the step at hand
    at: Tensor  # [n] int64: `places`
    rows: Tensor  # [n] int64: device rows
    seeds: Tensor  # [n] int64
    params: KernelParams
    edits: list[Edit]
    allowed: Tensor | None  # [n, V] bool: what `allowed_token_ids` leaves
    filters: list[Edit]  # after the masks
    slots: Tensor  # [h] int64: in the token history
    slots_of: Tensor  # [h] int64: of which sequences


@dataclass(frozen=True, slots=True)
class Chosen:
    """The sequences of a step that filters alone do not suffice for."""

    guided: list[int] = field(default_factory=list)  # places of those that wait for masks, in their order
    num_masked: int = 0  # of those, the first, which need nothing else
    with_masks: list[Group] = field(default_factory=list)  # of the others
    without: list[Group] = field(default_factory=list)  # of those that need no mask

    def groups(self, masks: Tensor) -> Iterator[tuple[Group, Tensor | None]]:
        """Each group, with its masks [n, words]."""
        for group in self.without:
            yield group, None
        start = self.num_masked
        for group in self.with_masks:
            yield group, masks[start : start + len(group.places)]
            start += len(group.places)


NOBODY = Chosen()


@dataclass(slots=True)
class LogitsProcessor:
    """Finds the sequences of a step that need it, and samples them."""

    batch: InputBatch
    step: StepTensors
    eos_token_ids: Sequence[int]
    vocab_size: int
    mask_of: Tensor = field(
        init=False
    )  # [B] int32: the mask of each sequence that needs nothing else, -1 of the others
    _last: Chosen = field(init=False, default=NOBODY)
    _members: Members | None = field(init=False, default=None)  # whose choice that is, as long as it stays the same

    def __post_init__(self) -> None:
        self.mask_of = torch.full((self.batch.num_rows,), -1, dtype=torch.int32, device=self.batch.device)

    def choose(self, packed: PackedStep) -> Chosen:
        """The sequences that are to be sampled again in this step. None while no request in the batch needs it."""
        if not self.batch.num_special:
            self._assign_masks([])
            self._last, self._members = NOBODY, None
            return NOBODY
        if packed.members is not self._members:
            self._last = self._choose(packed)
        for group in chain(self._last.without, self._last.with_masks):
            group.longest = int(packed.context_lens[group.places].max())
        return self._last

    def _choose(self, packed: PackedStep) -> Chosen:
        lengths = packed.context_lens.tolist()
        free: list[int] = []
        masked: list[int] = []
        guided: list[int] = []
        self._members = packed.members
        for i, row in enumerate(packed.members.rows):
            if i in packed.members.batch.partial:
                continue
            is_early = lengths[i] < row.min_context
            if is_early:
                self._members = None  # it will not be for ever
            if row.guided:
                # Log-probabilities are of raw logits, and masks are put on in place.
                only = not (is_early or row.special or row.sampling.logprobs is not None)
                (masked if only else guided).append(i)
            elif is_early or row.special:
                free.append(i)
        self._assign_masks(masked)
        return Chosen(masked + guided, len(masked), self._groups(guided, packed), self._groups(free, packed))

    def _assign_masks(self, places: list[int]) -> None:
        if places or self._last.num_masked:
            mask_of = torch.full((self.batch.num_rows,), -1, dtype=torch.int32)
            mask_of[places] = torch.arange(len(places), dtype=torch.int32)
            self.mask_of.copy_(self.batch.to_device(mask_of))

    def _groups(self, places: list[int], packed: PackedStep) -> list[Group]:
        groups = []
        size = max(MAX_ELEMENTS // self.vocab_size, 1)
        for start in range(0, len(places), size):
            part = places[start : start + size]
            groups.append(self._group(part, [packed.members.rows[i] for i in part]))
        return groups

    def _group(self, places: list[int], members: list[Row]) -> Group:
        for group in chain(self._last.without, self._last.with_masks):
            if group.places == places and all(a is b for a, b in zip(group.members, members, strict=True)):
                return group
        return _Builder(self, places, members).build()

    def sample(self, logits: Tensor, tokens: Tensor, group: Group, masks: Tensor | None = None) -> None:
        """Sample the group's sequences from the step's logits [B, V], into its tokens [B] and the device rows.

        masks [n, (V + 31) // 32] int32: a bit for each token that may be sampled.
        """
        state, at = self.batch.state, group.at
        now = Now(self.step.next_position.index_select(0, at), group.longest, group.seeds)
        own = self._edited(logits, group, now, masks)
        sampled = kernels.sample(own, *group.params, now.seeds, now.lengths)
        tokens.scatter_(0, at, sampled)
        state.last_token.scatter_(0, group.rows, sampled)
        if len(group.slots):
            self.batch.history.append(group.slots, now.lengths[group.slots_of], sampled[group.slots_of])

    def _edited(self, logits: Tensor, group: Group, now: Now, masks: Tensor | None) -> Tensor:
        """The group's logits [n, V] float32 after all that its members ask for."""
        own = logits[group.at].float()
        for edit in group.edits:
            edit(own, now)
        if group.allowed is not None:
            own = _restrict(own, group.allowed, logits[group.at])
        if masks is not None:
            own = _restrict(own, _unpack(masks.to(own.device, non_blocking=True), self.vocab_size), logits[group.at])
        for edit in group.filters:
            edit(own, now)
        return own


def _restrict(edited: Tensor, allowed: Tensor, raw: Tensor) -> Tensor:
    """`edited` logits where allowed; `raw` ones in a row whose edits banned all that is allowed."""
    edited = edited.masked_fill(~allowed, -torch.inf)
    stuck = edited.amax(1, keepdim=True) == -torch.inf
    return torch.where(stuck & allowed, raw.float(), edited)


def _unpack(masks: Tensor, vocab_size: int) -> Tensor:
    """[n, W] int32 -> [n, V] bool, the lowest bit first."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks.unsqueeze(2) >> bits) & 1).bool().view(len(masks), -1)[:, :vocab_size]


class _Builder:
    """Turns the parameters of some requests into the tensors of a `Group`."""

    def __init__(self, owner: LogitsProcessor, places: list[int], members: list[Row]) -> None:
        self.owner, self.places, self.members = owner, places, members
        self.params = [row.sampling for row in members]
        self.device = owner.batch.device
        self.history: TokenHistory = owner.batch.history

    def build(self) -> Group:
        with_history = [i for i, row in enumerate(self.members) if row.slot >= 0]
        edits = [self.bias(), self.bans(), self.words(), self.penalties(), self.dry()]
        late = [
            i for i, p in enumerate(self.params) if p.temperature > 0 and (p.typical_p < 1 or p.xtc_probability > 0)
        ]
        rows = self.ints(row.index for row in self.members)
        return Group(
            places=self.places,
            members=self.members,
            longest=0,
            at=self.ints(self.places),
            rows=rows,
            seeds=self.owner.batch.state.seed[rows],
            params=self.kernel_params(neutral=set(late)),
            edits=[edit for edit in edits if edit is not None],
            allowed=self.allowed(),
            filters=[edit for edit in (self.sigma(), self.late(late)) if edit is not None],
            slots=self.ints(self.members[i].slot for i in with_history),
            slots_of=self.ints(with_history),
        )

    def ints(self, values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return self.owner.batch.to_device(torch.tensor(list(values), dtype=dtype))

    def floats(self, values: Iterable[float]) -> Tensor:
        return self.owner.batch.to_device(torch.tensor(list(values), dtype=torch.float32))

    def column(self, name: str, of: Iterable[int]) -> Tensor:
        return self.floats(getattr(self.params[i], name) for i in of)

    def where(self, wanted: Callable[[SamplingParams], bool]) -> list[int]:
        return [i for i, p in enumerate(self.params) if wanted(p)]

    def kernel_params(self, neutral: set[int], of: Iterable[int] | None = None) -> KernelParams:
        """temperature, top_k, top_p, min_p; the `neutral` ones filter nothing."""
        chosen = range(len(self.params)) if of is None else of
        ps = [(self.params[i], i in neutral) for i in chosen]
        return (
            self.floats(p.temperature for p, _ in ps),
            self.ints((0 if off else max(p.top_k, 0) for p, off in ps), torch.int32),
            self.floats(1 if off else p.top_p for p, off in ps),
            self.floats(0 if off else p.min_p for p, off in ps),
        )

    def bias(self) -> Edit | None:
        entries = [(i, t, b) for i, p in enumerate(self.params) for t, b in (p.logit_bias or {}).items()]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return partial(_add, self.ints(rows), self.ints(tokens), self.floats(values))

    def bans(self) -> Edit | None:
        """Ends of text before `min_tokens`, and bad words of one token."""
        until: dict[tuple[int, int], int] = {}
        for i, (row, p) in enumerate(zip(self.members, self.params, strict=True)):
            for word in p.bad_words or ():
                assert not isinstance(word, str), "bad words reach the engine as token ids"
                if len(word) == 1:
                    until[i, word[0]] = FOREVER
            if row.min_context:
                ends = [*(() if p.ignore_eos else self.owner.eos_token_ids), *(p.stop_token_ids or ())]
                for token in ends:
                    until.setdefault((i, token), row.min_context)
        entries = [(i, token, until) for (i, token), until in until.items() if token < self.owner.vocab_size]
        if not entries:
            return None
        rows, tokens, limits = zip(*entries, strict=True)
        return partial(_ban_until, self.ints(rows), self.ints(tokens), self.ints(limits))

    def words(self) -> Edit | None:
        """Bad words of several tokens."""
        entries = [(i, word) for i, p in enumerate(self.params) for word in p.bad_words or () if len(word) > 1]
        if not entries:
            return None
        longest = max(len(word) for _, word in entries)
        rows = [i for i, _ in entries]
        words = self.ints(t for _, word in entries for t in [-1] * (longest - len(word)) + list(word))  # type: ignore
        slots = self.ints(self.members[i].slot for i in rows)
        prompts = self.ints(self.members[i].num_prompt_tokens for i in rows)
        return partial(_ban_words, self.history, self.ints(rows), slots, prompts, words.view(-1, longest))

    def penalties(self) -> Edit | None:
        at = self.where(lambda p: p.penalizes)
        if not at:
            return None
        return partial(
            _penalize,
            self.history,
            self.ints(at),
            self.ints(self.members[i].slot for i in at),
            self.ints(self.members[i].num_prompt_tokens for i in at),
            tuple(self.column(name, at) for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")),
        )

    def dry(self) -> Edit | None:
        at = self.where(lambda p: p.dry_multiplier > 0)
        if not at:
            return None
        breakers = torch.zeros(len(at), self.owner.vocab_size, dtype=torch.bool, device=self.device)
        entries = [(k, t) for k, i in enumerate(at) for t in self.params[i].dry_sequence_breakers or ()]
        if entries:
            rows, tokens = zip(*entries, strict=True)
            breakers[self.ints(rows), self.ints(tokens)] = True
        params = tuple(self.column(name, at) for name in ("dry_multiplier", "dry_base", "dry_allowed_length"))
        slots = self.ints(self.members[i].slot for i in at)
        return partial(_dont_repeat, self.history, self.ints(at), slots, breakers, params)

    def allowed(self) -> Tensor | None:
        if all(p.allowed_token_ids is None for p in self.params):
            return None
        every = torch.ones(self.owner.vocab_size, dtype=torch.bool, device=self.device)
        return torch.stack(
            [every if row.sampling.allowed_token_ids is None else self.allowed_by(row) for row in self.members]
        )

    def allowed_by(self, row: Row) -> Tensor:
        if row.allowed is None:
            row.allowed = torch.zeros(self.owner.vocab_size, dtype=torch.bool, device=self.device)
            row.allowed[self.ints(row.sampling.allowed_token_ids or ())] = True
        return row.allowed

    def sigma(self) -> Edit | None:
        if not self.where(lambda p: p.top_n_sigma > 0 and p.temperature > 0):
            return None
        sigmas = self.floats(p.top_n_sigma if p.temperature > 0 else 0 for p in self.params)
        return lambda logits, now: filters.keep_top_n_sigma(logits, sigmas)

    def late(self, at: list[int]) -> Edit | None:
        """What follows top_p, and so cannot be left to the sampling kernel."""
        if not at:
            return None
        own = tuple(self.column(name, at) for name in ("typical_p", "xtc_threshold", "xtc_probability"))
        return partial(_filter_late, self.ints(at), self.kernel_params(set(), at), own)


def _add(rows: Tensor, tokens: Tensor, values: Tensor, logits: Tensor, now: Now) -> None:
    logits.index_put_((rows, tokens), values, accumulate=True)


def _ban(rows: Tensor, tokens: Tensor, banned: Tensor, logits: Tensor) -> None:
    values = torch.zeros(len(rows), device=logits.device).masked_fill_(banned, -torch.inf)
    logits.index_put_((rows, tokens), values, accumulate=True)


def _ban_until(rows: Tensor, tokens: Tensor, limits: Tensor, logits: Tensor, now: Now) -> None:
    _ban(rows, tokens, now.lengths[rows] < limits, logits)


def _ban_words(
    history: TokenHistory, rows: Tensor, slots: Tensor, prompts: Tensor, words: Tensor, logits: Tensor, now: Now
) -> None:
    lengths = now.lengths[rows]
    recent = history.recent(slots, lengths, words.shape[1] - 1)
    _ban(rows, words[:, -1], filters.completes(recent, lengths - prompts, words), logits)


def _penalize(
    history: TokenHistory,
    at: Tensor,
    slots: Tensor,
    prompts: Tensor,
    params: tuple[Tensor, ...],
    logits: Tensor,
    now: Now,
) -> None:
    own = logits[at]
    filters.penalize(own, history.read(slots, now.longest), now.lengths[at], prompts, *params)
    logits[at] = own


def _dont_repeat(
    history: TokenHistory,
    at: Tensor,
    slots: Tensor,
    breakers: Tensor,
    params: tuple[Tensor, ...],
    logits: Tensor,
    now: Now,
) -> None:
    own = logits[at]
    filters.dont_repeat(own, history.read(slots, now.longest), now.lengths[at], breakers, *params)
    logits[at] = own


def _filter_late(at: Tensor, params: KernelParams, late: tuple[Tensor, ...], logits: Tensor, now: Now) -> None:
    own, temperature = logits[at], params[0]
    typical_p, xtc_threshold, xtc_probability = late
    filters.keep_nucleus(own, *params)
    filters.keep_typical(own, temperature, typical_p)
    filters.exclude_top_choices(own, temperature, xtc_threshold, xtc_probability, now.seeds[at], now.lengths[at])
    logits[at] = own
