"""Weights replaced in an engine that lives on: the answers of an engine that starts with the new ones."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from engine import LLM, AsyncEngine, EngineConfig, EngineError, EngineRequest, SamplingParams
from engine.models.errors import ModelError
from engine.setup.weight_transfer import send_weights
from tests.engine.setup.test_weight_transfer import free_address

pytestmark = pytest.mark.usefixtures("forked_engines")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = ["weights of the next step " * 3, "another"]
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def other(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    folder = tmp_path_factory.mktemp("other") / "step-2"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def answers(llm: LLM) -> list[Any]:
    results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in results]


@pytest.mark.parametrize(
    "settings",
    [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"enforce_eager": True}, {"tensor_parallel_size": 2}],
    ids=["captured", "int8", "int4", "eager", "two ranks"],
)
@pytest.mark.usefixtures("forked")
def test_answers_are_those_of_a_new_start(tiny_model: Path, other: Path, settings: dict[str, Any]) -> None:
    llm = LLM(model=str(other), **SETTINGS, **settings)
    expected = answers(llm)
    llm.close()
    llm = LLM(model=str(tiny_model), **SETTINGS, **settings)
    before = answers(llm)
    assert before != expected
    llm.update_weights(str(other))
    assert answers(llm) == expected
    llm.update_weights(str(tiny_model))
    assert answers(llm) == before
    llm.close()


def test_folders_that_cannot_be_used(tiny_model: Path, other: Path, tmp_path: Path) -> None:
    """The weights of before stay, and requests go on."""
    llm = LLM(model=str(tiny_model), **SETTINGS)
    before = answers(llm)
    with pytest.raises(EngineError, match="there is no folder"):
        llm.update_weights(str(tmp_path / "missing"))
    bigger = shutil.copytree(other, tmp_path / "bigger")
    config = json.loads((bigger / "config.json").read_text())
    (bigger / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(EngineError, match="holds another model"):
        llm.update_weights(str(bigger))
    torn = shutil.copytree(other, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:-5000])
    with pytest.raises(EngineError, match="cannot be used, those of before stay"):
        llm.update_weights(str(torn))
    assert answers(llm) == before
    llm.sleep()
    with pytest.raises(EngineError, match="asleep"):
        llm.update_weights(str(other))
    llm.close()


def test_a_served_model_keeps_new_weights_when_its_process_is_lost(tiny_model: Path, other: Path) -> None:
    config = EngineConfig(model=str(tiny_model), **SETTINGS)
    prompt = list(range(40))

    async def ask(engine: AsyncEngine, name: str) -> list[int]:
        request = EngineRequest(name, prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        return [token async for update in engine.generate(request) for token in update.token_ids]

    async def test() -> None:
        engine = await AsyncEngine.start(config)
        try:
            before = await ask(engine, "a")
            running = asyncio.create_task(ask(engine, "b"))
            await asyncio.sleep(0)
            await engine.update_weights(str(other))
            assert await running == before, "it was waited for"
            assert (engine.weights_path, engine.weights_version) == (str(other), 1)
            after = await ask(engine, "c")
            assert after != before
            with pytest.raises(EngineError, match="there is no folder"):
                await engine.update_weights("/nowhere")
            assert await ask(engine, "d") == after
            num_restarts = engine.state.num_restarts
            os.kill(engine.replicas[0].pid, signal.SIGKILL)
            while engine.state.num_restarts == num_restarts or not engine.state.is_ready:
                await asyncio.sleep(0.05)
            assert await ask(engine, "e") == after
        finally:
            engine.close()

    asyncio.run(test())


def some(folder: Path, part: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names have this part."""
    return {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if part in name}


