"""PyTorch gets the number of threads with which steps are done soonest."""

from engine.worker.parallel.step_threads import TRY_EVERY, StepThreads


class Machine:
    """Steps that take as long as `seconds` says for the number of threads that they have."""

    def __init__(self, most: int, seconds: dict[int, float]) -> None:
        self.seconds, self.now, self.num_threads = seconds, 0.0, most
        self.taken: list[int] = []
        self._threads = StepThreads(most, self._set, lambda: self.now)

    def _set(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def _step(self) -> str:
        self.taken.append(self.num_threads)
        self.now += self.seconds[self.num_threads]
        return "logits"

    def run(self, count: int) -> list[int]:
        """The threads that the newest steps had."""
        for _ in range(count):
            assert self._threads.run(self._step) == "logits"
        return self.taken[-count:]


def test_small_models_take_one_thread() -> None:
    machine = Machine(4, {4: 2.0, 1: 1.0})
    machine.run(2)
    assert machine.run(50) == [1] * 50
    assert machine.num_threads == 4, "what is no such step has all threads"


def test_beside_a_busy_process_steps_take_one_thread_until_it_has_gone() -> None:
    machine = Machine(4, {4: 1.0, 1: 3.0})
    machine.run(2)
    assert machine.run(20) == [4] * 20
    machine.seconds[4] = 9.0
    assert machine.run(20)[2:] == [1] * 18
    machine.seconds[4] = 1.0
    assert machine.run(TRY_EVERY)[-5:] == [4] * 5


def test_trying_costs_little() -> None:
    machine = Machine(8, {8: 1.0, 1: 8.0})
    machine.run(10 * TRY_EVERY)
    assert machine.now == 10 * TRY_EVERY + 7, "one thread was tried once"


def test_one_core() -> None:
    assert set(Machine(1, {1: 1.0}).run(100)) == {1}
