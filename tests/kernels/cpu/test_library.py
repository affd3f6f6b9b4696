"""The CPU's kernels are compiled once for each CPU, and their absence is no error."""

import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import library


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


COPY = 'while [ "$1" != "-o" ]; do shift; done; echo once >> "$(dirname "$0")/calls"; echo made > "$2"'


def test_it_is_compiled_once(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, COPY)
    made = library.build(compiler, tmp_path / "kernels")
    assert library.build(compiler, tmp_path / "kernels") == made
    assert made.read_text() == "made\n"
    assert (tmp_path / "calls").read_text() == "once\n"
    assert made.parent.stat().st_mode & 0o077 == 0
    assert list(made.parent.iterdir()) == [made]


def test_another_cpu_compiles_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fake_compiler(tmp_path, COPY)
    here = library.build(compiler, tmp_path)
    monkeypatch.setattr(library, "_cpu_features", lambda: "flags: none")
    assert library.build(compiler, tmp_path) != here


def test_a_compiler_that_fails_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 'no such option' >&2; exit 1"))
    with pytest.raises(subprocess.CalledProcessError):
        library.build(str(library.find_compiler()), tmp_path / "kernels")
    with caplog.at_level(logging.INFO):
        assert library.library() is None
    assert "no such option" in caplog.text
    assert not list((tmp_path / "kernels").iterdir())


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    with caplog.at_level(logging.INFO):
        assert library.library() is None
    assert "no C++ compiler is installed" in caplog.text


def test_large_pages_keep_copies_apart() -> None:
    pages = library.LargePages()
    tensors = [torch.arange(7), torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(9).double()]
    kept = [pages.keep(tensor) for tensor in tensors]
    assert all(torch.equal(*pair) for pair in zip(kept, tensors, strict=True))
    assert kept[0].data_ptr() % pages.PAGE == 0
    assert kept[1].data_ptr() == kept[0].data_ptr() + 64
    large = pages.keep(torch.zeros(pages.CHUNK + 1, dtype=torch.uint8))
    assert large.data_ptr() % pages.PAGE == 0
    assert torch.equal(pages.keep(tensors[1].T), tensors[1].T)
