"""Errors that the engine shows to its user, with one-line messages."""

from __future__ import annotations

from engine.core.params.errors import ParameterError as ParameterError


class ConfigError(ValueError):
    """An invalid setting. The message names the field, its value and the valid values."""


class EngineError(RuntimeError):
    """The engine cannot start or continue. The message gives the reason and what to change."""


class EngineDeadError(EngineError):
    """The engine process was lost together with the request's output, or it is not restarted any more."""


class EngineAsleepError(EngineError):
    """The engine sleeps: it takes no requests until it is woken up."""


class TagsError(ValueError):
    """Some tags have unusable schemas. `reasons` maps their indices in `StructuredOutputs.tags` to messages."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons

    def __str__(self) -> str:
        index, reason = next(iter(self.reasons.items()))
        return f"structured_outputs.tags[{index}].schema: {reason}"
