"""Calls of the engine's methods from another process: each gets its reply, or an error if the process is lost."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine import AsyncEngine, EngineConfig, EngineDeadError, EngineError, EngineRequest, SamplingParams
from engine.replicas.calls import Calls
from engine.replicas.messages import Call, Reply

PROMPT = list(range(3, 80))
LONG = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0, detokenize=False)


def test_each_call_gets_its_own_reply() -> None:
    sent: list[Call] = []

    async def test() -> None:
        calls = Calls(lambda call: sent.append(call) or True)  # type: ignore[func-returns-value]
        tasks = [asyncio.create_task(calls.call("add", number=number)) for number in range(3)]
        await asyncio.sleep(0)
        assert [(call.method, call.arguments) for call in sent] == [("add", {"number": n}) for n in range(3)]
        for call in reversed(sent):
            calls.reply(Reply(call.id, call.arguments["number"] * 10))
        assert await asyncio.gather(*tasks) == [0, 10, 20]

    asyncio.run(test())


def test_errors_and_calls_that_nothing_waits_for_any_more() -> None:
    sent: list[Call] = []

    async def test() -> None:
        calls = Calls(lambda call: sent.append(call) or True)  # type: ignore[func-returns-value]
        failing, cancelled, lost = (asyncio.create_task(calls.call("f")) for _ in range(3))
        await asyncio.sleep(0)
        calls.reply(Reply(sent[0].id, error="KeyError: 'x'"))
        cancelled.cancel()
        await asyncio.sleep(0)
        calls.reply(Reply(sent[1].id, 5))
        calls.reply(Reply(99, 5))
        calls.fail("killed")
        calls.reply(Reply(sent[2].id, 5))
        with pytest.raises(EngineError, match="KeyError: 'x'"):
            await failing
        with pytest.raises(EngineDeadError, match="killed"):
            await lost
        assert cancelled.cancelled()

    asyncio.run(test())


def test_a_call_without_a_process_fails_at_once() -> None:
    with pytest.raises(EngineDeadError, match="no engine process"):
        asyncio.run(Calls(lambda call: False).call("f"))


def config(model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", num_gpu_blocks_override=1024, **settings)


async def num_cached(engine: AsyncEngine, name: str) -> int:
    sampling = SamplingParams(max_tokens=2, temperature=0)
    return [each async for each in engine.generate(EngineRequest(name, PROMPT, sampling))][-1].num_cached_tokens


def test_the_prefix_cache_is_emptied_and_not_while_a_request_runs(tiny_model: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(config(tiny_model))
        try:
            assert [await num_cached(engine, name) for name in "ab"] == [0, 64]
            assert await engine.reset_prefix_cache()
            assert [await num_cached(engine, name) for name in "cd"] == [0, 64]
            running = engine.generate(EngineRequest("e", [1, 2], LONG))
            await anext(running)
            assert not await engine.reset_prefix_cache()
            await running.aclose()
        finally:
            engine.close()

    asyncio.run(asyncio.wait_for(test(), 200))


def test_a_dying_process_answers_with_an_error_and_the_next_one_replies(tiny_model: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(config(tiny_model, engine_restarts=1))
        try:
            os.kill(engine.replicas[0].pid, signal.SIGSTOP)
            call = asyncio.create_task(engine.reset_prefix_cache())
            await asyncio.sleep(0)
            os.kill(engine.replicas[0].pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="lost"):
                await call
            with pytest.raises(EngineDeadError, match="no engine process"):
                await engine.reset_prefix_cache()
            while not engine.state.is_ready:
                await engine.state_change(engine.state)
            assert await engine.reset_prefix_cache()
        finally:
            engine.close()

    asyncio.run(asyncio.wait_for(test(), 200))
