"""The loop of the engine process, over in-process sockets and a runner that needs no device."""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from engine.config import EngineConfig
from engine.core.batch import SchedulerOutput
from engine.core.engine_request import EngineRequest
from engine.core.fairness.request_queues import RequestQueues
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.engine import Engine
from engine.models.files import Progress
from engine.replicas import process, process_main
from engine.replicas.messages import (
    Abort,
    Add,
    Call,
    Command,
    Event,
    Ready,
    Reply,
    Shutdown,
    Start,
    Step,
    decode_event,
    encode,
)
from engine.replicas.process import EngineLoop, _start
from tests.support.fake_runner import FakeRunner, next_token


class Front:
    """The other side of the loop."""

    def __init__(
        self, commands: zmq.Socket[bytes], events: zmq.Socket[bytes], runner: FakeRunner, thread: threading.Thread
    ) -> None:
        self._commands, self._events, self.runner, self.thread = commands, events, runner, thread

    def send(self, *commands: Command) -> None:
        self._commands.send(encode(commands))

    def event(self) -> Event:
        return decode_event(self._events.recv())

    def receive(self) -> Step:
        step = self.event()
        assert isinstance(step, Step)
        return step

    def until_finished(self, request_id: str) -> tuple[list[int], str, list[Step]]:
        """Its tokens, its finish reason, and all messages on the way."""
        tokens: list[int] = []
        steps = []
        while True:
            step = self.receive()
            steps.append(step)
            outputs = step.outputs
            tokens += [i for name, i in zip(outputs.request_ids, outputs.token_ids, strict=True) if name == request_id]
            for output in outputs.outputs:
                if output.request_id == request_id:
                    tokens += output.new_token_ids
                    if output.finish_reason is not None:
                        return tokens, output.finish_reason, steps


@contextmanager
def running_loop(
    model: Path, errors: list[BaseException] | None = None, permits: threading.Semaphore | None = None
) -> Iterator[Front]:
    """`permits`: each step waits for one."""
    engine = Engine(
        EngineConfig(model=str(model), device="cpu", max_model_len=256, max_num_seqs=4),
        build_runner=FakeRunner.build,  # type: ignore[arg-type]
    )
    assert isinstance(engine.runner, FakeRunner)
    engine.runner.permits = permits
    with zmq.Context() as context:
        sockets = [context.socket(kind) for kind in (zmq.PUSH, zmq.PULL, zmq.PULL, zmq.PUSH)]
        front_commands, loop_commands, front_events, loop_events = sockets
        for bound, connected, name in (
            (loop_commands, front_commands, "commands"),
            (front_events, loop_events, "events"),
        ):
            bound.bind(f"inproc://{name}")
            connected.connect(f"inproc://{name}")
        front_events.rcvtimeo = 60_000
        caught: list[BaseException] = [] if errors is None else errors

        def loop() -> None:
            try:
                EngineLoop(engine, loop_commands, loop_events, lambda: None).run()
            except Exception as error:
                caught.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield Front(front_commands, front_events, engine.runner, thread)
        finally:
            front_commands.send(encode([Shutdown()]))
            thread.join(60)
            for socket in sockets:
                socket.close(linger=0)
        assert not thread.is_alive()
        assert errors is not None or not caught
        engine.close()


def add(request_id: str, prompt: list[int], max_tokens: int) -> Add:
    return Add(EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens)))


def test_one_message_a_step_first_and_last_words_in_full(tiny_model: Path) -> None:
    with running_loop(tiny_model) as front:
        front.send(add("a", [1, 2, 3], 5))
        tokens, reason, steps = front.until_finished("a")
        assert tokens == [next_token([1, 2, 3], position) for position in range(3, 8)]
        assert reason == "length"
        shapes = [(len(step.outputs.token_ids), len(step.outputs.outputs)) for step in steps if step.outputs]
        assert shapes == [(0, 1), (1, 0), (1, 0), (1, 0), (0, 1)]
        assert steps[-1].stats.num_free_blocks == steps[-1].stats.num_blocks


