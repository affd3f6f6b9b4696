"""The CPU's kernels are compiled once for each CPU, and their absence is no error."""

import ctypes
import logging
import os
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


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a library gives what is in the file."""

    def load(path: str) -> str:
        if (text := Path(path).read_text()) == "damaged":
            raise OSError("file too short")
        return text

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("umask", [0o022, 0o002])  # with the second, others of the group may write new files
def test_it_is_compiled_once(tmp_path: Path, umask: int) -> None:
    compiler, folder = fake_compiler(tmp_path, COPY), tmp_path / "kernels"
    before = os.umask(umask)
    try:
        assert all(str(library.load([compiler], folder)) == "made\n" for _ in range(2))
    finally:
        os.umask(before)
    assert (tmp_path / "calls").read_text() == "once\n"
    assert folder.stat().st_mode & 0o077 == 0
    assert len(list(folder.iterdir())) == 1


@pytest.mark.usefixtures("loaded")
def test_another_cpu_compiles_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, folder = fake_compiler(tmp_path, COPY), tmp_path / "kernels"
    library.load([compiler], folder)
    monkeypatch.setattr(library, "_cpu_features", lambda: "flags: none")
    library.load([compiler], folder)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.usefixtures("loaded")
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    compiler, folder = fake_compiler(tmp_path, COPY), tmp_path / "kernels"
    library.load([compiler], folder)
    (kept,) = folder.iterdir()
    kept.write_text("damaged")
    assert str(library.load([compiler], folder)) == kept.read_text() == "made\n"


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_is_not_loaded(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler, folder = fake_compiler(tmp_path, COPY), tmp_path / "kernels"
    library.load([compiler], folder)
    (kept,) = folder.iterdir()
    kept.write_text("planted")
    (folder if what == "folder" else kept).chmod(0o777)
    assert str(library.load([compiler], folder)) == "made\n"
    assert (what == "folder") == ("others may write to it" in caplog.text)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("no such option", "no such option"),
        ("x.s: Assembler messages:\nx.s:7: Error: no such instruction", "x.s:7: Error: no such instruction"),
        ("in f:\n/usr/bin/ld: cannot find -lstdc++\ncollect2: error: ld failed", "/usr/bin/ld: cannot find -lstdc++"),
    ],
)
def test_a_compiler_that_fails_is_no_error(
    said: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, f"echo '{said}' >&2; exit 1"))
    assert library.library() is None
    assert caplog.messages[-1].endswith(f": {reason}")
    assert not list((tmp_path / "kernels").iterdir())


def test_a_compiler_that_hangs_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "TIMEOUT", 0.2)
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 'license server?' >&2; exec sleep 60"))
    assert library.library() is None
    assert "cannot be compiled" in caplog.text


def test_the_compilers_command_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, COPY) + " -m64")
    assert library.find_compiler() == [str(tmp_path / "compiler"), "-m64"]


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
