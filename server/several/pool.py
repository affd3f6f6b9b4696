"""The models of a server that serves several: loaded when they are first asked for, asleep while others need room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI

from engine import AsyncEngine, ConfigError, EngineConfig, EngineError, EngineState, ModelError, TokenizerError
from engine.models.hub import short_name
from server.app import create_app
from server.generation.generation import too_late
from server.generation.model import Model
from server.generation.siblings import ListedModel, Siblings
from server.metrics import ReplicaClient
from server.observability.readiness import Readiness
from server.observability.server_metrics import ServerMetrics
from server.settings import ServerConfig

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PooledModel:
    """One of the models. `app` is None until it is loaded, `engine` also after it was lost for good."""

    config: EngineConfig
    settings: ServerConfig
    engine: AsyncEngine | None = None
    app: FastAPI | None = None
    num_active: int = 0  # requests
    last_used: float = 0.0  # monotonic seconds
    is_leaving: bool = False  # another model waits for its place: new requests for it wait behind that one
    keep_alive: float | None = None  # seconds after the last request until it sleeps; None: until its place is needed
    expires: asyncio.TimerHandle | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        return self.config.served_model_name

    @property
    def model(self) -> Model | None:
        """The model as its app serves it; None: it is not loaded."""
        return None if self.app is None else self.app.state.server.model

    @property
    def is_awake(self) -> bool:
        return self.app is not None and self.engine is not None and not self.engine.is_sleeping and not self.is_dead

    @property
    def is_dead(self) -> bool:
        return self.engine is not None and self.engine.state.phase == "dead"

    def serves(self, name: str) -> bool:
        return name in self.names or (self.model is not None and self.model.serves(name))


@dataclass(slots=True)
class _Turn:
    """A request's wait for a model. `is_over`: it waits no longer. `has_begun`: it has the model."""

    is_over: bool = False
    has_begun: bool = False


