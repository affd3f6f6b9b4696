"""Placement of an engine's ranks in a Ray cluster. Ray is played by a few functions; tests/ray has the real one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.errors import ModelError
from engine.worker.parallel import ray_launcher
from engine.worker.parallel.launcher import LaunchError
from engine.worker.parallel.ray_launcher import RankListener, RayLauncher, Seat, find_model


class FakeRay:
    """A cluster whose nodes have so many GPUs. Actors sit where `seats` says; this process is on node "a"."""

    def __init__(self, gpus: dict[str, int], seats: Sequence[Seat], is_free: bool = True) -> None:
        self.gpus, self.seats, self.is_free = gpus, seats, is_free
        self.killed: list[int] = []
        self.asked: dict[str, Any] = {}
        self.is_removed = self.is_shut_down = False
        self.util = SimpleNamespace(
            placement_group=self._placement_group,
            remove_placement_group=self._remove,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, **index: index),
        )

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "a")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Resources": {"GPU": count, "CPU": 8}} for name, count in self.gpus.items()]

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": sum(self.gpus.values())}

    def available_resources(self) -> dict[str, float]:
        return {}

    def _placement_group(self, bundles: list[dict[str, int]], **asked: Any) -> Any:
        self.asked = {"bundles": bundles, **asked}
        return SimpleNamespace(wait=lambda seconds: self.is_free)

    def _remove(self, group: Any) -> None:
        self.is_removed = True

    def remote(self, actor_class: type) -> Any:
        def options(scheduling_strategy: dict[str, int], **resources: int) -> Any:
            index = scheduling_strategy["placement_group_bundle_index"]
            return SimpleNamespace(
                remote=lambda: SimpleNamespace(sit=SimpleNamespace(remote=lambda _: index), index=index)
            )

        return SimpleNamespace(options=options)

    def get(self, refs: list[int], timeout: float) -> list[Seat]:
        return [self.seats[ref] for ref in refs]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.index)

    def shutdown(self) -> None:
        self.is_shut_down = True


def launch(monkeypatch: pytest.MonkeyPatch, ray: FakeRay, num_ranks: int, owns: bool = True) -> RayLauncher:
    monkeypatch.setattr(ray_launcher, "_connect", lambda: (ray, owns))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return RayLauncher(num_ranks, "auto", Path("/model"))


def test_ranks_that_fit_one_node_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = [Seat("a", "10.0.0.1", (name,), 1) for name in ("5", "2", "7", "4")]
    ray = FakeRay({"a": 8, "b": 8}, seats)
    launcher = launch(monkeypatch, ray, 4)
    assert ray.asked["strategy"] == "STRICT_PACK"
    assert ray.asked["bundles"] == [{"GPU": 1}] * 4
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,2,7,4", "the GPUs that were given, and no others"
    assert [location.device_index for location in launcher.locations] == [0, 1, 2, 3]
    assert {location.host for location in launcher.locations} == {"a"}
    assert ray.killed == [0], "rank 0 is this process"


def test_ranks_of_a_node_are_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = [
        Seat("a", "10.0.0.1", ("1",), 1),
        Seat("b", "10.0.0.2", ("0",), 2),
        Seat("a", "10.0.0.1", ("0",), 3),
        Seat("b", "10.0.0.2", ("1",), 4),
    ]
    ray = FakeRay({"a": 2, "b": 2}, seats)
    launcher = launch(monkeypatch, ray, 4)
    assert ray.asked["strategy"] == "PACK"
    assert ray.asked["bundle_label_selector"] == [{"ray.io/node-id": "a"}, {}, {}, {}], "rank 0 is this process"
    assert [(location.host, location.device_index) for location in launcher.locations] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1),
    ]  # fmt: skip
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_a_node_without_gpus_gives_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay({"a": 0, "b": 8}, [Seat("a", "10.0.0.1", (), 1)] * 2)
    launcher = launch(monkeypatch, ray, 2)
    assert ray.asked["bundles"] == [{"CPU": 1}] * 2
    assert [location.device_index for location in launcher.locations] == [0, 0]


@pytest.mark.parametrize("owns", [True, False])
def test_a_cluster_that_is_too_small(monkeypatch: pytest.MonkeyPatch, owns: bool) -> None:
    ray = FakeRay({"a": 1, "b": 1}, [], is_free=False)
    message = "4 GPUs are asked for, and the Ray cluster has 2 GPUs, of which 0 are free"
    with pytest.raises(LaunchError, match=message):
        launch(monkeypatch, ray, 4, owns)
    assert ray.is_removed
    assert ray.is_shut_down == owns, "a connection of the program's own stays"


class Crowd(FakeRay):
    """A cluster whose actors connect after peers that say nothing, or what is wrong."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__({"a": num_ranks}, [Seat("a", "127.0.0.1", (str(i),), i) for i in range(num_ranks)])
        self.peers: list[socket.socket] = []
        self.ends = threading.Event()

    def remote(self, actor_class: type) -> Any:
        options = super().remote(actor_class).options

        def with_life(**asked: Any) -> Any:
            def made() -> Any:
                actor = options(**asked).remote()
                actor.live = SimpleNamespace(remote=self._live)
                return actor

            return SimpleNamespace(remote=made)

        return SimpleNamespace(options=with_life)

    def _live(self, rank: int, address: tuple[str, int], secret: bytes, environment: dict[str, str]) -> Any:
        for said in (b"", b"\0", b"\x7f\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"):
            self.peers.append(socket.create_connection(address))
            self.peers[-1].sendall(said)

        def follow() -> None:
            with pytest.raises((AuthenticationError, OSError, EOFError)):
                Client(address, authkey=b"a guess")
            with ray_launcher.connect(rank, address, secret) as connection:
                connection.recv_bytes()

        threading.Thread(target=follow).start()
        return self.ends

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        return refs.wait() if refs is self.ends else super().get(refs, timeout or 0)


