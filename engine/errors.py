"""Errors that the engine shows to its user, with one-line messages."""

from __future__ import annotations


class ConfigError(ValueError):
    """An invalid setting. The message names the field, its value and the valid values."""


class EngineError(RuntimeError):
    """The engine cannot start or continue. The message gives the reason and what to change."""


class EngineDeadError(EngineError):
    """The engine process was lost together with the request's output, or it is not restarted any more."""


class TagsError(ValueError):
    """Some tags have unusable schemas. `reasons` maps their indices in `StructuredOutputs.tags` to messages."""

    def __init__(self, reasons: dict[int, str]) -> None:
        place, reason = next(iter(reasons.items()))
        super().__init__(f"structured_outputs.tags[{place}].schema: {reason}")
        self.reasons = reasons
