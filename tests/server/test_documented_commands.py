"""Every command and every snippet of the documents is run, or for a reason that stands here only read by its parser.

Commands run in a folder of their own, against one live server of the bundled model.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib
import importlib.util
import io
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.model_shapes import model_folder
from engine.config import EngineConfig
from engine.flags import load
from server.cli.bench import BENCHMARKS
from server.cli.main import command_line, main
from server.settings import ServerConfig
from tests.support.documents import ROOT, Command, commands, excerpts, mentions, snippets, statements
from tests.support.served import serve

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore:.*found in sys.modules")]

# How a command begins → why it is read, not run.
ONLY_READ = {
    "make": "sets up an environment, or takes minutes; `make -n` says what it would do",
    "git": "needs the network",
    "pip": "needs the network",
    "uv": "needs the network",
    ".venv/bin/pip": "needs the network",
    "docker": "needs Docker; what it hands to `quire serve` is read as well",
    "ray": "needs a cluster; tests/worker starts Ray itself",
    "kill": "restarts replicas: tests/engine/test_replicas.py",
    "curl -X POST http://127.0.0.1:8000/v1/weights?path=/models/step-200": "tests/engine/test_update_weights.py",
    "quire serve": "the live server stands for it; its settings are loaded",
    "quire pull": "needs the network: tests/server/commands/test_pull.py",
    "quire count": "needs a model of the Hub: tests/server/commands/test_count.py",
    "quire bench engines": "minutes, and another engine",
    "quire bench servers": "minutes, and another engine",
    "quire bench scale": "minutes, and several GPUs: tests/benchmarks/offline",
    "quire bench kernels": "needs a GPU",
    "quire bench startup": "starts servers of its own: tests/benchmarks/serving",
    "quire bench server-path": "starts a server of its own: tests/benchmarks/micro",
    "python -m benchmarks": "minutes, a GPU, or another engine",
    "QUIRE_CPU_ISA=x86-64-v3 python -m benchmarks": "minutes, and another engine",
    "python -m tests": "minutes, a GPU, a browser, or other programs",
}
ONLY_COMPILED = {  # how a snippet begins
    "from ray ": "needs a Ray cluster: tests/server/ray",
    "from quire import LLM, LoRARequest": "needs a model of the Hub and an adapter: tests/engine/test_lora.py",
}
# How a command begins → what makes its run short.
LESS = {
    "quire bench throughput": "--num-prompts 2 --input-len 8 --output-len 4 --num-runs 1",
    "quire bench serve": "--num-prompts 2 --random-input-len 8 --random-output-len 4 --port PORT",
    "quire check": "--only service",
    "quire top": "--count 1",
}
RESULTS = {  # files that commands compare and plot
    "before.json": "engines/engines-h200.json",
    "after.json": "engines/engines-h200.json",
    "engines.json": "engines/engines-h200.json",
    "engines-a.json": "engines/engines-h200.json",
    "engines-b.json": "engines/engines-llama-3.1-8b-h200.json",
    "servers.json": "serving/servers-h200.json",
    "kernels.json": "kernels/kernels-h200.json",
}
SHAPES = {"Qwen/Qwen3-32B": "qwen3-32b", "meta-llama/Llama-3.1-8B": "llama-3.1-8b"}  # for `quire plan`
PLACEHOLDERS = {
    "FILE": "keys.yaml",
    "/etc/quire/keys.yaml": "keys.yaml",
    "NAME": "throughput",
    "URL": "http://127.0.0.1:8000",
    "MODEL": "configs/demo",
    "Qwen/Qwen3-0.6B": "configs/demo",
}


SUBCOMMANDS: dict[str, argparse.ArgumentParser] = next(
    action.choices for action in command_line()._actions if isinstance(action, argparse._SubParsersAction)
)


class Understood(Exception):
    """A command line was read to its end."""


@pytest.fixture(scope="module")
def url(demo_model: Path, quick_quire: list[str]) -> Iterator[str]:
    with serve(demo_model, "--max-model-len", "2048", quire=quick_quire) as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a command: it runs as from the root of a clone, but what it writes does not stay."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "keys.yaml").write_text("bob: sha256:" + "0" * 64)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begins(command: Command, table: dict[str, str]) -> str | None:
    """The key of the table that the command begins with."""
    text = " ".join(command.words) + " "
    return next((key for key in table if text.startswith((f"{key} ", f"{key}."))), None)


def substituted(words: tuple[str, ...], url: str, folder: Path) -> list[str]:
    """With models and addresses that there are here."""
    found = []
    for word in words:
        if word in SHAPES:
            word = str(model_folder(SHAPES[word], folder))
        word = PLACEHOLDERS.get(word, word)
        found += glob.glob(word) if "*" in word else [word.replace("http://127.0.0.1:8000", url)]
    return found


@pytest.mark.parametrize("command", [each for each in commands() if not begins(each, ONLY_READ)], ids=str)
def test_a_command_runs(command: Command, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in RESULTS.items():
        shutil.copy(ROOT / "benchmarks" / "results" / source, folder / name)
    program, *words = substituted(command.words, url, folder)
    if program == "curl":
        done = subprocess.run(["curl", "-sS", "--fail-with-body", *words], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    assert program == "quire", f"run {program!r}, or say in ONLY_READ why not"
    if any(word.endswith("plot") for word in words[:2]):
        pytest.importorskip("matplotlib")
    less = LESS.get(begins(command, LESS) or "", "").replace("PORT", url.rpartition(":")[2])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main([*words, *less.split()]) == 0


@pytest.mark.parametrize("command", [each for each in commands() if begins(each, ONLY_READ)] + mentions(), ids=str)
def test_a_command_is_understood(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = substituted(command.words, "http://127.0.0.1:8000", folder)
    if program == "quire":
        understood(words, monkeypatch)
    elif program == "docker" and words[0] == "run":
        understood(["serve", *words[words.index("quire") + 1 :]], monkeypatch)
    elif program == "python":
        understood_module(words, monkeypatch)
    elif program == "make":
        done = subprocess.run([program, "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
    elif program in ("pip", "uv"):
        extras = set(re.findall(r"quire\[(\w+)\]", " ".join(words)))
        known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
        assert extras <= known
    else:
        assert begins(command, ONLY_READ), f"run {program!r}, or say in ONLY_READ why not"


def understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of quire's whose words its parser takes; of `serve`, whose settings are valid."""
    words = [word for word in words if word != "--help"]
    if words == ["bench", words[-1]] or len(words) == 1:  # a name in a sentence
        assert words[-1] in BENCHMARKS or words[0] in SUBCOMMANDS
        return
    args = command_line().parse_args(words)
    if args.command == "bench" and args.rest:
        stop_after_parsing(monkeypatch)
        module = importlib.import_module(f"benchmarks.{BENCHMARKS[args.benchmark][0]}")
        with pytest.raises(Understood):
            module.main(args.rest)
    elif args.command == "serve":
        given = {name: value for name, value in vars(args).items() if name not in ("command", "run", "model_arguments")}
        find = importlib.util.find_spec  # of extras, which need not be installed
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "ray" or find(name, *more))
        load(given | {"model": "configs/demo"}, EngineConfig, ServerConfig, environ={})


