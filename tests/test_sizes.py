"""The sizes that CONTRIBUTING.md sets: of functions, classes, argument lists, lines and the engine's top folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("quire", "engine", "kernels", "server", "benchmarks", "demo")
MAX_LINES_OF_FUNCTION = 60
MAX_LINES_OF_CLASS = 300  # with all its parents'
MAX_LINES_OF_MODEL_RUNNER = 230  # to which every feature of the device would like to add
MAX_PARAMETERS = 8  # without self; a host function that launches a kernel may unpack a record, so a few have more
MAX_LONG_SIGNATURES = 10
MAX_TOP_MODULES = 12
MAX_COLUMNS = 120  # of C++; the linter counts those of Python

Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees() -> Iterator[tuple[str, ast.Module]]:
    """File and syntax tree of every module of ours."""
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def num_lines(node: ast.ClassDef | Function) -> int:
    """Lines of a class or function, without its decorators."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def on_host(function: Function) -> bool:
    """Return False for device functions of Triton and Gluon, whose compiler may need one long body."""
    return not any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def num_parameters(function: Function) -> int:
    args = function.args
    named = [arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]]
    return len([name for name in named if name not in ("self", "cls")])


def host_functions() -> Iterator[tuple[str, Function]]:
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, Function) and on_host(node):
                yield f"{file}:{node.lineno} {node.name}", node


def sizes_of_classes() -> dict[str, int]:
    """Lines of each class, with those of all its parents."""
    found = {node.name: node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    parents = {name: [ast.unparse(base).split("[")[0] for base in node.bases] for name, node in found.items()}

    def family(name: str) -> set[str]:
        return {name}.union(*(family(parent) for parent in parents[name] if parent in found))

    return {name: sum(num_lines(found[each]) for each in family(name)) for name in found}


def test_functions_fit_a_screen() -> None:
    assert [name for name, node in host_functions() if num_lines(node) > MAX_LINES_OF_FUNCTION] == []


def test_few_functions_have_many_parameters() -> None:
    found = [name for name, node in host_functions() if num_parameters(node) > MAX_PARAMETERS]
    assert len(found) <= MAX_LONG_SIGNATURES, found


def test_classes_are_small() -> None:
    assert {name: lines for name, lines in sizes_of_classes().items() if lines > MAX_LINES_OF_CLASS} == {}


def test_the_model_runner_is_small() -> None:
    assert sizes_of_classes()["ModelRunner"] <= MAX_LINES_OF_MODEL_RUNNER


def test_the_top_of_the_engine_has_few_modules() -> None:
    assert len(list((ROOT / "engine").glob("*.py"))) <= MAX_TOP_MODULES


def test_lines_of_cpp_are_short() -> None:
    files = [path for folder in ("kernels/cpu/native", "tests/kernels/cpu") for path in (ROOT / folder).iterdir()]
    long = [
        f"{path.name}:{number}"
        for path in files
        if path.suffix in (".cpp", ".h")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    assert long == []