class ModelPool:
    """Lends models to requests. At most `max_loaded` are awake: the one that was used least recently, of those without
    requests, goes to sleep for another one.

    If all have requests, one leaves: its running requests end, and new ones wait. So no model waits for ever.
    """

    def __init__(self, configs: Sequence[EngineConfig], settings: ServerConfig) -> None:
        """Begin to load the first model. The configurations have names, see `configs_of`."""
        self.models = [PooledModel(each, _own(settings, i), keep_alive=settings.model_keep_alive)
                       for i, each in enumerate(configs)]  # fmt: skip
        self._settings = settings
        self._max_loaded = settings.max_loaded_models or 1
        self._switching = asyncio.Lock()  # first come, first served
        self._changed = asyncio.Event()  # a model has lost its last request
        self._siblings = Siblings(self._listed)
        self._contexts = contextlib.AsyncExitStack()  # of the apps
        self._tasks: set[asyncio.Task[None]] = set()
        self._readiness: Readiness | None = None
        self._metrics: ServerMetrics | None = None
        self._has_started = False
        self.default.engine = AsyncEngine.launch(self._config_of(self.default))

    @property
    def default(self) -> PooledModel:
        """The first model: for requests that name none."""
        return self.models[0]

    def find(self, name: str) -> PooledModel | None:
        """Return the model of this name, or with an adapter of this name."""
        return next((each for each in self.models if each.serves(name)), None)

    # ---- what a server needs of an engine ----

    @property
    def summary(self) -> str:
        assert self.default.engine is not None
        return self.default.engine.summary

    @property
    def name(self) -> str:
        """The names of all models, for display."""
        return ", ".join(each.names[0] for each in self.models)

    @property
    def replicas(self) -> Sequence[ReplicaClient]:
        return [replica for each in self.models if each.engine is not None for replica in each.engine.replicas]

    @property
    def state(self) -> EngineState:
        """The state of the first model until it is loaded; from then on "ready": requests wait for their models."""
        assert self.default.engine is not None or self._has_started
        states = [each.engine.state for each in self.models if each.engine is not None]
        if not self._has_started:
            return states[0]
        latest = max(states, key=lambda state: (bool(state.reason), state.at), default=EngineState())
        return EngineState("ready", num_restarts=sum(each.num_restarts for each in states), reason=latest.reason)

    async def state_change(self, seen: EngineState) -> EngineState:
        """Wait until the state differs from `seen`, and return it."""
        if not self._has_started and self.default.engine is not None:
            return await self.default.engine.state_change(seen)
        await asyncio.Future[None]()
        raise AssertionError("nothing ends this wait")

    async def ready(self) -> None:
        """Wait until the first model is loaded. Raises as `AsyncEngine.ready`."""
        assert self.default.engine is not None
        await self.default.engine.ready()

    def abort_all(self) -> None:
        for each in self.models:
            if each.engine is not None:
                each.engine.abort_all()

    async def restart(self, drain_seconds: float) -> None:
        """Restart the engines of all models that are awake, one after the other."""
        for each in self.models:
            if each.is_awake and each.engine is not None:
                await each.engine.restart(drain_seconds)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for each in self.models:
            if each.engine is not None:
                each.engine.close()

    @contextlib.asynccontextmanager
    async def opened(self, readiness: Readiness, metrics: ServerMetrics) -> AsyncIterator[None]:
        """Serve in the block, once the first model is loaded. Then the apps end."""
        self._readiness, self._metrics = readiness, metrics
        metrics.registry.register(self._siblings.requests)
        async with self._contexts:
            lag = asyncio.create_task(metrics.lag.watch())
            try:
                await self._open_app(self.default)
                self._has_started = True
                yield
            finally:
                lag.cancel()
                for task in self._tasks:
                    task.cancel()

    # ---- lending ----

    @contextlib.asynccontextmanager
    async def lent(self, model: PooledModel, deadline: float = math.inf) -> AsyncIterator[FastAPI]:
        """Keep a model awake in the block, after waiting for it until the deadline, in monotonic seconds.

        Raises `TimedOutError` at the deadline, and `EngineError` if the model cannot be loaded.
        """
        if model.is_awake and not model.is_leaving:
            self._begin(model)
        else:
            await self._wait_for(model, deadline)
        try:
            assert model.app is not None
            yield model.app
        finally:
            self._end(model)

    def set_keep_alive(self, model: PooledModel, seconds: float) -> None:
        """Let a model sleep after so many seconds without a request; negative: when its place is needed."""
        model.keep_alive = seconds if seconds >= 0 else None
        self._when_idle(model)

    def _when_idle(self, model: PooledModel) -> None:
        if model.expires is not None:
            model.expires.cancel()
            model.expires = None
        if model.num_active:
            return
        self._changed.set()
        if model.keep_alive is not None and model.is_awake:
            loop = asyncio.get_running_loop()
            model.expires = loop.call_later(model.keep_alive, self._expire, model)

    def _expire(self, model: PooledModel) -> None:
        model.expires = None
        self._in_background(self._sleep_if_idle(model))

    async def _sleep_if_idle(self, model: PooledModel) -> None:
        async with self._switching:
            if not model.num_active and model.is_awake:
                with contextlib.suppress(EngineError):  # it has been logged, and the model stays awake
                    await self._sleep(model)

    async def _wait_for(self, model: PooledModel, deadline: float) -> None:
        """Wait until a model is awake and this request has begun. What has begun to load goes on after the deadline."""
        turn = _Turn()
        task = self._in_background(self._take_turn(model, turn))
        try:
            await asyncio.wait({task}, timeout=None if deadline == math.inf else max(deadline - time.monotonic(), 0))
            if not task.done():
                raise too_late()
            await task
        except BaseException:
            turn.is_over = True
            self._changed.set()
            if turn.has_begun:
                self._end(model)
            raise

    async def _take_turn(self, model: PooledModel, turn: _Turn) -> None:
        async with self._switching:
            if not model.is_awake and await self._makes_room(model, turn):
                await self._wake(model)
            if turn.is_over:
                self._when_idle(model)
            else:
                self._begin(model)
                turn.has_begun = True

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, whose error is reported to those who wait for it only."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _end(self, model: PooledModel) -> None:
        model.num_active -= 1
        model.last_used = time.monotonic()
        self._when_idle(model)

    def _begin(self, model: PooledModel) -> None:
        model.num_active += 1
        if model.expires is not None:
            model.expires.cancel()
            model.expires = None

    async def _makes_room(self, model: PooledModel, turn: _Turn) -> bool:
        """Let models sleep until there is a place for this one; False: the turn is over before."""
        try:
            while not turn.is_over:
                awake = [each for each in self.models if each.is_awake and each is not model]
                if len(awake) < self._max_loaded:
                    return True
                if idle := [each for each in awake if not each.num_active]:
                    await self._sleep(min(idle, key=lambda each: each.last_used))
                else:
                    self._changed.clear()
                    min(awake, key=lambda each: each.last_used).is_leaving = True
                    await self._changed.wait()
            return False
        finally:
            for each in self.models:
                each.is_leaving = False

    async def _sleep(self, model: PooledModel) -> None:
        assert model.engine is not None
        started = time.monotonic()
        try:
            await model.engine.sleep(self._level)
        except EngineError as error:
            _log.error("%s cannot sleep: %s", model.names[0], error)
            raise
        _log.info("%s sleeps after %.1f s", model.names[0], time.monotonic() - started)

    @property
    def _level(self) -> int:
        return self._settings.sleep_level or (1 if self.models[0].config.num_ranks == 1 else 2)

    async def _wake(self, model: PooledModel) -> None:
        """Load a model, or wake it up. Raises `EngineError`."""
        started = time.monotonic()
        if model.is_dead:
            assert model.engine is not None
            model.engine.close()
            model.engine = None  # its app answers what needs no engine until there is another one
        if model.engine is not None and model.app is not None:
            await model.engine.wake_up()
            _log.info("%s is awake after %.1f s", model.names[0], time.monotonic() - started)
            return
        model.engine = AsyncEngine.launch(self._config_of(model))
        try:
            await model.engine.ready()
            await self._open_app(model)
        except BaseException as error:
            model.engine.close()
            model.engine = None
            if isinstance(error, (ConfigError, ModelError, TokenizerError)):
                raise EngineError(str(error)) from None
            raise
        _log.info("%s is loaded after %.1f s\n%s", model.names[0], time.monotonic() - started, model.engine.summary)

    async def _open_app(self, model: PooledModel) -> None:
        assert model.engine is not None
        app = create_app(
            model.engine,
            model.settings,
            served_model_names=model.names,
            log_stats=not model.config.disable_log_stats,
            kv_cache_dtype=model.config.kv_cache_dtype,
            readiness=self._readiness,
            server_metrics=self._metrics,
            siblings=self._siblings,
        )
        await self._contexts.enter_async_context(app.router.lifespan_context(app))
        model.app = app

    def _config_of(self, model: PooledModel) -> EngineConfig:
        """Return the configuration with which to start a model: its share of a GPU's memory, beside those awake."""
        others = sum(each.is_awake for each in self.models if each is not model)
        share = min((others + 1) / self._max_loaded, 1.0)
        return replace(model.config, gpu_memory_utilization=model.config.gpu_memory_utilization * share)

    def _listed(self) -> list[ListedModel]:
        loop, now = asyncio.get_running_loop(), time.time()
        return [
            ListedModel(
                each.names, each.created, each.model, each.is_awake,
                None if each.expires is None else now + each.expires.when() - loop.time(),
            )
            for each in self.models
        ]  # fmt: skip


