"""The runner of an engine: built at start, asleep while its memory is wanted elsewhere, then awake again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.models.files import Progress
from engine.models.spec import ModelSpec
from engine.worker.interface import Runner
from engine.worker.kv_cache import KVCacheTooSmallError
from engine.worker.model_runner import ModelRunner
from engine.worker.options import RunnerOptions
from engine.worker.parallel.launcher import Launcher, LaunchError, Lost
from engine.worker.parallel.losses import RankLostError
from engine.worker.parallel.ray_launcher import RayLauncher
from engine.worker.sleep import SleepingRunner, free_unused

SLEEP_LEVELS = (1, 2)

BuildRunner = Callable[..., Runner]  # (folder, spec, options, *, progress, launcher, lost), as `ranks.build_runner`


class RunnerBuilder:
    """Builds runners of one model with the ranks that its configuration asks for."""

    def __init__(
        self, build: BuildRunner, config: EngineConfig, folder: Path, progress: Progress, lost: Lost | None
    ) -> None:
        """Ray, if it starts the ranks, assigns their GPUs now. Raises `EngineError` if it cannot."""
        self._build, self._config, self.progress = build, config, progress
        self.folder = folder  # of the weights: another one may be set between two runners
        self.overlays = config.weight_overlays  # the same of folders whose tensors replace the model's
        self._lost = lost if config.num_ranks > 1 else None
        self._launcher = self._new_launcher()  # of the next runner

    def _new_launcher(self) -> Launcher | None:
        if self._config.distributed_executor_backend != "ray":
            return None
        try:
            return RayLauncher(self._config.num_ranks, self._config.device, self.folder)
        except LaunchError as error:
            raise EngineError(str(error)) from None

    def build(self, spec: ModelSpec, options: RunnerOptions) -> Runner:
        """Return a runner that is ready to step. Raises `EngineError` if the device has too little memory, or if a rank
        is lost meanwhile.
        """
        launcher, self._launcher = self._launcher or self._new_launcher(), None
        given = {"launcher": launcher, "lost": self._lost}
        given = {name: value for name, value in given.items() if value is not None}
        try:
            options = replace(options, weight_overlays=self.overlays)
            return self._build(self.folder, spec, options, progress=self.progress, **given)
        except (KVCacheTooSmallError, RankLostError) as error:
            raise EngineError(str(error)) from None
        except torch.OutOfMemoryError:
            raise EngineError(
                f"{options.device}: out of memory while starting; use a lower --gpu-memory-utilization, "
                "--max-num-batched-tokens or --max-num-seqs, or a smaller model"
            ) from None


class EngineRunner:
    """Owns the runner of an engine, and frees its memory while the engine sleeps."""

    def __init__(self, builder: RunnerBuilder, spec: ModelSpec, options: RunnerOptions) -> None:
        """Build the runner. Raises as `RunnerBuilder.build` does."""
        self._builder, self._spec, self._options = builder, spec, options
        self._runner: Runner | None = builder.build(spec, options)
        self._cache_bound = self._runner.cache_bound
        self._sleeping: SleepingRunner | None = None  # at level 1

    @property
    def awake(self) -> Runner:
        """The runner. Raises `EngineError` while there is none: the engine sleeps at level 2."""
        if self._runner is None:
            raise EngineError("the engine is asleep")
        return self._runner

    @property
    def is_asleep(self) -> bool:
        return self._runner is None or self._sleeping is not None

    def check_sleep(self, level: int) -> None:
        """Raise `EngineError` if the runner cannot sleep at this level."""
        if level not in SLEEP_LEVELS:
            raise EngineError(f"the level of sleep must be 1 or 2, got {level!r}")
        if level == 1 and not isinstance(self._runner, ModelRunner):
            raise EngineError("level 1 of sleep needs a model on one device: use level 2")

    def sleep(self, level: int) -> None:
        """Free the memory of a runner without requests. Nothing else may refer to the runner at level 2."""
        if level == 1:
            assert isinstance(self._runner, ModelRunner)
            self._sleeping = SleepingRunner(self._runner)
            return
        num_blocks, num_states = self.awake.num_blocks, self.awake.num_states  # the scheduler counts on them
        self._options = replace(self._options, num_gpu_blocks_override=num_blocks, num_states_override=num_states)
        self.awake.close()
        self._runner = None
        free_unused(self._options.device.torch_device)

    def wake_up(self) -> None:
        """Make the runner ready to step. Raises `EngineError` if memory is too low by now; it is still asleep then."""
        try:
            if self._sleeping is not None:
                self._sleeping.wake_up(self._builder.progress)
                self._sleeping = None
            else:
                self._runner = self._builder.build(self._spec, self._options)
                self._runner.cache_bound = self._cache_bound
        except torch.OutOfMemoryError:
            raise EngineError(f"{self._options.device}: too little free memory to wake up") from None

    def close(self) -> None:
        """End other ranks, and release the device's memory."""
        self._sleeping = None
        if self._runner is not None:
            self._runner.close()
