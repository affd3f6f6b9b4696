"""Estimates the time of steps that decode with and without drafts, from the steps that ran."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping

RECENT = 7  # steps of a size whose median counts
LEAST = 2  # measurements of a size before it counts: the first one may include preparations
FIRST_GUESS = 0.05  # of a step's time, that a further token is taken to cost until it has been measured
WAIT_GUESS = 0.1  # of a step's time, that waiting for a step with drafts is taken to cost until it has been measured
# Numbers of drafts of a step. There are few, since each size takes time to be captured and measured.
NUMBERS = (1, 2, 4, 8, 16, 32, 64)
LEAST_CHANGE = 0.05  # of a size's time, from which on estimates are made anew
MOST_TABLES = 256
STALE = 512  # steps after which a size that was not used since is measured again
RECHECK = 256  # steps after which plain ones are measured again
MEAN_OF = 16  # steps, about, of a mean
LONGEST = 2.0  # times the median, as which a longer step counts in the mean
EXACT = 16  # sizes up to this are measured apart, larger ones in steps of an eighth


def size_class(num_tokens: int) -> int:
    """Return the largest size that is measured together with this one, where no step is padded."""
    if num_tokens <= EXACT:
        return num_tokens
    width = 1 << (num_tokens.bit_length() - 4)
    return -(-num_tokens // width) * width


class _Times:
    """The latest times of steps of a size."""

    __slots__ = ("_num", "_recent", "last_used", "mean", "seconds")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._num = 0
        self.seconds = 0.0  # the median; 0: not yet known
        self.mean = 0.0  # over more steps
        self.last_used = 0  # number of steps recorded by then

    @property
    def is_new(self) -> bool:
        return len(self._recent) < RECENT

    def record(self, seconds: float, step: int) -> None:
        if step - self.last_used > STALE:
            self._recent.clear()
            self.seconds, self._num = 0.0, 0
        self.last_used = step
        self._recent.append(seconds)
        count = len(self._recent)
        if count >= LEAST:
            self.seconds = sorted(self._recent)[count // 2 if count > LEAST else 0]
            self._num = min(self._num + 1, MEAN_OF)
            self.mean += (min(seconds, LONGEST * self.seconds) - self.mean) / self._num


class StepCosts:
    """Seconds from the end of one step to the end of the next, for steps in which every request decodes.

    Plain steps go by their number of requests, steps with drafts by their number of tokens. They differ in more than
    that: other kernels may run, and a step with drafts ends before the next one is launched.

    Until a size has been measured, it is estimated from others, and from the device's own time for it, if known.
    """

    def __init__(self, device_seconds: Mapping[int, float] | None = None) -> None:
        """`device_seconds`: the device's time for a step, by its number of tokens, measured at start-up. Other steps
        are padded to these sizes. None: unknown, and no step is padded.
        """
        self._device = device_seconds or {}
        self._sizes = sorted(self._device)
        self._plain: dict[int, _Times] = {}
        self._drafted: dict[int, _Times] = {}
        self.num_steps = 0  # so many ran, measured or not
        self._tables: dict[tuple[int, int], list[tuple[int, float]]] = {}  # see `table`
        self._since = 0  # number of steps when the oldest table was made

    def __str__(self) -> str:
        """Milliseconds by number of tokens: on the device as measured at start-up, then as steps took of late."""
        kinds = {"device": self._device} | {
            name: {size: times.seconds for size, times in sorted(kind.items()) if times.seconds}
            for name, kind in (("plain", self._plain), ("with drafts", self._drafted))
        }
        columns = [
            f"{name} {', '.join(f'{size}: {1e3 * seconds:.2f}' for size, seconds in found.items())}"
            for name, found in kinds.items()
            if found
        ]
        return "; ".join(columns)

    def record(self, num_tokens: int, has_drafts: bool, seconds: float) -> None:
        """Record a step of `num_tokens` tokens, drafts among them, in which every request decoded."""
        kind, size = self._drafted if has_drafts else self._plain, self._size(num_tokens)
        times = kind.get(size)
        if times is None:
            times = kind[size] = _Times()
        before = times.seconds
        times.record(seconds, self.num_steps)
        if abs(times.seconds - before) > LEAST_CHANGE * before:
            self._tables.clear()

    def is_new(self, num_seqs: int) -> bool:
        """Return whether plain steps of so many requests were measured few times."""
        times = self._plain.get(self._size(num_seqs))
        return times is None or times.is_new

    def plain(self, num_seqs: int) -> float:
        """Return the seconds of a step of so many requests without drafts; 0: not known yet."""
        found = self._plain.get(self._size(num_seqs))
        return found.seconds if found is not None else 0.0

    def needs_plain(self, num_seqs: int) -> bool:
        """Return whether plain steps of so many requests are to be measured, for the first time or again."""
        found = self._plain.get(self._size(num_seqs))
        return found is None or not found.seconds or self.num_steps - found.last_used > RECHECK

    def mean_plain(self, num_seqs: int) -> float:
        """Return the mean seconds of a step of so many requests without drafts; 0: not known yet."""
        found = self._plain.get(self._size(num_seqs))
        return found.mean if found is not None and found.seconds else 0.0

    def drafted(self, num_seqs: int, num_tokens: int) -> float:
        """Estimate the seconds of a step with drafts of so many requests, whose plain time is known."""
        plain, size = self.plain(num_seqs), self._size(num_tokens)
        if self._sizes:
            return self._padded(num_seqs, plain, size)
        below, above = (num_seqs, plain), (0, 0.0)
        for known, times in self._drafted.items():
            if not self._is_known(times):
                continue
            if known == size:
                return times.seconds
            if below[0] < known < size:
                below = known, times.seconds
            elif known > size and (not above[0] or known < above[0]):
                above = known, times.seconds
        if above[0]:  # between two known sizes
            share = (size - below[0]) / (above[0] - below[0])
            return below[1] + share * (above[1] - below[1])
        each = FIRST_GUESS * plain
        if below[0] > num_seqs:
            each = max((below[1] - plain) / (below[0] - num_seqs), each)
        return below[1] + each * (size - below[0])

    def table(self, num_seqs: int, most: int) -> list[tuple[int, float]]:
        """Return the numbers of drafts to choose from for so many requests, and the seconds of a step with each. The
        plain time of these requests is known. The table is kept until times change or become stale.
        """
        if len(self._tables) >= MOST_TABLES or self.num_steps - self._since > STALE:
            self._tables.clear()
        if not self._tables:
            self._since = self.num_steps
        found = self._tables.get((num_seqs, most))
        if found is None:
            numbers = self.numbers(num_seqs, most)
            found = [(number, self.drafted(num_seqs, num_seqs + number)) for number in numbers]
            self._tables[num_seqs, most] = found
        return found

    def numbers(self, num_seqs: int, most: int) -> Iterable[int]:
        """Return the numbers of drafts to choose from for so many requests, in ascending order, up to `most`. Where
        steps are padded, more drafts up to the next number would cost nothing.
        """
        if not self._sizes:
            return (number for number in NUMBERS if number <= most)
        sizes = self._sizes[bisect.bisect_right(self._sizes, num_seqs) :]
        return sorted({min(size - num_seqs, most) for size in sizes})

    def _size(self, num_tokens: int) -> int:
        at = bisect.bisect_left(self._sizes, num_tokens)
        return self._sizes[at] if at < len(self._sizes) else size_class(num_tokens)

    def _is_known(self, times: _Times) -> bool:
        return times.seconds > 0 and self.num_steps - times.last_used <= STALE

    def _padded(self, num_seqs: int, plain: float, size: int) -> float:
        """Estimate the seconds of a step of a padded size with drafts."""
        found = self._drafted.get(size)
        if found is not None and self._is_known(found):
            return found.seconds
        largest = self._sizes[-1]

        def on_device(tokens: int) -> float:
            return self._device.get(tokens, self._device[largest] * tokens / largest)

        known = [times.seconds - on_device(each) for each, times in self._drafted.items() if self._is_known(times)]
        beside = plain - on_device(self._size(num_seqs)) + WAIT_GUESS * plain  # what is no time of the device
        return on_device(size) + (sorted(known)[len(known) // 2] if known else beside)