def test_abort_says_nothing_but_frees(tiny_model: Path) -> None:
    steps = threading.Semaphore(1)
    with running_loop(tiny_model, permits=steps) as front:
        front.send(add("a", [1], 200))
        assert front.receive().stats.num_running == 1
        front.send(Abort("a"), Abort("unknown"))
        steps.release(200)
        while (step := front.receive()).stats.num_running:
            assert all(output.finish_reason is None for output in step.outputs.outputs)
        assert step.stats.num_free_blocks == step.stats.num_blocks


def test_calls_are_answered_between_steps(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = threading.Semaphore(2)
    with running_loop(tiny_model, permits=steps) as front:
        front.send(Call(7, "reset_prefix_cache"))
        assert front.event() == Reply(7, True)
        front.send(add("a", [1], 20))
        while front.receive().stats.num_running == 0:  # the first call may have woken the loop once more
            pass
        front.send(Call(8, "reset_prefix_cache"), Call(9, "close"), Call(10, "reset_prefix_cache", {"all": True}))
        steps.release(200)
        replies: list[Reply] = []
        while len(replies) < 3:
            event = front.event()
            replies += [event] if isinstance(event, Reply) else []
        assert replies[0] == Reply(8, False), "a request is running"
        assert [reply.id for reply in replies] == [8, 9, 10]
        assert replies[1].error == "ValueError: the engine has no method 'close'"
        assert replies[2].error.startswith("TypeError:")
        assert front.until_finished("a")[1] == "length", "the loop goes on"
    assert "the call of close failed" in caplog.text


def test_request_that_cannot_run_is_answered(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_loop(tiny_model) as front:
        front.send(add("long", [1] * 300, 5))
        assert front.until_finished("long")[:2] == ([], "error")
        assert "the prompt has 300 tokens" in caplog.text
        front.send(add("b", [1], 2))
        assert front.until_finished("b")[1] == "length"


def burn(output: SchedulerOutput) -> None:
    raise ValueError("a step failed")


def test_request_that_fails_is_answered_and_the_others_go_on(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = RequestQueues.add

    def add_or_fail(queues: RequestQueues, request: Request) -> None:
        queue(queues, request)
        if request.request_id == "bad":
            raise KeyError("no such thing")

    monkeypatch.setattr(RequestQueues, "add", add_or_fail)
    with running_loop(tiny_model) as front:
        front.send(add("bad", [2], 5), add("good", [1], 5))
        tokens, reason, steps = front.until_finished("good")
        assert (len(tokens), reason) == (5, "length")
        (error,) = [o.error for step in steps for o in step.outputs.outputs if o.finish_reason == "error"]
        assert error == "an internal error (KeyError); see the server's log"
        assert "no such thing" in caplog.text


def test_exception_that_is_of_no_request_ends_the_loop(tiny_model: Path) -> None:
    errors: list[BaseException] = []
    steps = threading.Semaphore(1)
    with running_loop(tiny_model, errors, steps) as front:
        front.send(*(add(str(i), [i + 1], 250) for i in range(6)))
        steps.release(2)  # whatever the first step came too early for waits for the second one's end
        while (stats := front.receive().stats).num_running + stats.num_waiting < 6:
            pass
        assert stats.num_waiting == 2
        front.runner.launch_fault, front.runner.reset_fault = burn, RuntimeError("the fake device is on fire")
        steps.release()
        front.thread.join(60)
    assert [str(error) for error in errors] == ["the fake device is on fire"]


def test_the_engine_process_spares_the_garbage_collector_what_stays(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    config = EngineConfig(model=str(tiny_model), device="cpu")

    def build(config: EngineConfig, eos_token_ids: tuple[int, ...], progress: Progress) -> Engine:
        return Engine(config, eos_token_ids=eos_token_ids, build_runner=FakeRunner.build)  # type: ignore[arg-type]

    engine, event = _start(Start(config, ()), build)
    assert isinstance(event, Ready)
    assert frozen
    engine.close()


def test_the_loop_does_not_wait_long_for_threads_that_compile_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = sys.getswitchinterval(), list[float]()
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(process, "main", lambda: found.append(sys.getswitchinterval()))
    try:
        process_main.main()
    finally:
        sys.setswitchinterval(before)
    assert found[0] <= 0.001 < before, "seconds"
