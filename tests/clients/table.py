"""docs/clients.md: which clients were tried, written by the run that tried them."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
HEAD = "| client | version | tested |\n|---|---|---|\n"


@dataclass(frozen=True)
class Client:
    """One row, for a module of tests that all passed. `package`: of PyPI, in `environment` if it has one of its own, or
    of npm in `folder`.
    """

    name: str
    package: str
    tried: str
    folder: Path | None = None
    environment: Path | None = None

    @property
    def is_installed(self) -> bool:
        try:
            return bool(self.version)
        except (importlib.metadata.PackageNotFoundError, OSError, StopIteration):
            return False

    @property
    def version(self) -> str:
        if self.environment is not None:
            path = [str(each) for each in self.environment.glob("lib/*/site-packages")]
            return next(iter(importlib.metadata.distributions(name=self.package, path=path))).version
        if self.folder is None:
            return importlib.metadata.version(self.package)
        manifest = self.folder / "node_modules" / self.package / "package.json"
        version: str = json.loads(manifest.read_text(encoding="utf-8"))["version"]
        return version


def write(clients: list[Client], path: Path = DOCUMENT) -> None:
    """The rows of `clients` anew; those of others stay."""
    text = path.read_text(encoding="utf-8")
    before, head, rest = text.partition(HEAD)
    old, blank, after = rest.partition("\n\n")
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in old.splitlines() if row.startswith("| ")}
    rows |= {each.name: f"| {each.name} | `{each.package}` {each.version} | {each.tried} |" for each in clients}
    table = "\n".join(rows[name] for name in sorted(rows, key=str.lower))
    path.write_text(before + head + table + (blank + after or "\n"), encoding="utf-8")
