"""The prefix cache's tier in host memory, here a part of the same memory, through the whole engine: texts are those of
an engine without it, and what a small cache has evicted is found again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import tiers
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.worker.block_store import host_blocks
from engine.worker.block_store.host_blocks import HostBlocks
from tests.oracles.hybrids import fill_unwritten, make_hybrid
from tests.oracles.windowed import make_windowed
from tests.support.answers import greedy_answers, two_turns

MIB = 1 / 1024
PROMPTS = [[(7 * i * i + n) % 250 for i in range(60 + n)] for n in range(5)]
LENGTH = 12


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of tokens is loaded; host memory comes in small chunks of NaN, at once; a step copies one part."""

    def use(self: host_blocks.HostChunks, slot: int) -> None:
        use_later(self, slot)
        for chunk in self._chunks:
            chunk.result()

    use_later = host_blocks.HostChunks.use
    monkeypatch.setattr(host_blocks.HostChunks, "use", use)
    monkeypatch.setattr(tiers, "MIN_LOADED_TOKENS", 1)
    monkeypatch.setattr(host_blocks, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(host_blocks, "STAGING_BYTES", 1 << 16)
    monkeypatch.setattr(host_blocks, "LOADING_SHARE", 0)
    allocate = host_blocks.HostChunks._allocate
    monkeypatch.setattr(host_blocks.HostChunks, "_allocate", lambda self: allocate(self).fill_(255))


@pytest.fixture
def slow_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a load is noticed some steps late, and its blocks are NaN until then."""
    asked: dict[int, int] = {}
    finished = HostBlocks.finished_loads

    def late(self: HostBlocks) -> list[int]:
        ended = finished(self)
        asked.update(dict.fromkeys(ended, 0))
        for number in asked:
            asked[number] += 1
        ready = [number for number, count in asked.items() if count > 3]
        for number in ready:
            del asked[number]
        return ready

    monkeypatch.setattr(HostBlocks, "finished_loads", late)


def start(folder: Path, **settings: Any) -> Engine:
    settings = {"max_model_len": 128, "dtype": "float32", "block_size": 8, "debug_checks": True, **settings}
    return Engine(EngineConfig(model=str(folder), device="cpu", skip_tokenizer_init=True, **settings))


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    engine = start(tiny_model)
    found = two_turns(engine, PROMPTS, LENGTH)
    engine.close()
    return found


PARALLEL = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 16}, {"enforce_eager": True}, *PARALLEL],
    ids=["plain", "chunked", "eager", "two ranks", "two stages"],
)
@pytest.mark.usefixtures("forked")
def test_what_was_evicted_is_found(tiny_model: Path, expected: list[list[int]], settings: dict[str, Any]) -> None:
    engine = start(tiny_model, num_gpu_blocks_override=16, kv_offloading_size=8 * MIB, **settings)
    assert two_turns(engine, PROMPTS, LENGTH) == expected
    stats = engine.stats()
    assert stats.external_hits >= sum(len(prompt) // 8 * 8 for prompt in PROMPTS), "with the answers"
    assert 0 < stats.num_used_host_blocks <= stats.num_host_blocks
    assert engine.reset_prefix_cache()
    assert engine.stats().num_used_host_blocks == 0
    assert two_turns(engine, PROMPTS[:1], LENGTH)[0] == expected[0]
    assert engine.stats().external_hits == stats.external_hits, "nothing of before is found"
    engine.close()


@pytest.mark.parametrize(
    "settings",
    [{}, PARALLEL[0], pytest.param(PARALLEL[1], marks=pytest.mark.slow)],
    ids=["one", "two ranks", "two stages"],
)
@pytest.mark.usefixtures("forked")
def test_requests_run_while_blocks_are_on_their_way(
    tiny_model: Path, expected: list[list[int]], settings: dict[str, Any], slow_loads: None
) -> None:
    """Several requests at once, whose loads take some steps; one of them is aborted meanwhile."""
    engine = start(tiny_model, num_gpu_blocks_override=40, kv_offloading_size=8 * MIB, **settings)
    answers = [greedy_answers(engine, [prompt], LENGTH)[0] for prompt in PROMPTS]
    assert answers == expected[: len(PROMPTS)]
    for n in range(3):
        greedy_answers(engine, [[n] * 100], 20)  # evicts all others
    more = [[*prompt, *answer, 1, 2, 3] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    engine.add_request(EngineRequest("gone", more[0], SamplingParams(temperature=0, max_tokens=5)))
    engine.step()
    assert engine.scheduler.blocks.tier is not None
    assert engine.scheduler.blocks.tier.has_loads
    engine.abort("gone")
    runs_beside = EngineRequest("beside", [5] * 9, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    engine.add_request(runs_beside)
    assert greedy_beside(engine, more) == expected[len(PROMPTS) :]
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.external_hits > 0
    engine.close()


def test_a_load_arrives_in_parts_while_a_request_decodes(tiny_model: Path, expected: list[list[int]]) -> None:
    engine = start(tiny_model, num_gpu_blocks_override=40, kv_offloading_size=8 * MIB)
    answer = greedy_answers(engine, PROMPTS[:1], LENGTH)[0]
    for n in range(6):
        greedy_answers(engine, [[n] * 100], 20)  # evicts it
    decodes = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add_request(EngineRequest("decodes", [5] * 9, decodes))
    engine.step()
    again = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    engine.add_request(EngineRequest("again", [*PROMPTS[0], *answer, 1, 2, 3], again))
    found: dict[str, list[int]] = {"decodes": [], "again": []}
    while len(found["again"]) < LENGTH:
        for output in engine.step():
            found[output.request_id].extend(output.new_token_ids)
    assert len(found["decodes"]) < 50, "it had to wait until nothing else ran"
    assert found["again"] == expected[len(PROMPTS)]
    assert engine.stats().external_hits > 0
    engine.close()


def greedy_beside(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return what `greedy_answers` does, while other requests run."""
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        engine.add_request(EngineRequest(str(i), prompt, sampling))
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return [found[str(i)] for i in range(len(prompts))]


def test_salts_stay_apart(tiny_model: Path) -> None:
    engine = start(tiny_model, num_gpu_blocks_override=16, kv_offloading_size=8 * MIB)

    def cached(salt: str) -> int:
        request = EngineRequest("r", PROMPTS[0], SamplingParams(temperature=0, max_tokens=2), cache_salt=salt)
        engine.add_request(request)
        outputs = [output for _ in iter(engine.has_work, False) for output in engine.step().outputs]
        return outputs[0].num_cached_tokens

    assert cached("a") == 0
    greedy_answers(engine, PROMPTS[1:3], 4)
    assert cached("b") == 0
    greedy_answers(engine, PROMPTS[1:3], 4)
    assert cached("a") == 56
    assert engine.stats().external_hits >= 56
    engine.close()


def test_a_window_and_full_attention(tmp_path: Path) -> None:
    prompts, answers = make_windowed("every other layer", tmp_path)
    engine = start(tmp_path, max_model_len=200, num_gpu_blocks_override=52, kv_offloading_size=8 * MIB)
    for _ in range(2):
        for prompt, answer in zip(prompts, answers, strict=True):
            assert greedy_answers(engine, [prompt], len(answer)) == [answer]
    assert engine.stats().external_hits > 100
    engine.close()


@pytest.mark.parametrize("ranks", [{}, {"pipeline_parallel_size": 2}], ids=["one rank", "a stage without attention"])
@pytest.mark.usefixtures("forked")
def test_states_of_recurrent_layers(tmp_path: Path, ranks: dict[str, int]) -> None:
    prompts, answers = make_hybrid("lfm2", tmp_path)
    few = {"num_gpu_blocks_override": 30, "num_states_override": 6, "block_size": 16}
    engine = start(tmp_path, max_model_len=256, kv_offloading_size=8 * MIB, **few, **ranks)
    if not ranks:
        fill_unwritten(engine.runner)
    for _ in range(2):
        for prompt, answer in zip(prompts, answers, strict=True):
            assert greedy_answers(engine, [prompt], len(answer)) == [answer]
    assert engine.stats().external_hits > 100
    engine.close()


def test_a_full_cache_waits_for_room_instead_of_computing(tiny_model: Path) -> None:
    """Conversations at once, of which a third fits: nearly all of their contexts come back."""
    engine = start(tiny_model, num_gpu_blocks_override=30, kv_offloading_size=8 * MIB)
    prompts = [[(5 * i * i + 3 * n) % 250 for i in range(64)] for n in range(9)]
    greedy_beside(engine, prompts)
    assert engine.stats().external_hits == 0
    greedy_beside(engine, [[*prompt, 1, 2, 3] for prompt in prompts])
    stats = engine.stats()
    assert stats.external_hits >= 0.8 * 64 * len(prompts)
    assert stats.prefix_hits >= 0.95 * 64 * len(prompts)
    engine.close()


def test_sleep_empties_it(tiny_model: Path, expected: list[list[int]]) -> None:
    engine = start(tiny_model, num_gpu_blocks_override=16, kv_offloading_size=8 * MIB)
    for level in (1, 2):
        assert two_turns(engine, PROMPTS[:3], LENGTH) == [*expected[:3], *expected[5:8]]
        engine.sleep(level)
        engine.wake_up()
        assert engine.stats().num_used_host_blocks == 0
    assert two_turns(engine, PROMPTS[:3], LENGTH) == [*expected[:3], *expected[5:8]]
    engine.close()


def test_a_cpu_has_none_by_default(tiny_model: Path) -> None:
    engine = start(tiny_model)
    assert engine.scheduler.blocks.tier is None
    engine.close()
    with pytest.raises(ConfigError, match="kv_offloading_size must be a number at least 0"):
        EngineConfig(model=str(tiny_model), kv_offloading_size=-1)


def test_little_host_memory(tiny_model: Path, expected: list[list[int]]) -> None:
    """Room for ten blocks: some are found."""
    engine = start(tiny_model, num_gpu_blocks_override=16, kv_offloading_size=0.1 * MIB)
    assert two_turns(engine, PROMPTS, LENGTH) == expected
    assert 0 < engine.stats().num_host_blocks < 30
    engine.close()


def test_a_draft_model_finds_its_keys_and_values_again(tiny_model: Path) -> None:
    """The model drafts for itself: it is right as long as it reads what it has written."""
    drafts = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 3}
    drafts |= {"enable_adaptive_verification": False}
    engine = start(tiny_model, num_gpu_blocks_override=20, kv_offloading_size=8 * MIB, speculative_config=drafts)
    assert two_turns(engine, PROMPTS, LENGTH) == two_turns(engine, PROMPTS, LENGTH)
    stats = engine.stats()
    assert stats.external_hits > 300
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 50
    engine.close()