def understood_module(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`-m MODULE …`: the module is there, and takes the words if there are any."""
    assert words[0] == "-m"
    assert importlib.util.find_spec(words[1]) is not None
    if not words[2:]:
        return
    stop_after_parsing(monkeypatch)
    monkeypatch.setattr(sys, "argv", [words[1], *words[2:]])
    with contextlib.suppress(Understood):
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def stop_after_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)


@pytest.mark.parametrize("name", snippets())
def test_a_snippet_runs(name: str, url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = snippets()[name]
    code = compile(text.replace("http://127.0.0.1:8000", url), name, "exec")
    if text.startswith(tuple(ONLY_COMPILED)):
        modules = re.findall(r"^from (server[\w.]*|engine[\w.]*) import", text, re.MULTILINE)
        assert all(importlib.util.find_spec(module) for module in modules)
        return
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_excerpts_are_as_in_the_code() -> None:
    code = "".join(path.read_text() for folder in ("engine", "tests") for path in (ROOT / folder).rglob("*.py"))
    plain = re.sub(r"\s+", " ", code)
    assert len(excerpts()) > 3
    assert [text for text in excerpts() if re.sub(r"\s+", " ", text).strip() not in plain] == []


def test_what_is_only_read_is_there() -> None:
    found = {begins(each, table) for each in [*commands(), *mentions()] for table in (ONLY_READ, LESS)}
    assert [key for key in (*ONLY_READ, *LESS) if key not in found] == []
    assert all(any(text.startswith(key) for text in snippets().values()) for key in ONLY_COMPILED)


def test_examples_of_the_help_are_understood() -> None:
    parser = command_line()
    texts = [parser.epilog or "", *(each.epilog or "" for each in SUBCOMMANDS.values())]
    lines = [line for text in texts for line in re.findall(r"^  (quire .*?)(?:  .*)?$", text, re.MULTILINE)]
    assert len(lines) > 25
    for line in lines:
        if "--help" not in line:
            (words,) = statements(re.split(r" [>|]+ ", line)[0] + "\n")
            parser.parse_args(words[1:])
