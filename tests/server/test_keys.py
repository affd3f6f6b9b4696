"""The file of keys: what it may hold, what is refused without showing a key, and how it is read again."""

import json
import logging
import os
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.generation.caller import Caller
from server.http import api_keys as keys
from server.http.api_keys import Entry, KeyRing, add_to_file, hashed, new_key

SECRET = "quire-do-not-show-this"


def find(ring: KeyRing, key: str) -> Caller | None:
    return ring.find(key.encode())


def test_what_a_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(
        f"# our keys\nplain: 12345\nhashed: {hashed('two')}\n"
        f"more: {{key: [{hashed('three')}, three-b], priority: true, admin: true, "
        "requests_per_minute: 60, tokens_per_minute: 90000}\n"
    )
    ring = KeyRing((), str(file))
    assert find(ring, "12345") == Caller("plain", may_prioritise=False)
    assert find(ring, "two") == Caller("hashed", may_prioritise=False)
    assert find(ring, "three") == find(ring, "three-b") == Caller("more", True, 60, 90000, is_admin=True)
    for wrong in ("", "tw", hashed("two"), "hashed", "three "):
        assert find(ring, wrong) is None
    assert SECRET not in repr(vars(ring))


def test_json_and_a_lone_key_are_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(json.dumps({"a": {"key": hashed("one"), "priority": True}}))
    assert find(KeyRing((), str(file)), "one") == Caller("a")
    file.write_text("one\n")
    assert find(KeyRing((), str(file)), "one") == Caller("key", may_prioritise=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nothing yet\n", "holds no key"),
        (f"{SECRET} {SECRET}", "'NAME: KEY' lines"),
        (f"- {SECRET}", "'NAME: KEY' lines"),
        (f"a: [{SECRET}", "not YAML in line 1"),
        (f'a: "{SECRET}', "not YAML in line 1"),
        (f"a: {SECRET}\nb: {SECRET}", "a and b have the same key"),
        (f"a b: {SECRET}", "letters, digits"),
        (f"{'a' * 65}: {SECRET}", "letters, digits"),
        ("a: ", "the key of a"),
        (f"a: sha256:{SECRET}", "the key of a must be sha256:"),
        (f'a: " {SECRET}"', "the key of a"),
        (f"a: {{key: {SECRET}, requests_per_minute: 0}}", "limits of a"),
        (f"a: {{key: {SECRET}, requests_per_minute: {SECRET}}}", "requests_per_minute"),
        (f"a: {{key: {SECRET}, tokens_per_second: 1}}", "tokens_per_second"),
        ("a: {priority: true}", "key"),
        ("[" * 5000, "not YAML"),
        ("\x00\xff", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words) as caught:
        KeyRing((), str(file))
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value) or "letters" in words


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot be read"):
            KeyRing((), str(path))


def test_the_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys, "CHECK_SECONDS", 0.0)
    file = tmp_path / "keys.yaml"

    def write(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        os.replace(new, file)

    write("a: one")
    ring = KeyRing(("given",), str(file))
    write("b: two\nc: three")
    assert find(ring, "one") is None, "a key that was taken out opens nothing"
    assert find(ring, "two") == Caller("b", may_prioritise=False)
    assert find(ring, "given") == Caller("key-1", is_admin=True)
    for broken in ("b: [two", ""):
        write(broken)
        assert find(ring, "two") is not None, "a broken file changes nothing"
    file.unlink()
    assert find(ring, "two") is not None
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 3, "each is said once"
    assert all("the keys stay as they are" in error and "two" not in error for error in errors)
    write("b: four")
    assert [find(ring, key) is not None for key in ("two", "four")] == [False, True]


def test_new_keys_differ() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert all(len(new_key()) >= 43 for _ in range(10))


@pytest.mark.parametrize(
    "text", ["- a list\n", "title: two words \x07\n", "a b: c\n", "version: '3 '\nname: x\n", "[1]\n"]
)
def test_a_key_is_not_added_to_another_kind_of_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"stays as it is|is not YAML|must hold"):
        add_to_file(file, "a", Entry(hashed("one")))
    assert file.read_text() == text
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="is no regular file"):
        add_to_file(file, "a", Entry(hashed("one")))


def test_a_name_is_there_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"a: {SECRET}\na: other\n")
    with pytest.raises(ConfigError, match="a name is there twice"):
        KeyRing((), str(file))