@pytest.mark.parametrize(
    "settings", [{}, {"quantization": "int8"}, {"tensor_parallel_size": 2}], ids=["plain", "int8", "two ranks"]
)
@pytest.mark.usefixtures("forked")
def test_named_tensors_replace_those_of_the_model(
    tiny_model: Path, other: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """In memory or in a folder: answers are those of an engine that starts with these weights."""
    mlp, attention = some(other, "mlp"), some(other, "self_attn")
    folders = [tmp_path / name for name in ("mlp", "attention")]
    for folder, tensors in zip(folders, (mlp, attention), strict=True):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    fresh = LLM(model=str(tiny_model), weight_overlays=tuple(map(str, folders)), **SETTINGS, **settings)
    expected = answers(fresh)
    fresh.close()
    llm = LLM(model=str(tiny_model), **SETTINGS, **settings)
    before = answers(llm)
    llm.update_weights(mlp)
    assert answers(llm) != before
    llm.update_weights(str(folders[1]))
    assert answers(llm) == expected != before
    assert llm._engine.weights.overlays[1:] == (str(folders[1]),)
    llm.update_weights({name: tensor + 1 for name, tensor in mlp.items()})
    (written,) = llm._tensors.folders
    llm.update_weights(mlp)
    assert not Path(written.name).exists(), "all of its tensors were replaced"
    assert len(llm._engine.weights.overlays) == 2
    assert answers(llm) == expected
    llm.update_weights(str(tiny_model))
    assert answers(llm) == before
    assert llm._tensors.folders == []
    llm.close()


def test_tensors_that_another_process_sends(tiny_model: Path, other: Path) -> None:
    fresh = LLM(model=str(other), **SETTINGS)
    expected = answers(fresh)
    fresh.close()
    llm = LLM(model=str(tiny_model), **SETTINGS)
    address = free_address()
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send_weights, some(other, ""), address)
        llm.update_weights(address)
        sending.result()
    assert answers(llm) == expected
    with pytest.raises(EngineError, match="no weights came from gloo://:5: an address is"):
        llm.update_weights("gloo://:5")
    assert answers(llm) == expected
    llm.close()


def test_a_server_receives_tensors(tiny_model: Path, other: Path) -> None:
    """Requests go on until all have come. What it has received is there as long as it is used."""
    fresh = LLM(model=str(other), **SETTINGS)
    (answer,) = fresh.generate([{"prompt_token_ids": list(range(40))}], GREEDY, use_tqdm=False)
    fresh.close()
    address = free_address()

    async def test() -> None:
        engine = await AsyncEngine.start(EngineConfig(model=str(tiny_model), **SETTINGS))
        try:
            with pytest.raises(EngineError, match="no weights came from gloo://:5: an address is"):
                await engine.update_weights("gloo://:5")
            update = asyncio.create_task(engine.update_weights(address))
            await asyncio.to_thread(send_weights, some(other, ""), address)
            await update
            assert (engine.weights_path, engine.weights_version) == (address, 1)
            request = EngineRequest("a", list(range(40)), GREEDY)
            found = [token async for new in engine.generate(request) for token in new.token_ids]
            assert found == list(answer.outputs[0].token_ids)
            (folder,) = engine._availability._received.folders
            await engine.update_weights(str(other))
            assert not Path(folder.name).exists()
        finally:
            engine.close()

    asyncio.run(test())


def test_tensors_that_cannot_be_used(tiny_model: Path, other: Path, tmp_path: Path) -> None:
    llm = LLM(model=str(tiny_model), **SETTINGS)
    before = answers(llm)
    name, tensor = next(iter(some(other, "mlp.down_proj").items()))
    for wrong, message in (
        ({"x": tensor}, "the model has no tensor 'x'"),
        ({name: tensor[1:]}, "must have the shape"),
    ):
        with pytest.raises(EngineError, match=message):
            llm.update_weights(wrong)
        assert answers(llm) == before
    assert llm._tensors.folders == []
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(EngineError, match=r"holds no \.safetensors weights"):
        llm.update_weights(str(empty))
    llm.close()
    (empty / "model.safetensors").write_bytes(save({"x": tensor}))
    with pytest.raises(ModelError, match="the model has no tensor"):
        LLM(model=str(tiny_model), weight_overlays=(str(empty),), **SETTINGS)


def test_a_version_is_part_of_names(tiny_model: Path, other: Path) -> None:
    llm = LLM(model=str(tiny_model), **SETTINGS)
    found = []
    for update in (None, some(other, "mlp"), str(tiny_model)):
        if update is not None:
            llm.update_weights(update)
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        found.append({name for _, name in llm._engine.scheduler.blocks.pools.pools[0].published()})
    assert all(found)
    assert not found[0] & found[1]
    assert not (found[0] | found[1]) & found[2]
    llm.close()
