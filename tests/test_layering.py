"""The layers as code: imports run downward only. Reads the source; imports nothing of it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "engine", "server", "benchmarks", "quire")

# A layer is a package with a line of its own here; modules below it that have none belong to it.
# What each layer may import of ours: whole layers, and single modules of others.
CONTRACT = {
    "engine.core.batch",
    "engine.core.drafts.proposer",
    "engine.core.kv.cache_groups",
    "engine.core.kv.common_prefix",
    "engine.core.engine_request",
    "engine.core.params.pooling",
    "engine.core.params.sampling",
    "engine.core.params.structured",
}  # between policy and mechanism
FACE = {"=engine"}  # the public names that `engine/__init__.py` lists; "=" means this module alone, not its layer
PARAMETERS = {"engine.core.params.declare", "engine.core.params.pooling", "engine.core.params.structured"}
REQUESTS = (
    FACE | PARAMETERS | {"engine.core.batch", "engine.text", "engine.vision"}
)  # what becomes of a request, and of its outputs
NEUTRAL = {
    "server.http",
    "server.parsing",
    "server.generation",
    "server.metrics",
    "server.observability",
    "server.owned_store",
}  # no API's spelling
API_PARTS = {"server.apis.api", "server.apis.endpoint", "server.apis.parameters"}
APIS = {"server.apis.openai", "server.apis.anthropic", "server.apis.ollama"}
SERVER = (
    {"server", "server.cli.main", "server.cli.bench"} | APIS | NEUTRAL | REQUESTS | {"engine.flags", "engine.utils"}
)
ENGINE = {f"engine{below}" for below in ("", ".core", ".worker", ".models", ".text", ".structured", ".utils")} | {
    f"engine.{folder}" for folder in ("setup", "stepping", "processing", "offline", "replicas", "vision")
}
ALLOWED = {
    "quire": {"engine", "server.cli.main"},
    "kernels": {"kernels", "kernels.data", "kernels.reference", "kernels.cpu", "kernels.cuda"},
    "kernels.data": {"kernels.data"},
    "kernels.reference": {"kernels.reference", "kernels.data"},
    "kernels.cpu": {"kernels.cpu", "kernels.reference", "kernels.data"},
    "kernels.cuda": {"kernels", "kernels.cuda", "kernels.triton", "kernels.gluon", "kernels.gpu", "kernels.data"},
    "kernels.triton": {"kernels.triton", "kernels.gpu", "kernels.data"},
    "kernels.gluon": {"kernels.gluon", "kernels.gpu", "kernels.data"},
    "kernels.gpu": {"kernels.gpu", "kernels.data"},
    "engine.utils": {
        "engine.utils",
        "engine.errors",
        "engine.models.files",  # the type of progress callbacks
        "engine.core.fairness.tenants",
    },
    "engine.models": {"engine.models", "engine.utils.folder_files", "engine.utils.one_line", "kernels", "kernels.data"},
    "engine.worker": {"engine.worker", "engine.models", "kernels", "kernels.data", "kernels.triton.collectives"}
    | CONTRACT,
    "engine.core": {"engine.core"},
    "engine.text": {"engine.text", "engine.utils.folder_files", "engine.utils.one_line"},
    "engine.vision": {
        "engine.vision",
        "engine.models.errors",
        "engine.models.spec",
        "engine.core.engine_request",
        "engine.utils.folder_files",
    },
    "engine.structured": {
        "engine.structured",
        "engine.core.fairness.tenants",
        "engine.core.params.structured",
        "engine.utils.fair_executor",
        "engine.utils.memory",
    },
    "engine.setup": {"engine", "engine.setup", "engine.models", "engine.worker", "engine.processing"},
    "engine.stepping": {
        "engine",
        "engine.stepping",
        "engine.core",
        "engine.worker",
        "engine.models",
        "engine.structured",
    },
    "engine.processing": ENGINE,
    "engine.offline": ENGINE,
    "engine.replicas": ENGINE,
    "engine": ENGINE,
    "server": SERVER | {"server.docs", "engine.stats"},
    "server.several": SERVER | {"server.several", "engine.models.hub"},
    "server.processes": SERVER
    | {
        "server.processes",
        "engine.replicas",
        "engine.processing.input_processor",
        "engine.worker.parallel.lifeline",
    },
    "server.cli": SERVER
    | {"server.cli", "server.several", "server.processes", "engine.models.catalog", "engine.setup"},
    "server.docs": SERVER | {"server.docs", "engine.models.catalog"},
    "server.http": FACE
    | {
        "server.http",
        "server.metrics",
        "engine.core.fairness.tenants",
        "engine.utils",
        "server.generation.caller",
        "server.generation.errors",
        "server.generation.rate_limits",
        "server.generation.warnings",
        "server.generation.workers",
        "server.observability.context",
        "server.observability.readiness",
    },
    "server.observability": FACE
    | PARAMETERS
    | {"server.observability", "server.metrics", "server.owned_store", "engine.replicas.state"},
    "server.parsing": {
        "server.parsing",
        "engine.core.params.structured",
        "engine.structured.kinds",  # types of arguments, for grammars and parsers alike
        "engine.text",
    },
    "server.generation": (NEUTRAL - {"server.http"})
    | REQUESTS
    | {
        "server.settings",
        "engine.core.fairness.tenants",
        "engine.processing.beam_search",
        "engine.processing.output_collector",
        "engine.replicas.in_flight",
        "engine.utils",
    },
    "server.apis.openai": {"server.apis.openai", "engine.processing.beam_search"} | API_PARTS | NEUTRAL | REQUESTS,
    "server.apis.anthropic": {"server.apis.anthropic"} | API_PARTS | NEUTRAL | REQUESTS,
    "server.apis.ollama": {"server.apis.ollama"}
    | API_PARTS
    | {"server.apis.openai.conversation", "server.apis.openai.logprobs"}  # it has OpenAI's tools and log-probabilities
    | NEUTRAL
    | REQUESTS,
    "server.deploy_ray": SERVER | {"server.deploy_ray", "engine.replicas.routing"},
    "server.cli.main": SERVER | {"server.cli", "benchmarks"},
    "server.cli.bench": SERVER | {"server.cli", "benchmarks"},
    "benchmarks": {
        "benchmarks",
        "server",
        "server.cli",
        "server.cli.main",
        "kernels",
        "kernels.data",
        "kernels.triton",
        "kernels.cuda",
    }
    | ENGINE,
}
# What they may not import of others' (a layer below `engine` without a line here: as `engine`).
WEB = {"fastapi", "starlette", "uvicorn"}
FORBIDDEN = {
    "kernels": WEB | {"transformers"},
    "engine": WEB | {"transformers", "triton"},
    "engine.core": {"*"},  # all but the standard library
    "engine.text": WEB | {"transformers", "triton", "torch"},
    "engine.vision": WEB | {"transformers", "triton", "torch"},
    "server": {"transformers", "triton", "torch"},
    "server.generation": WEB | {"http", "transformers", "triton", "torch"},  # neutral: no statuses, no web framework
}


def layer_of(module: str) -> str | None:
    """The longest line of the table that is `module` or above it; None: not ours."""
    while module not in ALLOWED:
        module, dot, _ = module.rpartition(".")
        if not dot:
            return None
    return module


def imports_of(path: Path, module: str, root: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name of the module) of every import statement in a file, wherever it stands."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                if level:
                    above = package.rsplit(".", level - 1)[0]
                    base = f"{above}.{base}" if base else above
                for alias in names:  # `from a.b import c` imports a.b.c if that is a module, else a.b
                    inner = root.joinpath(*f"{base}.{alias.name}".split("."))
                    is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                    yield node.lineno, f"{base}.{alias.name}" if is_module else str(base)


def named_at_run_time(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every `import_module` of a constant, or of one that begins with a constant."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        match node:
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[name, *_]):
                if isinstance(name, ast.JoinedStr) and name.values:
                    name = name.values[0]
                if isinstance(name, ast.Constant):
                    yield node.lineno, str(name.value).rstrip(".")


def modules(root: Path) -> Iterator[tuple[Path, str]]:
    """File and name of every module of ours."""
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        yield path, ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def violations(root: Path) -> list[str]:
    found = []
    for path, module in modules(root):
        file = path.relative_to(root)
        layer = layer_of(module)
        assert layer, module
        forbidden = FORBIDDEN.get(layer) or FORBIDDEN.get(layer.partition(".")[0], set())
        for line, target in sorted([*imports_of(path, module, root), *named_at_run_time(path)]):
            top = target.partition(".")[0]
            if top in PACKAGES:
                wrong = not {f"={target}", target, layer_of(target)} & ALLOWED[layer]
            else:
                wrong = top == "tests" or top in forbidden or ("*" in forbidden and top not in sys.stdlib_module_names)
            if wrong:
                found.append(f"{file}:{line}: {layer} may not import {target}")
    return found


def test_imports_run_downward_only() -> None:
    assert violations(ROOT) == []


def test_every_folder_of_the_engine_has_its_line() -> None:
    folders = {f"engine.{path.parent.name}" for path in ROOT.glob("engine/*/*.py")}
    assert folders <= ALLOWED.keys()


def loops(root: Path) -> list[str]:
    """Import loops between modules and between folders beside each other, each as "a → b → a".

    A folder imports what any module in or below it imports from outside. Modules named at run time (a backend, a
    benchmark) are chosen, not depended on, and do not count.
    """
    imported: dict[str, set[str]] = {}
    beside: dict[str, set[str]] = {}
    for path, module in modules(root):
        targets = {target for _, target in imports_of(path, module, root) if target.partition(".")[0] in PACKAGES}
        imported[module] = targets - {module}
        for target in targets:
            own, other = folder_of(root, module), folder_of(root, target)
            common = next((i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
            if common is not None:
                beside.setdefault(".".join(own[: common + 1]), set()).add(".".join(other[: common + 1]))
    found = []
    for graph in (imported, beside):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(" → ".join(reversed(error.args[1])))
    return found


def folder_of(root: Path, module: str) -> list[str]:
    parts = module.split(".")
    return parts if root.joinpath(*parts).is_dir() else parts[:-1]


def test_no_import_loops() -> None:
    assert loops(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "loop"),
    [
        ("kernels/data/layout.py", "from kernels.data import plan", {"kernels.data.layout", "kernels.data.plan"}),
        ("server/http/sse.py", "from server.parsing import tools", {"server.http", "server.parsing"}),
        ("engine/__init__.py", "if TYPE_CHECKING:\n    from engine.plan import x", {"engine", "engine.plan"}),
    ],
)
def test_a_loop_is_found(tmp_path: Path, file: str, text: str, loop: set[str]) -> None:
    write(
        tmp_path,
        {
            "kernels/data/layout.py": "",
            "kernels/data/plan.py": "from kernels.data import layout",
            "server/http/sse.py": "",
            "server/http/errors.py": "from server.http import sse",
            "server/parsing/tools.py": "from server.http.errors import x",
            "engine/plan.py": "import engine",
            "engine/__init__.py": "",
        },
    )
    assert loops(tmp_path) == []
    write(tmp_path, {file: text})
    assert loop in [set(found.split(" → ")) for found in loops(tmp_path)]


LEGAL = {
    "kernels/__init__.py": "from kernels import reference",
    "kernels/cuda/linear.py": "from kernels.gluon import scaled\nfrom kernels.triton import norm",
    "kernels/data/layout.py": "",
    "kernels/gluon/scaled.py": "from kernels.gpu.launch import run",
    "kernels/gpu/launch.py": "import torch, triton",
    "kernels/reference/__init__.py": "from kernels.data import layout",
    "kernels/triton/norm.py": "from kernels.gpu import launch\nfrom . import codes",
    "kernels/triton/codes.py": "",
    "engine/__init__.py": "from engine.offline.llm import LLM",
    "engine/offline/llm.py": "from engine.core.scheduler import Scheduler\n"
    "from engine.worker import runner\nimport torch",
    "engine/plan.py": "",
    "engine/core/batch.py": "from dataclasses import dataclass\nimport collections.abc",
    "engine/core/scheduler.py": "from engine.core import batch\nfrom .batch import Scheduled",
    "engine/worker/runner.py": (
        "import kernels.data.layout\nfrom engine.core import batch\nfrom engine.models.decoder import Decoder"
    ),
    "engine/models/decoder.py": "import kernels\nfrom . import spec",
    "engine/models/spec.py": "",
    "engine/text/tokenizer.py": "import tokenizers",
    "server/app.py": "import fastapi\nfrom engine import LLM\nimport engine.text.tokenizer, engine.core.batch",
    "server/cli/main.py": "from benchmarks import throughput",
    "server/http/sse.py": "import starlette",
    "server/generation/start.py": "from server.parsing import tools",
    "server/parsing/tools.py": "",
    "server/apis/openai/chat.py": "from server.generation import start",
    "benchmarks/throughput.py": "import engine.offline.llm",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_checker_accepts_what_is_legal(tmp_path: Path) -> None:
    write(tmp_path, LEGAL)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "text", "target"),
    [
        ("kernels/triton/norm.py", "from engine.models import spec", "engine.models.spec"),
        ("kernels/triton/norm.py", "from engine import LLM", "engine"),
        ("kernels/triton/norm.py", "from kernels.gluon import scaled", "kernels.gluon.scaled"),
        ("kernels/gluon/scaled.py", "from kernels.triton.norm import rms_norm", "kernels.triton.norm"),
        ("kernels/gpu/launch.py", "from kernels.triton import norm", "kernels.triton.norm"),
        ("kernels/reference/__init__.py", "from kernels.cuda import linear", "kernels.cuda.linear"),
        ("engine/models/decoder.py", "import engine.core.batch", "engine.core.batch"),
        ("engine/models/decoder.py", "from ..worker import runner", "engine.worker.runner"),
        ("engine/worker/runner.py", "from engine.core.scheduler import Scheduler", "engine.core.scheduler"),
        ("engine/worker/runner.py", "from engine.core import scheduler", "engine.core.scheduler"),
        ("engine/worker/runner.py", "from engine.offline.llm import LLM", "engine.offline.llm"),
        ("engine/core/scheduler.py", "from engine.worker import runner", "engine.worker.runner"),
        ("engine/core/scheduler.py", "import numpy as np", "numpy"),
        ("engine/core/scheduler.py", "def f():\n    import torch", "torch"),
        ("engine/core/scheduler.py", "if TYPE_CHECKING:\n    from ..text.tokenizer import T", "engine.text.tokenizer"),
        ("engine/core/scheduler.py", "from .. import plan", "engine.plan"),
        ("engine/text/tokenizer.py", "from engine.models.spec import ModelSpec", "engine.models.spec"),
        ("engine/text/tokenizer.py", "import torch", "torch"),
        ("engine/offline/llm.py", "from server.app import app", "server.app"),
        ("engine/offline/llm.py", "import kernels", "kernels"),
        ("engine/offline/llm.py", "from tests.toy import Toy", "tests.toy"),
        ("server/app.py", "import torch.nn as nn", "torch.nn"),
        ("server/app.py", "from engine import worker", "engine.worker"),
        ("server/app.py", "from engine import plan", "engine.plan"),
        ("server/app.py", "from engine.offline.llm import LLM", "engine.offline.llm"),
        ("server/generation/start.py", "from engine.core.params.sampling import S", "engine.core.params.sampling"),
        ("server/app.py", "from engine.core.scheduler import Scheduler", "engine.core.scheduler"),
        ("server/app.py", "import kernels", "kernels"),
        ("server/app.py", "from benchmarks import throughput", "benchmarks.throughput"),
        ("server/app.py", "importlib.import_module('benchmarks.throughput')", "benchmarks.throughput"),
        ("server/app.py", "importlib.import_module(f'benchmarks.{name}')", "benchmarks"),
        ("server/cli/main.py", "import torch", "torch"),
        ("server/generation/start.py", "from server.apis.openai import chat", "server.apis.openai.chat"),
        ("server/apis/anthropic/handler.py", "from server.apis.openai import chat", "server.apis.openai.chat"),
        ("server/http/sse.py", "from server.generation import start", "server.generation.start"),
        ("server/generation/start.py", "from server.http import sse", "server.http.sse"),
        ("server/generation/start.py", "from http import HTTPStatus", "http"),
        ("server/generation/start.py", "import starlette.requests", "starlette.requests"),
        ("benchmarks/throughput.py", "import tests.toy", "tests.toy"),
    ],
)
def test_the_checker_finds_a_violation(tmp_path: Path, file: str, text: str, target: str) -> None:
    write(tmp_path, LEGAL | {file: text})
    [found] = violations(tmp_path)
    assert found.startswith(f"{file}:")
    assert found.endswith(f"may not import {target}")
