"""A replica of an engine: its current engine process, its requests and its latest statistics."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.core.batch import SchedulerStats
from engine.errors import ConfigError, EngineDeadError, EngineError
from engine.processing.output_collector import deliver
from engine.replicas.engine_process import EngineProcess
from engine.replicas.messages import Abort, Add, Ready, Start, Step
from engine.replicas.start_times import expected_seconds
from engine.replicas.state import STARTING, StateHolder
from engine.replicas.streams import RunningStream
from engine.replicas.supervisor import RestartPolicy, Supervisor
from engine.setup.weight_source import WeightSource
from engine.stats import ExpertTokens, StepTokens
from engine.worker.parallel.cores import num_cores

DRAIN_LOOK_SECONDS = 0.05  # interval of checks for remaining requests
# What the driver shows for each GPU. In a container, either may be missing or show GPUs that are not for it.
GPUS = (Path("/proc/driver/nvidia/gpus"), "*"), (Path("/dev"), "nvidia[0-9]*")
MAX_LOSSES = 2  # a waiting request ends if more engine processes are lost: it may be the cause


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks from a replica to its engine."""

    changed: Callable[[], None]  # the replica's state has changed
    started: Callable[[Replica], None]  # the replica accepts requests
    freed: Callable[
        [Replica, list[RunningStream]], None
    ]  # the replica has lost these requests; another replica may run them
    ended: Callable[[RunningStream], None]  # the request has finished


