from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("triton")

from kernels.gpu import launch


@pytest.fixture
def set_attribute(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The driver's function that sets an attribute of a kernel."""
    driver = SimpleNamespace(cuFuncSetAttribute=Mock())
    monkeypatch.setattr(launch, "CompiledKernel", SimpleNamespace)
    monkeypatch.setattr(launch, "_preferring", set())
    monkeypatch.setattr("kernels.gpu.launch.ctypes.CDLL", lambda name: driver)
    return driver.cuFuncSetAttribute


def test_a_kernel_is_told_once(set_attribute: Mock) -> None:
    for function in (7, 7, 9, 7):
        launch.prefer_shared_memory(SimpleNamespace(function=function))  # type: ignore[arg-type]
    assert [(call.args[0].value, *call.args[1:]) for call in set_attribute.call_args_list] == [(7, 9, 100), (9, 9, 100)]


def test_a_kernel_that_is_not_loaded_is_not_told(set_attribute: Mock) -> None:
    """While kernels are only compiled, and in the interpreter."""
    launch.prefer_shared_memory(None)
    launch.prefer_shared_memory(SimpleNamespace(function=None))  # type: ignore[arg-type]
    set_attribute.assert_not_called()


def test_without_the_driver_nothing_changes(set_attribute: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.gpu.launch.ctypes.CDLL", Mock(side_effect=OSError("no such library")))
    launch.prefer_shared_memory(SimpleNamespace(function=7))  # type: ignore[arg-type]
    set_attribute.assert_not_called()
