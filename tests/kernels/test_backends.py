"""The table of backends: what it names exists, takes what the reference implementation takes, and is what runs."""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernels
from kernels import reference


def operations(device_type: str) -> Iterator[tuple[str, str]]:
    return ((module, name) for module, names in kernels.BACKENDS[device_type].items() for name in names.split())


@pytest.mark.parametrize("device_type", kernels.BACKENDS)
def test_operations_take_what_the_reference_implementation_takes(device_type: Any) -> None:
    """And perhaps more, for tuning, with defaults."""
    if device_type == "cuda":
        pytest.importorskip("triton")
    for module, name in operations(device_type):
        want = inspect.signature(getattr(reference, name)).parameters
        have = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert list(have)[: len(want)] == list(want), name
        for parameter in want:
            assert have[parameter].default == want[parameter].default, (name, parameter)
            assert have[parameter].kind == want[parameter].kind, (name, parameter)
        assert all(have[parameter].default is not inspect.Parameter.empty for parameter in list(have)[len(want) :]), (
            name
        )


@pytest.mark.parametrize("device_type", kernels.BACKENDS)
def test_each_operation_is_named_once_and_dispatched(device_type: Any) -> None:
    names = [name for _, name in operations(device_type)]
    assert len(names) == len(set(names))
    for name in names:
        assert inspect.unwrap(getattr(kernels, name)) is getattr(reference, name)


def test_the_first_arguments_device_picks_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def norm(x: torch.Tensor) -> torch.Tensor:
        """An operation."""
        calls.append("reference")
        return x

    table = {"cpu": {}, "meta": {"tests.kernels.fake": "norm"}}
    monkeypatch.setattr(kernels, "BACKENDS", table)
    monkeypatch.setattr(
        kernels.importlib,  # type: ignore[attr-defined]
        "import_module",
        lambda name: type("Fake", (), {"norm": lambda x: calls.append(name)}),  # type: ignore[attr-defined]
    )
    operation = kernels._dispatched(norm)
    operation(torch.ones(1))
    operation(torch.ones(1, device="meta"))
    operation(torch.ones(1))
    assert calls == ["reference", "tests.kernels.fake", "reference"]
    assert operation.__doc__ == "An operation."


def test_a_device_without_a_backend_is_named() -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        kernels._dispatched(reference.silu_and_mul)(torch.ones(2, device="meta"))
