"""Identifies checkpoints without reading their weights."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path


def fingerprint(folder: Path) -> str:
    """Return a hash of the model's configuration and weight files, which changes whenever a file is replaced.

    A file is identified by its size and modification time; in Hugging Face's cache, where files are links to blobs named by
    their content, by that name.
    """
    digest = sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        blob, found = path.resolve(), path.stat()
        version = blob.name if path.is_symlink() and blob.parent.name == "blobs" else found.st_mtime_ns
        digest.update(json.dumps([path.name, found.st_size, version]).encode())
    return digest.hexdigest()
