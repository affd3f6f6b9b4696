"""The one owner of the choice between fast forms of operations and deterministic ones.

A deterministic form has one order of sums: what it computes for a token depends neither on the other tokens of the step
nor on how many there are. Kernels ask `FORMS`; nothing above them does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import WeakSet


class Forms:
    """The forms that this process uses. Who uses operations holds them meanwhile, so that they do not change."""

    def __init__(self) -> None:
        self.deterministic = False
        self._holders: WeakSet[object] = WeakSet()
        self._changed: list[Callable[[], None]] = []

    def on_change(self, forget: Callable[[], None]) -> None:
        """Call `forget` whenever the forms change."""
        self._changed.append(forget)

    def choose(self, deterministic: bool) -> None:
        """Choose the forms. RuntimeError: the others are in use."""
        if deterministic == self.deterministic:
            return
        if self._holders:
            gc.collect()  # a closed engine may wait for it
        if self._holders:
            raise RuntimeError(
                f"another engine of this process runs {'without' if deterministic else 'with'} deterministic: close it "
                "first, or use another process"
            )
        self.deterministic = deterministic
        for forget in self._changed:
            forget()

    @property
    def expand_latents(self) -> bool:
        """Return True if steps may expand latents to keys and values: prefill then rounds otherwise than decode."""
        return not self.deterministic

    @property
    def always_chooses(self) -> bool:
        """Return True if tokens that see few enough others to attend to all of them choose, too: other tokens of their
        step may have to.
        """
        return self.deterministic

    @property
    def copies_pages(self) -> bool:
        """Return True if steps may upcast pages of an e4m3 cache: prefill then rounds otherwise than decode."""
        return not self.deterministic

    @property
    def rows_alone(self) -> bool:
        """Return True if what PyTorch computes of logits is computed for each row alone: it divides the sums of a row,
        and rounds the elements of a tensor, by the number of rows.
        """
        return self.deterministic

    @property
    def sums_in_eighths(self) -> bool:
        """Return True if sums that ranks share are added up in eighths, so that they do not depend on the ranks."""
        return self.deterministic

    def hold(self, user: object) -> None:
        """Keep the forms until `release`, or until nothing refers to `user`."""
        self._holders.add(user)

    def release(self, user: object) -> None:
        """Undo `hold`."""
        self._holders.discard(user)


FORMS = Forms()
