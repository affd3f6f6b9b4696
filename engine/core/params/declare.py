"""Fields declared once: a dataclass field with its type, default, range and description.

    @dataclass(frozen=True)
    class Params:
        top_p: float = parameter(1.0, "sample from the most likely tokens …", above=0, at_most=1)

Parameters of requests are declared with `parameter`, settings with `engine.flags.flag`. From a parameter follow
the checks of its class, the HTTP schema, the options of `quire generate` and the tables of docs/api.md.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from engine.core.params.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a field, besides its name, type and default."""

    help: str  # a phrase for documentation
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest valid number. The lowest one above a number is the next float."""
        low = self.at_least if self.at_least is not None else -math.inf
        if self.above is not None:
            low = math.nextafter(self.above, math.inf)
        return low, self.at_most if self.at_most is not None else math.inf


D = TypeVar("D", bound=Declaration)


@dataclass(frozen=True, slots=True)
class DeclaredField(Generic[D]):
    """A declared field of a dataclass."""

    name: str
    annotation: Any  # its type
    default: Any
    declaration: D

    @property
    def kind(self) -> Any:
        """The type without None."""
        is_union = typing.get_origin(self.annotation) in (types.UnionType, typing.Union)
        kinds = [member for member in typing.get_args(self.annotation) if member is not types.NoneType]
        return kinds[0] if is_union and len(kinds) == 1 else self.annotation

    @property
    def is_optional(self) -> bool:
        return types.NoneType in typing.get_args(self.annotation)


def declared_fields(cls: type, declaration: type[D]) -> list[DeclaredField[D]]:
    """Return the fields of a dataclass that have such a declaration, in their order."""
    hints, found = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        if isinstance(declared := field.metadata.get("declaration"), declaration):
            default, factory = field.default, field.default_factory
            if factory is not dataclasses.MISSING:
                default = factory()
            found.append(DeclaredField(field.name, hints[field.name], default, declared))
    return found


@dataclass(frozen=True, slots=True)
class ParameterDeclaration(Declaration):
    """The declaration of a request parameter."""

    max_length: int | None = None  # entries of a list or an object
    wanted: str = ""  # the valid values in words, for errors, when the range alone is not clear enough
    unset: str = ""  # what the default means, when its value does not show it


def parameter(default: Any, help: str, **more: Any) -> Any:
    """Declare a field that requests may set; `more` holds the other fields of `ParameterDeclaration`."""
    return dataclasses.field(default=default, metadata={"declaration": ParameterDeclaration(help, **more)})


class Parameter(DeclaredField[ParameterDeclaration]):
    """A declared parameter."""

    __slots__ = ()

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
    """Return the parameters of a dataclass by name, in their order."""
    found = declared_fields(cls, ParameterDeclaration)
    return {each.name: Parameter(each.name, each.annotation, each.default, each.declaration) for each in found}


class NumberChecks:
    """Checks the ranges of all numbers of a parameter class, for its `__post_init__`."""

    def __init__(self, cls: type) -> None:
        self._checks = []
        for each in parameters_of(cls).values():
            if each.kind in (int, float):
                kinds = (int,) if each.kind is int else (float, int)
                self._checks.append((each, each.name, each.default, each.is_optional, kinds, *each.declaration.limits))

    def __call__(self, instance: Any) -> None:
        """Raise `ParameterError` for the first parameter that is out of range."""
        for parameter, name, default, is_optional, kinds, low, high in self._checks:
            value = getattr(instance, name)
            if value is default or (is_optional and value is None):
                continue
            is_number = type(value) in kinds or (isinstance(value, kinds) and not isinstance(value, bool))
            if not (is_number and low <= value <= high):
                raise ParameterError(name, f"must be {parameter.wanted}, got {value!r}")
