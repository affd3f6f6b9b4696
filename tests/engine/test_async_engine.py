"""The engine in a real process of its own, with a tiny model on the CPU."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import AsyncEngine, EngineConfig, SamplingParams
from engine.core.batch import EngineOutput, TokenLogprobs
from engine.core.engine_request import EngineRequest
from engine.errors import ConfigError, EngineDeadError, EngineError
from engine.models.errors import ModelError
from engine.processing.output_collector import OutputCollector, RequestUpdate
from engine.replicas.messages import Abort
from engine.replicas.replica import MAX_LOSSES
from engine.replicas.state import PHASES, EngineState
from engine.replicas.streams import Pace, Stream
from engine.utils.fair_tasks import FairTasks

pytestmark = pytest.mark.usefixtures("forked_engines")

ROOT = Path(__file__).resolve().parents[2]
QUICK = EngineRequest("a", [1, 2])
LONG = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0, detokenize=False)


def config(model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(model), "device": "cpu", "num_gpu_blocks_override": 1024, **settings})


@asynccontextmanager
async def running(model: Path, **settings: Any) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(config(model, **settings))
    try:
        yield engine
    finally:
        engine.close()


Run = Callable[[Callable[[AsyncEngine], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def run(tiny_model: Path) -> Iterator[Run]:
    """Runs a coroutine function on one engine that all tests share; nothing may be left running in it."""
    with asyncio.Runner() as runner:
        engine = runner.run(AsyncEngine.start(config(tiny_model)))

        async def clean(test: Callable[[AsyncEngine], Coroutine[Any, Any, None]]) -> None:
            await test(engine)
            assert engine.num_requests == 0
            await until(lambda: engine.stats is not None and engine.stats.num_free_blocks == engine.stats.num_blocks)

        yield lambda test: runner.run(asyncio.wait_for(clean(test), 200))
        engine.close()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.01)


async def collect(updates: AsyncIterator[RequestUpdate]) -> list[RequestUpdate]:
    return [update async for update in updates]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are children of this process, no forks of another."""
    monkeypatch.setattr("engine.replicas.engine_process.subprocess", subprocess)


