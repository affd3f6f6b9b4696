"""Contents of an installation: the wheel holds the page, the bundled model and the types, and is found from any
folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "server" / "static"


@pytest.mark.heavy
def test_the_wheel_holds_what_serving_needs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("kernels", "engine", "server", "benchmarks", "configs/demo"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "."]
    subprocess.run([*command, "."], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    page = {path.relative_to(ROOT).as_posix() for path in STATIC.rglob("*") if path.is_file()}
    assert page <= set(names)
    assert {f"{package}/py.typed" for package in ("kernels", "engine", "server")} <= set(names)
    demo = {name.rpartition("share/quire/demo/")[2] for name in names if "share/quire/demo/" in name}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= demo
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not any(each in line for line in needed for each in ("pytest", "triton", "playwright"))


def test_pictures_and_links_of_the_readme_can_be_made_absolute(tmp_path: Path) -> None:
    """Make them absolute as the release does, for PyPI."""
    shutil.copy(ROOT / "README.md", tmp_path)
    raw, blob = "https://raw.example/quire/v1", "https://example/quire/blob/v1"
    subprocess.run([ROOT / ".ci" / "absolute_links", raw, blob], cwd=tmp_path, check=True)
    before, after = (ROOT / "README.md").read_text(), (tmp_path / "README.md").read_text()
    pictures, links = r"!\[[^\]]*\]\(([^)]+)\)", r"(?<!!)\[[^\]]*\]\(([^)]+)\)"
    assert len(re.findall(links, after)) == len(re.findall(links, before)) > 10
    assert all(link.startswith("https://") for link in re.findall(links, after))
    assert re.findall(pictures, after) == [f"{raw}/{path}" for path in re.findall(pictures, before)] != []
