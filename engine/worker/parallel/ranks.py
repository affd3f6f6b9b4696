"""Several ranks that run one model: rank 0 in this process, the followers in processes started by a launcher.

Every rank launches the same steps. Each computes its heads and columns, all gather the same logits, or the same keys
of each one's best tokens, and so all sample the same tokens, which need not be sent back. Rank 0 sends only the
scheduler's output and grammar masks to the followers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from engine.core.batch import BlockMoves, ScheduledBatch, SchedulerOutput, StepResult
from engine.core.engine_request import Adapter
from engine.core.kv.cache_groups import CacheGroup
from engine.models.errors import ModelError
from engine.models.files import Progress, silent
from engine.models.shard import Shard, Stage
from engine.models.spec import ModelSpec
from engine.worker.block_store.block_file import BlockFile, BlockFileOptions
from engine.worker.device import Stopwatch
from engine.worker.kv_cache import KVCacheTooSmallError
from engine.worker.model_runner import ModelRunner
from engine.worker.options import RunnerOptions
from engine.worker.parallel.adapter_reads import AdapterReads, ReadAdapter, report_read
from engine.worker.parallel.connections import Build, Connections
from engine.worker.parallel.launcher import Follower, Launcher, LocalLauncher, Lost, end_without
from engine.worker.parallel.losses import LOSS_SECONDS, Answers, Losses, RankLostError
from engine.worker.parallel.rank_files import FileCall, Followers, Leader, OpenFile
from engine.worker.startup import build_runner as build_single
from engine.worker.step_handle import StepHandle

_log = logging.getLogger(__name__)

CONFIRMED_STEPS = 1000  # after a failed step, so many are confirmed: else a rank's failure is noticed one step late
RESET_SECONDS = 60  # time for all ranks to leave a failed step and confirm it
BEAT_SECONDS = 1.0  # between a follower's heartbeats
MAX_MISSED = 7  # a follower is lost after more successive missed heartbeats
NO_BATCH = ScheduledBatch([], [], 0, 0, [])


@dataclass(frozen=True, slots=True)
class Launch:
    """A step to run. `repeated`: it has the batch of the previous step, which the output leaves out.

    `sampled`: with pipeline parallelism, the tokens of requests since the last `Launch`, for the first stage.
    `confirm`: the last stage's ranks answer [0] once they have run it, or [1] if they could not.
    """

    output: SchedulerOutput
    repeated: bool
    sampled: dict[str, list[int]]
    confirm: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """Copies of blocks without a step."""

    moves: BlockMoves


@dataclass(frozen=True, slots=True)
class Sample:
    """The grammar masks of the last step's guided requests, and the indices to defer."""

    masks: bytes
    deferred: list[int]
    confirm: bool = False  # as in `Launch`


@dataclass(frozen=True, slots=True)
class Reset:
    """A step has failed: forget all rows and steps, connect anew, and answer []. Ranks that failed wait for this."""

    rendezvous: str


