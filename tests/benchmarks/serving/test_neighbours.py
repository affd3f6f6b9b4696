"""Speed beside busy processes: what is compared with what."""

import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import neighbours
from engine.errors import ConfigError


def test_quiet_and_busy_runs_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    running: list[Any] = []
    runs = []

    class Neighbour:
        def __init__(self, command: list[str]) -> None:
            assert command == neighbours.NEIGHBOUR
            running.append(self)

        def kill(self) -> None:
            running.remove(self)

        def wait(self) -> None:
            assert self not in running

    @contextlib.contextmanager
    def way(job: neighbours.Job) -> Iterator[neighbours.Measure]:
        def measure() -> float:
            runs.append(len(running))
            return 100.0 / (1 + len(running))

        yield measure

    clock = itertools.count()
    monkeypatch.setattr(neighbours, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(neighbours, "sleep", lambda seconds: None)
    monkeypatch.setattr(subprocess, "Popen", Neighbour)
    monkeypatch.setitem(neighbours.WAYS, "LLM", way)
    assert neighbours.main(["--ways", "LLM", "--models", "configs/demo", "--neighbours", "3", "--rounds", "2"]) == 0
    assert runs == [0, 0, 3, 0, 3]
    assert not running
    assert "| demo | LLM | 100 | 25 | 25% |" in capsys.readouterr().out


def test_unknown_ways() -> None:
    with pytest.raises(ConfigError, match="ways must be of LLM, serve, generate, bench, got 'chat'"):
        neighbours.NeighboursFlags(ways=("chat",))


@pytest.mark.slow
def test_the_command_and_the_server_give_figures(tmp_path: Path, demo_model: Path) -> None:
    flags = neighbours.NeighboursFlags(requests=2, output_len=4)
    job = neighbours.Job(demo_model, flags, {"max_model_len": 64, "max_num_seqs": 2, "device": "cpu"}, tmp_path)
    with neighbours.served(job) as measure:
        assert measure() > 0
    with neighbours.benched(job) as measure:
        assert measure() > 0
