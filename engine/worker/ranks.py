"""Several ranks that run one model together: rank 0 in this process, the others in processes that follow it.

Every rank launches the same steps. Each computes its heads and columns, all of them gather the same logits, and so all
sample the same tokens, which nothing sends back: what a follower is told is the scheduler's output and the masks of
grammars.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.core.batch import ScheduledBatch, SchedulerOutput
from engine.core.cache_groups import CacheGroup
from engine.models.errors import ModelError
from engine.models.progress import Progress, silent
from engine.models.shard import Communicator, Shard
from engine.models.spec import ModelSpec
from engine.worker.block_copier import BlockCopier
from engine.worker.communicator import GpuCommunicator, GroupCommunicator
from engine.worker.device import CudaDevice
from engine.worker.model_runner import ModelRunner, StepHandle
from engine.worker.options import RunnerOptions
from engine.worker.startup import build_runner as build_single

_log = logging.getLogger(__name__)
START_SECONDS = 600  # that ranks may take to find each other
EXIT_SECONDS = 10
NO_BATCH = ScheduledBatch([], [], 0, 0, [])


@dataclass(frozen=True, slots=True)
class Build:
    """The first message to a follower."""

    shard: Shard
    store: str  # a file where ranks find each other
    folder: Path
    spec: ModelSpec
    options: RunnerOptions


@dataclass(frozen=True, slots=True)
class Launch:
    """A step to run; `repeated`: with the batch of the one before it, which the output leaves out."""

    output: SchedulerOutput
    repeated: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """The masks of the last step's guided requests, and which of them miss theirs."""

    masks: bytes
    deferred: list[int]


@dataclass(frozen=True, slots=True)
class Close:
    """The last message."""


def build_runner(
    folder: Path, spec: ModelSpec, options: RunnerOptions, *, progress: Progress = silent
) -> ModelRunner | RankedRunner:
    """A runner of the model in `folder`, ready to step, on as many ranks as the options say."""
    if options.num_ranks == 1:
        return build_single(folder, spec, options, progress=progress)
    return RankedRunner.build(folder, spec, options, progress=progress)


def join(build: Build) -> tuple[RunnerOptions, Communicator]:
    """Meet the other ranks, on this rank's device. Returns the options for it."""
    device, shard = build.options.device, build.shard
    if isinstance(device, CudaDevice):
        device = CudaDevice(shard.rank)
        torch.cuda.set_device(device.torch_device)
    dist.init_process_group(
        "nccl" if device.is_accelerator else "gloo",
        init_method=f"file://{build.store}",
        rank=shard.rank,
        world_size=shard.size,
        timeout=timedelta(seconds=START_SECONDS),
        device_id=device.torch_device if device.is_accelerator else None,
    )
    communicator = GpuCommunicator(device.torch_device) if device.is_accelerator else GroupCommunicator()
    return replace(build.options, device=device), communicator