def engines_of(pid: int) -> set[int]:
    """The engine processes that a process has started."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and b"engine.replicas.process" in status.with_name("cmdline").read_bytes():
                found.add(int(status.parent.name))
        except OSError:
            continue
    return found


def test_many_at_once_give_what_each_gives_alone(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        assert engine.model.tokenizer is not None
        prompts = [engine.model.tokenizer.encode(f"prompt {i} " * (1 + i % 5)) for i in range(24)]
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        alone = [await collect(engine.generate(EngineRequest(f"alone-{i}", prompts[i], sampling))) for i in range(3)]
        together = await asyncio.gather(
            *(collect(engine.generate(EngineRequest(str(i), prompt, sampling))) for i, prompt in enumerate(prompts))
        )
        for updates in together:
            assert [u.finish_reason for u in updates] == [None] * (len(updates) - 1) + ["length"]
            token_ids = [i for u in updates for i in u.token_ids]
            assert len(token_ids) == 20
        for i in range(3):
            tokens = [[t for u in updates for t in u.token_ids] for updates in (alone[i], together[i])]
            assert tokens[0] == tokens[1]
        last = alone[0][-1]
        times = last.timings
        assert 0 < times.arrival_time <= times.queued_ts <= times.scheduled_ts <= times.first_token_ts
        assert times.first_token_ts <= times.last_token_ts <= time.monotonic()
        assert engine.model.name.endswith("tiny")
        assert engine.model.default_sampling == {"temperature": 0.5, "top_k": 40}
        assert engine.model.max_model_len == 4096
        assert "ready in" in engine.summary

    run(test)


def test_logprobs_travel(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        updates = await collect(
            engine.generate(EngineRequest("a", [1, 2], SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True)))
        )
        found = [entry for u in updates for entry in u.logprobs or []]
        assert [len(entry.top_ids) for entry in found] == [2] * 4
        assert all(entry.logprob <= 0 and entry.rank >= 1 for entry in found)

    run(test)


def test_stream_interval(tiny_model: Path) -> None:
    async def test() -> None:
        async with running(tiny_model, stream_interval=5) as engine:
            sampling = SamplingParams(max_tokens=22, ignore_eos=True, temperature=0)
            updates = await collect(engine.generate(EngineRequest("a", [1, 2], sampling)))
        lengths = [len(update.token_ids) for update in updates]
        assert sum(lengths) == 22
        assert all(length >= 5 for length in lengths[1:-1])

    asyncio.run(test())


def test_what_a_stream_interval_holds_back() -> None:
    async def test() -> None:
        stream = Stream(QUICK, OutputCollector([1, 2], SamplingParams(max_tokens=22), None), 5, Pace(), FairTasks(1))
        stream.add(EngineOutput("a", [7]), 0.0)
        assert stream.ready, "the first token does not wait"
        assert stream.take().token_ids == [7]
        for token_id in range(4):
            stream.add_token(token_id, 0.0)
            assert not stream.ready
        stream.add_token(4, 0.0)
        assert stream.ready
        assert stream.take().token_ids == [0, 1, 2, 3, 4]
        stream.add_token(5, 0.0)
        assert not stream.ready
        stream.add(EngineOutput("a", [6], "length"), 0.0)
        assert stream.ready, "nor does the last one"
        assert stream.take().token_ids == [5, 6]
        stream.add_tokens([7, 8], 0.0)
        assert not stream.output.has_output, "nothing comes after it"

    asyncio.run(test())


def test_a_run_of_tokens_counts_in_full() -> None:
    async def test() -> None:
        stream = Stream(QUICK, OutputCollector([1, 2], SamplingParams(max_tokens=22), None), 5, Pace(), FairTasks(1))
        stream.add(EngineOutput("a", [7]), 0.0)
        assert stream.take().token_ids == [7]
        stream.add_tokens([0, 1, 2], 0.0)
        assert not stream.ready
        stream.add_tokens([3, 4], 0.0)
        assert stream.ready
        assert stream.take().token_ids == [0, 1, 2, 3, 4]

    asyncio.run(test())


def test_updates_of_crowded_streams_have_pauses() -> None:
    async def test() -> None:
        pace = Pace(0.0125)
        stream = Stream(QUICK, OutputCollector([1, 2], SamplingParams(max_tokens=22), None), 1, pace, FairTasks(1))
        stream.add(EngineOutput("a", [7]), 10.0)
        assert stream.take().token_ids == [7]
        stream.add_token(1, 10.005)
        assert stream.take().token_ids == [1]
        for token_id, now in ((2, 10.010), (3, 10.015)):
            stream.add_token(token_id, now)
            assert not stream.ready
        stream.add_token(4, 10.020)
        assert stream.ready
        assert stream.take().token_ids == [2, 3, 4]
        pace.seconds = 50e-6
        stream.add_token(5, 10.0201)
        assert stream.ready, "it is the only one now"

    asyncio.run(test())


def test_crowded_streams_have_pauses_with_log_probabilities_too() -> None:
    """Else hundreds of such streams would fill the event loop: no updates are dearer."""

    def output(token_id: int) -> EngineOutput:
        return EngineOutput("a", [token_id], logprobs=[TokenLogprobs(-1.0, 1, [token_id], [-1.0])])

    async def test() -> None:
        sampling = SamplingParams(max_tokens=22, logprobs=1)
        stream = Stream(QUICK, OutputCollector([1, 2], sampling, None), 1, Pace(0.0125), FairTasks(1))
        stream.add(output(7), 10.0)
        assert stream.take().token_ids == [7]
        stream.add(output(1), 10.005)
        assert stream.ready
        stream.take()
        for token_id, now in ((2, 10.010), (3, 10.015)):
            stream.add(output(token_id), now)
            assert not stream.ready
        stream.add(output(4), 10.020)
        assert stream.ready
        assert [at.top_ids for at in stream.take().logprobs or []] == [[2], [3], [4]]

    asyncio.run(test())


def test_requests_begin_before_they_are_read_and_end_when_nobody_can_read_them(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        assert engine.stats is not None
        num_before = engine.stats.generation_tokens
        read = engine.generate(EngineRequest("read", [1, 2], LONG.clone(max_tokens=30)))
        dropped = [engine.generate(EngineRequest("dropped", [1, 2], LONG))]
        closed = engine.generate(EngineRequest("closed", [1, 2], LONG))
        # The first of the three is never behind the others: by then it has all of its tokens.
        await until(lambda: engine.stats is not None and engine.stats.generation_tokens >= num_before + 90)
        assert engine.num_requests == 3
        dropped.clear()
        await closed.aclose()
        await until(lambda: engine.num_requests == 1)
        assert [len(update.token_ids) for update in await collect(read)] == [30], "all that had come meanwhile"
        assert await collect(read) == []

    run(test)


def test_slow_reader_gets_merged_updates(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate(EngineRequest("a", [1, 2], LONG.clone(max_tokens=200)))) as updates:
            first = await anext(updates)
            await until(lambda: engine.stats is not None and engine.stats.num_running == 0)
            rest = [update async for update in updates]
        assert len(first.token_ids) + sum(len(u.token_ids) for u in rest) == 200
        assert len(rest) <= 1

    run(test)


def test_stop_string_ends_the_request_in_the_engine(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        greedy = LONG.clone(max_tokens=40, detokenize=True)
        whole = "".join([u.text for u in await collect(engine.generate(EngineRequest("a", [5, 6, 7], greedy)))])
        stop = whole[4:7]
        updates = await collect(engine.generate(EngineRequest("b", [5, 6, 7], LONG.clone(detokenize=True, stop=stop))))
        assert "".join(u.text for u in updates) == whole[: whole.index(stop)]
        assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", stop)

    run(test)


def test_abort_and_hanging_up(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        assert engine.stats is not None
        # told to end
        updates = engine.generate(EngineRequest("a", [1], LONG))
        await anext(updates)
        await engine.abort("a")
        await engine.abort("a")
        await engine.abort("unknown")
        assert (await collect(updates))[-1].finish_reason == "abort"
        # the iterator is closed
        updates = engine.generate(EngineRequest("a", [1], LONG))
        await anext(updates)
        await updates.aclose()
        # the task that waits is cancelled
        task = asyncio.create_task(collect(engine.generate(EngineRequest("a", [1], LONG))))
        await asyncio.sleep(0)  # it waits
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.num_requests == 0
        # all of them
        tasks = [asyncio.create_task(collect(engine.generate(EngineRequest(str(i), [1], LONG)))) for i in range(8)]
        await until(lambda: engine.num_requests == 8)
        engine.abort_all()
        assert {(await task)[-1].finish_reason for task in tasks} == {"abort"}

    run(test)


def test_what_cannot_run_is_refused_at_once(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        for prompt, sampling, message in [
            ([], SamplingParams(), "the prompt is empty"),
            ([1] * 4096, SamplingParams(), "the prompt has 4096 tokens, but the context holds 4096"),
            ([300], SamplingParams(), "from 0 to 299, got 300"),
            ([-1], SamplingParams(), "from 0 to 299, got -1"),
            ([1], SamplingParams(stop_token_ids=[300]), "stop_token_ids must be below 300, got 300"),
            ([1], SamplingParams(n=2), "n must be 1"),
        ]:
            with pytest.raises(ValueError, match=message):
                engine.generate(EngineRequest("a", prompt, sampling))
        async with aclosing(engine.generate(EngineRequest("a", [1], LONG))) as first:
            await anext(first)
            with pytest.raises(ValueError, match="request id 'a' is in use"):
                await anext(engine.generate(EngineRequest("a", [1], LONG)))

    run(test)


@pytest.mark.parametrize("where", ["no process takes requests", "the process is stopped", "it has begun"])
def test_a_deadline_holds_wherever_the_request_is(run: Run, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: AsyncEngine) -> None:
        (replica,) = engine.replicas
        if where == "no process takes requests":
            monkeypatch.setattr(replica, "_is_draining", True)
        if where == "the process is stopped":
            os.kill(replica.pid, signal.SIGSTOP)
        try:
            request = EngineRequest("late", [1, 2], LONG, deadline=time.monotonic() + 0.2)
            async with asyncio.timeout(60):
                *begun, last = await collect(engine.generate(request))
        finally:
            monkeypatch.undo()
            os.kill(replica.pid, signal.SIGCONT)
        assert (last.finish_reason, len(engine.in_flight), len(engine._streams._deadlines)) == ("timeout", 0, 0)
        assert not begun or where == "it has begun"
        in_time = EngineRequest("in time", [1, 2], SamplingParams(max_tokens=4), deadline=time.monotonic() + 100)
        assert (await collect(engine.generate(in_time)))[-1].finish_reason in ("length", "stop")
        assert len(engine._streams._deadlines) == 0

    run(test)


def test_a_restart_is_called_off_and_requests_that_waited_for_it_run(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate(EngineRequest("a", [1], LONG))) as running:
            await anext(running)
            restart = asyncio.create_task(engine.restart(60))
            await asyncio.sleep(0)
            waiting = engine.generate(EngineRequest("b", [1], SamplingParams(max_tokens=2)))
            assert not engine.replicas[0].takes_requests
            restart.cancel()
            assert (await collect(waiting))[-1].finish_reason is not None

    run(test)


def test_killed_process_fails_every_request(tiny_model: Path) -> None:
    async def test() -> None:
        async with running(tiny_model, engine_restarts=0) as engine:
            tasks = [asyncio.create_task(collect(engine.generate(EngineRequest(str(i), [1], LONG)))) for i in range(4)]
            await until(lambda: engine.stats is not None and engine.stats.num_running == 4)
            os.kill(engine.replicas[0].pid, signal.SIGKILL)
            for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
                assert isinstance(result, EngineDeadError)
                assert "SIGKILL" in str(result)
            assert engine.state.phase == "dead"
            with pytest.raises(EngineDeadError):
                engine.generate(EngineRequest("a", [1], LONG))
            await engine.abort("a")

    asyncio.run(test())


def test_lost_process_is_started_again_and_waiting_requests_run_there(tiny_model: Path) -> None:
    async def test() -> None:
        async with running(tiny_model, max_num_seqs=1) as engine:
            sampling = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
            expected = await collect(engine.generate(EngineRequest("before", [3, 4], sampling)))
            begun = engine.generate(EngineRequest("begun", [1], LONG))
            await anext(begun)
            waiting = engine.generate(EngineRequest("waiting", [3, 4], sampling))
            dropped = engine.generate(EngineRequest("dropped", [3, 4], LONG))
            first, ready = engine.replicas[0].pid, engine.state
            os.kill(first, signal.SIGKILL)
            state = await engine.state_change(ready)
            assert (state.phase, state.num_restarts) == ("restarting", 1)
            assert "SIGKILL" in state.reason
            assert engine.stats is None, "old numbers are no numbers"
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await collect(begun)
            meanwhile = engine.generate(EngineRequest("meanwhile", [3, 4], sampling))
            await dropped.aclose()
            for updates in (waiting, meanwhile):
                found = await collect(updates)
                assert [i for u in found for i in u.token_ids] == [i for u in expected for i in u.token_ids]
            assert engine.replicas[0].pid != first
            assert engine.state.is_ready
            assert engine.num_requests == 0

    asyncio.run(test())


def test_hanging_process_is_found_and_replaced(tiny_model: Path) -> None:
    async def test() -> None:
        async with running(tiny_model) as engine:
            os.kill(engine.replicas[0].pid, signal.SIGSTOP)
            updates = engine.generate(EngineRequest("a", [1], LONG.clone(max_tokens=3)))
            phases, state = [], engine.state
            engine.replicas[0].supervisor.watchdog_timeout = 2
            while not (state := await engine.state_change(state)).is_ready:
                phases.append(state.phase)
                if state.phase == "restarting":
                    engine.replicas[0].supervisor.watchdog_timeout = 1000  # however slow the machine is
            assert phases[:2] == ["unresponsive", "restarting"]
            assert "no sign of life" in engine.state.reason
            assert (await collect(updates))[-1].finish_reason == "length"

    asyncio.run(test())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_that_hangs_in_its_start_is_found(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TESTED_AS", "a process")  # of its own: a fork may be ready before it is stopped

    async def test() -> None:
        engine = AsyncEngine.launch(config(tiny_model, engine_watchdog_timeout=1))
        os.kill(engine.replicas[0].pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="no sign of life for 1 s while starting"):
            await engine.ready()
        engine.close()

    asyncio.run(test())


def test_request_that_was_there_at_every_loss_ends(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        updates = engine.generate(EngineRequest("a", [1], LONG))
        (replica,) = engine.replicas
        assert replica.ready is not None
        for _ in range(MAX_LOSSES + 1):
            replica.states.enter("restarting", reason="it was killed")
            replica.lost("it was killed")
            replica.states.enter("ready")
            replica.supervisor.send(Abort("a"))
            replica.started(replica.ready)
        with pytest.raises(EngineDeadError, match="it was killed"):
            await collect(updates)
        await collect(engine.generate(EngineRequest("b", [1], LONG.clone(max_tokens=2))))  # brings statistics again

    run(test)


def test_launch_returns_at_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine = AsyncEngine.launch(config(tiny_model))
        phases, states = list[str](), engine.replicas[0].states
        show = states.show

        def seen(state: EngineState) -> None:
            phases.append(state.phase)
            show(state)

        monkeypatch.setattr(states, "show", seen)
        assert engine.state.phase == "starting"
        with pytest.raises(EngineError, match="starting"):
            engine.generate(EngineRequest("a", [1], LONG))
        state = engine.state
        while not state.is_ready:
            state = await engine.state_change(state)
        assert phases == sorted(phases, key=PHASES.index)
        assert {"loading", "profiling"} <= {*phases}
        await engine.ready()
        assert (await collect(engine.generate(EngineRequest("a", [1], LONG.clone(max_tokens=2)))))[-1].finish_reason
        engine.close()

    asyncio.run(test())


def test_close_while_starting(tiny_model: Path) -> None:
    async def test() -> None:
        engine = AsyncEngine.launch(config(tiny_model))
        waiting = asyncio.create_task(engine.ready())
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await waiting
        assert gone(engine.replicas[0].pid)

    asyncio.run(test())


PARENT = """
import asyncio, sys
from engine import AsyncEngine, EngineConfig, EngineRequest, SamplingParams

