"""Files of a folder that is not trusted: opened once, and only if they lie there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.utils import folder_files
from engine.utils.folder_files import open_file, read_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model" / "inner").mkdir(parents=True)
    (tmp_path / "model" / "inner" / "file").write_bytes(b"own")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"secret")
    return tmp_path / "model"


def test_files_and_links_within_the_folder(folder: Path) -> None:
    (folder / "link").symlink_to("inner/file")
    for name in ("link", "inner/file", "inner/../link"):
        assert read_file(folder / name, folder, 3) == b"own"


@pytest.mark.parametrize("name", ["../outside/file", "link", "folder/file", "/etc/passwd"])
def test_what_lies_elsewhere_is_refused(folder: Path, name: str) -> None:
    (folder / "link").symlink_to(folder.parent / "outside" / "file")
    (folder / "folder").symlink_to(folder.parent / "outside")
    with pytest.raises(OSError, match="outside the model's folder"):
        read_file(folder / name, folder, 100)


@pytest.mark.parametrize("swapped", ["file", "inner"])
def test_a_link_that_appears_after_the_check_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    place = folder_files._place

    def then_swap(path: Path, root: Path) -> tuple[Path, Path]:
        found = place(path, root)
        if swapped == "file":
            (folder / "inner" / "file").unlink()
            (folder / "inner" / "file").symlink_to(folder.parent / "outside" / "file")
        else:
            (folder / "inner").rename(folder / "before")
            (folder / "inner").symlink_to(folder.parent / "outside")
        return found

    monkeypatch.setattr(folder_files, "_place", then_swap)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):  # noqa: PT011 (which one is the system's choice)
        read_file(folder / "inner" / "file", folder, 100)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_sizes_and_kinds(folder: Path) -> None:
    with pytest.raises(OSError, match="too large"):
        read_file(folder / "inner" / "file", folder, 2)
    os.mkfifo(folder / "pipe")
    for name in ("pipe", "inner"):
        with pytest.raises(OSError, match="no regular file"):
            open_file(folder / name, folder)
    for name in ("none", "loop"):
        (folder / "loop").unlink(missing_ok=True)
        (folder / "loop").symlink_to("loop")
        with pytest.raises(OSError, match=r"No such file|symbolic links"):
            open_file(folder / name, folder)
