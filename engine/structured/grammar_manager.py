"""The grammars of running requests: compiled beside the engine's loop, followed token by token. Knows ids and tokens only.

One thread owns this. Only compiling happens in another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from engine.structured.grammar import Compiler, make_executor

MAX_WEIGHT = 16 << 20  # characters of all grammars that are compiled at a time; the others wait
MAX_THREADS = 8
FEW = 64  # below so many masks one thread fills them: several are hardly faster, and hold up what drives the device
LEAST = 4  # masks that are filled even when there is no time
LEAST_SHARE = 4  # and of those who wait for one, at least one in so many
MAX_MASKS = 1 << 20
MAX_INTERVAL = 512  # fills between two trials of the slower way


@dataclass(slots=True)
class _Followed:
    """A running request's grammar."""

    matcher: LLMatcher
    forced: list[int] = field(default_factory=list)  # the tokens that must come next, the last one first


_Wanted = list[tuple[_Followed, int]]  # a mask, and the row that it goes to


@dataclass(slots=True)
class _Way:
    fill: Callable[[_Wanted, np.ndarray], None]
    seconds: float = 0.0  # for each mask, lately; 0: not known


class _Filler:
    """Fills masks in this thread, or in several at once where that has lately been faster.

    Waking threads may take as long as filling 50 masks does (on a virtual machine: a millisecond). So for many masks both
    ways are tried, and the slower one again now and then.
    """

    def __init__(self) -> None:
        self._alone, self._together = _Way(_fill_alone), _Way(self._fill_together)
        self._interval = self._until_trial = 8  # fills
        self._threads: LLExecutor | None = None

    def __call__(self, wanted: _Wanted, masks: np.ndarray) -> float:
        """Fill the rows of masks [n, words] that are named; the seconds it took."""
        way, slower, is_trial = self._alone, self._together, False
        if len(wanted) >= FEW:
            if slower.seconds < way.seconds:
                way, slower = slower, way
            self._until_trial -= 1
            if is_trial := not self._until_trial:
                way = slower
                self._until_trial = self._interval = min(2 * self._interval, MAX_INTERVAL)
        start = perf_counter()
        way.fill(wanted, masks)
        seconds = perf_counter() - start
        if wanted:
            each = seconds / len(wanted)
            if not way.seconds:
                way.seconds = each
            elif is_trial or each < way.seconds:
                way.seconds = (way.seconds + each) / 2
            else:  # a grammar's first masks take long, the next ones do not
                way.seconds += (each - way.seconds) / 8
        return seconds

    def number_in(self, seconds: float) -> int:
        """How many masks can be filled in that time, as far as is known."""
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


class GrammarManager:
    """`add` a request, and when `take_ready` names it: `advance` by each of its tokens, and `fill` its masks."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._waiting: dict[str, str] = {}  # request id → grammar
        self._compiling: dict[str, Future[LLMatcher]] = {}
        self._followed: dict[str, _Followed] = {}
        self._weights: dict[str, int] = {}  # of those being compiled or compiled
        self._compile_thread: ThreadPoolExecutor | None = None
        self._fill = _Filler()
        self._turn = 0  # whose it is when not all can have one: a place
        self._seconds = float("inf")  # that a hurried fill may take
        self._seconds_spent = 0.0  # in the last one

    def __bool__(self) -> bool:
        """Whether a request is being followed."""
        return bool(self._followed)

    def add(self, request_id: str, grammar: str) -> None:
        self._waiting[request_id] = grammar
        self._compile_waiting()

    def _compile_waiting(self) -> None:
        weight = sum(self._weights.values())
        for request_id, grammar in list(self._waiting.items()):
            if weight and weight + len(grammar) > MAX_WEIGHT:
                break
            del self._waiting[request_id]
            self._weights[request_id] = len(grammar)
            weight += len(grammar)
            self._compiling[request_id] = self._compile(grammar)

    def _compile(self, grammar: str) -> Future[LLMatcher]:
        if (matcher := self._compiler.remembered(grammar)) is not None:
            found: Future[LLMatcher] = Future()
            found.set_result(matcher)
            return found
        if self._compile_thread is None:
            self._compile_thread = make_executor(1)
        return self._compile_thread.submit(self._compiler.compile, grammar)

    def wait(self, seconds: float) -> None:
        """Until one of those being compiled is ready, but not for longer than this."""
        wait(self._compiling.values(), seconds, FIRST_COMPLETED)

    def take_ready(self) -> list[tuple[str, str]]:
        """Requests that may begin, with "", and those that never will, with the reason."""
        ready = []
        for request_id, future in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            error = future.exception()
            if error is None:
                self._followed[request_id] = _Followed(future.result())
            else:
                self.forget(request_id)
            ready.append((request_id, "" if error is None else str(error)))
        return ready

    def forget(self, request_id: str) -> None:
        """A request has ended. Others are no concern of this."""
        self._waiting.pop(request_id, None)
        self._followed.pop(request_id, None)
        if (future := self._compiling.pop(request_id, None)) is not None:
            future.cancel()
        if self._weights.pop(request_id, None) is not None:
            self._compile_waiting()

    def advance(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The request's next tokens. Others than the masks allow put it into an error that `fill` tells of.

        After the end nothing but ends of text is allowed.
        """
        followed = self._followed.get(request_id)
        if followed is not None and not followed.matcher.is_stopped():
            followed.matcher.consume_tokens(list(token_ids))
            del followed.forced[-len(token_ids) :]

    def fill(
        self, request_ids: Sequence[str], masks: np.ndarray, hurry: bool = False
    ) -> tuple[list[int], dict[str, str]]:
        """Set the tokens that may come next. Returns whom there was no time for (places), and what went wrong with whom.

        masks [len(request_ids), (vocabulary + 31) // 32] int32, contiguous: a bit for each token, the lowest first. Whoever
        is not followed (any more) may go on as they like. In a `hurry`, only so many have their turn as `keep_pace` has
        found to be time for.
        """
        wanted: _Wanted = []
        late: _Wanted = []
        for i, request_id in enumerate(request_ids):
            followed = self._followed.get(request_id)
            if followed is None:
                masks[i] = -1
            elif followed.forced and not followed.matcher.is_error():
                _allow_one(masks[i], followed.forced[-1])
            else:
                wanted.append((followed, i))
        most = max(self._fill.number_in(self._seconds), LEAST, -(-len(wanted) // LEAST_SHARE)) if hurry else len(wanted)
        if most < len(wanted):
            wanted.sort(key=lambda each: (each[1] < self._turn, each[1]))
            wanted, late = wanted[:most], wanted[most:]
            self._turn = late[0][1]
        self._seconds_spent = self._fill(wanted, masks)
        errors: dict[str, str] = {}
        for followed, i in wanted:
            if followed.matcher.is_error():
                errors[request_ids[i]] = followed.matcher.get_error()
            else:  # all that the grammar leaves no choice about, at once: the next masks cost nothing
                followed.forced = followed.matcher.compute_ff_tokens()[::-1]
        return [i for _, i in late], errors

    def keep_pace(self, too_late: bool, seconds_left: float) -> None:
        """Learn how long a hurried fill may take: whether the last one held up what waits for it, or how much longer it might
        have taken.
        """
        if too_late:
            self._seconds = 0.9 * min(self._seconds, self._seconds_spent)
        else:
            self._seconds = max(self._seconds, self._seconds_spent + 0.8 * seconds_left)

    def close(self) -> None:
        if self._compile_thread is not None:
            self._compile_thread.shutdown(wait=False, cancel_futures=True)
