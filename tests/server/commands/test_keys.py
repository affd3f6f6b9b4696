"""`quire keys`: what it shows, and what it writes."""

import re
import stat
from pathlib import Path

import pytest

from server.cli import main as cli
from server.generation.caller import Caller
from server.http.api_keys import KeyRing, read_keys


def new(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The exit code, standard output, standard error."""
    code = cli.main(["keys", "new", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_key_opens_what_its_line_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = new(capsys, "alice")
    assert code == 0
    (key,) = out.splitlines()
    line = err.rstrip().splitlines()[-1].strip()
    assert line.startswith("alice: sha256:")
    assert key not in err, "standard error may be kept"
    file = tmp_path / "keys.yaml"
    file.write_text(line)
    assert KeyRing((), str(file)).find(key.encode()) == Caller("alice", may_prioritise=False)


def test_keys_are_added_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    alice = new(capsys, "alice", "--file", file)[1].strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("# ours\n" + file.read_text().rstrip("\n"))
    limits = ("--priority", "--admin", "--requests-per-minute", 60, "--tokens-per-minute", 9000)
    bob = new(capsys, "bob", "--file", file, *limits)[1].strip()
    ring = KeyRing((), str(file))
    assert ring.find(alice.encode()) == Caller("alice", may_prioritise=False)
    assert ring.find(bob.encode()) == Caller("bob", True, 60, 9000, is_admin=True)
    text = file.read_text()
    assert text.startswith("# ours\n")
    assert alice not in text
    assert bob not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("alice",), "alice has a key there"),
        (("a b",), "letters, digits"),
        (("eve\nroot: x",), "letters, digits"),
        (("bob", "--requests-per-minute", 0), "at least 1"),
    ],
)
def test_what_would_break_the_file_is_refused(
    words: tuple[object, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("alice: {key: one}\n")
    code, out, err = new(capsys, *words, "--file", file)
    assert (code, out) == (1, "")
    assert message in err
    assert file.read_text() == "alice: {key: one}\n"


def test_a_file_of_another_form_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ('{"a": "one"}', "one", "[a]"):
        file = tmp_path / "keys"
        file.write_text(text)
        assert new(capsys, "bob", "--file", file)[0] == 1
        assert file.read_text() == text
    assert new(capsys, "bob", "--file", tmp_path / "none" / "keys")[0] == 1


KEYS = """# ours
alice: {key: one, requests_per_minute: 60}  # until May
# bob has two keys
bob:
  key: [two, three]
  priority: true

# the robots
ci: four
"""


def test_keys_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    assert cli.main(["keys", "list", "--file", str(file)]) == 0
    head, *rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert head == ["NAME", "KEYS", "REQUESTS/MIN", "TOKENS/MIN", "MAY"]
    assert rows == [["alice", "1", "60", "–"], ["bob", "2", "–", "–", "priority"], ["ci", "1", "–", "–"]]
    assert cli.main(["keys", "list", "--file", str(tmp_path / "none")]) == 1


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("alice", "alice: {key: one, requests_per_minute: 60}  # until May\n"),
        ("bob", "bob:\n  key: [two, three]\n  priority: true\n"),
        ("ci", "ci: four\n"),
    ],
)
def test_removing_a_key_leaves_the_other_lines(
    name: str, gone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    file.chmod(0o640)
    before = read_keys(file)
    assert cli.main(["keys", "remove", name, "--file", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert file.read_text() == KEYS.replace(gone, "")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert set(read_keys(file).items()) == {item for item in before.items() if item[1].name != name}
    assert [path.name for path in tmp_path.iterdir()] == ["keys.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice: one\n", "has its only key"),
        ("bob: one\nci: two\n", "alice has no key there; it holds those of bob, ci"),
        ("{alice: one, bob: two}\n", "alice does not have lines of its own"),
        ("- a\n", "must hold 'NAME: KEY' lines"),
    ],
)
def test_keys_that_cannot_be_removed(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    assert cli.main(["keys", "remove", "alice", "--file", str(file)]) == 1
    assert message in capsys.readouterr().err
    assert file.read_text() == text
