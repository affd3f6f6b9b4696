"""Contents of an installation: the wheel holds the page, the bundled model and the types, and is found from any
folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("quire", "engine", "kernels", "server", "benchmarks")


@pytest.mark.heavy
def test_the_wheel_holds_what_serving_needs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in (*PACKAGES, "configs/demo"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    prebuilt = tmp_path / "kernels" / "cpu" / "prebuilt" / "cpu-x86-64-v3-0123.so"
    prebuilt.parent.mkdir()
    prebuilt.write_text("a library\n")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "."]
    subprocess.run([*command, "."], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    kinds = ("*.py", "py.typed", "cpu/native/*", "static/**/*")
    files = {path for package in PACKAGES for kind in kinds for path in (ROOT / package).rglob(kind)}
    needed_files = {path.relative_to(ROOT).as_posix() for path in files if path.is_file()}
    assert {f"{package}/py.typed" for package in PACKAGES if package != "benchmarks"} <= needed_files
    assert sorted(needed_files - set(names)) == []
    assert prebuilt.relative_to(tmp_path).as_posix() in names
    demo = {name.rpartition("share/quire/demo/")[2] for name in names if "share/quire/demo/" in name}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= demo
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not any(each in line for line in needed for each in ("pytest", "triton", "playwright"))


def test_the_image_and_the_type_checker_are_given_every_package() -> None:
    """Compare the lists of packages in pyproject.toml, the Dockerfile and .dockerignore."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    included = project["setuptools"]["packages"]["find"]["include"]
    assert sorted(included) == sorted(f"{package}*" for package in PACKAGES)
    assert set(PACKAGES) <= set(project["mypy"]["packages"])
    assert set(PACKAGES) <= set(project["coverage"]["run"]["source"])
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(PACKAGES) <= set(copied)
    assert {f"!{package}" for package in PACKAGES} <= set((ROOT / ".dockerignore").read_text().splitlines())


def test_no_folder_of_tests_hides_an_installed_package() -> None:
    """Find packages below tests/, which pytest imports by their bare name: a `packaging` hides that of setuptools."""
    folders = {path.parent for path in (ROOT / "tests").rglob("__init__.py")}
    names = {folder.name for folder in folders if folder.parent not in folders}
    assert len(names) > 2
    assert names & {*packages_distributions(), *sys.stdlib_module_names} == set()


def test_patterns_of_project_files_find_something() -> None:
    """Find the files that `make quick` tests, and those that coverage leaves out."""
    makefile = (ROOT / "Makefile").read_text()
    selected = re.findall(r"tests/[\w/]+(?:\.py)?", makefile.partition("QUICK := ")[2].partition("\n\n")[0])
    assert len(selected) > 8
    left_out = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]["omit"]
    assert [each for each in [*selected, *left_out] if not list(ROOT.glob(each))] == []


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
