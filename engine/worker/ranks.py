"""Several ranks that run one model together: rank 0 in this process, the others in processes that follow it, wherever a
launcher has started them.

Every rank launches the same steps. Each computes its heads and columns, all of them gather the same logits, and so all
sample the same tokens, which nothing sends back: what a follower is told is the scheduler's output and the masks of
grammars.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.core.batch import ScheduledBatch, SchedulerOutput, StepResult
from engine.core.cache_groups import CacheGroup
from engine.models.errors import ModelError
from engine.models.progress import Progress, silent
from engine.models.shard import Communicator, Shard, Stage
from engine.models.spec import ModelSpec
from engine.worker.block_file import BlockFile, BlockFileOptions
from engine.worker.communicator import GpuCommunicator, GroupCommunicator, StageLink
from engine.worker.device import CudaDevice
from engine.worker.launcher import Follower, Launcher, LocalLauncher, Lost, end_without
from engine.worker.model_runner import ModelRunner, StepHandle
from engine.worker.options import RunnerOptions
from engine.worker.rank_files import FileCall, Followers, Leader, OpenFile, of_rank
from engine.worker.startup import build_runner as build_single

LOSS_SECONDS = 5  # in which a follower's end is noticed
BEAT_SECONDS = 1.0  # between a follower's signs of life
MAX_MISSED = 7  # signs of life, one after another, until a follower is lost
START_SECONDS = 600  # that ranks may take to find each other
NO_BATCH = ScheduledBatch([], [], 0, 0, [])


@dataclass(frozen=True, slots=True)
class Build:
    """The first message to a follower."""

    rank: int  # of all
    shard: Shard
    stage: Stage
    device_index: int  # of its GPU
    one_host: bool  # all ranks are on
    rendezvous: str  # a URL where ranks find each other
    folder: Path
    spec: ModelSpec
    options: RunnerOptions

    def own_file(self, options: BlockFileOptions, folder: Path | None = None) -> BlockFileOptions:
        """The options of this rank's file of blocks. `folder`: has the model, where that is another one than rank 0's."""
        return of_rank(options, self.rank, f"{self.shard}, {self.stage}", folder or options.folder)


@dataclass(frozen=True, slots=True)
class Launch:
    """A step to run; `repeated`: with the batch of the one before it, which the output leaves out. `sampled`: in a pipeline the
    newest tokens of requests, which its first stage needs by now.
    """

    output: SchedulerOutput
    repeated: bool
    sampled: dict[str, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """The masks of the last step's guided requests, and which of them miss theirs."""

    masks: bytes
    deferred: list[int]


@dataclass(frozen=True, slots=True)
class Close:
    """The last message."""


def build_runner(
    folder: Path,
    spec: ModelSpec,
    options: RunnerOptions,
    *,
    progress: Progress = silent,
    launcher: Launcher | None = None,
    lost: Lost = lambda reason: None,
) -> ModelRunner | RankedRunner:
    """A runner of the model in `folder`, ready to step, on as many ranks as the options say. `launcher`: starts them, else
    they are processes of this machine. `lost`: is told which rank is lost, before this process ends for that.
    """
    num_ranks = options.num_ranks_per_stage * options.num_stages
    if num_ranks == 1:
        return build_single(folder, spec, options, progress=progress)
    return RankedRunner.build(folder, spec, options, launcher or LocalLauncher(num_ranks), lost, progress=progress)


@dataclass(frozen=True, slots=True)
class Membership:
    """What a rank has of the others, and the options for its device."""

    options: RunnerOptions
    communicator: Communicator
    link: StageLink | None


