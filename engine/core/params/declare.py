"""Request parameters, each declared once: a dataclass field with its type, default, range and description.

    @dataclass(frozen=True)
    class Params:
        top_p: float = parameter(1.0, "sample from the most likely tokens …", above=0, at_most=1)

The class's checks, the HTTP schema, the options of `quire generate` and the tables of docs/api.md are derived from it.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

from engine.core.params.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a field, besides its name, type and default."""

    help: str  # a phrase for documentation
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    max_length: int | None = None  # entries of a list or an object
    wanted: str = ""  # the valid values in words, for errors, when the range alone is not clear enough
    unset: str = ""  # what the default means, when its value does not show it


def parameter(default: Any, help: str, **more: Any) -> Any:
    """Declare a dataclass field that requests may set; `more` holds the other fields of `Declaration`."""
    return dataclasses.field(default=default, metadata={"parameter": Declaration(help, **more)})


@dataclass(frozen=True, slots=True)
class Parameter:
    """A declared parameter."""

    name: str
    annotation: Any  # its type
    default: Any
    declaration: Declaration

    @property
    def kind(self) -> Any:
        """The type without None."""
        members = typing.get_args(self.annotation) if isinstance(self.annotation, types.UnionType) else ()
        kinds = [member for member in members if member is not types.NoneType]
        return kinds[0] if len(kinds) == 1 else self.annotation

    @property
    def is_optional(self) -> bool:
        return types.NoneType in typing.get_args(self.annotation)

    @property
    def wanted(self) -> str:
        """The valid values in words that follow "must be"."""
        if self.declaration.wanted:
            return self.declaration.wanted
        low = self.declaration.above if self.declaration.above is not None else self.declaration.at_least
        if self.declaration.at_most is None:
            return f"at least {low:g}"
        if self.kind is int:
            return f"an integer from {low:g} to {self.declaration.at_most:g}"
        return f"in {'[' if self.declaration.above is None else '('}{low:g}, {self.declaration.at_most:g}]"


def parameters_of(cls: type) -> dict[str, Parameter]:
    """Return the parameters of a dataclass by name, in their order. Fields without a declaration are left out."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: Parameter(field.name, hints[field.name], field.default, field.metadata["parameter"])
        for field in dataclasses.fields(cls)
        if "parameter" in field.metadata
    }


class NumberChecks:
    """Checks the ranges of all numbers of a parameter class, for its `__post_init__`."""

    def __init__(self, cls: type) -> None:
        self._checks = []
        for each in parameters_of(cls).values():
            if each.kind in (int, float):
                kinds = (int,) if each.kind is int else (float, int)
                self._checks.append(
                    (each, each.name, each.default, each.is_optional, kinds, *_limits(each.declaration))
                )

    def __call__(self, instance: Any) -> None:
        """Raise `ParameterError` for the first parameter that is out of range."""
        for parameter, name, default, is_optional, kinds, low, high in self._checks:
            value = getattr(instance, name)
            if value is default or (is_optional and value is None):
                continue
            is_number = type(value) in kinds or (isinstance(value, kinds) and not isinstance(value, bool))
            if not (is_number and low <= value <= high):
                raise ParameterError(name, f"must be {parameter.wanted}, got {value!r}")


def _limits(declared: Declaration) -> tuple[float, float]:
    """Return the lowest and the highest valid value. The lowest value above a number is the next float."""
    low = declared.at_least if declared.at_least is not None else -math.inf
    if declared.above is not None:
        low = math.nextafter(declared.above, math.inf)
    return low, declared.at_most if declared.at_most is not None else math.inf
