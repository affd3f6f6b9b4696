"""The faster of the C++ kernels and PyTorch is measured once, kept, and computes the same."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from kernels import reference
from kernels.cpu import build, library, matmul, measure, rotary
from kernels.cpu.choice import SIZES, Choices


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Any:
    native = library.library()
    if native is None:
        pytest.skip("no compiler is installed")
    monkeypatch.setattr(native, "choices", Choices())
    return native


def test_pytorch_is_taken_for_sizes_at_which_it_is_much_faster() -> None:
    choices = Choices({"float32 products": (2.0, 0.9, 0.5)})
    taken = [choices.takes_pytorch("products", torch.float32, tokens) for tokens in (0, 1, 15, 16, 255, 256, 9999)]
    assert taken == [False] * 5 + [True] * 2
    assert not choices.takes_pytorch("products", torch.bfloat16, 256)
    assert not choices.takes_pytorch("attention", torch.float32, 256)
    assert "float32 products 2.0/0.9/0.5*" in choices.describe()


def test_it_is_measured_once_and_kept(native: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    compiled = build.path(build.cache_folder(), native.instruction_set)
    compiled.parent.mkdir(mode=0o700)
    compiled.touch()
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "auto")
    monkeypatch.setattr(measure, "_interruptions", int)  # however busy this machine is
    timed = measure._once(lambda: None, lambda: None)
    assert timed > 0
    monkeypatch.setattr(measure, "_once", lambda *_: timed)
    measure.choose()
    kept = json.loads(compiled.with_suffix(".json").read_text())
    assert kept == {name: list(ratios) for name, ratios in native.choices.times.items()}
    assert len(kept) == 8
    assert native.choices.describe() in kernels.cpu_kernels()
    monkeypatch.setattr(measure, "_measure", lambda: pytest.fail("measured again"))
    measure.choose()


def test_what_a_busy_machine_makes_uncertain_is_not_kept(
    native: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=measure.logger.name)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "auto")
    compiled = build.path(build.cache_folder(), native.instruction_set)
    compiled.parent.mkdir(mode=0o700)
    compiled.touch()
    disturbed = itertools.cycle([0.5, 2.0])
    monkeypatch.setattr(measure, "_once", lambda *_: next(disturbed))
    measure.choose()
    assert not compiled.with_suffix(".json").exists()
    assert not native.choices.times
    assert caplog.messages == [
        "the machine is too busy to time the C++ kernels: they are used, the next start times them"
    ]
    interruptions = itertools.count(step=1000)
    monkeypatch.setattr(measure, "_once", lambda *_: 0.5)
    monkeypatch.setattr(measure, "_interruptions", lambda: next(interruptions))
    measure.choose()
    assert not compiled.with_suffix(".json").exists()
    assert not native.choices.takes_pytorch("products", torch.float32, 1)
    monkeypatch.setattr(measure, "_interruptions", int)
    for name, ratios in {"the same choice": [2.0, 4.0], "about the same": [0.75, 0.85]}.items():
        measured = itertools.cycle(ratios)
        monkeypatch.setattr(measure, "_once", lambda *_, measured=measured: next(measured))
        measure.choose()
        assert set(native.choices.times.values()) == {(sum(ratios) / 2,) * len(SIZES)}, name
        compiled.with_suffix(".json").unlink()


@pytest.mark.parametrize("text", ["", "[]", '{"float32 products": 1}', '{"float32 products": [1.0, NaN, 1.0]}'])
def test_a_damaged_choice_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "choice.json").write_text(text)
    assert Choices.read(tmp_path / "choice.json") is None


def test_a_forced_choice_is_not_measured(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_measure", lambda: pytest.fail("measured"))
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "native")
    measure.choose()
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "pytorch")
    assert library.library.__wrapped__() is None
    assert kernels.cpu_kernels() == "PyTorch"
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "fast")
    with pytest.raises(ValueError, match="must be one of auto, native, pytorch, got 'fast'"):
        library.library.__wrapped__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_attention_by_pytorch(native: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    never = (0.1,) * len(SIZES)
    operations = ("products", "attention", "norms")
    monkeypatch.setattr(native, "choices", Choices({f"{name} {operation}": never for operation in operations}))
    x, weight, bias = torch.randn(7, 37).to(dtype), torch.randn(100, 37).to(dtype), torch.randn(100).to(dtype)
    norm, residual = torch.rand(37).to(dtype), torch.randn(7, 100).to(dtype)
    monkeypatch.setattr(native, "call", lambda called, *_: pytest.fail(called))
    monkeypatch.setattr(rotary, "norm_rows", lambda *_: pytest.fail("norms"))
    packed = matmul.pack_weight(weight)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for operation, arguments in (
        ("linear", (x,)),
        ("linear_add", (residual, x)),
        ("norm_linear", (x, norm, 1e-5)),
    ):
        got, want = (
            getattr(module, operation)(*(a.clone() if torch.is_tensor(a) else a for a in arguments), w, bias)
            for module, w in ((matmul, packed), (reference, weight))
        )
        torch.testing.assert_close(got, want, **tolerance)
    twice = torch.randn(2 * native.layout.tile_rows, 37).to(dtype)
    got, want = matmul.linear_gated(x, matmul.pack_weight(twice)), reference.linear_gated(x, twice)
    torch.testing.assert_close(got, want, **tolerance)
