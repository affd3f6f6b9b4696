"""Cores that a process computes on: files of the system as they are in containers and on machines with several
nodes.
"""

import os
from pathlib import Path

import pytest

from engine.worker.parallel import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of eight cores, without nodes."""
    affinity = [set(range(8))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: affinity[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, mask: affinity.append(set(mask)))
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cores, "NODES", tmp_path)
    return tmp_path


def add_node(machine: Path, name: str, cpus: str) -> None:
    (machine / name).mkdir()
    (machine / name / "cpulist").write_text(f"{cpus}\n")


@pytest.mark.parametrize(
    ("quota", "count"),
    [(None, 8), ("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8), ("?", 8)],
)
def test_a_container_may_have_less_than_the_machine(machine: Path, quota: str | None, count: int) -> None:
    if quota is not None:
        (machine / "cpu.max").write_text(f"{quota}\n")
    assert cores.num_cores() == count


@pytest.mark.parametrize(("replica", "kept"), [(0, {1, 3, 4, 5, 6}), (1, {0, 2, 7}), (2, {1, 3, 4, 5, 6})])
def test_a_process_keeps_to_one_node(machine: Path, replica: int, kept: set[int]) -> None:
    add_node(machine, "node0", "0,2,7-9")
    add_node(machine, "node1", "1,3-6")
    add_node(machine, "node2", "10-19")  # not for this process
    add_node(machine, "node3", "")  # memory alone
    cores.keep_to_one_node(replica)
    assert os.sched_getaffinity(0) == kept
    assert cores.num_cores() == len(kept)


def test_one_node_is_the_whole_machine(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_node(machine, "node0", "0-63")
    cores.keep_to_one_node(0)
    assert cores.num_cores() == 8
    assert not caplog.messages
