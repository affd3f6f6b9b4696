"""Several engine processes behind one `AsyncEngine`."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, AsyncEngine, EngineConfig, SamplingParams
from engine.core.engine_request import EngineRequest
from engine.errors import ConfigError, EngineDeadError, EngineError
from engine.processing.output_collector import RequestUpdate
from engine.replicas.replica import Replica, _own_config, _own_environment, check_gpus
from engine.replicas.state import EngineState, combined

pytestmark = pytest.mark.usefixtures("forked_engines")

SHORT = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
LONG = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0, detokenize=False)


@asynccontextmanager
async def replicas(model: Path, **settings: Any) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=str(model), device="cpu", num_gpu_blocks_override=512, data_parallel_size=2, **settings)
    engine = await AsyncEngine.start(config)
    try:
        yield engine
    finally:
        engine.close()


async def tokens_of(updates: AsyncIterator[RequestUpdate]) -> list[int]:
    return [token_id async for update in updates for token_id in update.token_ids]


def owner_of(engine: AsyncEngine, request_id: str) -> Replica:
    """Who works on the request."""
    (replica,) = [replica for replica in engine.replicas if request_id in replica.streams]
    return replica


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_replica_dies_and_the_other_goes_on(tiny_model: Path) -> None:
    async def test() -> None:
        async with replicas(tiny_model, max_num_seqs=1) as engine:
            first, second = engine.replicas
            assert first.pid != second.pid
            assert (engine.num_blocks, engine.max_num_seqs) == (1024, 2)
            assert "2 replicas" in engine.summary
            expected = await tokens_of(engine.generate(EngineRequest("before", [3, 4], SHORT)))

            running = [engine.generate(EngineRequest(f"running-{i}", [1, i], LONG)) for i in range(2)]
            lost, kept = (owner_of(engine, f"running-{i}") for i in range(2))
            assert lost is not kept
            for updates in running:
                await anext(updates)
            waiting = [engine.generate(EngineRequest(f"waiting-{i}", [3, 4], SHORT)) for i in range(4)]
            assert {owner_of(engine, f"waiting-{i}").index for i in range(4)} == {0, 1}
            os.kill(lost.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await tokens_of(running[0])
            assert engine.state.is_ready, "one replica is"
            assert engine.state.num_restarts == 1
            assert {owner_of(engine, f"waiting-{i}") for i in range(4)} == {kept}
            await running[1].aclose()
            assert [await tokens_of(updates) for updates in waiting] == [expected] * 4

            await until(lambda: lost.takes_requests)
            await engine.restart(drain_seconds=60)
            assert engine.state.num_restarts == 3
            assert all(replica.takes_requests for replica in engine.replicas)
            assert await tokens_of(engine.generate(EngineRequest("after", [3, 4], SHORT))) == expected
            assert engine.num_requests == len(engine.in_flight) == 0

    asyncio.run(test())


def test_a_restart_waits_for_answers_and_new_requests_go_elsewhere(tiny_model: Path) -> None:
    async def test() -> None:
        async with replicas(tiny_model) as engine:
            first, second = engine.replicas
            updates = engine.generate(EngineRequest("a", [1], LONG.clone(max_tokens=300)))
            owner = owner_of(engine, "a")
            restart = asyncio.create_task(owner.restart(60))
            await asyncio.sleep(0)
            assert not owner.takes_requests
            for i in range(3):
                other = engine.generate(EngineRequest(str(i), [1], SHORT))
                assert owner_of(engine, str(i)) is (second if owner is first else first)
                await other.aclose()
            assert len(await tokens_of(updates)) == 300
            await restart
            assert owner.takes_requests

    asyncio.run(test())


def test_no_replica_is_left(tiny_model: Path) -> None:
    async def test() -> None:
        async with replicas(tiny_model, engine_restarts=0) as engine:
            lost = ((signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "no sign of life"))
            for replica, (sent, how) in zip(engine.replicas, lost, strict=True):
                assert engine.state.is_ready
                os.kill(replica.pid, sent)
                if sent == signal.SIGSTOP:
                    replica.supervisor.watchdog_timeout = 0.5
                await until(lambda replica=replica: replica.states.state.phase == "dead")  # type: ignore[misc]
                assert how in replica.states.state.reason
            await until(lambda: engine.state.phase == "dead")
            assert "no sign of life" in engine.state.reason
            with pytest.raises(EngineDeadError):
                engine.generate(EngineRequest("a", [1], SHORT))
            await asyncio.wait_for(engine.restart(0), 60)
            assert engine.state.phase == "dead", "no other process may be started"

    asyncio.run(test())


def test_a_stopped_replica_is_lost_long_before_the_watchdogs_time(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.replicas.supervisor.STOPPED_SECONDS", 1.0)

    async def test() -> None:
        async with replicas(tiny_model) as engine:
            replica = engine.replicas[0]
            assert replica.supervisor.watchdog_timeout == 120
            os.kill(replica.pid, signal.SIGSTOP)
            await until(lambda: engine.state.num_restarts == 1)
            assert replica.states.state.reason == "the engine process was stopped for 1 s"
            assert engine.state.is_ready
            await until(lambda: replica.takes_requests)

    asyncio.run(test())


@pytest.mark.parametrize("is_known", [True, False], ids=["stopped", "silent"])
def test_new_requests_avoid_a_replica_that_stands_still(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Also one that may be in a long step: whether it is stopped is not known, and it has been silent for longer."""
    if not is_known:
        monkeypatch.setattr("engine.replicas.engine_process.EngineProcess.is_stopped", lambda _: False)
        monkeypatch.setattr("engine.replicas.supervisor.SILENT_SECONDS", 3.0)

    async def test() -> None:
        async with replicas(tiny_model, max_num_seqs=1) as engine:
            stopped, other = engine.replicas
            os.kill(stopped.pid, signal.SIGSTOP)
            await until(lambda: stopped.stands_still and not other.stands_still)
            assert stopped.takes_requests, "it is not lost yet"
            running = [engine.generate(EngineRequest(str(i), [1, i], LONG)) for i in range(6)]
            assert {owner_of(engine, str(i)) for i in range(6)} == {other}
            os.kill(stopped.pid, signal.SIGCONT)
            await until(lambda: not stopped.stands_still)
            assert {owner_of(engine, str(i)) for i in range(6)} == {other}, "those stay"
            running.append(engine.generate(EngineRequest("new", [1, 9], LONG)))
            assert owner_of(engine, "new") is stopped
            for updates in running:
                await updates.aclose()

    asyncio.run(test())


