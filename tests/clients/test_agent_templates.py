"""Coding agents with published chat templates: ten turns of commands, errors, text beside calls, a cancelled turn.

QUIRE_TEST_TEMPLATES names a folder of the templates (*.jinja): see CONTRIBUTING.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.sessions import NUM_TURNS, SessionEngine, results
from tests.clients.table import Client
from tests.clients.test_agents import FOLDER as AGENTS
from tests.clients.test_agents import program
from tests.support.live_server import Live, run_server, wait_until

FOLDER = Path(os.environ.get("QUIRE_TEST_TEMPLATES", "/nonexistent"))
TEMPLATES = {
    "Qwen3-Coder": "Qwen3-Coder",
    "GLM-4.7": "GLM-4.7-Flash",
    "gpt-oss": "openai-gpt-oss-120b",
    "Mistral Small 3.2": "Mistral-Small-3.2-24B-Instruct-2506",
    "DeepSeek V3.2": "deepseek-ai-DeepSeek-V3.2",
}
CLIENTS = (Client("OpenCode", "opencode-ai", "`run`: ten turns with each template above", AGENTS),)
SECONDS = 240
Start = Callable[[Live, Path, str, bool], tuple[list[str], dict[str, str]]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="QUIRE_TEST_TEMPLATES names no folder of templates"),
]
needs_npm = pytest.mark.skipif(not (AGENTS / "node_modules").is_dir(), reason="needs npm install in agents_js")


def claude(live: Live, folder: Path, words: str, resumes: bool) -> tuple[list[str], dict[str, str]]:
    arguments = ["-p", words, "--allowedTools", "Bash", "--output-format", "json", *(["--continue"] if resumes else [])]
    return [program("claude"), *arguments], {
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{live.port}",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "toy",
        "CLAUDE_CONFIG_DIR": str(folder / "config"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def codex(live: Live, folder: Path, words: str, resumes: bool) -> tuple[list[str], dict[str, str]]:
    provider = f'{{name="quire",base_url="http://127.0.0.1:{live.port}/v1",wire_api="responses"}}'
    settings = ["-c", "model_provider=quire", "-c", f"model_providers.quire={provider}", "-m", "toy"]
    flags = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *settings]
    resume = ["resume", "--last"] if resumes else []
    return [program("codex"), "exec", *resume, *flags, words], {"CODEX_HOME": str(folder)}


def opencode(live: Live, folder: Path, words: str, resumes: bool) -> tuple[list[str], dict[str, str]]:
    config = {
        "provider": {
            "quire": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"http://127.0.0.1:{live.port}/v1", "apiKey": "none"},
                "models": {"toy": {"tool_call": True, "limit": {"context": 200_000, "output": 4096}}},
            }
        },
        "permission": {"*": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    flags = ["--continue"] if resumes else []
    environment = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    return [program("opencode"), "run", "--model", "quire/toy", *flags, words], environment


def session_of(start: Start, live: Live, engine: SessionEngine, folder: Path) -> str:
    """Run an agent, interrupt it in one turn, go on, and return its last output."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    command, more = start(live, folder, "Run the commands.", False)
    out = folder / "out.txt"
    with out.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment | more, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        try:
            wait_until(lambda: engine.is_interrupted or process.poll() is not None, SECONDS)
            assert engine.is_interrupted, out.read_text(errors="replace")
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            process.kill()
            process.wait()
    live.wait_idle()
    engine.is_resumed = True
    command, more = start(live, folder, "Go on.", True)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | more,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(engine: SessionEngine) -> None:
    """All results are in the prompt of the last turn, in their order."""
    prompt = next(prompt for i in reversed(range(len(engine.requests))) if engine.tool in (prompt := engine.prompt(i)))
    found = [[prompt.find(each) for each in results(turn)] for turn in range(NUM_TURNS)]
    assert min(map(min, found)) >= 0, prompt
    assert found == sorted(found), "within a turn, an agent may send results in any order"
    assert "Go on." in prompt
    assert "I look at it." in prompt


@needs_npm
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("start", "tool", "argument", "more"),
    [
        (claude, "Bash", "command", {"description": "runs it"}),
        (codex, "exec_command", "cmd", {}),
        (opencode, "bash", "command", {"description": "runs it"}),
    ],
    ids=["claude", "codex", "opencode"],
)
def test_ten_turns(start: Start, tool: str, argument: str, more: dict[str, Any], template: str, tmp_path: Path) -> None:
    source = (FOLDER / f"{TEMPLATES[template]}.jinja").read_text(encoding="utf-8")
    engine = SessionEngine(source, tool, argument, more)
    with run_server(engine) as live:
        assert "All done." in session_of(start, live, engine, tmp_path)
        check(engine)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_ten_turns_of_openai_agents(api: str, template: str, tmp_path: Path) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    source = (FOLDER / f"{TEMPLATES[template]}.jinja").read_text(encoding="utf-8")
    engine = SessionEngine(source, "shell", "command")

    @agents.function_tool
    def shell(command: str) -> str:
        """Runs a command."""
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
        return f"exit code {done.returncode}\n{done.stdout}"

    async def run(url: str) -> str:
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = getattr(agents, api)(model="toy", openai_client=client)
        agent = agents.Agent(name="demo", instructions="Use tools.", model=model, tools=[shell])
        session = agents.SQLiteSession("one")
        first = agents.Runner.run_streamed(agent, "Run the commands.", session=session, max_turns=30)

        async def read() -> None:
            async for _ in first.stream_events():
                pass

        task = asyncio.create_task(read())
        while not engine.is_interrupted and not task.done():
            await asyncio.sleep(0.01)
        assert engine.is_interrupted, task
        first.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        engine.is_resumed = True
        second = await agents.Runner.run(agent, "Go on.", session=session, max_turns=30)
        await client.close()
        return str(second.final_output)

    with run_server(engine) as live:
        assert asyncio.run(run(f"http://127.0.0.1:{live.port}")) == "All done."
        check(engine)