@dataclass(frozen=True, slots=True)
class AdapterCall:
    """Call a method of the runner about a LoRA adapter, as rank 0 does."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """The last message."""


AdapterMessage: TypeAlias = ReadAdapter | AdapterCall


def build_runner(
    folder: Path,
    spec: ModelSpec,
    options: RunnerOptions,
    *,
    progress: Progress = silent,
    launcher: Launcher | None = None,
    lost: Lost = lambda reason: None,
) -> ModelRunner | RankedRunner:
    """Build a runner of the model in `folder`, ready to step, on as many ranks as the options say.

    `launcher`: starts the ranks; default: processes on this machine. `lost`: called with the reason when a rank is
    lost: if it returns True, calls of the runner raise `RankLostError`, otherwise this process exits.
    """
    num_ranks = options.num_ranks_per_stage * options.num_stages
    if num_ranks == 1:
        return build_single(folder, spec, options, progress=progress)
    return RankedRunner.build(folder, spec, options, launcher or LocalLauncher(num_ranks), lost, progress=progress)


class PipelinedStep:
    """A launched step that runs on the stages before the last one.

    This rank, on the last stage, runs its part when the step is read. The next steps are launched by then, and the
    other stages work on them meanwhile.
    """

    device_waited, has_ended = False, False

    def __init__(
        self,
        launch: Callable[[], StepHandle],
        sampled: dict[str, list[int]],
        encoder_seconds: Callable[[], float] = float,
    ) -> None:
        """`launch`: launches this rank's part. `sampled`: receives its tokens. `encoder_seconds`: returns what the
        first stage has reported since.
        """
        self._launch, self._sampled, self._encoder_seconds = launch, sampled, encoder_seconds
        self._handle: StepHandle | None = None

    @property
    def has_run(self) -> bool:
        return self._handle is not None

    def run(self) -> StepHandle:
        """Launch this rank's part, if not done yet. All earlier steps must have been run."""
        if self._handle is None:
            self._handle = self._launch()
        return self._handle

    @property
    def guided(self) -> list[int]:
        """The guided indices of a step that has run; empty before."""
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
            if count:
                self._sampled.setdefault(request_id, []).extend(islice(tokens, count))
        if seconds := self._encoder_seconds():
            result = replace(result, encoder_seconds=seconds)
        return output, result


