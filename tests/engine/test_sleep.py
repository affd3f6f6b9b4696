"""An engine that sleeps has given its memory back, and answers the same after it has woken up."""

import asyncio
import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, AsyncEngine, EngineAsleepError, EngineConfig, EngineError, EngineRequest, SamplingParams
from engine.worker import sleep
from engine.worker.model_runner import ModelRunner
from engine.worker.sleep import HostCopy, storages_of

pytestmark = pytest.mark.usefixtures("forked_engines")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = ["the sleeping engine wakes up and says " * 3, "another", "a third"]


def load(model: Path, **settings: Any) -> LLM:
    return LLM(model=str(model), device="cpu", max_num_seqs=8, **{"num_gpu_blocks_override": 256, **settings})


def answers(llm: LLM) -> list[Any]:
    results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in results]


def weights_of(llm: LLM) -> list[weakref.ref[torch.Tensor]]:
    runner = llm._engine.runner
    assert isinstance(runner, ModelRunner)
    return [weakref.ref(tensor) for tensor in (*runner.model.parameters(), *runner.model.buffers())]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_texts_are_the_same_after_each_level(tiny_model: Path, quantization: str | None) -> None:
    llm = load(tiny_model, quantization=quantization)
    before = answers(llm)
    for level in (1, 2, 1):
        kv_cache = [weakref.ref(each) for each in llm._engine.runner.forward.kv_cache]  # type: ignore[attr-defined]
        weights = weights_of(llm)
        assert not llm.is_sleeping()
        llm.sleep(level)
        llm.sleep(level)
        assert llm.is_sleeping()
        assert not any(each() is not None for each in kv_cache), "the KV cache is held"
        assert weights
        assert all((each() is None) == (level == 2) for each in weights)
        with pytest.raises(ValueError, match="asleep"):
            answers(llm)
        llm.wake_up()
        llm.wake_up()
        assert answers(llm) == before
        assert llm._engine.stats().num_blocks == 256
    llm.close()


def test_the_prefix_cache_is_empty_after_sleep_and_a_file_of_it_is_saved(tiny_model: Path, tmp_path: Path) -> None:
    for file, num_cached in ((None, 0), (str(tmp_path / "cache"), 64)):
        llm = load(tiny_model, prefix_cache_file=file)
        before = answers(llm)
        llm.sleep()
        llm.wake_up()
        stats = llm._engine.stats()
        after = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0]
        assert (after.outputs[0].token_ids, after.outputs[0].logprobs) == before[0]
        assert (llm._engine.stats().prefix_hits - stats.prefix_hits >= 16) == (num_cached > 0)
        llm.close()


@pytest.mark.usefixtures("forked")
def test_ranks_sleep_at_level_2_only(tiny_model: Path) -> None:
    llm = load(tiny_model, tensor_parallel_size=2)
    before = answers(llm)
    with pytest.raises(EngineError, match="level 1 of sleep needs a model on one device: use level 2"):
        llm.sleep()
    assert not llm.is_sleeping()
    llm.sleep(2)
    llm.wake_up()
    assert answers(llm) == before
    llm.close()


def test_an_engine_with_requests_does_not_sleep(tiny_model: Path) -> None:
    llm = load(tiny_model)
    engine = llm._engine
    engine.add_request(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True)))
    engine.step()
    with pytest.raises(EngineError, match="requests are running"):
        engine.sleep()
    with pytest.raises(EngineError, match="must be 1 or 2, got 3"):
        engine.sleep(3)
    engine.abort("a")
    engine.sleep()  # although a step of it is in flight
    engine.wake_up()
    assert answers(llm)
    llm.sleep(2)
    llm.close()


