"""Grammars of guided requests: compiles them outside the engine's loop, advances them by each token, and fills their
masks before the device needs them.

Everything here runs in the engine's thread, except for compilation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from engine.core.fairness.tenants import group_of
from engine.structured.compile_threads import CompileThreads
from engine.structured.grammar import Compiler, explain
from engine.structured.unique import UniqueItems, of_grammar

# Total characters of grammars that are compiled or followed. Further requests wait; a group of tenants that has no
# grammar gets one in any case, so that it never waits for others.
MAX_WEIGHT = 16 << 20
IDLE_SECONDS = 0.02  # how long to wait for a grammar if there is no other work
MAX_THREADS = 8
FEW = 64  # fewer masks are filled in one thread: several are hardly faster, and delay the thread that drives the device
# Even after the deadline, at least LEAST masks are filled, and at least one of every LEAST_FRACTION needed.
LEAST = 4
LEAST_FRACTION = 4
MAX_MASKS = 1 << 20
MAX_INTERVAL = 512  # longest interval between trials of the slower method, in fills

T = TypeVar("T")  # a request


@dataclass(slots=True)
class _Held(Generic[T]):
    """A request that waits for its grammar to be compiled."""

    request: T
    grammar: str
    tenant: str
    matcher: Future[LLMatcher] | None = None  # None: compilation has not started


@dataclass(slots=True)
class _Followed:
    """The grammar of a running request."""

    matcher: LLMatcher
    unique: UniqueItems | None = None
    forced: list[int] = field(default_factory=list)  # the only possible next tokens, in reverse order
    looked_ahead: bool = False  # `forced` is of the matcher's current state


_Wanted = list[tuple[_Followed, int]]  # grammars and the rows of their masks


@dataclass(slots=True)
class _Method:
    fill: Callable[[_Wanted, np.ndarray], None]
    seconds: float = 0.0  # moving average per mask; 0: unknown


class _Filler:
    """Fills masks in this thread, or in several threads if that was faster recently.

    Waking threads may take as long as filling 50 masks (on a virtual machine, a millisecond). So for many masks both
    methods are tried, and the slower one is tried again now and then.
    """

    def __init__(self) -> None:
        self._alone, self._together = _Method(_fill_alone), _Method(self._fill_together)
        self._interval = self._until_trial = 8  # fills
        self._threads: LLExecutor | None = None

    def __call__(self, wanted: _Wanted, masks: np.ndarray) -> float:
        """Fill the wanted rows of `masks` [n, words]. Returns the seconds that this took."""
        method, slower, is_trial = self._alone, self._together, False
        if len(wanted) >= FEW:
            if slower.seconds < method.seconds:
                method, slower = slower, method
            self._until_trial -= 1
            if is_trial := not self._until_trial:
                method = slower
                self._until_trial = self._interval = min(2 * self._interval, MAX_INTERVAL)
        start = perf_counter()
        method.fill(wanted, masks)
        seconds = perf_counter() - start
        if wanted:
            each = seconds / len(wanted)
            if not method.seconds:
                method.seconds = each
            elif is_trial or each < method.seconds:
                method.seconds = (method.seconds + each) / 2
            else:  # only the first masks of a grammar take long
                method.seconds += (each - method.seconds) / 8
        return seconds

    def number_in(self, seconds: float) -> int:
        """Estimate how many masks this thread fills in `seconds`."""
        each = self._alone.seconds
        return int(min(seconds / each, MAX_MASKS)) if each else MAX_MASKS

    def _fill_together(self, wanted: _Wanted, masks: np.ndarray) -> None:
        if self._threads is None:
            self._threads = LLExecutor(max(min((os.cpu_count() or 1) - 1, MAX_THREADS), 1))
        fill_next_token_bitmask_par(self._threads, [(followed.matcher, i) for followed, i in wanted], masks)


def _fill_alone(wanted: _Wanted, masks: np.ndarray) -> None:
    address, num_bytes = masks.ctypes.data, masks.strides[0]
    for followed, i in wanted:
        followed.matcher.unsafe_compute_mask_ptr(address + i * num_bytes, num_bytes)


def _allow_one(mask: np.ndarray, token_id: int) -> None:
    mask.fill(0)
    mask.view(np.uint32)[token_id >> 5] = 1 << (token_id & 31)


def _caught(function: Callable[..., None], *args: Any) -> str:
    """Call a function of the grammar library. Returns the error message, also of a Rust panic, or ""."""
    try:
        function(*args)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return str(error) or type(error).__name__
    return ""


class GrammarManager(Generic[T]):
    """Holds guided requests until their grammars are compiled, then follows the grammars until the requests finish.

    `add` a request. Once `take_compiled` returns it, `advance` it by each of its tokens and `fill` its masks. Finally
    `remove` it.

    A step that has other requests does not wait for masks beyond a deadline: the time that the device is busy with the
    work before sampling. The device cannot be asked for that time, so `learn_deadline` estimates it.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._held: dict[str, _Held[T]] = {}
        self._followed: dict[str, _Followed] = {}
        self._weights: dict[str, tuple[str, int]] = {}  # group and characters of grammars being compiled or followed
        self._compile_thread = CompileThreads(1)
        self._fill = _Filler()
        self._next = 0  # the first row of the next fill, if the deadline does not allow for all rows
        self._seconds = float("inf")  # time until the deadline
        self._seconds_spent = 0.0  # duration of the last fill

    @property
    def num_held(self) -> int:
        """Number of requests that wait for their grammars."""
        return len(self._held)

    @property
    def num_followed(self) -> int:
        return len(self._followed)

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    def add(self, request_id: str, grammar: str, request: T, tenant: str = "") -> None:
        """Hold the request until its grammar is compiled. Grammars of different tenants are compiled alternately."""
        self._held[request_id] = _Held(request, grammar, tenant)
        self._start_compiling()

    def _start_compiling(self) -> None:
        weight = sum(characters for _, characters in self._weights.values())
        groups, full = {group for group, _ in self._weights.values()}, set[str]()
        for request_id, held in self._held.items():
            group = group_of(held.tenant)
            if held.matcher is not None or group in full:
                continue
            if group in groups and weight + len(held.grammar) > MAX_WEIGHT:
                full.add(group)
                continue
            self._weights[request_id] = group, len(held.grammar)
            weight += len(held.grammar)
            groups.add(group)
            held.matcher = self._compile(held)

    def _compile(self, held: _Held[T]) -> Future[LLMatcher]:
        if (matcher := self._compiler.cached(held.grammar)) is not None:
            found: Future[LLMatcher] = Future()
            found.set_result(matcher)
            return found
        return self._compile_thread.submit(held.tenant, self._compiler.compile, held.grammar)

    def take_compiled(self, idle: bool = False) -> tuple[list[T], dict[str, str]]:
        """Return the requests whose grammars are compiled; and by request id, the errors of grammars that failed to
        compile. Their requests are removed.

        `idle`: there is no other work, so wait a little for one of the grammars.
        """
        if idle:
            futures = [held.matcher for held in self._held.values() if held.matcher is not None]
            wait(futures, IDLE_SECONDS, FIRST_COMPLETED)
        ready: list[T] = []
        errors: dict[str, str] = {}
        for request_id, held in list(self._held.items()):
            if held.matcher is None or not held.matcher.done():
                continue
            if (error := held.matcher.exception()) is None:
                del self._held[request_id]
                self._followed[request_id] = _Followed(held.matcher.result(), of_grammar(held.grammar))
                ready.append(held.request)
            else:
                errors[request_id] = str(error) or type(error).__name__
                self.remove(request_id)
        return ready, errors

    def remove(self, request_id: str) -> bool:
        """Forget a request, if it is known. Returns whether it was waiting for its grammar."""
        self._followed.pop(request_id, None)
        held = self._held.pop(request_id, None)
        if held is not None and held.matcher is not None:
            held.matcher.cancel()
        if self._weights.pop(request_id, None) is not None:
            self._start_compiling()
        return held is not None

    def advance(self, request_id: str, token_ids: Sequence[int]) -> str:
        """Advance the request's grammar by its new tokens. If a mask did not allow a token, `fill` reports the error.

        After the end of the grammar, only end-of-text tokens are allowed. Returns an error of the grammar library, or
        "".
        """
        followed = self._followed.get(request_id)
        if followed is None:
            return ""
        return _caught(self._advance, followed, token_ids)

    def _advance(self, followed: _Followed, token_ids: Sequence[int]) -> None:
        if not followed.matcher.is_stopped():
            followed.matcher.consume_tokens(list(token_ids))
            if followed.unique is not None:
                followed.unique.advance(b"".join(self._compiler.endings.tokens[i] for i in token_ids))
            del followed.forced[-len(token_ids) :]
            followed.looked_ahead = bool(followed.forced)

    def forced(self, request_id: str, most: int) -> list[int] | None:
        """Return at most `most` next tokens that have no alternative; None: the request can have no drafts."""
        followed = self._followed.get(request_id)
        if followed is None or followed.unique is not None or followed.matcher.is_error():
            return None
        if not followed.looked_ahead and _caught(self._look_ahead, followed):
            return None  # `fill` will find the error
        return followed.forced[: -most - 1 : -1]

    def fill(
        self,
        request_ids: Sequence[str],
        masks: np.ndarray,
        by_deadline: bool = False,
        drafts: Sequence[Sequence[int]] = (),
    ) -> tuple[list[int], dict[str, str]]:
        """Write the mask of allowed next tokens for each request. A request that is no longer followed may get any
        token.

        masks [len(request_ids), (vocabulary + 31) // 32] int32, contiguous: one bit per token, the lowest first.
        `drafts`: for each row, the drafts after which its token comes; (): there are none. A request with n drafts has
        n + 1 rows, after none of them, the first, the first two … If a draft is not allowed, the rows after it do not
        matter. Returns the rows that are not filled, none unless `by_deadline`; and the errors of grammars by request
        id.
        """
        wanted: _Wanted = []
        after_drafts: dict[str, list[tuple[int, int]]] = {}  # number of drafts, and row
        for i, request_id in enumerate(request_ids):
            if drafts and drafts[i]:
                after_drafts.setdefault(request_id, []).append((len(drafts[i]), i))
                continue
            followed = self._followed.get(request_id)
            if followed is None:
                masks[i] = -1
            elif followed.forced and not followed.matcher.is_error():
                _allow_one(masks[i], followed.forced[-1])
            else:
                wanted.append((followed, i))
        late: list[int] = []
        if by_deadline:
            wanted, late = self._split(wanted)
        errors: dict[str, str] = {}
        if _caught(self._fill_all, wanted, masks):  # one of them has failed: find it
            for followed, i in wanted:
                if error := _caught(self._fill_all, [(followed, i)], masks):
                    masks[i] = -1
                    errors[request_ids[i]] = error
        for followed, i in wanted:
            error = ""
            if not followed.matcher.is_error() and not followed.looked_ahead:
                error = _caught(self._look_ahead, followed)
            if followed.unique is not None and not error and not followed.matcher.is_error():
                error = _caught(followed.unique.narrow, masks[i], followed.matcher, self._compiler.endings)
            if error or followed.matcher.is_error():
                errors.setdefault(request_ids[i], error or explain(followed.matcher.get_error()))
        for request_id, rows in after_drafts.items():
            if late:  # no time is left
                late += [i for _, i in rows]
            elif (found := self._followed.get(request_id)) is not None and request_id not in errors:
                first = next(i for i, each in enumerate(request_ids) if each == request_id and not drafts[i])
                if error := _caught(self._fill_after_drafts, found, drafts, first, sorted(rows), masks):
                    errors[request_id] = error
        return late, errors

    @staticmethod
    def _fill_after_drafts(
        followed: _Followed,
        drafts: Sequence[Sequence[int]],
        before: int,
        rows: Sequence[tuple[int, int]],
        masks: np.ndarray,
    ) -> None:
        """Write the masks after the drafts of a request, in order. `before`: row of the mask before the first draft.

        The matcher takes the drafts and goes back.
        """
        matcher, num_bytes, num_taken = followed.matcher, masks.strides[0], 0
        forced = followed.forced[::-1]
        try:
            for number, row in rows:
                draft = drafts[row][-1]
                if not masks[before].view(np.uint32)[draft >> 5] >> (draft & 31) & 1:
                    break
                if number < len(forced) and list(drafts[row]) == forced[:number]:
                    _allow_one(masks[row], forced[number])
                else:
                    while num_taken < number and not matcher.is_stopped():  # at its end it takes no more
                        matcher.consume_token(drafts[row][num_taken])
                        num_taken += 1
                    matcher.unsafe_compute_mask_ptr(masks.ctypes.data + row * num_bytes, num_bytes)
                before = row
        finally:
            if num_taken:
                matcher.rollback(num_taken)

    def _fill_all(self, wanted: _Wanted, masks: np.ndarray) -> None:
        self._seconds_spent = self._fill(wanted, masks)

    @staticmethod
    def _look_ahead(followed: _Followed) -> None:
        """Find all next tokens without an alternative: their masks cost nothing."""
        followed.forced, followed.looked_ahead = followed.matcher.compute_ff_tokens()[::-1], True

    def _split(self, wanted: _Wanted) -> tuple[_Wanted, list[int]]:
        """Return the masks that the deadline allows for, and the rows of the others. The next fill begins with
        these.
        """
        most = max(self._fill.number_in(self._seconds), LEAST, -(-len(wanted) // LEAST_FRACTION))
        if most >= len(wanted):
            return wanted, []
        wanted = sorted(wanted, key=lambda each: (each[1] < self._next, each[1]))
        late = [i for _, i in wanted[most:]]
        self._next = late[0]
        return wanted[:most], late

    def idle(self) -> None:
        """Release idle compile threads. Call it when there is no work."""
        self._compile_thread.release()

    def learn_deadline(self, missed: bool, seconds_left: float) -> None:
        """Update the deadline. `missed`: the device waited for the last fill; otherwise it was busy for
        `seconds_left` longer.
        """
        if missed:
            self._seconds = 0.9 * min(self._seconds, self._seconds_spent)
        else:
            self._seconds = max(self._seconds, self._seconds_spent + 0.8 * seconds_left)

    def close(self) -> None:
        self._compile_thread.shutdown()
