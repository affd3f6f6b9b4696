"""Coding agents from npm against a scripted model: a command that they run, and its result in the next turn."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.scripted import call, scripted
from tests.clients.table import Client

FOLDER = Path(__file__).with_name("agents_js")
CLIENTS = (
    Client("Codex CLI", "@openai/codex", "`exec`: a command and its result, reasoning kept between turns", FOLDER),
    Client(
        "Claude Code",
        "@anthropic-ai/claude-code",
        "`-p`: a command and its result, thinking kept between turns",
        FOLDER,
    ),
    Client("OpenAI Agents (JavaScript)", "@openai/agents", "tools with zod, structured output, streams", FOLDER),
)
THOUGHT = "<think>\nHm.\n</think>\n\n"
SECONDS = 120

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node"),
    pytest.mark.skipif(not (FOLDER / "node_modules").is_dir(), reason="needs npm install in tests/clients/agents_js"),
]


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run a program and return its output. It sees no other settings of this user."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def program(name: str) -> str:
    return str(FOLDER / "node_modules" / ".bin" / name)


def test_codex(tmp_path: Path) -> None:
    command = json.dumps({"cmd": "echo hello-$((40+2))"})
    with scripted(THOUGHT + call("exec_command", command), THOUGHT + "It says hello.") as (live, engine):
        provider = f'{{name="quire",base_url="http://127.0.0.1:{live.port}/v1",wire_api="responses"}}'
        out = run(
            [
                program("codex"), "exec", "--json", "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox",
                "-c", "model_provider=quire", "-c", f"model_providers.quire={provider}", "-m", "toy", "say hello",
            ],
            tmp_path,
            CODEX_HOME=str(tmp_path),
        )  # fmt: skip
        assert '"text":"It says hello."' in out
        assert "hello-42" in engine.prompt()
        assert engine.prompt().startswith(engine.prompt(0)), (
            "the second turn goes on from the first: its prefix is cached"
        )


def test_claude_code(tmp_path: Path) -> None:
    command = json.dumps({"command": "echo hello-$((40+2))", "description": "says hello"})
    with scripted(THOUGHT + call("Bash", command), THOUGHT + "It says hello.") as (live, engine):
        environment = {
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{live.port}",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "toy",
            "CLAUDE_CONFIG_DIR": str(tmp_path / "config"),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        arguments = ["-p", "say hello", "--allowedTools", "Bash(echo *)", "--output-format", "json"]
        out = run([program("claude"), *arguments], tmp_path, **environment)
        assert json.loads(out)["result"] == "It says hello."
        assert "hello-42" in engine.prompt()
        assert "x-anthropic-billing-header" not in engine.prompt()
        first = engine.prompt(0)
        run([program("claude"), *arguments], tmp_path, **environment)
        again = engine.prompt(-2)
        num_equal = next(
            (i for i, pair in enumerate(zip(first, again, strict=False)) if len(set(pair)) > 1), len(first)
        )
        assert num_equal > 0.9 * len(first), "another session begins alike"


def test_openai_agents_in_javascript() -> None:
    weather = call("weather", '{"city": "Rome", "days": 2}')
    with scripted(weather, '{"city": "Rome", "sunny": true}') as (live, _):
        url = f"http://127.0.0.1:{live.port}"
        done = subprocess.run(["node", "--test"], cwd=FOLDER, env={**os.environ, "QUIRE_URL": url}, timeout=SECONDS)
        assert done.returncode == 0