@pytest.mark.parametrize("at_once", [64, 2])
def test_silent_peers_and_strangers_delay_no_rank(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Not even if they are more than are greeted at the same time."""
    monkeypatch.setattr(ray_launcher, "MAX_GREETINGS", at_once)
    ray = Crowd(4)
    followers = launch(monkeypatch, ray, 4).start(lambda reason: None)
    assert [follower.rank for follower in followers] == [1, 2, 3]
    for follower in followers:
        follower.expect_end()
        follower.send(b"go")
        follower.connection.close()
    ray.ends.set()
    for peer in ray.peers:
        peer.close()


def test_a_rank_that_does_not_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "START_SECONDS", 0.0)
    with (
        RankListener("127.0.0.1", b"secret") as listener,
        pytest.raises(LaunchError, match="rank 1, 2 did not connect"),
    ):
        listener.accept(2)


def test_a_model_of_the_hub_is_found_on_another_node(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    asked = []

    def resolve(name: str, revision: str | None = None) -> Path:
        asked.append((name, revision))
        return tiny_model

    monkeypatch.setattr(ray_launcher, "resolve_model", resolve)
    commit = "0123456789abcdef" * 2 + "01234567"
    assert find_model(Path(f"/home/first/hub/models--Qwen--Qwen3-0.6B/snapshots/{commit}")) == tiny_model
    assert find_model(tiny_model) == tiny_model
    assert asked == [("Qwen/Qwen3-0.6B", commit), (str(tiny_model), None)]


def test_a_folder_that_another_node_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        find_model(tmp_path / "absent")


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs Ray: pip install 'quire\[ray\]'"):
        EngineConfig(model="m", tensor_parallel_size=2, distributed_executor_backend="ray")


def test_ray_needs_several_ranks() -> None:
    with pytest.raises(ConfigError, match="needs tensor_parallel_size or pipeline_parallel_size above 1"):
        EngineConfig(model="m", distributed_executor_backend="ray")
