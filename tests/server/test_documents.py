"""README, reference, presets and dashboard: what they name exists."""

import re
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.flags import load, settings_of
from server.openai.chat.protocol import NOT_YET_IN_CHAT, ChatCompletionRequest
from server.openai.completions.protocol import NOT_YET_IN_COMPLETIONS, CompletionRequest
from server.openai.fields import NO_EFFECT, NOT_YET_IN_BOTH
from server.settings import ServerConfig
from tests.support.live_server import Live

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = [document.parent / link for link in re.findall(r"\]\(([^):]+)\)", text)]
    paths = [
        ROOT / path for path in re.findall(r"`((?:engine|server|kernels|tests|configs|benchmarks)/[\w./-]*)`", text)
    ]
    assert [str(path) for path in links + paths if not path.exists()] == []


def test_the_tests_behind_the_security_page_exist() -> None:
    named = re.findall(r"`tests/([a-z_/]+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 15
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def test_messages_to_look_up_are_written_somewhere() -> None:
    rows = (
        (ROOT / "docs" / "deploy.md").read_text().partition("## Troubleshooting")[2].partition("\n## ")[0].splitlines()
    )
    messages = re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in rows if row.startswith("| `")))
    source = "".join(path.read_text() for folder in ("engine", "server") for path in (ROOT / folder).rglob("*.py"))
    plain = re.sub(r"[\"']\s+f?[\"']", "", re.sub(r"\{[^{}]*\}", "{}", source))  # texts that go on in the next line
    parts = {part.strip(" :{}") for message in messages for part in re.split("…|[0-9]+|SIGKILL", message)}
    assert len(messages) > 12
    assert [part for part in parts if part not in plain] == []


def test_flags_of_the_readme_exist() -> None:
    options = {setting.option for cls in (EngineConfig, ServerConfig) for setting in settings_of(cls).values()}
    rows = [line.split("|")[1] for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `--")]
    named = set(re.findall(r"--(?:no-)?([a-z-]+)", " ".join(rows)))
    assert len(named) > 10
    assert {"--" + name for name in named} <= options


def test_the_reference_lists_every_request_parameter() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    not_yet = NOT_YET_IN_BOTH | NOT_YET_IN_CHAT | NOT_YET_IN_COMPLETIONS
    for request in (ChatCompletionRequest, CompletionRequest):
        supported = set(request.model_fields) - set(not_yet) - set(NO_EFFECT)
        assert [name for name in sorted(supported) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("preset", sorted((ROOT / "configs" / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_load(preset: Path) -> None:
    config, _ = load({"model": "any", "config": str(preset)}, EngineConfig, ServerConfig, environ={})
    assert config != EngineConfig(model="any")


@pytest.mark.parametrize("file", ["grafana/quire.json", "prometheus/alerts.yml"])
def test_dashboard_and_alerts_ask_for_metrics_that_exist(file: str, live: Live) -> None:
    live.complete(max_tokens=2)  # some exist from the first step on
    text = (ROOT / "configs" / "deploy" / file).read_text()
    asked = set(re.findall(r"(?:vllm|quire):\w+|\bhttp_\w+|\bprocess_\w+", text))
    known = re.findall(r"^# TYPE (\S+) (\w+)$", live.http.get("/metrics").text, re.MULTILINE)
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    assert len(asked) > 10
    assert asked <= {name + part for name, kind in known for part in parts.get(kind, ("",))}
