"""Native calls that are made together."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.cpu import call_batches, matmul, step
from kernels.cpu.call_batches import CallBatches
from kernels.cpu.library import library
from tests.support.unwritten import unwritten_is_unknown

TABLE, IDS = torch.randn(9, 32), torch.tensor([1, 2, 7])


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    if library() is None:
        pytest.skip("no compiler")
    with unwritten_is_unknown():  # to fill what is empty would be computing
        yield


def waiting() -> int:
    native = library()
    assert native is not None
    return -1 if native.waiting is None else len(native.waiting._calls)


def test_calls_wait_until_the_work_is_done() -> None:
    weight, counts = matmul.pack_weight(torch.randn(48, 32)), []

    def work() -> Tensor:
        x = step.embedding(TABLE, IDS)
        result = matmul.linear(x[:, :].view(3, 32), weight)
        counts.append(waiting())
        return result

    assert torch.equal(CallBatches().run(work), work())
    assert counts == [2, -1]


def test_pytorch_reads_what_calls_before_it_write() -> None:
    counts = []

    def work() -> Tensor:
        x = step.embedding(TABLE, IDS)
        y = x * 2
        counts.append(waiting())
        return y + step.embedding(TABLE, IDS)

    assert torch.equal(CallBatches().run(work), 3 * TABLE[IDS])
    assert counts == [0]


@pytest.mark.parametrize("copy", [lambda x: x.reshape(-1), lambda x: x.flatten()])
def test_what_cannot_be_viewed_is_copied_after_the_calls_before(copy: Callable[[Tensor], Tensor]) -> None:
    with torch.inference_mode():  # these are operations of their own then
        found = CallBatches().run(lambda: copy(step.embedding(TABLE, IDS)[:, 4:8]))
    assert torch.equal(found, TABLE[IDS][:, 4:8].reshape(-1))


def test_memory_that_nothing_else_holds_lasts_until_the_call() -> None:
    def work() -> Tensor:
        x = step.embedding(TABLE, IDS)
        for _ in range(20):
            x = matmul.linear(x, weight)
        return x

    weight = matmul.pack_weight(torch.eye(32))
    assert torch.equal(CallBatches().run(work), TABLE[IDS])


def test_calls_that_hold_much_memory_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def work() -> None:
        for _ in range(4):
            step.embedding(TABLE, IDS)
            counts.append(waiting())

    monkeypatch.setattr(call_batches, "MOST_BYTES", 2 * 3 * 32 * 4 - 1)
    CallBatches().run(work)
    assert counts == [1, 2, 1, 2]


def test_nothing_waits_after_a_failure() -> None:
    def work() -> None:
        step.embedding(TABLE, IDS)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CallBatches().run(work)
    assert waiting() == -1
    assert torch.equal(step.embedding(TABLE, IDS), TABLE[IDS])


def test_calls_of_other_threads_do_not_wait() -> None:
    found = []

    def other() -> None:
        x = CallBatches().run(lambda: step.embedding(TABLE, IDS))
        found.append((torch.equal(x, TABLE[IDS]), waiting()))

    def work() -> Tensor:
        x = step.embedding(TABLE, IDS)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return x

    assert torch.equal(CallBatches().run(work), TABLE[IDS])
    assert found == [(True, 1)]


def test_work_with_few_calls_in_a_batch_is_done_as_usual_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def work() -> Tensor:
        x = step.embedding(TABLE, IDS)
        counts.append(waiting())
        return x.add_(1)

    monkeypatch.setattr(call_batches, "REST", 2)
    batches = CallBatches()
    for _ in range(4):
        assert torch.equal(batches.run(work), TABLE[IDS] + 1)
    assert counts == [1, -1, -1, 1]


def test_work_with_many_other_operations_is_done_as_usual_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def work() -> None:
        for _ in range(call_batches.FEW_CALLS):
            step.embedding(TABLE, IDS)
        counts.append(waiting())
        for _ in range(call_batches.MANY_OPERATIONS * call_batches.FEW_CALLS):
            TABLE.view(-1)

    monkeypatch.setattr(call_batches, "REST", 2)
    batches = CallBatches()
    for _ in range(4):
        batches.run(work)
    assert counts == [4, -1, -1, 4]


def test_recorded_work_is_not_put_off() -> None:
    weight = matmul.pack_weight(torch.randn(48, 32))
    recorded = step.record(lambda: CallBatches().run(lambda: matmul.linear(step.embedding(TABLE, IDS), weight)))
    assert recorded.replay is not None
    assert torch.equal(recorded.result, matmul.linear(TABLE[IDS], weight))
