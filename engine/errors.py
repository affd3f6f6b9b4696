"""Errors that the engine shows to its user: one clear line each."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that is not right: names the field, its value and what would be right."""


class EngineError(RuntimeError):
    """The engine cannot start or go on; the message says why and what to change."""


class EngineDeadError(EngineError):
    """The engine process was lost, and with it the answer that it worked on; or it is gone for good."""


class TagsError(ValueError):
    """The schemas of some tags cannot be used; `reasons` tells why, by their place in `StructuredOutputs.tags`."""

    def __init__(self, reasons: dict[int, str]) -> None:
        place, reason = next(iter(reasons.items()))
        super().__init__(f"structured_outputs.tags[{place}].schema: {reason}")
        self.reasons = reasons
