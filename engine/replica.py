"""One of an engine's replicas: an engine process at a time, the requests that it has, what it last said."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.core.batch import SchedulerStats
from engine.engine_process import EngineProcess
from engine.errors import ConfigError
from engine.expert_tokens import ExpertTokens
from engine.messages import Abort, Add, Ready, Start, Step
from engine.output_collector import deliver
from engine.start_times import expected_seconds
from engine.state import StateHolder
from engine.step_tokens import StepTokens
from engine.streams import Stream
from engine.supervisor import RestartPolicy, Supervisor
from engine.worker.cores import num_cores

DRAIN_LOOK_SECONDS = 0.05  # between two looks at the requests that are left
GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each of this machine's
MAX_LOSSES = 2  # of the engine process that a waiting request outlives: it may be what kills it


@dataclass(frozen=True, slots=True)
class Listener:
    """What a replica tells its engine."""

    changed: Callable[[], None]  # the replica's state
    started: Callable[[Replica], None]  # it takes requests
    freed: Callable[[Replica, list[Stream]], None]  # it has lost these requests, which another may answer
    ended: Callable[[Stream], None]  # its request is finished


class Replica:
    """Belongs to an event loop. Requests come by `add`, when `takes_requests`, and their updates go to their streams."""

    def __init__(self, config: EngineConfig, index: int, listener: Listener) -> None:
        """The replica of number `index`. Its process starts now, and imports PyTorch until `run` tells it what to load."""
        self.index, self._listener = index, listener
        self.config = _own_config(config, index)
        self.states = StateHolder(expected_seconds=expected_seconds(config), changed=listener.changed)
        self.streams: dict[str, Stream] = {}
        self.stats: SchedulerStats | None = None  # the newest; None while there is no process that is ready
        self.step_tokens = StepTokens()
        self.expert_tokens = ExpertTokens()
        self.ready: Ready | None = None  # what the newest process said when it was
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
        """Of the engine process."""
        return self.supervisor.process.pid

    @property
    def num_blocks(self) -> int:
        return self.ready.num_blocks if self.ready is not None else 0

    @property
    def takes_requests(self) -> bool:
        return self.ready is not None and self.states.state.is_ready and not self._is_draining

    async def run(self, start: Start) -> str:
        """Keep a process running; why the last one ended. `EngineError` when the first cannot start."""
        reason = await self.supervisor.run(Start(self.config, start.eos_token_ids, self.index))
        self.states.enter("dead", reason=reason)
        self._release(reason)
        return reason

    def add(self, stream: Stream) -> None:
        """Its request is this replica's from now on."""
        self.streams[stream.request.request_id] = stream
        self.supervisor.send(Add(stream.request))

    def remove(self, request_id: str, *, abort: bool) -> None:
        """The request is not waited for any more. Unknown ids are fine."""
        if self.streams.pop(request_id, None) is not None and abort:
            self.supervisor.send(Abort(request_id))

    async def restart(self, seconds: float) -> None:
        """A new process in place of this one, once its requests have ended or `seconds` are over. Of no effect once no other
        process may be started.
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

    # ---- what the supervisor tells ----

    def started(self, ready: Ready) -> None:
        self.ready, self.stats = ready, ready.stats
        self._listener.started(self)

    def stepped(self, step: Step) -> None:
        """A step's outputs, for those who wait for them."""
        self.stats = step.stats
        self.step_tokens.see(step.stats)
        self.expert_tokens.add(step.expert_tokens)
        deliver(step.outputs, self.streams, time.monotonic())
        for output in step.outputs.outputs:
            if output.finish_reason is not None and (stream := self.streams.get(output.request_id)) is not None:
                self._listener.ended(stream)

    def lost(self, reason: str) -> None:
        self._release(reason)

    def _release(self, reason: str) -> None:
        """Requests whose answers have begun end, and so do those that have seen this too often; others go elsewhere."""
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
    """`ConfigError` when there are GPUs, but not enough for all replicas: one without would compute on the CPU."""
    if config.data_parallel_size == 1 or config.device == "cpu" or config.distributed_executor_backend != "mp":
        return
    visible, num_needed = _visible_gpus(), config.data_parallel_size * config.num_ranks
    count = len(list(GPUS.glob("*")) if visible is None else visible)
    if 0 < count < num_needed:
        each = f", each of {config.num_ranks}" if config.num_ranks > 1 else ""
        raise ConfigError(
            f"data_parallel_size must be at most {count // config.num_ranks} on {count} GPUs{each}, "
            f"got {config.data_parallel_size}"
        )


def _visible_gpus() -> list[str] | None:
    """As `CUDA_VISIBLE_DEVICES` names them; None: it is not set, and all are visible."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name.strip() for name in names.split(",") if name.strip() not in ("", "-1")]


def _own_config(config: EngineConfig, index: int) -> EngineConfig:
    """Files that a process writes are its own."""
    if config.data_parallel_size == 1 or config.prefix_cache_file is None:
        return config
    return replace(config, prefix_cache_file=f"{config.prefix_cache_file}.{index}")


def _own_environment(config: EngineConfig, index: int) -> dict[str, str]:
    """Each replica sees the GPUs that are its own, unless Ray chooses them, and has its share of the cores."""
    if config.data_parallel_size == 1:
        return {}
    size, visible = config.num_ranks, _visible_gpus()
    first = index * size
    mine = list(map(str, range(first, first + size))) if visible is None else visible[first : first + size]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if config.distributed_executor_backend == "mp" else {}
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(num_cores() // config.data_parallel_size, 1))
    return environment