def test_a_replica_that_cannot_start_ends_the_start(make_model: Callable[[Path], Path], tmp_path: Path) -> None:
    broken = make_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")

    async def test() -> None:
        with pytest.raises(EngineError, match=r"model\.safetensors"):
            async with replicas(broken):
                pass

    asyncio.run(test())


def test_replicas_are_the_servers(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size must be 1 offline"):
        LLM(str(tiny_model), data_parallel_size=2)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"]), ("GPU-a, GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"])],
)
def test_each_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]) -> None:
    show_gpus(monkeypatch, visible)
    config = EngineConfig(model="m", data_parallel_size=2, tensor_parallel_size=2)
    check_gpus(config)
    assert [_own_environment(config, index)["CUDA_VISIBLE_DEVICES"] for index in range(2)] == expected
    assert _own_environment(EngineConfig(model="m", tensor_parallel_size=2), 0) == {}


def show_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize("visible", [None, "0,1,2"])
def test_no_replica_is_left_without_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    for name in ("0", "1", "2", "3", "nvidia0", "nvidia1", "nvidia2"):  # of four GPUs, three are for this container
        (tmp_path / name).mkdir()
    monkeypatch.setattr(
        "engine.replicas.replica.GPUS", ((tmp_path, "[0-9]"), (tmp_path, "nvidia[0-9]*"), (tmp_path, "none"))
    )
    show_gpus(monkeypatch, visible)
    config = EngineConfig(model="m", data_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_size must be at most 1 on 3 GPUs, each of 2, got 2"):
        check_gpus(config)
    check_gpus(replace(config, device="cpu"))
    show_gpus(monkeypatch, "")
    check_gpus(config)
    assert _own_environment(config, 1)["CUDA_VISIBLE_DEVICES"] == "", "GPUs that are hidden stay so"


def test_each_has_a_prefix_cache_file_of_its_own() -> None:
    config = EngineConfig(model="m", data_parallel_size=2, prefix_cache_file="cache")
    assert [_own_config(config, index).prefix_cache_file for index in range(2)] == ["cache.0", "cache.1"]


@pytest.mark.parametrize(
    ("phases", "has_started", "shown"),
    [
        (["loading", "ready"], False, "loading"),
        (["capturing", "loading"], False, "loading"),
        (["ready", "dead"], False, "dead"),
        (["restarting", "ready"], True, "ready"),
        (["dead", "loading"], True, "loading"),
        (["unresponsive", "restarting"], True, "unresponsive"),
        (["dead", "dead"], True, "dead"),
    ],
)
def test_the_state_of_all_together(phases: list[str], has_started: bool, shown: str) -> None:
    states = [EngineState(phase, num_restarts=i) for i, phase in enumerate(phases)]
    found = combined(states, has_started)
    assert (found.phase, found.num_restarts) == (shown, 1)
