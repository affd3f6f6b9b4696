"""The prefix cache in a file: an engine finds what the one before it computed, and says the same; only what is its
own.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import signal
from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.stepping import prefix_cache_store
from engine.stepping.prefix_cache_store import PrefixCacheStore

PROMPT = [(i * 37) % 250 for i in range(200)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prefixes.kv"


@pytest.fixture
def start(tiny_model: Path, path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine with the file; those that still run are lost at the end, as in a crash."""
    engines: list[Engine] = []

    def start_one(**settings: Any) -> Engine:
        settings = {"model": str(tiny_model), "prefix_cache_file": str(path), "max_model_len": 500, **settings}
        settings.setdefault("num_gpu_blocks_override", 64)
        engines.append(Engine(EngineConfig(device="cpu", skip_tokenizer_init=True, debug_checks=True, **settings)))
        return engines[-1]

    yield start_one
    for engine in engines:
        crash(engine)


def store_of(engine: Engine) -> PrefixCacheStore:
    """The store of an engine without recurrent layers."""
    assert isinstance(engine._store, PrefixCacheStore)
    return engine._store


def crash(engine: Engine) -> None:
    """The engine is gone without a word, and its lock with it."""
    if engine._store is not None:
        store_of(engine)._file._io.shutdown()
        store_of(engine)._file._file.close()
        engine._store = None


def ask(engine: Engine, prompt: list[int], max_tokens: int = 6, salt: str = "") -> tuple[list[int], int]:
    """The greedy answer, and how many tokens of the prompt were cached."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(EngineRequest("r", prompt, sampling, cache_salt=salt))
    tokens, cached = [], 0
    while engine.has_work():
        for output in engine.step():
            tokens += output.new_token_ids
            cached = getattr(output, "num_cached_tokens", cached) or cached
    return tokens, cached


def slot_bytes(engine: Engine) -> int:
    """Distance of blocks in the file, bytes."""
    return store_of(engine)._file._file.slot_bytes


def wait(engine: Engine, seconds: float) -> bool:
    """The engine has nothing to do for so long. Whether there is more to do then."""
    store = store_of(engine)
    now = store._clock() + seconds
    store._clock = lambda: now
    more = engine.idle()
    store._file._io.submit(int).result()  # what was handed to the thread is written
    return more


def rest(engine: Engine) -> None:
    """The engine has nothing to do for a long time."""
    wait(engine, 10)
    while wait(engine, 10):
        pass


def test_a_restart_finds_the_prefix_and_says_the_same(start: Callable[..., Engine]) -> None:
    first = start()
    answer = ask(first, PROMPT)
    assert answer[1] == 0
    first.close()
    second = start()
    assert ask(second, PROMPT) == (answer[0], 192)
    assert ask(second, PROMPT, salt="another") == (answer[0], 0)
    second.close()
    third = start()
    assert ask(third, PROMPT, salt="another") == (answer[0], 192)
    assert ask(third, PROMPT, salt="a third") == (answer[0], 0)


def test_neither_salts_nor_tokens_are_in_the_file(start: Callable[..., Engine], path: Path) -> None:
    engine = start()
    ask(engine, PROMPT, salt="pepper")
    engine.close()
    content = path.read_bytes()
    assert b"pepper" not in content
    assert sha256(b"pepper").digest() not in content
    for dtype in ("q", "i", "h", "B"):
        assert array(dtype, PROMPT[16:20]).tobytes() not in content


def test_layers_with_windows(tmp_path: Path, start: Callable[..., Engine]) -> None:
    """A prefix is found only with the end of what each group of layers keeps of it."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    layers = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 24, "layer_types": kinds}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 300, "rms_norm_eps": 1e-6}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **shape, **layers, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"model": str(tmp_path), "load_format": "dummy", "block_size": 8, "num_gpu_blocks_override": 300}
    first = start(**settings)
    assert len(first.runner.cache_groups) > 1
    answer, _ = ask(first, PROMPT, 40)
    first.close()
    assert ask(start(**settings), PROMPT, 40) == (answer, 192)