class RankedRunner:
    """Rank 0's runner, which the processes of the other ranks follow. If one of those is lost, this process ends."""

    def __init__(self, runner: ModelRunner, followers: Sequence[_Follower]) -> None:
        """Use `build`."""
        self._runner, self._followers = runner, followers
        self.num_blocks, self.block_size, self.max_model_len = (
            runner.num_blocks,
            runner.block_size,
            runner.max_model_len,
        )
        self._batch = NO_BATCH  # of the last step

    @classmethod
    def build(cls, folder: Path, spec: ModelSpec, options: RunnerOptions, *, progress: Progress) -> RankedRunner:
        """Start the followers and load every rank's part side by side. ModelError as `startup.build_runner`."""
        size = options.num_ranks
        spec.for_rank(Shard(0, size))  # says at once what cannot be divided
        with tempfile.TemporaryDirectory(prefix="quire-ranks-") as name:
            first = Build(Shard(0, size), f"{name}/store", folder, spec, options)
            followers = [_Follower(rank) for rank in range(1, size)]
            try:
                for follower in followers:
                    follower.send(pickle.dumps(replace(first, shard=Shard(follower.rank, size))))
                own, communicator = join(first)
                runner = build_single(
                    folder, spec, own, progress=progress, shard=first.shard, communicator=communicator
                )
            except BaseException:
                for follower in followers:
                    follower.end(kill=True)
                if dist.is_initialized():
                    dist.destroy_process_group()
                raise
        return cls(runner, followers)

    @property
    def cache_groups(self) -> Sequence[CacheGroup]:
        return self._runner.cache_groups

    @property
    def kv_cache_bytes(self) -> int:
        """Of all ranks together."""
        return self._runner.kv_cache_bytes * (1 + len(self._followers))

    @property
    def device_name(self) -> str:
        return f"{1 + len(self._followers)} x {self._runner.device_name}"

    def launch(self, output: SchedulerOutput) -> StepHandle:
        repeated = output.batch is self._batch
        self._tell(Launch(replace(output, batch=NO_BATCH) if repeated else output, repeated))
        self._batch = output.batch
        handle = self._runner.launch(output)
        if handle.finish is not None:
            handle.finish = partial(self._sample, handle, handle.finish)
        return handle

    def reset(self) -> None:
        """After a failed step ranks wait for each other in vain: nothing but a new start helps."""
        raise RuntimeError("a step failed on one of several ranks")

    def _sample(self, handle: StepHandle, finish: Callable[[Sequence[int]], None], deferred: Sequence[int]) -> None:
        self._tell(Sample(handle.masks.tobytes(), list(deferred)))
        finish(deferred)

    def _tell(self, message: Launch | Sample | Close) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for follower in self._followers:
            follower.send(data)

    def block_copier(self, max_bytes: int) -> BlockCopier:
        raise NotImplementedError("each rank has a part of every block")

    def close(self) -> None:
        """End the followers and release the devices' memory."""
        for follower in self._followers:
            follower.expect_end()
        with contextlib.suppress(OSError):
            self._tell(Close())
        _leave(self._runner)
        for follower in self._followers:
            follower.end(kill=False)


class _Follower:
    """The process of another rank. Its standard input is its lifeline: it ends when this process does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._connection, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.worker.follower", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            process_group=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        self._may_end = False
        threading.Thread(target=self._watch, name=f"watch over rank {rank}", daemon=True).start()

    def send(self, data: bytes) -> None:
        self._connection.send_bytes(data)

    def expect_end(self) -> None:
        """Its end is no failure any more."""
        self._may_end = True

    def end(self, kill: bool) -> None:
        self.expect_end()
        if kill:
            self._popen.kill()
        try:
            self._popen.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._connection.close()
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def _watch(self) -> None:
        """A collective without one of its ranks never ends: without a follower there is nothing left to do here."""
        code = self._popen.wait()
        if self._may_end:
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        _log.critical("the process of rank %d (pid %d) %s", self.rank, self._popen.pid, how)
        logging.shutdown()
        os._exit(1)


def follow(connection: Connection) -> None:
    """A follower's whole life: build its part, then launch what rank 0 launches, until `Close`."""
    build: Build = pickle.loads(connection.recv_bytes())
    options, communicator = join(build)
    try:
        runner = build_single(build.folder, build.spec, options, shard=build.shard, communicator=communicator)
    except ModelError as error:
        _log.critical("rank %d: %s", build.shard.rank, error)
        sys.exit(1)
    handle: StepHandle | None = None
    batch = NO_BATCH
    while True:
        match pickle.loads(connection.recv_bytes()):
            case Launch(output, repeated):
                batch = batch if repeated else output.batch
                launched = runner.launch(replace(output, batch=batch))
                if handle is not None and handle.done is not None:
                    handle.done.synchronize()  # as rank 0: at most two steps are queued
                handle = launched
            case Sample(masks, deferred):
                assert handle is not None
                handle.masks[:] = np.frombuffer(masks, np.int32).reshape(handle.masks.shape)
                handle.sample(deferred)
            case Close():
                break
    _leave(runner)


def _leave(runner: ModelRunner) -> None:
    """Part from the other ranks, which do so at the same time: NCCL's connections end together, and after the graphs that
    use them.
    """
    runner.device.synchronize()
    runner.close()
    dist.destroy_process_group()
