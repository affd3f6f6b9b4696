"""Memory of images: no caller takes all of it, and none is locked out."""

from __future__ import annotations

from engine.vision.held_bytes import HeldBytes

MOST = 1200


def fill(held: HeldBytes, tenant: str) -> int:
    """Take as much as the caller may."""
    taken = 0
    while held.may_take(tenant, MOST):
        held.add(tenant, 1)
        taken += 1
    return taken


def test_a_caller_takes_half_and_leaves_the_rest_to_others() -> None:
    held = HeldBytes()
    assert fill(held, "a") == MOST // 2
    assert fill(held, "b") == MOST // 4
    assert fill(held, "c") == MOST // 8
    assert held.total < MOST


def test_callers_who_come_at_once_get_equal_parts() -> None:
    held = HeldBytes()
    while callers := [each for each in "abc" if held.may_take(each, MOST)]:
        for each in callers:
            held.add(each, 1)
    assert held._of_caller == dict.fromkeys("abc", MOST // 4)


def test_what_is_released_can_be_taken_again() -> None:
    held = HeldBytes()
    taken = fill(held, "a")
    held.add("a", -taken)
    assert (held.total, held._of_caller) == (0, {})
    assert fill(held, "b") == taken
