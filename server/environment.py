"""Whether the packages that Python finds are Quire's own: others have the same names, such as Hugging Face's `kernels`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

PACKAGES = ("kernels", "engine", "server")
ROOT = Path(__file__).resolve().parents[1]


def foreign_package(root: Path = ROOT) -> str | None:
    """What to tell the user when one of the packages is not Quire's, else None. `root`: the folder that has them."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        expected = root / name / "__init__.py"
        if origin != expected or "Quire" not in expected.read_text(encoding="utf-8"):
            return (
                f"the package {name!r} in {origin.parent if origin else 'this environment'} is {_owners(name)}, not Quire's: "
                "install Quire in an environment of its own, for instance with `uv tool install quire`"
            )
    return None


def _owners(name: str) -> str:
    """The distributions that have a package of this name, without Quire."""
    found = importlib.metadata.packages_distributions().get(name, [])
    others = sorted({f"{each} {importlib.metadata.version(each)}" for each in found if each != "quire"})
    return f"that of {' and '.join(others)}" if others else "another program's"
