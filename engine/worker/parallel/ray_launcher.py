"""Ranks on the nodes of a Ray cluster: an actor for each rank except 0, in a placement group for all ranks.

Rank 0 is this process. It sends messages over its own connections, authenticated by a shared secret. Ray only starts
the actors, and reports when one is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from engine.models.hub import resolve_model
from engine.worker.parallel.launcher import EXIT_SECONDS, Follower, LaunchError, Location, Lost, end_without
from engine.worker.parallel.ranks import follow

_log = logging.getLogger(__name__)

WAIT_SECONDS = 1800.0  # for resources: an autoscaling cluster starts machines meanwhile
SAY_SECONDS = 10.0  # wait before a log message
START_SECONDS = 300.0  # for the actors to start, and to find the model; then for them to connect
GREETING_SECONDS = 10  # for a peer to send the next bytes of its greeting
RETRY_SECONDS = 0.2
WELCOME = b"welcome"
MAX_GREETINGS = 64  # at the same time; of more, the oldest peer is turned away
NODE_LABEL = "ray.io/node-id"
# Prefixes of environment variables that are copied from rank 0 to the other ranks.
PASSED = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "CUDA_LAUNCH",
    "HF_",
    "QUIRE_CACHE",
    "QUIRE_CPU",
    "QUIRE_LOG",
    "OMP_",
)


@dataclass(frozen=True, slots=True)
class Seat:
    """The location of an actor."""

    node_id: str
    host: str
    gpu_ids: tuple[str, ...]
    pid: int


class RayLauncher:
    """Connects to the cluster and reserves a GPU, or on CPUs a core, for each rank.

    Uses this node if it has enough, else as few nodes as possible. Afterwards this process sees only the reserved GPUs
    of this node.
    """

    def __init__(self, num_ranks: int, device: str, folder: Path) -> None:
        """`device`: "cpu", "cuda" or "auto". `folder`: the model's, which is found or downloaded on all nodes.

        Raises `LaunchError` if there is no cluster or the ranks cannot be placed.
        """
        self._ray, self._owns_connection = _connect()
        self._group: Any = None
        try:
            self._place(num_ranks, device, folder)
        except BaseException:
            self.close()
            raise

    def _place(self, num_ranks: int, device: str, folder: Path) -> None:
        ray = self._ray
        own = ray.get_runtime_context().get_node_id()
        resources = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == own)
        kind = "CPU" if device == "cpu" or not resources.get("GPU") else "GPU"
        if device == "cuda" and kind == "CPU":
            raise LaunchError(
                "device is cuda, and this node of the Ray cluster has no GPU: start `quire` on one that has"
            )
        self._group = ray.util.placement_group(
            [{kind: 1}] * num_ranks,
            strategy="STRICT_PACK" if resources.get(kind, 0) >= num_ranks else "PACK",
            bundle_label_selector=[{NODE_LABEL: own}, *[{}] * (num_ranks - 1)],
        )
        self._reserve(num_ranks, kind)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor_class = ray.remote(RankActor)
        actors = [
            actor_class.options(
                num_cpus=int(kind == "CPU"),
                num_gpus=int(kind == "GPU"),
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=index),
            ).remote()
            for index in range(num_ranks)
        ]
        seats = self._seats(actors, folder)
        ray.kill(actors[0])  # rank 0 is this process, on the actor's GPU
        first, *others = zip(seats, actors, strict=True)
        others.sort(key=lambda each: (each[0].node_id != own, each[0].node_id))
        self._actors = [actor for _, actor in others]
        self._seated = [first[0], *(seat for seat, _ in others)]
        self._gpus = _gpus_by_node(self._seated)
        if kind == "GPU":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[own])
        if (num_hosts := len({seat.node_id for seat in seats})) > 1:
            _log.info("%d ranks on %d nodes: %s", num_ranks, num_hosts, ", ".join(seat.host for seat in self._seated))

    def _reserve(self, num_ranks: int, kind: str) -> None:
        if self._group.wait(SAY_SECONDS):
            return
        total, free = (each.get(kind, 0) for each in (self._ray.cluster_resources(), self._ray.available_resources()))
        have = f"the Ray cluster has {total:g} {kind}s, of which {free:g} are free"
        _log.warning("%d are needed, but %s: waiting for more", num_ranks, have)
        if not self._group.wait(WAIT_SECONDS):
            raise LaunchError(f"{num_ranks} {kind}s are asked for, and {have}")

    def _seats(self, actors: Sequence[Any], folder: Path) -> list[Seat]:
        try:
            seats: list[Seat] = self._ray.get([actor.sit.remote(folder) for actor in actors], timeout=START_SECONDS)
        except Exception as error:
            raise LaunchError(f"a rank cannot start on its node of the Ray cluster: {_said(error)}") from None
        return seats

    @property
    def locations(self) -> Sequence[Location]:
        gpus = self._gpus
        return [
            Location(seat.node_id, gpus[seat.node_id].index(seat.gpu_ids[0]) if seat.gpu_ids else 0)
            for seat in self._seated
        ]

    def start(self, lost: Lost) -> Sequence[Follower]:
        secret = secrets.token_bytes(32)
        environment = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        with RankListener(self._seated[0].host, secret) as listener:
            followers = []
            for rank, (seat, actor) in enumerate(zip(self._seated[1:], self._actors, strict=True), start=1):
                own = {**environment, "CUDA_VISIBLE_DEVICES": ",".join(self._gpus[seat.node_id])}
                life = actor.live.remote(rank, listener.address, secret, own)
                followers.append(_Actor(self._ray, rank, seat, actor, life, lost))
            for rank, connection in listener.accept(len(followers)).items():
                followers[rank - 1].connection = connection
        return followers

    def rendezvous(self) -> str:
        host = self._seated[0].host
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        return f"tcp://{host}:{port}"

    def close(self) -> None:
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        if self._owns_connection:
            self._ray.shutdown()


class RankListener:
    """Accepts the connections of ranks, which know the secret.

    Each peer is greeted in a thread of its own: one that is silent, slow or a stranger delays none of the others.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._socket, self._secret = socket.create_server((host, 0), backlog=128), secret
        self.address: tuple[str, int] = self._socket.getsockname()
        self._found: SimpleQueue[tuple[int, Connection]] = SimpleQueue()
        self._lock, self._greeted = threading.Lock(), deque[socket.socket]()  # the oldest first
        threading.Thread(target=self._listen, name="ranks that connect", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._socket.close()
        with self._lock:
            for peer in self._greeted:
                _turn_away(peer)

    def accept(self, num_ranks: int) -> dict[int, Connection]:
        """Return the connections of ranks 1 to `num_ranks`. Raises `LaunchError` if one has not connected in time."""
        connections: dict[int, Connection] = {}
        deadline = time.monotonic() + START_SECONDS
        while len(connections) < num_ranks:
            try:
                rank, connection = self._found.get(timeout=max(deadline - time.monotonic(), 0))
            except Empty:
                missing = ", ".join(str(rank) for rank in range(1, num_ranks + 1) if rank not in connections)
                reason = f"did not connect to {self.address[0]} within {START_SECONDS:.0f} s: is the network open?"
                raise LaunchError(f"rank {missing} {reason}") from None
            connections[rank] = connection
        return connections

    def _listen(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return  # closed
            with self._lock:
                self._greeted.append(peer)
                if len(self._greeted) > MAX_GREETINGS:
                    _turn_away(self._greeted.popleft())
            threading.Thread(target=self._greet, args=[peer], name="greeting of a rank", daemon=True).start()

    def _greet(self, peer: socket.socket) -> None:
        connection = Connection(os.dup(peer.fileno()))
        try:
            _limit_waits(peer, GREETING_SECONDS)
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            rank = connection.recv()
            _limit_waits(peer, 0)
            _send_at_once(connection)
            with self._lock:
                self._greeted.remove(peer)  # raises if it was turned away meanwhile
            connection.send_bytes(WELCOME)
            self._found.put((rank, connection))
        except Exception:  # of a stranger: anything
            connection.close()
            with self._lock, contextlib.suppress(ValueError):
                self._greeted.remove(peer)
        finally:
            peer.close()


def _turn_away(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has gone
        peer.shutdown(socket.SHUT_RDWR)


def _limit_waits(peer: socket.socket, seconds: int) -> None:
    """Let reads and writes raise OSError after `seconds`; 0: never."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def connect(rank: int, address: tuple[str, int], secret: bytes) -> Connection:
    """Connect a rank to the `RankListener` at `address`. Tries again if it is turned away in a crowd."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection = Client(address, authkey=secret)
            _send_at_once(connection)
            connection.send(rank)
            connection.recv_bytes(len(WELCOME))
        except (OSError, EOFError):
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
        else:
            return connection


class RankActor:
    """The actor of a rank."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def sit(self, folder: Path) -> Seat:
        """Find the model, and return the location of this actor."""
        import ray

        self._folder = find_model(folder)
        context = ray.get_runtime_context()
        gpu_ids = context.get_accelerator_ids().get("GPU", [])
        return Seat(context.get_node_id(), ray.util.get_node_ip_address(), tuple(map(str, gpu_ids)), os.getpid())

    def live(self, rank: int, address: tuple[str, int], secret: bytes, environment: Mapping[str, str]) -> None:
        """Follow rank 0, which listens at `address`, until it closes."""
        os.environ.update(environment)
        with connect(rank, address, secret) as connection:
            follow(connection, self._folder)


class _Actor:
    """A follower. Ray stops it when this process exits."""

    connection: Any = None  # a Connection, once it has connected

    def __init__(self, ray: Any, rank: int, seat: Seat, actor: Any, life: Any, lost: Lost) -> None:
        self._ray, self.rank, self._actor, self._life, self._lost = ray, rank, actor, life, lost
        self.where = f"pid {seat.pid} on {seat.host}"
        self._may_end = False
        threading.Thread(target=self._watch, name=f"watch over rank {rank}", daemon=True).start()

    def send(self, data: bytes) -> None:
        self.connection.send_bytes(data)

    def expect_end(self) -> None:
        self._may_end = True

    def end(self, kill: bool) -> None:
        self.expect_end()
        if not kill:
            self._ray.wait([self._life], timeout=EXIT_SECONDS)
        self._ray.kill(self._actor)
        if self.connection is not None:
            self.connection.close()

    def _watch(self) -> None:
        how = "ended"
        try:
            self._ray.get(self._life)
        except Exception as error:
            how = f"was lost: {_said(error)}"
        if not self._may_end:
            end_without(self, how, self._lost)


def find_model(folder: Path) -> Path:
    """Return the folder with the model's files on this node.

    This is the same folder if it exists. A model of the Hugging Face Hub is otherwise found in, or downloaded to, this
    node's cache. Raises `ModelError` if the model is not available.
    """
    match = re.search(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$", str(folder))
    if folder.is_dir() or match is None:
        return resolve_model(str(folder))
    return resolve_model(match[1].replace("--", "/"), revision=match[2])


def _connect() -> tuple[Any, bool]:
    """Return Ray, and whether this call has connected it."""
    import ray  # an optional dependency

    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address="auto", configure_logging=False)
    except ConnectionError:
        raise LaunchError(
            "distributed_executor_backend ray finds no Ray cluster here: `ray start --head` on the first machine, "
            "`ray start --address=FIRST:6379` on the others, or name one by RAY_ADDRESS"
        ) from None
    return ray, True


def _gpus_by_node(seats: Sequence[Seat]) -> dict[str, list[str]]:
    """Return the GPU ids of the ranks on each node."""
    gpus: dict[str, list[str]] = {seat.node_id: [] for seat in seats}
    for seat in seats:
        gpus[seat.node_id] += seat.gpu_ids
    return gpus


def _send_at_once(connection: Connection) -> None:
    """Send small messages without delay (TCP_NODELAY)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _said(error: Exception) -> str:
    """Return the first line of the error of Ray or of the actor."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
