"""Commands that documents name exist: modules run with `python -m`, and benchmarks of `quire bench`."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from server.cli.bench import BENCHMARKS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "benchmarks/results/README.md",
    ROOT / "demo/README.md",
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    modules = re.findall(r"python -m ((?:benchmarks|tests|demo)(?:\.\w+)*)", text)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert set(re.findall(r"quire bench ([a-z][\w-]*)", text)) <= BENCHMARKS.keys()


def test_every_benchmark_of_the_command_line_is_a_module() -> None:
    assert [
        module for module, _ in BENCHMARKS.values() if importlib.util.find_spec(f"benchmarks.{module}") is None
    ] == []


@pytest.mark.parametrize("name", ["all_reduce", "gpu_profile", "kernels", "gemms"])
def test_what_needs_a_gpu_says_so_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.micro.{name}").main([])
    assert re.fullmatch(
        r"(quire bench |benchmarks\.micro\.)\w+: needs .* NVIDIA GPUs?; PyTorch sees none here", str(ended.value)
    )