def test_a_crash_leaves_what_was_saved_on_idle(start: Callable[..., Engine]) -> None:
    engine = start()
    without_tier(engine)
    answer, _ = ask(engine, PROMPT)
    rest(engine)
    ask(engine, PROMPT[::-1])
    crash(engine)
    again = start()
    assert ask(again, PROMPT) == (answer, 192)
    assert ask(again, PROMPT[::-1])[1] == 0


def without_tier(engine: Engine) -> None:
    """The store does what it does with several ranks."""
    assert engine._store is not None
    store_of(engine)._tier = engine.scheduler.blocks.pools.pools[0].on_publish = None


def test_blocks_are_saved_while_requests_come(start: Callable[..., Engine]) -> None:
    engine = start()
    for i in range(3):
        ask(engine, [i, *PROMPT])
        assert engine._store is not None
        store_of(engine)._file._io.submit(int).result()
    assert engine.stats().num_file_blocks >= 24
    crash(engine)
    assert ask(start(), [1, *PROMPT])[1] == 192


def test_nothing_is_saved_while_requests_come_without_a_tier(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache_store, "BUFFER_BYTES", 1)  # a block at a time
    engine = start()
    without_tier(engine)
    assert engine._store is not None
    assert not engine.idle()
    for i in range(5):
        ask(engine, [i, *PROMPT])
        assert not wait(engine, 0)
        assert not wait(engine, prefix_cache_store.IDLE_SECONDS / 2)
    assert wait(engine, prefix_cache_store.IDLE_SECONDS), "there is more"
    ask(engine, [9, *PROMPT])
    assert not wait(engine, 0), "a request came: later"
    assert len(store_of(engine)._file.entries()) == 1
    rest(engine)
    published = engine.scheduler.blocks.pools.pools[0].published()
    assert {entry.name for entry in store_of(engine)._file.entries()} == {name for _, name in published}


