"""API keys: creates them, reads them from a file, and looks them up. Only hashes are stored."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from engine import ConfigError
from server.generation.caller import Caller

_log = logging.getLogger(__name__)

MARK = "sha256:"
MAX_FILE_BYTES = 1 << 20  # about 10,000 keys
CHECK_SECONDS = 1.0  # between checks whether the file has changed
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(MARK + r"[0-9a-fA-F]{64}")


class Entry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An entry of a key file that has more than a key."""

    key: str | list[str]  # several during a rotation
    priority: bool = False  # whether its requests may set a `priority` below 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    admin: bool = False  # whether it may see other keys' requests and usage, and change what all keys share
    adapters: list[str] | None = None  # names of the LoRA adapters that it may use; None: all


def new_key() -> str:
    """Return a new key of 256 random bits. It cannot be guessed, so a fast hash is safe."""
    return f"quire-{secrets.token_urlsafe(32)}"


def hashed(key: str) -> str:
    """Return a key's hash as in a key file."""
    return MARK + hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """The keys of a server. A key file is reloaded when it changes; an invalid file changes nothing."""

    def __init__(self, keys: Sequence[str], file: str | None) -> None:
        """`keys` get the names key-1, key-2 …; a single one is an admin's. `file`: see `read_keys`. Raises
        `ConfigError` if it cannot be read.
        """
        self._given = {
            _digest(key, f"api_key: key {number}"): Caller(f"key-{number}", is_admin=len(keys) == 1)
            for number, key in enumerate(keys, 1)
        }
        self._path = Path(file) if file is not None else None
        self._version = self._file_version()
        self._callers = self._given | (read_keys(self._path) if self._path is not None else {})
        self._next_check = time.monotonic() + CHECK_SECONDS

    def find(self, key: bytes) -> Caller | None:
        """Return the caller with this key, or None.

        The lookup uses the key's hash. Its timing reveals only hashes, and no one can construct a key for a given hash
        prefix.
        """
        if self._path is not None and time.monotonic() >= self._next_check:
            self._read_again(self._path)
        return self._callers.get(hashlib.sha256(key).digest())

    def _read_again(self, path: Path) -> None:
        self._next_check = time.monotonic() + CHECK_SECONDS
        if (version := self._file_version()) == self._version:
            return
        self._version = version
        try:
            self._callers = self._given | read_keys(path)
        except ConfigError as error:
            _log.error("the keys stay as they are: %s", error)
        else:
            _log.info("api_key_file %s: read again, %d keys", path, len(self._callers))

    def _file_version(self) -> tuple[int, ...]:
        """Return a value that differs after a change, also if a symbolic link was redirected, as Kubernetes does."""
        try:
            status = self._path.stat() if self._path is not None else None
        except OSError:
            status = None
        return (status.st_ino, status.st_size, status.st_mtime_ns) if status is not None else ()


def read_keys(path: Path) -> dict[bytes, Caller]:
    """Read a key file. Returns the callers by the SHA-256 of their keys. Raises `ConfigError`, which never shows a key.

    The file is YAML (or JSON): lines `NAME: KEY`, with an `Entry` instead of the key if there are more settings. A key
    is `sha256:` and its hash, or the key itself. A file may also contain just a single key.
    """
    label = f"api_key_file {path}"
    callers = _callers(_entries(_read(path, label), label), label)
    if not callers:
        raise ConfigError(f"{label}: holds no key that could open the server")
    return callers