def test_weights_come_back_from_host_memory_whatever_was_in_their_place(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, as on a GPU: all memory that the runner refers to is given back meanwhile."""
    monkeypatch.setattr(sleep, "CHUNK_BYTES", 1000)
    llm = load(tiny_model, enforce_eager=True)
    before = answers(llm)
    runner = llm._engine.runner
    assert isinstance(runner, ModelRunner)
    storages = storages_of(runner.model, torch.device("cpu"))
    addresses = {storage.data_ptr() for storage in storages}
    assert {tensor.untyped_storage().data_ptr() for tensor in runner.model.parameters()} <= addresses
    sizes = [storage.nbytes() for storage in storages]
    copy = HostCopy(storages, pinned=False)
    assert copy.num_bytes == sum(sizes)
    assert {storage.nbytes() for storage in storages} == {0}
    poison = [torch.full((size // 4 + 1,), torch.nan) for size in sizes]
    copy.restore()
    del poison
    gc.collect()
    assert [storage.nbytes() for storage in storages] == sizes
    assert answers(llm) == before
    llm.close()


def test_without_memory_the_copy_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(10.0), torch.arange(7)]
    wanted = [tensor.clone() for tensor in tensors]
    copy = HostCopy([tensor.untyped_storage() for tensor in tensors], pinned=False)
    pieces = HostCopy._pieces

    def fail(self: HostCopy) -> Any:
        yield next(pieces(self))
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "_pieces", fail)
        with pytest.raises(torch.OutOfMemoryError):
            copy.restore()
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
    copy.restore()
    assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))


async def text_of(engine: AsyncEngine, name: str) -> list[int]:
    updates = engine.generate(EngineRequest(name, list(range(3, 40)), GREEDY.clone(logprobs=None)))
    return [token async for update in updates for token in update.token_ids]


@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.slow), {"data_parallel_size": 2}])
def test_engine_processes_sleep_and_wake_up(tiny_model: Path, settings: dict[str, Any]) -> None:
    async def test() -> None:
        config = EngineConfig(model=str(tiny_model), device="cpu", num_gpu_blocks_override=128, **settings)
        engine = await AsyncEngine.start(config)
        try:
            before = await text_of(engine, "a")
            pids = [replica.pid for replica in engine.replicas]
            for level in (1, 2):
                await engine.sleep(level)
                await engine.sleep(level)
                assert (engine.is_sleeping, engine.sleep_level, engine.state.phase) == (True, level, "asleep")
                with pytest.raises(EngineAsleepError, match="wake_up"):
                    await text_of(engine, "b")
                await engine.wake_up()
                assert (engine.is_sleeping, engine.sleep_level, engine.state.phase) == (False, 0, "ready")
                assert await text_of(engine, "c") == before
            assert [replica.pid for replica in engine.replicas] == pids
            assert engine.state.num_restarts == 0
            long = engine.generate(EngineRequest("d", [1, 2], SamplingParams(max_tokens=300, ignore_eos=True)))
            await anext(long)
            waiting = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0)
            with pytest.raises(EngineAsleepError):
                await text_of(engine, "e")
            assert [each.finish_reason async for each in long][-1] == "length"
            await waiting
            assert engine.sleep_level == 1
            await engine.wake_up()
            long = engine.generate(EngineRequest("f", [1, 2], SamplingParams(max_tokens=1500, ignore_eos=True)))
            await anext(long)
            await engine.sleep(abort=True)
            assert [each.finish_reason async for each in long][-1] == "abort"
            os.kill(pids[0], signal.SIGKILL)
            while engine.state.num_restarts == 0 or not engine.state.is_ready:
                await engine.state_change(engine.state)
            await engine.wake_up()
            assert await text_of(engine, "g") == before
        finally:
            engine.close()

    asyncio.run(test())


def test_engine_processes_that_cannot_sleep_stay_awake(tiny_model: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(
            EngineConfig(model=str(tiny_model), device="cpu", num_gpu_blocks_override=128, tensor_parallel_size=2)
        )
        try:
            with pytest.raises(EngineError, match="use level 2"):
                await engine.sleep()
            assert not engine.is_sleeping
            assert await text_of(engine, "a")
        finally:
            engine.close()

    asyncio.run(test())