def join(build: Build) -> Membership:
    """Meet the other ranks, on this rank's device."""
    device, size, stage = build.options.device, build.shard.size, build.stage
    num_ranks = size * stage.count
    if isinstance(device, CudaDevice):
        device = CudaDevice(build.device_index)
        torch.cuda.set_device(device.torch_device)
    dist.init_process_group(
        "nccl" if device.is_accelerator else "gloo",
        init_method=build.rendezvous,
        rank=build.rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=START_SECONDS),
        device_id=device.torch_device if device.is_accelerator else None,
    )
    options = replace(build.options, device=device)
    if stage.count == 1:
        share_memory = device.is_accelerator and build.one_host
        communicator = (GpuCommunicator if share_memory else GroupCommunicator)(device.torch_device)
        return Membership(options, communicator, None)
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, num_ranks, size)]
    group = groups[build.rank // size]
    before = None if stage.is_first else build.rank + size
    after = None if stage.is_last else build.rank - size
    link = StageLink(before, after, build.spec.hidden_size, options.dtype, device.torch_device)
    return Membership(options, GroupCommunicator(device.torch_device, group), link)


class PipelinedStep:
    """A launched step that the stages before the last one work on; this one, the last, does its part when it is read: by then
    the next steps are launched, which the others work on meanwhile.
    """

    device_waited, has_ended = False, False

    def __init__(self, launch: Callable[[], StepHandle], sampled: dict[str, int]) -> None:
        """`launch`: this rank's part. `sampled`: gains the tokens that it gives."""
        self._launch, self._sampled = launch, sampled
        self._handle: StepHandle | None = None

    @property
    def has_run(self) -> bool:
        return self._handle is not None

    def run(self) -> StepHandle:
        """Launch this rank's part, unless that was done. Steps that were launched before have been run."""
        if self._handle is None:
            self._handle = self._launch()
        return self._handle

    @property
    def guided(self) -> list[int]:
        """Of a step that has not run: none."""
        return [] if self._handle is None else self._handle.guided

    @property
    def masks(self) -> np.ndarray:
        return self.run().masks

    @property
    def wait_seconds(self) -> float:
        return self.run().wait_seconds

    def sample(self, deferred: Sequence[int] = ()) -> None:
        self.run().sample(deferred)

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        output, result = self.run().read()
        tokens = iter(result.token_ids)
        for request_id, count in zip(output.batch.request_ids, result.num_sampled, strict=True):
            for _ in range(count):
                self._sampled[request_id] = next(tokens)
        return output, result


class Watch:
    """Receives the followers' answers, and looks for their signs of life: a follower that is stopped, or whose machine is
    gone, ends nothing by itself, and the others wait for it for ever.
    """

    def __init__(self, followers: Sequence[Follower], lost: Lost) -> None:
        self.answers: list[SimpleQueue[list[int]]] = [SimpleQueue() for _ in followers]
        self._followers, self._lost = followers, lost
        self._missed = [0] * len(followers)  # looks since the last message of each follower
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="answers of ranks", daemon=True).start()
        self._thread = threading.Thread(target=self._look, name="watch over ranks", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        indices: dict[Any, int] = {follower.connection: i for i, follower in enumerate(self._followers)}
        while indices and not self._ended.is_set():
            with contextlib.suppress(OSError):  # closed by this process, which ends the followers
                for connection in wait(list(indices), BEAT_SECONDS):
                    self._receive(connection, indices)

    def _receive(self, connection: Any, indices: dict[Any, int]) -> None:
        try:
            data = connection.recv_bytes()
        except (OSError, EOFError):  # its end is noticed elsewhere
            del indices[connection]
            return
        self._missed[indices[connection]] = 0
        if data:
            self.answers[indices[connection]].put(json.loads(data))

    def _look(self) -> None:
        """Looks are counted, not time: when this process or its machine sleeps, that says nothing about the others."""
        while not self._ended.wait(BEAT_SECONDS):
            for i, follower in enumerate(self._followers):
                self._missed[i] += 1
                if self._missed[i] > MAX_MISSED:
                    how = f"gave no sign of life for {MAX_MISSED * BEAT_SECONDS:.0f} s"
                    end_without(follower, how, self._lost)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class RankedRunner:
    """Rank 0's runner, which the processes of the other ranks follow. If one of those is lost, this process ends."""

    def __init__(
        self, build: Build, runner: ModelRunner, launcher: Launcher, followers: Sequence[Follower], watch: Watch
    ) -> None:
        """Use `build`."""
        self._build, self._runner, self._launcher = build, runner, launcher
        self.followers, self._watch = followers, watch
        self.num_blocks, self.block_size, self.max_model_len = (
            runner.num_blocks,
            runner.block_size,
            runner.max_model_len,
        )
        self.cache_bound, self.attention_backend = runner.cache_bound, runner.attention_backend
        self._batch = NO_BATCH  # of the last step
        self._is_pipelined = runner.options.num_stages > 1
        self._sampled: dict[str, int] = {}  # by requests, their newest tokens that no other rank knows
        self._guided: set[str] = set()  # requests
        self._waiting: list[PipelinedStep] = []  # that this rank has not run, the oldest first

    @classmethod
    def build(
        cls,
        folder: Path,
        spec: ModelSpec,
        options: RunnerOptions,
        launcher: Launcher,
        lost: Lost,
        *,
        progress: Progress,
    ) -> RankedRunner:
        """Start the followers and load every rank's part side by side. ModelError as `startup.build_runner`."""
        size, num_stages, locations = options.num_ranks_per_stage, options.num_stages, launcher.locations
        spec.for_rank(Shard(0, size))  # says at once what cannot be divided
        Stage(0, num_stages).layers(spec.num_layers)
        one_host = len({location.host for location in locations}) == 1
        with launcher.rendezvous() as rendezvous:
            builds = [
                Build(
                    rank,
                    Shard(rank % size, size),
                    Stage(num_stages - 1 - rank // size, num_stages),
                    location.device_index,
                    one_host,
                    rendezvous,
                    folder,
                    spec,
                    options,
                )
                for rank, location in enumerate(locations)
            ]
            followers = launcher.start(lost)
            try:
                for follower, build in zip(followers, builds[1:], strict=True):
                    follower.send(pickle.dumps(build))
                runner = _build_part(builds[0], folder, progress)
            except BaseException:
                for follower in followers:
                    follower.end(kill=True)
                launcher.close()
                if dist.is_initialized():
                    dist.destroy_process_group()
                raise
        return cls(builds[0], runner, launcher, followers, Watch(followers, lost))

    @property
    def cache_groups(self) -> Sequence[CacheGroup]:
        return self._runner.cache_groups

    @property
    def kv_cache_bytes(self) -> int:
        """Of all ranks together."""
        return self._runner.kv_cache_bytes * (1 + len(self.followers))

    @property
    def device_name(self) -> str:
        return f"{1 + len(self.followers)} x {self._runner.device_name}"

    def launch(self, output: SchedulerOutput) -> StepHandle | PipelinedStep:
        repeated = output.batch is self._batch
        sampled = dict(self._sampled)
        self._sampled.clear()
        self._tell(Launch(replace(output, batch=NO_BATCH) if repeated else output, repeated, sampled))
        self._batch = output.batch
        if not self._is_pipelined:
            return self._launch_here(output)
        self._guided.difference_update(output.removed)
        self._guided.update(new.request_id for new in output.new_requests if new.request.sampling.structured_outputs)
        step = PipelinedStep(partial(self._launch_here, output), self._sampled)
        self._waiting = [*(each for each in self._waiting if not each.has_run), step]
        if not self._guided.isdisjoint(output.batch.request_ids):  # whose masks are filled before it is read
            self._run_waiting()
        return step

    def _run_waiting(self) -> None:
        for step in self._waiting:
            step.run()
        self._waiting.clear()

    def _launch_here(self, output: SchedulerOutput) -> StepHandle:
        handle = self._runner.launch(output)
        if handle.finish is not None:
            handle.finish = partial(self._sample, handle, handle.finish)
        return handle

    def reset(self) -> None:
        """After a failed step ranks wait for each other in vain: nothing but a new start helps. Where the step failed since a
        rank was lost, this process ends while it waits here, and the log has the rank's name.
        """
        time.sleep(LOSS_SECONDS)
        raise RuntimeError("a step failed on one of several ranks")

    def _sample(self, handle: StepHandle, finish: Callable[[Sequence[int]], None], deferred: Sequence[int]) -> None:
        self._tell(Sample(handle.masks.tobytes(), list(deferred)))
        finish(deferred)

    def _tell(self, message: Launch | Sample | OpenFile | FileCall | Close) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for follower in self.followers:
            follower.send(data)

    def open_block_file(self, options: BlockFileOptions) -> BlockFile | None:
        """Rank 0's file, which calls the followers' files. None when a rank's file cannot be used."""
        self._tell(OpenFile(options))
        followers = Followers(self._call_files, self._watch.answers)
        return self._runner.open_block_file(self._build.own_file(options), followers)

    def _call_files(self, call: FileCall) -> None:
        self._run_waiting()  # so that blocks have the same content as on the other stages
        self._tell(call)

    def close(self) -> None:
        """End the followers and release the devices' memory."""
        self._run_waiting()  # what the other stages have begun
        self._watch.end()
        for follower in self.followers:
            follower.expect_end()
        with contextlib.suppress(OSError):
            self._tell(Close())
        _leave(self._runner)
        for follower in self.followers:
            follower.end(kill=False)
        self._launcher.close()


def follow(connection: Connection, folder: Path | None = None) -> None:
    """A follower's whole life: build its part, then launch what rank 0 launches, until `Close`. `folder`: has the model,
    where that is another one than rank 0's. ModelError as `startup.build_runner`.
    """
    build: Build = pickle.loads(connection.recv_bytes())
    try:
        runner = _build_part(build, folder or build.folder, silent)
    except ModelError as error:
        raise ModelError(f"rank {build.rank}: {error}") from None
    leader = Leader(connection)
    threading.Thread(target=_beat, args=[leader], name="signs of life", daemon=True).start()
    file: BlockFile | None = None
    handle: StepHandle | None = None
    batch = NO_BATCH
    while True:
        match pickle.loads(connection.recv_bytes()):
            case Launch(output, repeated, sampled):
                batch = batch if repeated else output.batch
                runner.learn(sampled)
                launched = runner.launch(replace(output, batch=batch))
                if handle is not None and handle.done is not None:
                    handle.done.synchronize()  # as rank 0: at most two steps are queued
                handle = launched
            case Sample(masks, deferred):
                assert handle is not None
                if build.stage.is_last:
                    handle.masks[:] = np.frombuffer(masks, np.int32).reshape(handle.masks.shape)
                handle.sample(deferred)
            case OpenFile(file_options):
                file = runner.open_block_file(build.own_file(file_options, folder), leader)
            case FileCall(method, arguments):
                getattr(file, method)(*arguments)
            case Close():
                break
    _leave(runner)


def _beat(leader: Leader) -> None:
    with contextlib.suppress(OSError):  # rank 0 is gone
        while True:
            leader.beat()
            time.sleep(BEAT_SECONDS)


def _build_part(build: Build, folder: Path, progress: Progress) -> ModelRunner:
    """A rank's runner, once it has met the others."""
    member = join(build)
    return build_single(
        folder, build.spec, member.options, progress=progress, shard=build.shard, stage=build.stage,
        communicator=member.communicator, link=member.link,
    )  # fmt: skip


def _leave(runner: ModelRunner) -> None:
    """Part from the other ranks, which do so at the same time: NCCL's connections end together, and after the graphs that
    use them.
    """
    runner.device.synchronize()
    runner.close()
    dist.destroy_process_group()