def add_to_file(path: Path, name: str, entry: Entry) -> None:
    """Append a line to a key file; only its owner can read a new file. Raises `ConfigError` if the name exists."""
    label = f"file {path}"
    if path.exists() and not path.is_file():
        raise ConfigError(f"{label}: is no regular file")
    before = _read(path, label) if path.exists() else b""
    try:
        _callers(_entries(before, label), label)
    except ConfigError as error:
        raise ConfigError(f"{error}; a file that is no key file stays as it is") from None
    if name in _entries(before, label):
        raise ConfigError(f"{label}: {name} has a key there")
    line = (b"\n" if before and not before.endswith(b"\n") else b"") + entry_line(name, entry).encode() + b"\n"
    _entries(before + line, label)  # raises if the file is not made of lines
    try:
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(line)
    except OSError as error:
        raise ConfigError(f"{label}: cannot be written ({error.strerror or error})") from None


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the entries of a key file by name. Raises `ConfigError`."""
    label = f"file {path}"
    entries = _entries(_read(path, label), label)
    _callers(entries, label)
    return {name: value if isinstance(value, Entry) else Entry(value) for name, value in entries.items()}


def remove_from_file(path: Path, name: str) -> None:
    """Remove an entry from a key file, whose other lines stay as they are.

    Raises `ConfigError` if it has no such entry or no other one: a server keeps its keys when a file holds none.
    """
    label, entries = f"file {path}", read_entries(path)
    if name not in entries:
        raise ConfigError(f"{label}: {name} has no key there; it holds those of {', '.join(entries) or 'no one'}")
    if len(entries) == 1:
        raise ConfigError(
            f"{label}: {name} has its only key, and a server keeps its keys when the file holds none: "
            "add another key first, or stop the server and delete the file"
        )
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    root: Any = yaml.compose(text, yaml.BaseLoader)  # a mapping, since it has entries
    key, value = next(pair for pair in root.value if pair[0].value == name)
    first, last = key.start_mark.line, value.end_mark.line + (value.end_mark.column > 0)
    while last > first + 1 and lines[last - 1].lstrip()[:1] in ("", "#"):  # a block's end is the next entry's begin
        last -= 1
    rest = "".join(lines[:first] + lines[last:])
    if set(_entries(rest.encode(), label)) != set(entries) - {name}:
        raise ConfigError(f"{label}: {name} does not have lines of its own: remove it with an editor")
    _replace(path.resolve(), rest, label)


def _replace(path: Path, text: str, label: str) -> None:
    """Replace a file at once, so that no server reads half of it."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            file.write(text)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"{label}: cannot be written ({error.strerror or error})") from None


def entry_line(name: str, entry: Entry) -> str:
    """Return a line of a key file, without line end. Raises `ConfigError` if it could not be read back."""
    _callers({name: entry}, "key")
    more = msgspec.to_builtins(entry)
    if list(more) == ["key"]:
        return f"{name}: {entry.key}"
    return f"{name}: {{{', '.join(f'{field}: {json.dumps(value)}' for field, value in more.items())}}}"


def _callers(entries: Mapping[str, str | list[str] | Entry], label: str) -> dict[bytes, Caller]:
    callers: dict[bytes, Caller] = {}
    for name, value in entries.items():
        entry = value if isinstance(value, Entry) else Entry(value)
        limits = (entry.requests_per_minute, entry.tokens_per_minute)
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{label}: a name must be 1 to 64 letters, digits or ._@-, got {name[:100]!r}")
        if any(limit is not None and limit < 1 for limit in limits):
            raise ConfigError(f"{label}: the limits of {name} must be at least 1")
        adapters = None if entry.adapters is None else frozenset(entry.adapters)
        caller = Caller(name, entry.priority, *limits, is_admin=entry.admin, adapters=adapters)
        for key in [entry.key] if isinstance(entry.key, str) else entry.key:
            other = callers.setdefault(_digest(key, f"{label}: the key of {name}"), caller)
            if other.name != name:
                raise ConfigError(f"{label}: {other.name} and {name} have the same key")
    return callers


class _Loader(yaml.BaseLoader):
    """Loads all values as strings, and refuses duplicate names."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(problem="a name is there twice", problem_mark=node.start_mark)
        return mapping


def _read(path: Path, label: str) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read ({error.strerror or error})") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{label}: is larger than {MAX_FILE_BYTES >> 20} MiB")
    return text


def _entries(text: bytes, label: str) -> Mapping[str, str | list[str] | Entry]:
    try:
        content = yaml.load(text, _Loader)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{label}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:  # the message of a YAMLError shows lines of the file
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f" in line {line + 1}" if line is not None else ""
        raise ConfigError(f"{label}: is not YAML{where}") from None
    if isinstance(content, str) and content and not content.split()[1:]:
        return {"key": content}
    try:
        return msgspec.convert(content or {}, dict[str, str | list[str] | Entry], strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{label}: must hold 'NAME: KEY' lines ({error})") from None


def _digest(key: str, label: str) -> bytes:
    if not key or key != key.strip() or (key.startswith(MARK) and not _HASH.fullmatch(key)):
        raise ConfigError(f"{label} must be {MARK} and 64 hex digits, or a key without spaces around it")
    return bytes.fromhex(key.removeprefix(MARK)) if key.startswith(MARK) else hashlib.sha256(key.encode()).digest()
