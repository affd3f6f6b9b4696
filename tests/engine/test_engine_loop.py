"""The engine's loop over a runner that needs no device."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.batch import SchedulerOutput
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.models.families import read_spec
from engine.setup.options import runner_options
from engine.worker.device import CpuDevice
from engine.worker.kv_cache import KVCacheTooSmallError
from tests.support.fake_runner import FakeRunner, next_token


def make_engine(model: Path, **settings: Any) -> Engine:
    return Engine(
        EngineConfig(model=str(model), device="cpu", **settings),
        build_runner=FakeRunner.build,  # type: ignore[arg-type]
    )


def run(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    engine.scheduler.check()
    return tokens


def expected(prompt: list[int], count: int) -> list[int]:
    return [next_token(prompt, position) for position in range(len(prompt), len(prompt) + count)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 3},
        {"num_gpu_blocks_override": 24},
        {"pipeline_parallel_size": 4},
    ],
)
def test_every_request_gets_its_tokens(tiny_model: Path, settings: dict[str, Any]) -> None:
    engine = make_engine(tiny_model, max_model_len=256, **settings)
    prompts = {str(i): [i + 1] * (5 + 7 * i) for i in range(12)}
    for request_id, prompt in prompts.items():
        engine.add_request(EngineRequest(request_id, prompt, SamplingParams(max_tokens=20 + len(request_id))))
    assert run(engine) == {i: expected(prompt, 20 + len(i)) for i, prompt in prompts.items()}
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


def test_debug_checks_find_broken_bookkeeping(tiny_model: Path) -> None:
    for debug_checks in (False, True):
        engine = make_engine(tiny_model, debug_checks=debug_checks)
        engine.add_request(EngineRequest("a", [1, 2, 3], SamplingParams(max_tokens=9)))
        engine.step()
        engine.scheduler.queues.running[0].num_slots += 1  # more than its blocks have
        if debug_checks:
            with pytest.raises(AssertionError):
                engine.step()
        else:
            engine.step()


def test_one_step_ahead(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    engine.add_request(EngineRequest("a", [1, 2, 3], SamplingParams(max_tokens=2)))
    assert not engine.step()
    assert len(engine.in_flight) == 1
    assert [output.new_token_ids for output in engine.step().outputs] == [[next_token([1, 2, 3], 3)]]
    (last,) = engine.step().outputs
    assert last.finish_reason == "length"
    assert not engine.in_flight
    assert not engine.has_work()


def test_a_pipeline_has_a_step_for_each_stage(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, pipeline_parallel_size=4)
    for request_id in "abcdefgh":
        engine.add_request(EngineRequest(request_id, [1, 2, 3], SamplingParams(max_tokens=12)))
    depths = []
    while engine.has_work():
        engine.step()
        depths.append(len(engine.in_flight))
    assert max(depths) == 3, "three, and the one that is read"
    assert depths.count(3) > len(depths) / 2


def test_a_step_that_ends_as_it_is_launched_is_read_at_once(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    launch = engine.runner.launch

    def launched(output: SchedulerOutput) -> Any:
        handle = launch(output)
        handle.has_ended = True  # type: ignore[misc]
        return handle

    engine.runner.launch = launched  # type: ignore[method-assign]
    engine.add_request(EngineRequest("a", [1, 2, 3], SamplingParams(max_tokens=2)))
    assert [output.new_token_ids for output in engine.step().outputs] == [[next_token([1, 2, 3], 3)]]
    assert not engine.in_flight
    (last,) = engine.step().outputs
    assert last.finish_reason == "length"
    assert not engine.has_work()


def test_a_specification_that_was_read_is_not_read_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(tiny_model)
    monkeypatch.setattr("engine.engine.read_spec", lambda folder: pytest.fail("read again"))
    config = EngineConfig(model=str(tiny_model), device="cpu")
    assert Engine(config, spec=spec, build_runner=FakeRunner.build).spec == spec  # type: ignore[arg-type]


def test_end_of_text_from_the_front_end_counts(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), device="cpu")
    engine = Engine(config, eos_token_ids=[next_token([1, 2], 4)], build_runner=FakeRunner.build)  # type: ignore[arg-type]
    assert engine.spec.eos_token_ids == (257, next_token([1, 2], 4))
    engine.add_request(EngineRequest("a", [1, 2], SamplingParams(max_tokens=50)))
    assert run(engine)["a"] == expected([1, 2], 3)


def test_abort_frees_blocks(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    engine.add_request(EngineRequest("a", [1] * 40, SamplingParams(max_tokens=100)))
    engine.add_request(EngineRequest("b", [2] * 40, SamplingParams(max_tokens=3)))
    engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    assert run(engine) == {"b": expected([2] * 40, 3)}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_seeds_follow_the_configuration(tiny_model: Path) -> None:
    def seeds(seed: int) -> list[int]:
        engine = make_engine(tiny_model, seed=seed)
        for i in range(3):
            engine.add_request(EngineRequest(str(i), [1], SamplingParams(seed=7 if i == 2 else None)))
        return [request.seed for request in engine.scheduler.queues.waiting]

    assert seeds(0) == seeds(0) != seeds(1)
    assert seeds(0)[2] == 7
    assert len(set(seeds(0))) == 3


@pytest.mark.parametrize(
    ("stored", "multiplies", "chosen"),
    [
        ("bfloat16", True, "bfloat16"),
        ("float16", True, "bfloat16"),
        ("float32", True, "float32"),
        ("bfloat16", False, "float32"),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_it_multiplies_that(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, stored: str, multiplies: bool, chosen: str
) -> None:
    monkeypatch.setattr(CpuDevice, "multiplies_bfloat16", multiplies)
    spec = replace(read_spec(tiny_model), dtype=stored)
    options = runner_options(EngineConfig(model="m", device="cpu"), spec, offline=True)
    assert str(options.dtype) == str(options.kv_dtype) == f"torch.{chosen}"


def test_choices_left_open_are_made(tiny_model: Path) -> None:
    spec = read_spec(tiny_model)
    options = runner_options(EngineConfig(model="m", device="cpu"), spec, offline=True)
    assert (options.max_model_len, options.max_num_seqs, options.max_num_batched_tokens) == (4096, 256, 2048)
    assert str(options.dtype) == "torch.float32"
    with pytest.raises(ConfigError, match="max_model_len must be at most 4096, the model's own context, got 5000"):
        runner_options(EngineConfig(model="m", device="cpu", max_model_len=5000), spec, offline=True)


def test_cache_too_small_is_one_line(tiny_model: Path) -> None:
    def build(*args: Any, **kwargs: Any) -> FakeRunner:
        raise KVCacheTooSmallError("room for 7")

    with pytest.raises(EngineError, match="room for 7"):
        Engine(EngineConfig(model=str(tiny_model), device="cpu"), build_runner=build)  # type: ignore[arg-type]


def test_close_gives_all_back(tiny_model: Path) -> None:
    num_frozen = gc.get_freeze_count()
    engine = make_engine(tiny_model)
    assert gc.get_freeze_count() == num_frozen, "only programs freeze: this process may be a user's"
    assert "context 4,096" in engine.summary()
    engine.close()
    assert isinstance(engine.runner, FakeRunner)
    assert engine.runner.closed
