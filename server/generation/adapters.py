"""The LoRA adapters that are served beside the model, each under a name of its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import Adapter, Classifier, ConfigError, EngineError, ModelError
from server.generation.caller import Caller
from server.generation.engine_client import EngineClient
from server.generation.errors import (
    InvalidRequestError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
)
from server.settings import LoraModule, ServerConfig

MAX_NAMED = 10_000  # adapters
_NAME = re.compile(r"[^\s/][^\x00-\x1f]{0,255}")  # under which an adapter can be loaded
_FOLDER = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")  # of the folder of adapters, found by its name


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter under its name. `parent`: the name of the model that it changes. `classifier`: the adapter's own, else
    the model's.
    """

    adapter: Adapter
    parent: str
    classifier: Classifier | None

    @property
    def name(self) -> str:
        return self.adapter.name


class ServedAdapters:
    """The adapters that the server offers, by name. The engine loads one when a request needs it."""

    def __init__(self, engine: EngineClient, settings: ServerConfig, model_names: Sequence[str]) -> None:
        """`model_names`: served names of the model itself."""
        self._engine, self._settings, self._model_names = engine, settings, model_names
        self._served: dict[str, ServedAdapter] = {}
        self._folder = Path(settings.lora_folder).expanduser().resolve() if settings.lora_folder else None
        self._loading = asyncio.Lock()  # one adapter at a time: each may take gigabytes
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def all(self) -> list[ServedAdapter]:
        return list(self._served.values())

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter of this name; None: there is none."""
        served = self._served.get(name or "")
        return None if served is None else served.adapter

    def classifier(self, name: str | None) -> Classifier | None:
        """Return the classifier that requests for a name get; None: there is none."""
        served = self._served.get(name or "")
        return self._engine.model.classifier if served is None else served.classifier

    async def load_configured(self) -> None:
        """Load the adapters of the configuration. Raises `ConfigError`, with a reason, if one cannot be used."""
        for module in self._settings.lora_modules:
            given = LoraModule.read(module)
            if given.name in (*self._model_names, *self._served):
                raise ConfigError(f"lora_modules: the name {given.name!r} is in use already")
            try:
                await self._load(given.name, given.path, given.base_model_name or self._model_names[0])
            except (ModelError, EngineError) as error:
                raise ConfigError(f"lora_modules: {given.name}: {error}") from None

    async def resolve(self, name: str | None, caller: Caller) -> None:
        """Serve an adapter of the folder of adapters under the name of its own folder, at its first request."""
        if self._folder is None or not name or name in self._served or name in self._model_names:
            return
        if _FOLDER.fullmatch(name) is None or not caller.may_use(name):
            return
        # Others may wait for it, too, so it is loaded even if this request ends before.
        loading = asyncio.create_task(self._resolve(name, self._folder / name))
        self._tasks.add(loading)
        loading.add_done_callback(self._tasks.discard)
        await asyncio.shield(loading)

    async def _resolve(self, name: str, path: Path) -> None:
        async with self._loading:
            if name not in self._served and await asyncio.to_thread((path / "adapter_config.json").is_file):
                await self._try_loading(name, str(path), self._model_names[0])

    async def load(self, caller: Caller, name: str, path: str, *, in_place: bool, parent: str | None) -> None:
        """Read an adapter for an admin, and serve it from now on.

        Raises `RequestError` if it cannot be used, or lies where no adapters may be read.
        """
        if _NAME.fullmatch(name) is None:
            raise InvalidRequestError("must be a name of up to 256 characters", "lora_name")
        if name in self._model_names:
            raise InvalidRequestError(f"{name!r} is the model's own name", "lora_name")
        allowed = self._allowed(caller, path)
        async with self._loading:
            if name in self._served and not in_place:
                raise InvalidRequestError(
                    f"an adapter named {name!r} is loaded already: unload it first, or set load_inplace", "lora_name"
                )
            if len(self._served) >= MAX_NAMED:
                raise InvalidRequestError(f"{MAX_NAMED} adapters are loaded: unload one first", "lora_name")
            await self._try_loading(name, allowed, parent or self._model_names[0])

    async def unload(self, name: str) -> None:
        """Serve an adapter no more. Its running requests go on."""
        async with self._loading:
            if self._served.pop(name, None) is None:
                raise NotFoundError(f"no adapter is named {name!r}", "lora_name", lead=None)

    def _allowed(self, caller: Caller, path: str) -> str:
        """Return the path from which an adapter may be read. Raises `RequestError` for other paths."""
        if self._folder is None:
            if not caller.name:
                raise NotPermittedError(
                    "adapters are loaded at run time from the folder that --lora-folder names, or by a server with API "
                    "keys: start it with one of them",
                    "lora_path",
                )
            return path
        try:
            resolved = (self._folder / path).resolve()
        except (OSError, ValueError, RuntimeError):
            resolved = None
        if resolved is None or not resolved.is_relative_to(self._folder) or resolved == self._folder:
            raise NotPermittedError(f"must lie in the folder {self._folder} (--lora-folder)", "lora_path")
        return str(resolved)

    async def _try_loading(self, name: str, path: str, parent: str) -> None:
        try:
            await self._load(name, path, parent)
        except ModelError as error:
            raise InvalidRequestError(f"the adapter {name!r} cannot be used: {error}") from None
        except EngineError as error:
            raise UnavailableError(f"the engine did not load the adapter {name!r}: {error}") from None

    async def _load(self, name: str, path: str, parent: str) -> None:
        adapter = await self._engine.load_adapter(name, path)
        classifier = await asyncio.to_thread(self._engine.model.classifier_with, adapter)
        self._served[name] = ServedAdapter(adapter, parent, classifier)
