"""Number of requests that are taken: exactly as many as run and may wait, and a fair part for each owner."""

from contextlib import ExitStack, suppress

import pytest

from engine.replicas.in_flight import InFlight
from server.generation.errors import BusyError, InvalidRequestError, RequestError
from server.generation.queue import MAX_SECONDS, UNKNOWN_SECONDS, RequestQueue


def make(max_num_seqs: int = 8, max_num_queued: int = 4) -> tuple[RequestQueue, InFlight]:
    sent = InFlight()
    return RequestQueue(sent, max_num_seqs, max_num_queued, lambda reason: None), sent


def refusal(queue: RequestQueue, num_new: int, owner: str = "a") -> RequestError:
    with pytest.raises(RequestError) as caught, queue.entering(num_new, owner):
        pass
    return caught.value


def test_as_many_as_run_and_may_wait_are_taken() -> None:
    queue, sent = make()
    for number in range(12):
        with queue.entering(1, "a"):
            sent.add(str(number), "a")
    assert isinstance(refusal(queue, 1), BusyError)
    sent.end("3")
    with queue.entering(1, "a"):
        assert isinstance(refusal(queue, 1), BusyError), "what is being prepared counts"
    with queue.entering(1, "a"), pytest.raises(RequestError), queue.entering(1, "a"):
        pass
    with queue.entering(1, "a"):
        pass


def test_several_answers_count_as_several_requests() -> None:
    queue, _ = make()
    with queue.entering(10, "a"):
        assert isinstance(refusal(queue, 3), BusyError)
        with queue.entering(2, "a"):
            pass
    assert isinstance(refusal(queue, 13), InvalidRequestError), "it would never be taken"


def test_one_owner_cannot_have_it_all() -> None:
    queue, _ = make()
    with ExitStack() as stack:
        stack.enter_context(queue.entering(12, "a"))
        sent_by_b = 0
        for number in range(12):
            try:
                stack.enter_context(queue.entering(1, "b"))
            except BusyError:
                break
            sent_by_b = number + 1
        assert 0 < sent_by_b < 12
        assert isinstance(refusal(queue, 1, "a"), BusyError)
        stack.enter_context(queue.entering(1, "c"))


def test_many_names_at_one_address_get_one_part() -> None:
    queue, _ = make()
    with ExitStack() as stack:
        stack.enter_context(queue.entering(12, "address a/user 0"))
        taken = 0
        for number in range(1, 100):
            with suppress(BusyError):
                stack.enter_context(queue.entering(1, f"address a/user {number}"))
                taken += 1
        assert taken < 12
        for _ in range(6):
            stack.enter_context(queue.entering(1, "address b"))
        assert isinstance(refusal(queue, 1, "address b"), BusyError)


def test_retry_after_is_when_the_queue_of_now_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, sent = make(1, 3)
    found = []
    for seconds in (None, 0.01, 2.5, 1e9):
        asked: list[int] = []
        monkeypatch.setattr(
            sent, "seconds_until", lambda num_ends, seconds=seconds, asked=asked: asked.append(num_ends) or seconds
        )
        with queue.entering(4, "a"):
            refused = refusal(queue, 1)
            assert isinstance(refused, BusyError)
            found.append(refused.retry_after)
        assert asked == [3]
    assert found == [UNKNOWN_SECONDS, 1, 3, MAX_SECONDS]
