"""README, reference, presets and dashboard: what they name exists."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, __version__
from engine.config import EngineConfig
from engine.flags import load, settings_of
from engine.replicas.start_times import times_file
from server.cli.chat.terminal import history_file
from server.cli.main import COMMANDS
from server.settings import ServerConfig
from tests.support.documents import DOCUMENTS, ROOT
from tests.support.live_server import Live

NOTES = [*sorted((ROOT / "docs" / "notes").glob("*.md")), ROOT / "CHANGELOG.md"]
RESULTS, DEMO = ROOT / "benchmarks" / "results" / "README.md", ROOT / "demo" / "README.md"


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTES, DEMO, RESULTS], ids=lambda path: path.parent.name + path.stem)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = [document.parent / link for link in re.findall(r"\]\(([^):#]+)[)#]", text)]
    paths = [
        ROOT / path
        for path in re.findall(r"`((?:quire|engine|server|kernels|tests|configs|benchmarks|demo|docs)/[\w./-]*)`", text)
    ]
    assert [str(path) for path in links + paths if not path.exists()] == []
    modules = re.findall(
        r"(?:python -m |`)((?:quire|engine|server|kernels|tests|benchmarks|demo)(?:\.[a-z_]+)+)`?", text
    )
    assert [name for name in modules if not is_there(name)] == []


def is_there(name: str) -> bool:
    """Find a module, or a name in one; or the name of a file."""
    if re.search(r"\.(?:json|yaml|md|service|png)$", name):
        return True
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        pass
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def test_methods_that_the_architecture_names_exist() -> None:
    named = re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 2
    source = [path.read_text() for folder in ("engine", "kernels", "server") for path in (ROOT / folder).rglob("*.py")]
    bodies = {
        name: "".join(re.findall(rf"^class {name}\b.*?(?=^\S|\Z)", "".join(source), re.DOTALL | re.MULTILINE))
        for name, _ in named
    }
    assert [f"{name}.{part}" for name, part in named if not re.search(rf"\b{part}\b", bodies[name])] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_find_them(document: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", document.read_text()):
        target = document.parent / path if path else document
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


def test_the_version_is_the_changelogs_newest() -> None:
    dated = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    project = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project == [__version__]
    assert dated[0] == __version__


def test_files_are_written_where_the_document_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("QUIRE_CACHE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    table = (ROOT / "docs" / "operations.md").read_text().partition("\n## Files\n")[2].partition("\n## ")[0]
    for path in (times_file(), times_file().parent / "kernels", history_file()):
        assert f"| `~/{path.relative_to(tmp_path)}`" in table
    commands = {"pull", *(word for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for word in row.split("`"))}
    named = {name.removeprefix("quire ").split()[0] for name in commands if name.strip(", ")}
    assert {*COMMANDS, "completion"} - named == set()
    options = {setting.option for cls in (EngineConfig, ServerConfig) for setting in settings_of(cls).values()}
    assert {"--download-dir", "--prefix-cache-file", "--record-trace", "--uds"} <= options


def test_no_document_needs_a_published_package() -> None:
    """Only releasing.md may: `pip install 'quire[extra]'` adds to an environment that holds Quire."""
    published = re.compile(r"(?:pip|tool) install (?:--upgrade )?quire\b")
    pages = [path for path in (*DOCUMENTS, ROOT / "README.md") if path.name != "releasing.md"]
    assert [path.name for path in pages if published.search(path.read_text())] == []


def test_the_site_has_every_page_once() -> None:
    named = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.heavy
def test_the_site_can_be_built(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stderr
    guide = (tmp_path / "guide" / "index.html").read_text()
    assert "config.json" in guide
    assert "../configs" not in guide, "a link that leaves the site"


def test_every_path_of_the_server_is_documented(live: Live) -> None:
    text = (ROOT / "docs" / "api.md").read_text() + (ROOT / "docs" / "operations.md").read_text()
    known = set(re.findall(r"/[\w/{}.-]+", text))
    paths = {re.sub(r"\{\w+\}", "{id}", path) for path in live.http.get("/openapi.json").json()["paths"]}
    assert len(paths) > 20
    assert sorted(path for path in paths if path not in known and path != "/") == []


def test_the_tests_behind_the_security_page_exist() -> None:
    named = re.findall(r"`tests/([a-z_/]+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 15
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def test_messages_to_look_up_are_written_somewhere() -> None:
    rows = (
        (ROOT / "docs" / "troubleshooting.md")
        .read_text()
        .partition("## By message")[2]
        .partition("\n## ")[0]
        .splitlines()
    )
    messages = re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in rows if row.startswith("| `")))
    source = "".join(
        path.read_text()
        for folder, files in (("engine", "*.py"), ("kernels", "*.py"), ("server", "*.py"), ("server/static/js", "*.js"))
        for path in (ROOT / folder).rglob(files)
    )
    plain = re.sub(r"[\"']\s+f?[\"']", "", re.sub(r"\{[^{}]*\}", "{}", source))  # texts that go on in the next line
    parts = {part.strip(" :{}") for message in messages for part in re.split("…|[0-9]+|SIGKILL", message)}
    assert len(messages) > 12
    assert [part for part in parts if part not in plain] == []


def test_the_diagram_names_what_is_there() -> None:
    names = re.findall(r">((?:server|engine|kernels)(?:/\w+)?)[:,<]", (ROOT / "docs" / "architecture.svg").read_text())
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()] == []


def test_the_speeds_are_those_of_the_results() -> None:
    text = (ROOT / "docs" / "performance.md").read_text().partition("| work | ")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)`.*? \| (.*) \|$", text, re.MULTILINE))
    files = {"qwen3-0.6b": "engines-h200.json", "llama-3.1-8b": "engines-llama-3.1-8b-h200.json"}
    for column, (model, file) in enumerate(files.items()):
        result = json.loads((ROOT / "benchmarks" / "results" / "engines" / file).read_text())
        runs = [run for run in result["runs"] + result["starts"] if (run["engine"], run["model"]) == ("quire", model)]
        ratios = {run.get("work", "start-up"): f"{run['ratio']:.{2 if 'work' in run else 1}f}" for run in runs}
        assert len(ratios) > 6
        assert {work: row.split("|")[column].strip() for work, row in rows.items()} == dict.fromkeys(rows, "") | ratios


def test_every_result_is_explained() -> None:
    folder = ROOT / "benchmarks" / "results"
    explained = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text())
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert sorted(files - {"README.md", *explained}) == []


def test_flags_of_the_readme_exist() -> None:
    options = {setting.option for cls in (EngineConfig, ServerConfig) for setting in settings_of(cls).values()}
    rows = [line.split("|")[1] for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `--")]
    named = set(re.findall(r"--(?:no-)?([a-z-]+)", " ".join(rows)))
    assert len(named) > 10
    assert {"--" + name for name in named} <= options


def test_the_reference_lists_every_request_parameter(live: Live) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    description = live.http.get("/openapi.json").json()
    models = description["components"]["schemas"]
    bodies = [
        operation["requestBody"]["content"]["application/json"]["schema"]
        for path in description["paths"].values()
        for operation in path.values()
        if "requestBody" in operation
    ]
    kinds = [kind for body in bodies for kind in body.get("oneOf", [body])]
    names = {name for kind in kinds for name in _resolved(kind, models)["properties"]}
    assert len(names) > 100
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def _resolved(schema: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    return models[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def test_every_method_of_the_offline_api_is_documented() -> None:
    text = (ROOT / "docs" / "offline.md").read_text()
    methods = [name for name in vars(LLM) if not name.startswith("_")]
    assert len(methods) > 6
    assert [name for name in methods if f"`{name}(" not in text] == []


def test_every_environment_variable_is_documented() -> None:
    text = (ROOT / "docs" / "flags.md").read_text()
    code = [path.read_text() for folder in ("engine", "kernels", "server") for path in (ROOT / folder).rglob("*.py")]
    read = set(re.findall(r"\"((?:QUIRE|VLLM)_[A-Z_]*[A-Z])\"", "".join(code)))
    assert len(read) > 4
    assert [name for name in sorted(read) if f"`{name}" not in text] == []  # some are named by their beginning


def test_every_metric_is_documented_with_its_type(live: Live) -> None:
    live.complete(max_tokens=2)  # some exist from the first step on
    exposed = dict(re.findall(r"^# TYPE (\S+) (\w+)$", live.http.get("/metrics").text, re.MULTILINE))
    exposed = {name: kind for name, kind in exposed.items() if name.startswith(("vllm:", "quire:", "http_"))}
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert dict(rows) == {name: kind for name, kind in exposed.items() if not name.endswith("_created")}


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