async def main():
    engine = await AsyncEngine.start(EngineConfig(model=sys.argv[1], device="cpu", num_gpu_blocks_override=1024))
    sampling = SamplingParams(max_tokens=3000, ignore_eos=True, detokenize=False)
    async for update in engine.generate(EngineRequest("a", [1], sampling)):
        print("token", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_process_does_not_outlive_its_parent(tiny_model: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, str(tiny_model)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"token\n"
            (child,) = engines_of(parent.pid)
            parent.send_signal(number)
            parent.wait(60)
        finally:
            parent.kill()
    end = time.monotonic() + 60
    while not gone(child):
        assert time.monotonic() < end, "the engine process is still there"
        time.sleep(0.02)


@pytest.mark.usefixtures("own_processes")
def test_failed_start_is_one_line(tiny_model: Path, make_model: Callable[[Path], Path], tmp_path: Path) -> None:
    broken = make_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = engines_of(os.getpid())
    for model, settings, kind, message in [
        (broken, {}, EngineError, "model.safetensors"),
        (tiny_model, {"num_gpu_blocks_override": 3}, EngineError, "--max-model-len 48"),
        (tmp_path / "nowhere", {}, ModelError, "nowhere"),
        (tiny_model, {"max_model_len": 5000}, ConfigError, "max_model_len must be at most 4096"),
    ]:
        with pytest.raises(kind, match=message) as caught:
            asyncio.run(AsyncEngine.start(config(model, **settings)))
        assert "\n" not in str(caught.value)
        assert engines_of(os.getpid()) == before


@pytest.mark.usefixtures("own_processes")
def test_cancelled_start_leaves_nothing(tiny_model: Path) -> None:
    async def test() -> None:
        before = engines_of(os.getpid())
        start = asyncio.create_task(AsyncEngine.start(config(tiny_model)))
        await until(lambda: engines_of(os.getpid()) != before)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert engines_of(os.getpid()) == before

    asyncio.run(test())


def test_close_twice_and_with_requests_running(tiny_model: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(config(tiny_model))
        task = asyncio.create_task(collect(engine.generate(EngineRequest("a", [1], LONG))))
        await until(lambda: engine.stats is not None and engine.stats.num_running == 1)
        engine.close()
        engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await task
        assert engine.state.phase == "dead"
        assert gone(engine.replicas[0].pid)

    asyncio.run(test())