def configs_of(config: EngineConfig, settings: ServerConfig, others: Sequence[str]) -> list[EngineConfig]:
    """Return the configuration of each model, with its name: `config` is the first one's. Raises `ConfigError`."""
    models, names = [config.model, *others], config.served_model_name
    if names and len(names) != len(models):
        raise ConfigError(f"served_model_name must be one name for each of {len(models)} models, got {len(names)}")
    names = names or tuple(short_name(each) for each in models)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two models have the name {twice[0]!r}: give each its own with --served-model-name")
    if config.distributed_executor_backend == "ray":
        raise ConfigError("distributed_executor_backend ray needs a single model")
    if settings.lora_modules or settings.lora_folder:
        raise ConfigError("lora_modules and lora_folder need a single model: load adapters by /v1/load_lora_adapter")
    if settings.sleep_level == 1 and config.num_ranks > 1:
        raise ConfigError("sleep_level 1 needs models on one device: use 2")
    file = config.prefix_cache_file
    config = replace(config, enable_sleep_mode=config.num_ranks == 1)
    return [
        replace(
            config, model=model, served_model_name=(name,), prefix_cache_file=file if file is None else f"{file}.{i}"
        )
        for i, (model, name) in enumerate(zip(models, names, strict=True))
    ]


def _own(settings: ServerConfig, index: int) -> ServerConfig:
    """Return the settings with files of the model's own."""
    trace = settings.record_trace
    return settings if trace is None else replace(settings, record_trace=f"{trace}.{index}")
