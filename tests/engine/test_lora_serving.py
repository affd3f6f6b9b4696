"""Adapters of engines in processes of their own: loaded on request and by requests, dropped, lost with a process."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, Adapter, AsyncEngine, EngineConfig, EngineRequest, LoRARequest, ModelError, SamplingParams
from engine.models.lora import WEIGHTS
from engine.replicas import engine_process
from tests.oracles.random_adapters import write_random_adapter

pytestmark = pytest.mark.usefixtures("forked_engines")

NUM_ADAPTERS = 6
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 256, "block_size": 8, "num_gpu_blocks_override": 120,
    "enable_lora": True, "max_lora_rank": 8, "debug_checks": True,
}  # fmt: skip
PROMPT = [7 * i % 250 + 1 for i in range(20)]


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_random_adapter(root / f"a{i}", tiny_model, 2 + i, i) for i in range(NUM_ADAPTERS)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path, adapters: list[Path]) -> list[list[int]]:
    """The answer of the base, then of each adapter, one after the other."""
    llm = LLM(str(tiny_model), **SETTINGS)
    requests = [None, *(LoRARequest(path.name, 1, str(path)) for path in adapters)]
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    answers = []
    for request in requests:
        [result] = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False, lora_request=request)
        answers.append(result.outputs[0].token_ids)
    llm.close()
    assert len({tuple(each) for each in answers}) > NUM_ADAPTERS // 2
    return answers


def run(model: Path, work: Callable[[AsyncEngine], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(EngineConfig(model=str(model), **SETTINGS | settings))
        try:
            await work(engine)
        finally:
            engine.close()

    asyncio.run(main())


async def complete(engine: AsyncEngine, name: str, adapter: Adapter | None, max_tokens: int) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    tokens: list[int] = []
    async for update in engine.generate(EngineRequest(name, PROMPT, sampling, adapter=adapter)):
        assert not update.error, update.error
        tokens += update.token_ids
    return tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"max_loras": 2, "max_cpu_loras": 3},
        pytest.param({"max_loras": 1, "data_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 2, "max_cpu_loras": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_are_loaded_evicted_and_loaded_again_under_load(
    tiny_model: Path, adapters: list[Path], expected: list[list[int]], settings: dict[str, Any]
) -> None:
    draw = random.Random(0)

    async def work(engine: AsyncEngine) -> None:
        known = [None, *[await engine.load_adapter(path.name, str(path)) for path in adapters]]

        async def client(number: int) -> None:
            for index in range(6):
                which, length = draw.randrange(len(known)), draw.randint(1, 30)
                if which and draw.random() < 0.2:
                    known[which] = await engine.load_adapter(f"a{which - 1}", str(adapters[which - 1]))
                work = asyncio.create_task(complete(engine, f"{number} {index}", known[which], length))
                if draw.random() < 0.15:
                    await asyncio.sleep(0.01)
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                else:
                    assert await work == expected[which][:length], which

        await asyncio.gather(*map(client, range(12)))

    run(tiny_model, work, **settings)


def test_a_new_process_reads_the_adapters_that_its_requests_need(
    tiny_model: Path, adapters: list[Path], expected: list[list[int]]
) -> None:
    async def work(engine: AsyncEngine) -> None:
        adapter = await engine.load_adapter("a", str(adapters[0]))
        assert await complete(engine, "1", adapter, 30) == expected[1]
        os.kill(engine.replicas[0].pid, signal.SIGKILL)
        state = engine.state
        while state.is_ready:
            state = await engine.state_change(state)
        assert await complete(engine, "2", adapter, 30) == expected[1]

    run(tiny_model, work)
    assert engine_process.ENGINE_MODULE


def test_adapters_that_are_no_use_are_refused_and_the_engine_goes_on(
    tiny_model: Path, adapters: list[Path], expected: list[list[int]], tmp_path: Path
) -> None:
    other = write_random_adapter(tmp_path / "large", tiny_model, 9, 0)

    async def work(engine: AsyncEngine) -> None:
        with pytest.raises(ModelError, match="rank 9, above max_lora_rank=8"):
            await engine.load_adapter("large", str(other))
        with pytest.raises(ModelError, match="is no folder"):
            await engine.load_adapter("nothing", str(tmp_path / "nothing"))
        known = await engine.load_adapter("a", str(adapters[0]))
        unread = await engine.load_adapter("b", str(adapters[1]))
        stale = Adapter("b", unread.path, "0" * 64)  # its files have been replaced
        sampling = SamplingParams(temperature=0, max_tokens=4)
        updates = [u async for u in engine.generate(EngineRequest("1", PROMPT, sampling, adapter=stale))]
        assert updates[-1].is_refused
        assert "its files have changed since the adapter was loaded" in updates[-1].error
        assert await complete(engine, "2", known, 30) == expected[1]

    run(tiny_model, work)


def _harmed(adapter: Path, root: Path) -> dict[str, tuple[Path, str]]:
    """Return copies of an adapter that are no use: kind → folder and reason."""
    stored = load_file(adapter / WEIGHTS)
    name = next(name for name in stored if name.endswith("lora_A.weight"))
    found: dict[str, tuple[Path, str]] = {}

    def copy(kind: str, reason: str, tensors: dict[str, torch.Tensor]) -> Path:
        folder = root / kind
        shutil.copytree(adapter, folder)
        save_file(tensors, folder / WEIGHTS)
        found[kind] = folder, reason
        return folder / WEIGHTS

    copy("NaN", "holds NaN or infinity", stored | {name: torch.full_like(stored[name], torch.nan)})
    copy("other base", "the adapter is for another base model", stored | {name: torch.ones(2, 640)})
    copy("half", "lacks lora_A", {each: tensor for each, tensor in stored.items() if each != name})
    os.truncate(copy("10 GB", "corrupt or truncated", stored), 10 << 30)  # a hole: takes no room
    outside = copy("path outside", "outside the model's folder", stored)
    outside.rename(root / "elsewhere")
    outside.symlink_to(root / "elsewhere")
    return found


def test_adapters_that_mean_harm_are_refused_under_load(
    tiny_model: Path, adapters: list[Path], expected: list[list[int]], tmp_path: Path
) -> None:
    harmed = _harmed(adapters[0], tmp_path)

    async def work(engine: AsyncEngine) -> None:
        known = [None, *[await engine.load_adapter(path.name, str(path)) for path in adapters[:2]]]

        async def streams(round: int) -> None:
            names = [f"{round} {index}" for index in range(3)]
            answers = await asyncio.gather(
                *(complete(engine, name, adapter, 30) for name, adapter in zip(names, known, strict=True))
            )
            assert answers == expected[:3]

        for number, (kind, (folder, reason)) in enumerate(harmed.items()):
            running = asyncio.create_task(streams(number))
            await asyncio.sleep(0)
            with pytest.raises(ModelError, match=reason) as error:
                await engine.load_adapter(kind, str(folder))
            assert "\n" not in str(error.value)
            await running

    run(tiny_model, work, max_loras=2)


def test_adapters_need_the_setting(tiny_model: Path, adapters: list[Path]) -> None:
    async def work(engine: AsyncEngine) -> None:
        assert engine.max_loras == 0
        adapter = Adapter("a", str(adapters[0]), "0" * 64)
        sampling = SamplingParams(temperature=0, max_tokens=4)
        updates = [u async for u in engine.generate(EngineRequest("1", PROMPT, sampling, adapter=adapter))]
        assert updates[-1].is_refused
        assert "enable_lora" in updates[-1].error

    run(tiny_model, work, enable_lora=False)
