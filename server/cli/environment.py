"""Checks that Python imports Quire's own packages: others have the same names, such as Hugging Face's `kernels`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# The docstring of each names Quire: that tells them from packages that another distribution has written over them.
PACKAGES = ("kernels", "engine", "server", "quire")
ROOT = Path(__file__).resolve().parents[2]


def foreign_package(root: Path = ROOT) -> str | None:
    """Return a message if one of the packages is not Quire's, else None. `root`: the folder of Quire's packages."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        expected = root / name / "__init__.py"
        if origin != expected or "Quire" not in expected.read_text(encoding="utf-8"):
            return (
                f"the package {name!r} in {origin.parent if origin else 'this environment'} is {_owners(name)}, not "
                "Quire's: "
                "install Quire in an environment of its own, for instance with `uv tool install .` in its folder"
            )
    return None


def _owners(name: str) -> str:
    """Return the distributions, other than Quire, that contain a package of this name."""
    import importlib.metadata  # takes 0.03 s

    found = importlib.metadata.packages_distributions().get(name, [])
    others = sorted({f"{each} {importlib.metadata.version(each)}" for each in found if each != "quire"})
    return f"that of {' and '.join(others)}" if others else "another program's"
