"""Opens files of a folder that is not trusted, such as a downloaded model's.

Only regular files that lie in the folder, or in the blobs of the Hugging Face cache to which the folder belongs:

    models--OWNER--NAME/snapshots/REVISION/config.json → ../../blobs/HASH
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH: needs no right to list it
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe without a writer does not block


def open_file(path: Path, folder: Path, max_bytes: int | None = None) -> BinaryIO:
    """Open a file of `folder` for reading. max_bytes: None: any size.

    Raises `OSError` whose `strerror` says what is wrong: it lies elsewhere, is no regular file, or is too large.
    """
    descriptor = _open(*_place(path, folder))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if max_bytes is not None and found.st_size > max_bytes:
            raise _too_large(found.st_size, max_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, folder: Path, max_bytes: int) -> bytes:
    """Read a file of `folder`. Errors: see `open_file`."""
    with open_file(path, folder, max_bytes) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it has grown
        raise _too_large(len(content), max_bytes)
    return content


def _too_large(size: int, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is too large: {size >> 20} MiB, of at most {max_bytes >> 20}")


def _place(path: Path, folder: Path) -> tuple[Path, Path]:
    """Return the base in which the file lies, the folder or the cache's blobs, and its path from there, without links.

    What the folder's own links lead to must lie there too: then no link of it shows another file of this machine.
    """
    base, file = (Path(os.path.realpath(each, strict=True)) for each in (folder, path))
    if file.is_relative_to(base):
        return base, file.relative_to(base)
    for snapshot in (base, *base.parents):
        blobs = snapshot.parent.parent / "blobs"
        if snapshot.parent.name == "snapshots" and file.parent == blobs:
            return blobs, Path(file.name)
    raise OSError(errno.EXDEV, "it is a link to a file outside the model's folder; copy that file here")


def _open(base: Path, file: Path) -> int:
    """Open a file below `base` by its path from there. A link that has appeared since is not followed."""
    *folders, name = file.parts or ("",)
    parent = os.open(base, _FOLDER)
    try:
        for each in folders:
            inner = os.open(each, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = inner
        return os.open(name, _FILE, dir_fd=parent)
    finally:
        os.close(parent)