def test_blocks_that_are_evicted_before_they_are_saved_are_left_out(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache_store, "BUFFER_BYTES", 1)
    engine = start()
    without_tier(engine)
    assert engine._store is not None
    ask(engine, PROMPT)
    wait(engine, 0)
    assert wait(engine, 10)
    pool = engine.scheduler.blocks.pools.pools[0]
    pool.release(pool.take(64))
    rest(engine)
    assert len(store_of(engine)._file.entries()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"kv_cache_dtype": "fp8"},
        {"max_model_len": 1000},
        {"hf_overrides": {"rope_theta": 5000}},
        {"model": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_another_model_or_setting_wrote_is_ignored(
    start: Callable[..., Engine],
    tiny_model: Path,
    tmp_path: Path,
    change: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    engine = start()
    ask(engine, PROMPT)
    engine.close()
    if "model" in change:  # of the same shapes, with other weights
        shutil.copytree(tiny_model, tmp_path / "other")
        weights = tmp_path / "other" / "model.safetensors"
        os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
        change = {"model": str(tmp_path / "other")}
    caplog.clear()
    assert ask(start(**change), PROMPT)[1] == 0
    assert len([record for record in caplog.records if "begins anew" in record.message]) == 1


def test_a_damaged_block_is_computed_again(start: Callable[..., Engine], path: Path) -> None:
    engine = start()
    answer, _ = ask(engine, PROMPT)
    middle = 4096 + 5 * slot_bytes(engine) + 500
    engine.close()
    data = bytearray(path.read_bytes())
    data[middle] ^= 1
    path.write_bytes(data)
    again = start()
    tokens, cached = ask(again, PROMPT)
    assert tokens == answer
    assert cached < 192
    again.close()
    assert ask(start(), PROMPT) == (answer, 192)


def test_a_small_file_keeps_the_head_of_the_newest_prefix(start: Callable[..., Engine]) -> None:
    engine = start()
    slot = slot_bytes(engine)
    engine.close()
    for _ in range(2):
        small = start(prefix_cache_file_size=4096 + 5 * slot)
        ask(small, PROMPT[::-1])
        answer, _ = ask(small, PROMPT)
        small.close()
    assert ask(start(prefix_cache_file_size=4096 + 5 * slot), PROMPT) == (answer, 80)


def test_the_start_takes_no_longer_than_allowed(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    answer, _ = ask(engine, PROMPT)
    engine.close()
    with monkeypatch.context() as hurried:
        hurried.setattr(prefix_cache_store, "LOAD_SECONDS", -1.0)
        start().close()
    assert ask(start(), PROMPT) == (answer, 192), "what was not loaded stays in the file"


def test_a_full_disk_is_one_warning(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = start()
    monkeypatch.setattr(os, "pwritev", full)
    for i in range(3):
        assert len(ask(engine, [i, *PROMPT])[0]) == 6
        rest(engine)
    engine.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is not saved for now: No space left" in caplog.text


@pytest.mark.parametrize("kind", ["a folder", "in use", "something else"])
def test_a_file_that_cannot_be_used_is_one_warning(
    start: Callable[..., Engine], path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "a folder":
        path.mkdir()
    elif kind == "in use":
        start()
    else:
        path.write_bytes(b"my only copy")
    engine = start()
    assert len(ask(engine, PROMPT)[0]) == 6
    assert not engine.idle()
    engine.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "will not survive a restart" in caplog.text
    if kind == "something else":
        assert path.read_bytes() == b"my only copy"


def test_a_reset_empties_the_file(start: Callable[..., Engine]) -> None:
    engine = start()
    ask(engine, PROMPT)
    engine.close()
    engine = start()
    assert engine.reset_prefix_cache()
    crash(engine)
    assert ask(start(), PROMPT)[1] == 0


def test_after_a_failed_step_nothing_is_saved(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler has published the blocks that the step was to fill."""
    engine = start()
    monkeypatch.setattr(engine.runner, "launch", lambda output: 1 / 0)
    assert ask(engine, PROMPT)[0] == []
    engine.close()
    assert ask(start(), PROMPT)[1] == 0


def test_requests_that_are_cut_off_leave_their_blocks(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.add_request(EngineRequest("r", PROMPT, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    assert engine.has_work()
    engine.close()
    assert ask(start(), PROMPT)[1] == 192


def test_it_needs_a_prefix_cache(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_cache_file needs enable_prefix_caching"):
        EngineConfig(model=str(tiny_model), prefix_cache_file="x", enable_prefix_caching=False)


@pytest.mark.heavy
def test_a_killed_engine_s_successor_finds_what_was_saved(tiny_model: Path, path: Path) -> None:
    """The processes of a server: saved on idle, killed, started again by the supervisor."""
    config = EngineConfig(
        model=str(tiny_model), device="cpu", num_gpu_blocks_override=64, max_model_len=500, prefix_cache_file=str(path)
    )
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def num_saved() -> int:
        """Blocks whose slots have begun, but for the last of them."""
        with path.open("rb") as file:
            identity = file.read(4096)[12:].rstrip(b"\0")
        slot = -(-(int(json.loads(identity)["block_bytes"]) + 80) // 4096) * 4096 if identity else 1 << 30
        return (path.stat().st_size - 4096) // slot

    async def ask(engine: AsyncEngine, request_id: str) -> tuple[list[int], int]:
        updates = [update async for update in engine.generate(EngineRequest(request_id, PROMPT, sampling))]
        return [token for update in updates for token in update.token_ids], updates[-1].num_cached_tokens

    async def test() -> None:
        engine = await AsyncEngine.start(config)
        try:
            answer, cached = await ask(engine, "first")
            assert cached == 0
            while num_saved() < 11:
                await asyncio.sleep(0.05)
            ready = engine.state
            os.kill(engine.replicas[0].pid, signal.SIGKILL)
            await engine.state_change(ready)
            tokens, cached = await ask(engine, "again")
            assert tokens == answer
            assert cached >= 176, "the last block may have been on its way"
        finally:
            engine.close()

    asyncio.run(asyncio.wait_for(test(), 200))
