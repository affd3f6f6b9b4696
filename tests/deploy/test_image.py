"""The Dockerfile without Docker: its stages are read, and its commands run in an environment of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.processes import free_port
from engine.config import EngineConfig
from engine.flags import Parser, load
from server.cli import serve as serve_command
from server.settings import ServerConfig
from tests.packaging.set_up import first_token, started

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {"FROM", "RUN", "WORKDIR", "ARG", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


@pytest.fixture(scope="module")
def steps() -> list[Any]:
    """The instructions, as Docker's own parser reads them: cmd, value, json."""
    return list(pytest.importorskip("dockerfile").parse_file(str(ROOT / "Dockerfile")))


def values(steps: list[Any], name: str) -> list[list[str]]:
    return [list(step.value) for step in steps if step.cmd.upper() == name]


def is_sent(path: str) -> bool:
    """Return whether .dockerignore lets a top-level path into the build."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().split():
        if fnmatch(path, line.removeprefix("!")):
            sent = line.startswith("!")
    return sent


def test_instructions_are_known_and_their_commands_are_shell(steps: list[Any]) -> None:
    assert {step.cmd.upper() for step in steps} == KNOWN
    for (command,) in values(steps, "RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)
        if "apt-get install" in command:
            assert "apt-get update" in command
            assert "--no-install-recommends" in command
            assert command.rstrip("; }").endswith("rm -rf /var/lib/apt/lists/*")


def test_what_is_copied_is_there_and_is_all_that_is_installed(steps: list[Any]) -> None:
    copied = [source for *sources, _ in values(steps, "COPY") for source in sources]
    for source in copied:
        assert (ROOT / source).exists(), source
        assert is_sent(source), source
    setup = (ROOT / "pyproject.toml").read_text()
    packages = re.findall(r'"(\w+)\*"', re.findall(r"^include = (.*)$", setup, re.MULTILINE)[0])
    assert set(packages) <= set(copied)
    assert not is_sent("tests")
    assert not is_sent(".venv")


def test_there_is_a_compiler_for_the_kernels_of_a_cpu(steps: list[Any]) -> None:
    """`find_compiler` looks for c++, g++ and clang++: the first two come with Debian's package g++."""
    (first, *_) = [command for (command,) in values(steps, "RUN") if "apt-get install" in command]
    assert "g++" in first.split()


def test_it_ends_as_a_user_without_rights_and_serves(steps: list[Any]) -> None:
    names = [step.cmd.upper() for step in steps]
    assert values(steps, "USER") == [["quire"]]
    assert "RUN" not in names[names.index("USER") :]
    (entrypoint,), (command,) = values(steps, "ENTRYPOINT"), values(steps, "CMD")
    assert entrypoint[:2] == ["quire", "serve"]
    parser = Parser()
    serve_command.add_parser(parser.add_subparsers())
    given = vars(parser.parse_args([*entrypoint[1:], *command]))
    config, settings = load({**given, "model": given["model_arguments"][0]}, EngineConfig, ServerConfig)
    assert (settings.host, str(settings.port)) == ("0.0.0.0", values(steps, "EXPOSE")[0][0])
    assert config.model.removeprefix("/app/") == "configs/demo"
    (check,) = [step for step in steps if step.cmd.upper() == "HEALTHCHECK"]
    compile(json.loads(check.original[check.original.index("[") :])[-1], "healthcheck", "exec")
    assert f":{settings.port}/health" in check.original


@pytest.mark.slow
def test_its_commands_make_an_environment_that_serves(steps: list[Any], tmp_path: Path) -> None:
    """Every step but those of root, for a CPU, in a new folder that holds only what is copied."""
    app, venv = tmp_path / "app", tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, "PATH": f"{venv}/bin:{kept['PATH']}", "TORCH": "cpu", "EXTRA": ""}
    for step in steps:
        if step.cmd.upper() == "COPY":
            *sources, folder = step.value
            for source in sources:
                to = app / folder / (Path(source).name if folder == "./" else "")
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    to.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, to)
        elif step.cmd.upper() == "RUN" and re.search(r"pip install|kernels\.cpu\.build", step.value[0]):
            subprocess.run(["sh", "-c", step.value[0]], cwd=app, env=environment, check=True)
    ((program, *words),), (command,), port = values(steps, "ENTRYPOINT"), values(steps, "CMD"), free_port()
    words = [*words, *(word.replace("/app/", f"{app}/") for word in command)]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    with started([str(venv / "bin" / program), *words], tmp_path) as log:
        assert first_token(port, log)
    assert list(venv.glob("lib/*/site-packages/kernels/cpu/prebuilt/*.so"))
    assert "compiling kernels" not in log.read_text()


# Compose


def test_compose_takes_the_file() -> None:
    """By the specification's own rules: unknown keys and units are errors."""
    parse = pytest.importorskip("compose_spec").PyCompose.from_yaml
    text = (ROOT / "configs" / "deploy" / "compose.yaml").read_text()
    parse(text).validate()
    for right, wrong in (("stop_grace_period", "stop_grace"), ("30s", "30x"), ("8000:8000", "8000:many")):
        with pytest.raises(ValueError, match="services"):
            parse(text.replace(right, wrong)).validate()


def test_compose_starts_a_server_that_may_finish() -> None:
    file = yaml.safe_load((ROOT / "configs" / "deploy" / "compose.yaml").read_text())
    service = file["services"]["quire"]
    assert (ROOT / "configs" / "deploy" / service["build"]["context"] / "Dockerfile").is_file()
    parser = Parser()
    serve_command.add_parser(parser.add_subparsers())
    for environment, model, name in (
        ({}, "/app/configs/demo", "quire-demo"),
        ({"MODEL": "Qwen/Qwen3-0.6B"}, "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ({"MODEL": "/models/mine", "NAME": "mine"}, "/models/mine", "mine"),
    ):
        given = vars(parser.parse_args(["serve", *(substituted(word, environment) for word in service["command"])]))
        config, settings = load({**given, "model": given["model_arguments"][0]}, EngineConfig, ServerConfig)
        assert (config.model, config.served_model_name) == (model, (name,))
        assert service["stop_grace_period"].endswith("s")
        assert int(service["stop_grace_period"][:-1]) > settings.shutdown_timeout
    assert "HF_TOKEN" in service["environment"]
    assert {volume.partition(":")[0] for volume in service["volumes"]} == set(file["volumes"])


def substituted(text: str, environment: dict[str, str]) -> str:
    """Return what Compose makes of `${NAME:-default}`, where the default may hold another one."""
    pattern = re.compile(r"\$\{(\w+):-([^${}]*)\}")
    while pattern.search(text):
        text = pattern.sub(lambda found: environment.get(found[1]) or found[2], text)
    return text
