"""The prefix cache's file as a tier: what a small cache has evicted is read again while requests run."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import tiers
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.stepping import prefix_cache_store
from engine.worker.block_store.block_file import BlockFile
from engine.worker.block_store.cache_file import CacheFile
from tests.engine.stepping.test_prefix_cache_store import store_of
from tests.oracles.families import make_checkpoint
from tests.oracles.hybrids import make_hybrid
from tests.support.answers import greedy_answers, two_turns

PROMPTS = [[(7 * i * i + n) % 250 for i in range(60 + n)] for n in range(5)]
LENGTH = 12


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of tokens is loaded, and buffers hold a few blocks."""
    monkeypatch.setattr(tiers, "MIN_LOADED_TOKENS", 1)
    monkeypatch.setattr(prefix_cache_store, "BUFFER_BYTES", 1 << 15)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prefixes.kv"


Start = Callable[..., Engine]


@pytest.fixture
def start(tiny_model: Path, path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def start_one(**settings: Any) -> Engine:
        settings = {"num_gpu_blocks_override": 16, "prefix_cache_file": str(path), "dtype": "float32", **settings}
        settings = {"model": str(tiny_model), "max_model_len": 128, "block_size": 8, **settings}
        engines.append(Engine(EngineConfig(device="cpu", skip_tokenizer_init=True, debug_checks=True, **settings)))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    config = EngineConfig(
        model=str(tiny_model), device="cpu", skip_tokenizer_init=True, max_model_len=128, dtype="float32"
    )
    engine = Engine(config)
    found = two_turns(engine, PROMPTS, LENGTH)
    engine.close()
    return found


def files_of(engine: Engine) -> list[BlockFile]:
    store: Any = engine._store
    return [each._file for each in getattr(store, "_stores", [store])]


def written(engine: Engine) -> None:
    """Wait until the files have what was to be saved."""
    for _ in range(100):
        engine.idle()
        files_of(engine)[0]._io.submit(int).result()  # the thread that writes all of them


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 16}, {"kv_offloading_size": 0.1 / 1024}],
    ids=["plain", "chunked", "below host memory"],
)
def test_what_was_evicted_is_found(start: Start, expected: list[list[int]], settings: dict[str, Any]) -> None:
    engine = start(**settings)
    assert two_turns(engine, PROMPTS, LENGTH) == expected
    written(engine)
    hits = engine.stats().external_hits
    assert two_turns(engine, PROMPTS, LENGTH) == expected
    stats = engine.stats()
    assert stats.external_hits - hits >= 2 * sum(len(prompt) // 8 * 8 for prompt in PROMPTS) - 8 * len(PROMPTS)
    assert stats.num_damaged_blocks == 0
    assert stats.num_file_blocks > 40
    assert engine.reset_prefix_cache()
    assert engine.stats().num_file_blocks == 0
    assert two_turns(engine, PROMPTS[:1], LENGTH)[0] == expected[0]


def test_a_restart_finds_what_the_cache_has_no_room_for(start: Start, expected: list[list[int]]) -> None:
    engine = start()
    two_turns(engine, PROMPTS, LENGTH)
    written(engine)
    engine.close()
    engine._store = None
    again = start()
    assert two_turns(again, PROMPTS, LENGTH) == expected
    assert again.stats().external_hits > 300


def test_requests_run_while_a_slow_disk_reads(
    start: Start, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests at once; one of them is aborted while its blocks are on their way."""
    engine = start(num_gpu_blocks_override=40)
    assert two_turns(engine, PROMPTS, LENGTH) == expected
    written(engine)
    read = CacheFile.read

    def slow(*arguments: Any) -> bool:
        time.sleep(0.01)
        return read(*arguments)

    monkeypatch.setattr(CacheFile, "read", slow)
    more = [[*prompt, *answer, 1, 2, 3] for prompt, answer in zip(PROMPTS, expected, strict=False)]
    engine.add_request(EngineRequest("gone", more[0], SamplingParams(temperature=0, max_tokens=5)))
    engine.step()
    tier = engine.scheduler.blocks.tier
    assert tier is not None
    assert tier.has_loads
    engine.abort("gone")
    assert greedy_answers(engine, more, LENGTH) == expected[len(PROMPTS) :]
    while tier.has_loads:
        engine.idle()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.external_hits > 100


def test_damaged_blocks_are_computed_again(
    start: Start, expected: list[list[int]], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    two_turns(engine, PROMPTS, LENGTH)
    written(engine)
    slot_bytes, num_slots = store_of(engine)._file._file.slot_bytes, engine.stats().num_file_blocks
    with path.open("r+b") as file:
        for slot in range(num_slots):
            file.seek(4096 + slot * slot_bytes + 300)
            file.write(b"x" * 40)
    assert two_turns(engine, PROMPTS, LENGTH) == expected
    damaged = engine.stats().num_damaged_blocks
    assert 0 < damaged <= num_slots
    assert all("damaged blocks are dropped" in record.getMessage() for record in caplog.records)
    written(engine)
    assert two_turns(engine, PROMPTS, LENGTH) == expected, "what was computed again is there"


def test_a_full_disk_is_tried_again(
    start: Start, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert two_turns(engine, PROMPTS, LENGTH) == expected
        written(engine)
    assert engine.stats().num_file_blocks == 0
    assert len(caplog.records) == 1
    monkeypatch.setattr(prefix_cache_store, "RETRY_SECONDS", 0.0)
    assert two_turns(engine, PROMPTS, LENGTH) == expected
    written(engine)
    assert engine.stats().num_file_blocks > 20


def test_what_turns_out_to_be_corrupt_leaves_the_file(start: Start) -> None:
    """Blocks are unpublished when a request computes NaN: they must not come back from the file."""
    engine = start(num_gpu_blocks_override=40)
    greedy_answers(engine, PROMPTS[:1], LENGTH)
    written(engine)
    assert engine.stats().num_file_blocks == 8
    request = EngineRequest("r", PROMPTS[0], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    engine.add_request(request)
    engine.step()
    running = engine.scheduler.queues.running[0]
    running.num_admitted_tokens = len(running.token_ids)  # as if nothing had been sampled
    engine.scheduler.blocks.unpublish(running)
    engine.abort("r")
    written(engine)
    assert engine.stats().num_file_blocks == 1, "that of the answer"
    assert len(store_of(engine)._file.entries()) == 1


@pytest.mark.parametrize("host", [{}, {"kv_offloading_size": 0.2 / 1024}], ids=["file", "host memory and file"])
def test_states_of_recurrent_layers(tmp_path: Path, start: Start, host: dict[str, float]) -> None:
    """Each answer follows from states and keys of both files, which a restart finds, too."""
    prompts, answers = make_hybrid("lfm2", tmp_path)
    few = {"model": str(tmp_path), "num_gpu_blocks_override": 20, "num_states_override": 6, "max_model_len": 256}
    few["block_size"] = 16
    engine = start(**few, **host)
    for turn in range(3):
        hits = engine.stats().external_hits
        for prompt, answer in zip(prompts, answers, strict=True):
            assert greedy_answers(engine, [prompt], len(answer)) == [answer], turn
        written(engine)
    assert engine.stats().external_hits - hits > 50
    assert min(len(file.entries()) for file in files_of(engine)) > 2
    engine.close()
    engine._store = None
    again = start(**few, **host)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert greedy_answers(again, [prompt], len(answer)) == [answer]
    assert again.stats().external_hits > 50
    assert again.reset_prefix_cache()
    assert again.stats().num_file_blocks == 0


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    make_checkpoint("lfm2", folder)
    return folder


@pytest.mark.parametrize("num_rounds", [12, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("host", [{}, {"kv_offloading_size": 0.1 / 1024}], ids=["file", "host memory and file"])
@pytest.mark.parametrize("name", ["tiny_model", "hybrid"])
def test_no_fault_of_a_disk_changes_an_answer(
    name: str,
    request: pytest.FixtureRequest,
    start: Start,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_rounds: int,
    host: dict[str, Any],
) -> None:
    """In each round some conversations go on, while the disk is full, slow or damages blocks, or the engine is lost."""
    rng, read, write = Random(num_rounds), CacheFile.read, os.pwritev
    monkeypatch.setattr(prefix_cache_store, "RETRY_SECONDS", 0.0)
    prompts = [[rng.randrange(3, 190) for _ in range(rng.randint(30, 90))] for _ in range(12)]
    plain: dict[str, Any] = {"model": str(request.getfixturevalue(name)), "max_model_len": 128, "dtype": "float32"}
    truth = Engine(EngineConfig(device="cpu", skip_tokenizer_init=True, **plain))
    expected = [greedy_answers(truth, [prompt], LENGTH)[0] for prompt in prompts]
    truth.close()
    few = {"num_gpu_blocks_override": 30, **({"num_states_override": 16} if name == "hybrid" else {})}
    settings = {**plain, **few, **host}
    paths = [path, *([path.with_name(f"{path.name}.states")] if name == "hybrid" else [])]

    def full(*arguments: Any) -> int:
        if rng.random() < 0.5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    def slow(*arguments: Any) -> bool:
        time.sleep(0.002)
        return read(*arguments)

    engine, hits = start(**settings), 0
    for number in range(num_rounds):
        fault, chosen_path = rng.choice(["none", "full", "slow", "damage", "lost"]), rng.choice(paths)
        with monkeypatch.context() as patch:
            if fault == "full":
                patch.setattr(os, "pwritev", full)
            if fault == "slow":
                patch.setattr(CacheFile, "read", slow)
            if fault == "damage":
                with chosen_path.open("r+b") as file:
                    file.seek(rng.randrange(4096, max(chosen_path.stat().st_size, 4097)))
                    file.write(rng.randbytes(5000))
            if fault == "lost":
                hits += engine.stats().external_hits
                lose(engine)
                with chosen_path.open("r+b") as file:
                    file.truncate(max(chosen_path.stat().st_size - rng.choice([0, 1000]), 4096))  # a torn last block
                engine = start(**settings)
            chosen = rng.sample(range(len(prompts)), 4)
            answers = greedy_answers(engine, [prompts[i] for i in chosen], LENGTH)
            assert answers == [expected[i] for i in chosen], (number, fault)
    assert hits + engine.stats().external_hits > 0


def lose(engine: Engine) -> None:
    """The engine is gone without a word, and its locks with it."""
    for file in files_of(engine):
        file.reads.close()
        file._io.shutdown()
        file._file.close()
    engine._store = None