class Watch:
    """Receives the followers' replies and checks their heartbeats.

    If a follower is stopped or its machine is lost, no process exits by itself, and the other ranks would wait forever.
    """

    def __init__(self, followers: Sequence[Follower], losses: Losses, seconds: float = BEAT_SECONDS) -> None:
        """`seconds`: between checks."""
        self.answers = [Answers(losses) for _ in followers]
        self.adapters = AdapterReads(1 + len(followers))
        self._encoder_seconds: deque[float] = deque()  # of the first stage's steps
        self._followers, self._losses, self._seconds = followers, losses, seconds
        self._missed = [0] * len(followers)  # checks since each follower's last message
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="answers of ranks", daemon=True).start()
        self._thread = threading.Thread(target=self._look, name="watch over ranks", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        indices: dict[Any, int] = {follower.connection: i for i, follower in enumerate(self._followers)}
        while indices and not self._ended.is_set():
            indices = {each: i for each, i in indices.items() if not each.closed}
            with contextlib.suppress(OSError):  # this process has closed it, to stop the followers
                for connection in wait(list(indices), self._seconds):
                    self._receive(connection, indices)

    def _receive(self, connection: Any, indices: dict[Any, int]) -> None:
        try:
            data = connection.recv_bytes()
        # The follower's exit is noticed elsewhere. TypeError: this process closes the connection meanwhile.
        except (OSError, EOFError, TypeError):
            del indices[connection]
            return
        self._missed[indices[connection]] = 0
        message = json.loads(data) if data else None
        if isinstance(message, list):
            self.answers[indices[connection]].put(message)
        elif message and "read" in message:
            self.adapters.receive(message)
        elif message and "encoder_seconds" in message:
            self._encoder_seconds.append(message["encoder_seconds"])

    def take_encoder_seconds(self) -> float:
        """Return for how long another stage encoded images since the last call, as far as it has reported."""
        return sum(self._encoder_seconds.popleft() for _ in range(len(self._encoder_seconds)))

    def _look(self) -> None:
        """Count checks, not time: when this process or its machine sleeps, that says nothing about the followers."""
        while not self._ended.wait(self._seconds):
            for i, follower in enumerate(self._followers):
                self._missed[i] += 1
                if self._missed[i] > MAX_MISSED:
                    how = f"sent no heartbeat for {MAX_MISSED * self._seconds:.0f} s"
                    return end_without(follower, how, self._losses)
        return None

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class RankedRunner:
    """Rank 0's runner, which sends its calls to the followers. If one is lost, see `build_runner`."""

    def __init__(
        self,
        build: Build,
        runner: ModelRunner,
        launcher: Launcher,
        followers: Sequence[Follower],
        watch: Watch,
        connections: Connections,
        losses: Losses,
    ) -> None:
        """Use `build`."""
        self._build, self._runner, self._launcher = build, runner, launcher
        self.followers, self._watch = followers, watch
        self._connections, self._losses = connections, losses
        self.num_blocks, self.num_states = runner.num_blocks, runner.num_states
        self.block_size, self.max_model_len = runner.block_size, runner.max_model_len
        self.cache_bound, self.attention_backend = runner.cache_bound, runner.attention_backend
        self.step_seconds = runner.step_seconds
        self._batch = NO_BATCH  # the last step's
        self._is_pipelined = runner.options.num_stages > 1
        self._sampled: dict[str, list[int]] = {}  # request id → tokens that are not yet sent to the other ranks
        self._guided: set[str] = set()  # ids of guided requests
        self._waiting: list[PipelinedStep] = []  # steps that this rank has not run, the oldest first
        self._num_to_confirm = 0  # steps
        self._unreset: list[Follower] = []  # followers that have yet to leave a failed step

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
        """Start the followers and load all parts in parallel. Raises `ModelError` as `startup.build_runner` does, and
        `RankLostError`.
        """
        losses = Losses(lost)
        size, num_stages, locations = options.num_ranks_per_stage, options.num_stages, launcher.locations
        followers: Sequence[Follower] = ()
        is_in_use = dist.is_initialized()  # by another engine of this process
        try:
            spec.for_rank(Shard(0, size))  # raises an error at once if the model cannot be divided
            Stage(0, num_stages).layers(spec.num_layers)
            rendezvous = launcher.rendezvous()
            stages = [locations[first : first + size] for first in range(0, len(locations), size)]
            builds = [
                Build(
                    rank,
                    Shard(rank % size, size),
                    Stage(num_stages - 1 - rank // size, num_stages),
                    location.device_index,
                    len({each.host for each in stages[rank // size]}) == 1,
                    rendezvous,
                    folder,
                    spec,
                    options,
                )
                for rank, location in enumerate(locations)
            ]
            followers = launcher.start(losses)
            for follower, build in zip(followers, builds[1:], strict=True):
                follower.send(pickle.dumps(build))
            connections = Connections(builds[0], losses)
            runner = _build_part(builds[0], folder, progress, connections)
        except BaseException as error:
            try:
                losses.check(LOSS_SECONDS if followers and _may_be_of_a_loss(error) else 0)
            finally:
                for follower in followers:
                    follower.end(kill=True)
                if dist.is_initialized() and not is_in_use:
                    dist.destroy_process_group()
                launcher.close()
            raise
        return cls(builds[0], runner, launcher, followers, Watch(followers, losses), connections, losses)

    @property
    def cache_groups(self) -> Sequence[CacheGroup]:
        return self._runner.cache_groups

    @property
    def kv_cache_bytes(self) -> int:
        """The sum over all ranks."""
        return self._runner.kv_cache_bytes * (1 + len(self.followers))

    @property
    def device_name(self) -> str:
        return f"{1 + len(self.followers)} x {self._runner.device_name}"

    def launch(self, output: SchedulerOutput) -> StepHandle | PipelinedStep:
        repeated = output.batch is self._batch
        sampled = dict(self._sampled)
        self._sampled.clear()
        confirm, self._num_to_confirm = self._num_to_confirm > 0, max(self._num_to_confirm - 1, 0)
        self._tell(Launch(replace(output, batch=NO_BATCH) if repeated else output, repeated, sampled, confirm))
        self._batch = output.batch
        if not self._is_pipelined:
            return self._launch_here(output, confirm)
        self._guided.difference_update(output.removed)
        self._guided.update(new.request_id for new in output.new_requests if new.request.sampling.structured_outputs)
        launch = partial(self._launch_here, output, confirm)
        step = PipelinedStep(launch, self._sampled, self._watch.take_encoder_seconds)
        self._waiting = [*(each for each in self._waiting if not each.has_run), step]
        if not self._guided.isdisjoint(output.batch.request_ids):  # their masks are filled before the step is read
            self._run_waiting()
        return step

    def move_blocks(self, moves: BlockMoves) -> None:
        self._run_waiting()  # copies begin after earlier steps
        self._tell(Move(moves))
        self._runner.move_blocks(moves)

    def finished_loads(self) -> list[int]:
        """See `HostBlocks.finished_loads`. Other ranks wait for a load when they get `BlockMoves.arrived`."""
        return self._runner.finished_loads()

    def wait_for_load(self) -> None:
        """See `HostBlocks.wait_for_load`."""
        self._runner.wait_for_load()

    @property
    def num_host_slots(self) -> list[int]:
        """See `HostBlocks.num_slots`. Other ranks allocate the same ones at the same time, or wait for them."""
        return self._runner.num_host_slots

    def _run_waiting(self) -> None:
        for step in self._waiting:
            step.run()
        self._waiting.clear()

    def _launch_here(self, output: SchedulerOutput, confirm: bool) -> StepHandle:
        handle = self._runner.launch(output)
        if handle.finish is not None:
            handle.finish = partial(self._sample, handle, handle.finish, confirm)
        self._check_others(confirm)
        return handle

    def _check_others(self, confirm: bool) -> None:
        """Raise an error if the last message failed on another rank of this stage. `confirm`: as in the message."""
        of_stage = self._watch.answers[: self._build.shard.size - 1]
        if confirm and any(answers.get() != [0] for answers in of_stage):
            raise RuntimeError("a step failed on another rank; the log has its error")

    def reset(self) -> None:
        """Drop all steps in flight on all ranks, after a failed one or to run other requests.

        Raises an error if a rank was lost, or if the ranks cannot leave the step: on GPUs, stages cannot, nor can a
        rank that waits in a collective for another one that has failed. Then this process exits within RESET_SECONDS.
        """
        self._batch = NO_BATCH
        self._sampled.clear()
        self._guided.clear()
        self._waiting.clear()
        self._unreset = list(self.followers)
        deadline = threading.Timer(RESET_SECONDS, self._give_up)  # nothing else ends a wait for a GPU
        deadline.daemon = True
        deadline.start()
        try:
            if not self._connections.survive_failures:
                raise RuntimeError("a step failed on one of several stages")
            self._connections.leave()
            rendezvous = self._launcher.rendezvous() if self._connections.are_renewed else ""
            self._tell(Reset(rendezvous))
            self._connections.renew(rendezvous)
            self._runner.reset()
            for answers in self._watch.answers:
                while answers.get():  # what is left of dropped steps
                    pass
                self._unreset.pop(0)
            self._num_to_confirm = CONFIRMED_STEPS if self._connections.are_renewed else 0
        except Exception:
            self._losses.check(LOSS_SECONDS)
            raise
        finally:
            deadline.cancel()

    def _give_up(self) -> None:
        if self._unreset:
            end_without(self._unreset[0], f"did not leave a failed step within {RESET_SECONDS} s", self._losses)

    def _sample(
        self, handle: StepHandle, finish: Callable[[Sequence[int]], None], confirm: bool, deferred: Sequence[int]
    ) -> None:
        self._tell(Sample(handle.masks.tobytes(), list(deferred), confirm))
        finish(deferred)
        self._check_others(confirm)

    def _tell(self, message: Launch | Move | Sample | Reset | OpenFile | FileCall | AdapterMessage | Close) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            for follower in self.followers:
                follower.send(data)
        except OSError:
            self._losses.check(LOSS_SECONDS)
            raise

    def load_adapter(self, adapter: Adapter) -> Future[Any]:
        """See `AdapterSlots.load`. Each rank reads its part of the files in a thread; ready once all have."""
        number, ready = self._watch.adapters.begin()
        self._tell(ReadAdapter(adapter, number))
        self._watch.adapters.finish_own(number, self._runner.load_adapter(adapter))
        return ready

    def drop_adapter(self, adapter: Adapter) -> None:
        """See `AdapterSlots.drop`."""
        self._tell(AdapterCall("drop_adapter", (adapter,)))
        self._runner.drop_adapter(adapter)

    @property
    def num_adapter_parts(self) -> int:
        """See `AdapterSlots.num_parts`. This rank decides for all."""
        return self._runner.num_adapter_parts

    def place_adapter(self, adapter: Adapter, slot: int, part: int, num_parts: int) -> None:
        """See `AdapterSlots.place`. All ranks have read their parts."""
        self._tell(AdapterCall("place_adapter", (adapter, slot, part, num_parts)))
        self._runner.place_adapter(adapter, slot, part, num_parts)

    def open_block_file(self, options: BlockFileOptions) -> BlockFile | None:
        """Open rank 0's file, which calls the followers' files. Returns None if a rank's file cannot be used."""
        self._tell(OpenFile(options))
        followers = Followers(options.pool, self._call_files, self._watch.answers)
        return self._runner.open_block_file(self._build.own_file(options), followers)

    def _call_files(self, call: FileCall) -> None:
        self._run_waiting()  # so that the blocks are up to date, as on the other stages
        self._tell(call)

    def close(self) -> None:
        """Stop the followers and release the devices' memory."""
        if not self._losses:
            self._run_waiting()  # steps that the other stages have started
        self._watch.end()
        for follower in self.followers:
            follower.expect_end()
        if self._losses:
            for follower in self.followers:
                follower.end(kill=True)
        else:
            with contextlib.suppress(OSError):
                self._tell(Close())
        _leave(self._runner)
        for follower in self.followers:
            follower.end(kill=False)
        self._launcher.close()


def follow(connection: Connection, folder: Path | None = None) -> None:
    """Run a follower: build its part, then execute rank 0's messages until `Close`.

    `folder`: the model's, if it differs from rank 0's. Raises `ModelError` as `startup.build_runner` does.
    """
    build: Build = pickle.loads(connection.recv_bytes())
    connections, leader = Connections(build), Leader(connection)
    try:
        runner = _build_part(build, folder or build.folder, silent, connections)
    except Exception as error:
        said = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        leader.report({"failed": said.partition("\n")[0]})
        if isinstance(error, ModelError):
            raise ModelError(f"rank {build.rank}: {error}") from None
        raise
    gc.collect()
    gc.freeze()  # what lives as long as this process is not searched for garbage while the other ranks wait
    threading.Thread(target=_beat, args=[leader], name="heartbeats", daemon=True).start()
    files: dict[int, BlockFile | None] = {}  # by pool
    steps = FollowedSteps(build, runner, connections, leader.report)
    while True:
        if steps.have_failed and not connections.are_renewed and not connection.poll(RESET_SECONDS):
            raise RuntimeError("a step failed on this rank alone")
        match pickle.loads(connection.recv_bytes()):
            case Move(moves):
                if not steps.have_failed:
                    runner.move_blocks(moves)
            case Launch() | Sample() as message:
                steps.run(message)
                if message.confirm and build.stage.is_last:
                    leader.agree([int(steps.have_failed)])
            case Reset(rendezvous):
                steps.reset(rendezvous)
                leader.agree([])
            case OpenFile(file_options):
                files[file_options.pool] = runner.open_block_file(build.own_file(file_options, folder), leader)
            case FileCall(pool, method, arguments):
                getattr(files[pool], method)(*arguments)
            case ReadAdapter(adapter, number):
                report_read(number, build.rank, leader.report, runner.load_adapter(adapter))
            case AdapterCall(method, arguments):
                getattr(runner, method)(*arguments)
            case Close():
                break
    _leave(runner)


class FollowedSteps:
    """The steps of a follower. After one has failed, it ignores the next ones until rank 0 drops them all."""

    def __init__(
        self,
        build: Build,
        runner: ModelRunner,
        connections: Connections,
        report: Callable[[dict[str, Any]], None] = lambda report: None,
    ) -> None:
        """`report`: sends rank 0 what it has not asked for."""
        self._build, self._runner, self._connections, self._report = build, runner, connections, report
        self._encodings: deque[Stopwatch] = deque()  # measured the encoder, and are not reported yet
        # One rank of the first of several stages says how long images took.
        self._reports_encoder = build.stage.is_first and not build.stage.is_last and build.shard.rank == 0
        self.have_failed = False
        self._handle: StepHandle | None = None  # of the last step
        self._batch = NO_BATCH

    def run(self, message: Launch | Sample) -> None:
        """Launch a step or sample its guided requests. Raises an error if only the end of this process helps."""
        if self.have_failed:
            if not self._connections.are_renewed:
                raise RuntimeError("a step failed on this rank alone, and rank 0 waits for it")
            return
        try:
            if isinstance(message, Launch):
                self._launch(message)
            else:
                self._sample(message)
        except Exception:
            if not self._connections.survive_failures:
                raise
            _log.warning("rank %d left a step, which failed here or on another rank", self._build.rank, exc_info=True)
            self.have_failed = True
        if self.have_failed:  # the exception, which holds on to the connections, is gone by now
            self._connections.leave()

    def _launch(self, message: Launch) -> None:
        self._batch = self._batch if message.repeated else message.output.batch
        if self._build.stage.is_first:  # it embeds them; the last stage has sampled them
            self._runner.batch.set_newest(message.sampled)
        launched = self._runner.launch(replace(message.output, batch=self._batch))
        if self._handle is not None and self._handle.done is not None:
            self._handle.done.synchronize()  # like rank 0, queue at most two steps
        self._handle = launched
        if launched.encoding is not None and self._reports_encoder:
            self._encodings.append(launched.encoding)
        while self._encodings and self._encodings[0].is_done():
            self._report({"encoder_seconds": self._encodings.popleft().seconds()})

    def _sample(self, message: Sample) -> None:
        handle = self._handle
        assert handle is not None
        if self._build.stage.is_last:
            handle.masks[:] = np.frombuffer(message.masks, np.int32).reshape(handle.masks.shape)
        handle.sample(message.deferred)

    def reset(self, rendezvous: str) -> None:
        """Forget all steps and rows, as all ranks do at the same time. Raises if the device itself has failed."""
        self._handle, self._batch = None, NO_BATCH
        self._connections.renew(rendezvous)
        self._runner.reset()
        self.have_failed = False


def _may_be_of_a_loss(error: BaseException) -> bool:
    """Return False for errors of rank 0 itself, which say what is wrong with the model or the memory."""
    own = (ModelError, KVCacheTooSmallError, RankLostError, torch.OutOfMemoryError)
    return isinstance(error, Exception) and not isinstance(error, own)


def _beat(leader: Leader) -> None:
    with contextlib.suppress(OSError):  # rank 0 is gone
        while True:
            leader.beat()
            time.sleep(BEAT_SECONDS)


def _build_part(build: Build, folder: Path, progress: Progress, connections: Connections) -> ModelRunner:
    """Connect to the other ranks, and build this rank's runner."""
    return build_single(
        folder, build.spec, build.options, progress=progress, shard=build.shard, stage=build.stage,
        connect=connections,
    )  # fmt: skip


def _leave(runner: ModelRunner) -> None:
    """Release the runner and disconnect from the other ranks. All ranks do so at the same time.

    NCCL's connections must be closed together, and after the graphs that use them.
    """
    runner.device.synchronize()
    runner.close()
    if dist.is_initialized():  # a follower that failed has left
        dist.destroy_process_group()
