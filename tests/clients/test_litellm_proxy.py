"""LiteLLM's proxy in front of Quire, as teams run it: OpenAI's and Anthropic's clients through it."""

import os
import secrets
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.processes import free_port
from tests.clients.scripted import call, scripted
from tests.clients.table import Client

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".clients" / "litellm"  # it wants older packages than others do
KEY = f"sk-{secrets.token_hex(32)}"
PROGRAM = ENVIRONMENT / "bin" / "litellm"
CLIENTS = (
    Client(
        "LiteLLM proxy", "litellm", "chat, streams and tools through it, as `hosted_vllm/…`", environment=ENVIRONMENT
    ),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PROGRAM.is_file(), reason="needs litellm[proxy] in an environment of its own: .clients/litellm"
    ),
]
CONFIG = """
model_list:
  - model_name: demo
    litellm_params: {{model: hosted_vllm/toy, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
"""


def test_through_the_proxy(tmp_path: Path) -> None:
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    messages: Any = [{"role": "user", "content": "Weather in Rome?"}]
    tools: Any = [weather]
    with scripted(call("weather", '{"city": "Rome"}')) as (live, engine):
        port = free_port()
        (tmp_path / "config.yaml").write_text(CONFIG.format(port=live.port), encoding="utf-8")
        command = [str(PROGRAM), "--config", "config.yaml", "--port", str(port), "--host", "127.0.0.1"]
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
        proxy = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        try:
            _wait(f"http://127.0.0.1:{port}/health/liveliness", proxy)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}", api_key=KEY, max_retries=0) as client:
                done = client.chat.completions.create(model="demo", messages=messages, tools=tools)
                assert done.choices[0].finish_reason == "tool_calls"
                engine.turns = ("It is sunny.",)
                stream = client.chat.completions.create(model="demo", messages=messages, stream=True)
                assert (
                    "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "It is sunny."
                )
        finally:
            proxy.terminate()
            proxy.wait(20)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError("the proxy does not answer")
