"""The prefix cache in a file for each rank, over gloo: found where all ranks have it.

By itself: a process holds one group of ranks at a time.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from tests.engine.stepping.test_prefix_cache_store import PROMPT, ask
from tests.engine.test_ranks import _child_of

TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 500, "num_gpu_blocks_override": 64}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prefixes.kv"


@pytest.fixture
def start(tiny_model: Path, path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start_one(**settings: Any) -> Engine:
        config = EngineConfig(
            model=str(tiny_model), skip_tokenizer_init=True, debug_checks=True, prefix_cache_file=str(path),
            **SETTINGS, **settings,
        )  # fmt: skip
        engines.append(Engine(config))
        return engines[-1]

    yield start_one
    for engine in engines:
        if engine._store is not None:
            engine.close()


@pytest.mark.usefixtures("forked")
def test_two_ranks_find_what_both_have(start: Callable[..., Engine], path: Path) -> None:
    alone = start()
    expected, cached = ask(alone, PROMPT)
    assert cached == 0
    alone.close()
    first = start(**TENSOR)
    assert ask(first, PROMPT) == (expected, 0), "nothing of a rank that holds the whole model"
    first.close()
    again = start(**TENSOR)
    assert ask(again, PROMPT) == (expected, 192)
    again.close()
    own = [path.with_name(f"{path.name}.rank{rank}") for rank in range(2)]
    data = bytearray(own[1].read_bytes())
    for at in range(4500, len(data), 4096):  # in each slot
        data[at] ^= 1
    own[1].write_bytes(data)
    damaged = start(**TENSOR)
    assert ask(damaged, PROMPT) == (expected, 0)
    damaged.close()
    os.replace(own[0], path)
    assert ask(start(), PROMPT) == (expected, 0), "nothing of a rank that holds a part"


@pytest.mark.usefixtures("forked")
def test_stages_find_what_a_stop_in_the_middle_left(start: Callable[..., Engine]) -> None:
    """The last stage has not run its part of the newest steps when the engine is closed."""
    expected, _ = ask(start(), PROMPT)
    first = start(pipeline_parallel_size=2)
    first.add_request(EngineRequest("r", PROMPT, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
    first.step()
    assert first.has_work()
    first.close()
    assert ask(start(pipeline_parallel_size=2), PROMPT) == (expected, 192)


@pytest.mark.slow
def test_after_the_loss_of_a_rank_the_files_are_found(tiny_model: Path, path: Path) -> None:
    config = EngineConfig(model=str(tiny_model), prefix_cache_file=str(path), **SETTINGS, **TENSOR)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    async def ask(engine: AsyncEngine, request_id: str) -> tuple[list[int], int]:
        updates = [update async for update in engine.generate(EngineRequest(request_id, PROMPT, sampling))]
        return [token for update in updates for token in update.token_ids], updates[-1].num_cached_tokens

    async def test() -> None:
        engine = await AsyncEngine.start(config)
        try:
            answer, cached = await ask(engine, "first")
            assert cached == 0
            await asyncio.sleep(4)  # it is idle, and saves
            ready = engine.state
            os.kill(_child_of(engine.replicas[0].pid), signal.SIGKILL)
            while engine.state.num_restarts == ready.num_restarts or not engine.state.is_ready:
                await engine.state_change(engine.state)
            assert await ask(engine, "again") == (answer, 192)
        finally:
            engine.close()

    asyncio.run(asyncio.wait_for(test(), 200))