class Replica:
    """Runs requests in an engine process and passes outputs to their streams. Bound to an event loop."""

    def __init__(self, config: EngineConfig, index: int, listener: Listener) -> None:
        """Start the process of replica `index`. It imports PyTorch until `run` tells it what to load."""
        self.index, self._listener = index, listener
        self.config = _own_config(config, index)
        self.states = StateHolder(expected_seconds=expected_seconds(config), changed=listener.changed)
        self.streams: dict[str, RunningStream] = {}
        self.stats: SchedulerStats | None = None  # the latest; None while no process is ready
        self.step_tokens = StepTokens()
        self.expert_tokens = ExpertTokens()
        self.ready: Ready | None = None  # the latest process's
        self.sleep_level = 0  # 0: awake
        self._is_draining = False
        environment = _own_environment(config, index)
        self.supervisor = Supervisor(
            lambda: EngineProcess(environment),
            self,
            self.states,
            RestartPolicy(config.engine_restarts),
            config.engine_watchdog_timeout,
        )

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self.supervisor.process.pid

    @property
    def num_blocks(self) -> int:
        return self.ready.num_blocks if self.ready is not None else 0

    @property
    def takes_requests(self) -> bool:
        return self.ready is not None and self.states.state.is_ready and not self._is_draining

    @property
    def stands_still(self) -> bool:
        """Return whether it takes requests, but does not seem to work on any."""
        return self.supervisor.stands_still

    async def run(self, start: Start) -> str:
        """Keep a process running. Returns why the last one ended. Raises `EngineError` if the first cannot start."""
        reason = await self.supervisor.run(lambda: Start(self.config, start.eos_token_ids, self.index))
        self.states.enter("dead", reason=reason)
        self._release(reason)
        return reason

    def add(self, stream: RunningStream) -> None:
        """Run the stream's request on this replica."""
        self.streams[stream.request.request_id] = stream
        self.supervisor.send(Add(stream.request))

    def remove(self, request_id: str, *, abort: bool) -> None:
        """Forget a request, and abort it if `abort`. Unknown ids are ignored."""
        if self.streams.pop(request_id, None) is not None and abort:
            self.supervisor.send(Abort(request_id))

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the engine in its process; see `Calls.call`."""
        return await self.supervisor.calls.call(method, **arguments)

    async def restart(self, seconds: float) -> None:
        """Replace the process when its requests have finished, or after `seconds`.

        Returns when the new process is ready, or when no further process will be started.
        """
        self._is_draining = True
        try:
            end = time.monotonic() + seconds
            while any(not stream.output.finished for stream in self.streams.values()) and time.monotonic() < end:
                await asyncio.sleep(DRAIN_LOOK_SECONDS)
            num_restarts = self.states.state.num_restarts + self.supervisor.restart("the replica was restarted")
            while (state := self.states.state).phase != "dead":
                if state.is_ready and state.num_restarts >= num_restarts:
                    break
                await self.states.change(state)
        finally:
            self._is_draining = False

    async def sleep(self, level: int) -> None:
        """Let the engine sleep once its requests have ended, see `Engine.sleep`. Raises `EngineError`."""
        self._is_draining = True
        try:
            await self._drained()
            self.sleep_level = level  # even if the caller does not wait for the reply
            await self.call("sleep", level=level)
            self.states.enter("asleep")
        except EngineError:
            self.sleep_level = 0
            raise
        finally:
            self._is_draining = False

    async def _drained(self) -> None:
        """Wait until the requests have ended."""
        while any(not stream.output.finished for stream in self.streams.values()):
            await asyncio.sleep(DRAIN_LOOK_SECONDS)

    async def update_weights(self, source: WeightSource) -> None:
        """Replace the weights once the requests have ended, see `Engine.update_weights`. A process that is started
        again loads the new ones, too. Raises `EngineError`.
        """
        self._is_draining = True
        try:
            await self._drained()
            self.states.enter("starting")
            await self.call("update_weights", path=source.folder, overlays=list(source.overlays))
            self.config = source.applied(self.config)
        finally:
            self._is_draining = False
            if self.states.state.phase in STARTING:
                self.states.enter("ready")

    async def wake_up(self) -> None:
        """End `sleep`. Raises `EngineError` if memory is too low by now; the engine is still asleep then."""
        if not self.sleep_level:
            return
        self.states.enter("starting")
        try:
            await self.call("wake_up")
        except EngineDeadError:
            raise  # a new process starts, awake
        except EngineError:
            self.states.enter("asleep")
            raise
        self.sleep_level = 0
        self.states.enter("ready")

    # ---- callbacks of the supervisor ----

    def started(self, ready: Ready) -> None:
        self.sleep_level = 0
        self.ready, self.stats = ready, ready.stats
        self._listener.started(self)

    def stepped(self, step: Step) -> None:
        """Deliver the outputs of a step to the streams."""
        self.stats = step.stats
        self.step_tokens.observe(step.stats)
        self.expert_tokens.add(step.expert_tokens)
        deliver(step.outputs, self.streams, time.monotonic())
        for output in step.outputs.outputs:
            if output.finish_reason is not None and (stream := self.streams.get(output.request_id)) is not None:
                self._listener.ended(stream)

    def lost(self, reason: str) -> None:
        self._release(reason)

    def _release(self, reason: str) -> None:
        """End requests that have output or have lost too many processes. Hand all others back to the engine."""
        self.stats, streams, self.streams = None, self.streams, {}
        waiting = []
        for stream in streams.values():
            stream.num_losses += 1
            if stream.has_begun or stream.num_losses > MAX_LOSSES:
                stream.close(reason)
            else:
                waiting.append(stream)
        self._listener.freed(self, waiting)


def check_gpus(config: EngineConfig) -> None:
    """Raise `ConfigError` if there are GPUs, but too few for all replicas: the others would run on the CPU."""
    if config.data_parallel_size == 1 or config.device == "cpu" or config.distributed_executor_backend != "mp":
        return
    visible, num_needed = _visible_gpus(), config.data_parallel_size * config.num_ranks
    count = _num_gpus() if visible is None else len(visible)
    if 0 < count < num_needed:
        each = f", each of {config.num_ranks}" if config.num_ranks > 1 else ""
        raise ConfigError(
            f"data_parallel_size must be at most {count // config.num_ranks} on {count} GPUs{each}, "
            f"got {config.data_parallel_size}"
        )


def _num_gpus() -> int:
    """Return the number of GPUs that this process can use; 0 if there is none."""
    return min(filter(None, (len(list(folder.glob(pattern))) for folder, pattern in GPUS)), default=0)


def _visible_gpus() -> list[str] | None:
    """Return the names in `CUDA_VISIBLE_DEVICES`; None if it is not set, so that all GPUs are visible."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name.strip() for name in names.split(",") if name.strip() not in ("", "-1")]


def _own_config(config: EngineConfig, index: int) -> EngineConfig:
    """Return the replica's configuration, with a prefix cache file of its own."""
    if config.data_parallel_size == 1 or config.prefix_cache_file is None:
        return config
    return replace(config, prefix_cache_file=f"{config.prefix_cache_file}.{index}")


def _own_environment(config: EngineConfig, index: int) -> dict[str, str]:
    """Return the replica's environment: its own GPUs, unless Ray assigns them, and an equal number of cores."""
    if config.data_parallel_size == 1:
        return {}
    size, visible = config.num_ranks, _visible_gpus()
    first = index * size
    mine = list(map(str, range(first, first + size))) if visible is None else visible[first : first + size]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if config.distributed_executor_backend == "mp" else {}
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(num_cores() // config.data_parallel_size, 1))
    return environment
