"""The CPU's kernels are compiled once for each instruction set, and their absence is no error."""

import ctypes
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import build, instruction_set, library

KEPT = build.cache_folder()  # as it is outside these tests


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


NAME = "x86-64-v3"
COPY = 'while [ "$1" != "-o" ]; do shift; done; echo once >> "$(dirname "$0")/calls"; echo made > "$2"'


def libraries(folder: Path) -> list[Path]:
    return list(folder.glob("*.so"))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a library gives what is in the file."""

    def load(path: str) -> str:
        if (text := Path(path).read_text()) == "damaged":
            raise OSError("file too short")
        return text

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("umask", [0o022, 0o002])  # with the second, others of the group may write new files
def test_it_is_compiled_once(tmp_path: Path, umask: int) -> None:
    compiler, folder = fake_compiler(tmp_path, COPY), tmp_path / "kernels"
    before = os.umask(umask)
    try:
        assert all(str(build.load([compiler], folder, NAME)) == "made\n" for _ in range(2))
    finally:
        os.umask(before)
    assert (tmp_path / "calls").read_text().count("once") == len(list(build.SOURCES.glob("*.cpp"))) + 1
    assert folder.stat().st_mode & 0o077 == 0
    assert libraries(folder)[0].name.startswith("cpu-x86-64-v3-")


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(build, "compiling", lambda done, total: told.append((done, total)))
    sources = [tmp_path / f"{i}.cpp" for i in range(3)]
    build.build([fake_compiler(tmp_path, COPY)], sources, tmp_path / "made.so", NAME)
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.usefixtures("loaded")
def test_processes_wait_for_the_one_that_compiles(tmp_path: Path) -> None:
    compiler, folder = fake_compiler(tmp_path, f"sleep 0.05; {COPY}"), tmp_path / "kernels"
    results: list[str] = []
    callers = [
        threading.Thread(target=lambda: results.append(str(build.load([compiler], folder, NAME)))) for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == ["made\n"] * 3
    assert (tmp_path / "calls").read_text().count("once") == len(list(build.SOURCES.glob("*.cpp"))) + 1


COMPILE = """
import sys
from pathlib import Path
from kernels.cpu import build
build.load([sys.argv[1]], Path(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.usefixtures("loaded")
def test_others_wait_for_a_process_and_one_goes_on_when_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process and its compilers are killed in the middle. Two others wait for it; one of them compiles."""
    gate, begun, folder = tmp_path / "gate", tmp_path / "begun", tmp_path / "kernels"
    script = f'touch {begun} "$TMPDIR/own"; while [ ! -e {gate} ]; do sleep 0.02; done; {COPY}'
    compiler = fake_compiler(tmp_path, script)
    command = [sys.executable, "-c", COMPILE, compiler, str(folder), NAME]
    first = subprocess.Popen(command, start_new_session=True)
    while not begun.exists():
        assert first.poll() is None
        time.sleep(0.01)
    told, results = threading.Semaphore(0), list[str]()
    monkeypatch.setattr(build, "compiling", lambda *_: told.release())
    others = [
        threading.Thread(target=lambda: results.append(str(build.load([compiler], folder, NAME)))) for _ in range(2)
    ]
    for other in others:
        other.start()
    assert all(told.acquire(timeout=60) for _ in others)  # they show the progress of the first one
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert len(list(folder.glob(f"{build.SCRATCH}*/own"))) == 1
    gate.touch()
    for other in others:
        other.join()
    assert results == ["made\n"] * 2
    assert (tmp_path / "calls").read_text().count("once") == len(list(build.SOURCES.glob("*.cpp"))) + 1
    assert {each.name for each in folder.iterdir()} == {libraries(folder)[0].name, "lock"}


@pytest.mark.usefixtures("loaded")
def test_libraries_that_are_not_used_any_more_are_removed(tmp_path: Path) -> None:
    compiler, folder = fake_compiler(tmp_path, COPY), tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    old, recent = folder / "cpu-x86-64-v3-0.so", folder / "cpu-x86-64-v3-1.so"
    for library_file in (old, old.with_suffix(".json"), recent):
        library_file.touch()
    os.utime(old, (0, time.time() - build.UNUSED_SECONDS - 1))
    build.load([compiler], folder, NAME)
    assert not old.exists()
    assert not old.with_suffix(".json").exists()
    assert recent.exists()
    assert len(libraries(folder)) == 2
    (made,) = set(libraries(folder)) - {recent}
    os.utime(made, (0, 0))
    build.load([compiler], folder, NAME)
    assert made.stat().st_mtime > 0  # its last use


@pytest.mark.usefixtures("loaded")
def test_another_instruction_set_is_another_library(tmp_path: Path) -> None:
    compiler, folder = fake_compiler(tmp_path, COPY), tmp_path / "kernels"
    for name in (NAME, "x86-64-v4"):
        build.load([compiler], folder, name)
    assert len(libraries(folder)) == 2


@pytest.mark.usefixtures("loaded")
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    compiler, folder = fake_compiler(tmp_path, COPY), tmp_path / "kernels"
    build.load([compiler], folder, NAME)
    (kept,) = libraries(folder)
    kept.write_text("damaged")
    assert str(build.load([compiler], folder, NAME)) == kept.read_text() == "made\n"


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_is_not_loaded(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler, folder = fake_compiler(tmp_path, COPY), tmp_path / "kernels"
    build.load([compiler], folder, NAME)
    (kept,) = libraries(folder)
    kept.write_text("planted")
    (folder if what == "folder" else kept).chmod(0o777)
    assert str(build.load([compiler], folder, NAME)) == "made\n"
    assert (what == "folder") == ("others may write to it" in caplog.text)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("no such option", "no such option"),
        ("x.s: Assembler messages:\nx.s:7: Error: no such instruction", "x.s:7: Error: no such instruction"),
        ("in f:\n/usr/bin/ld: cannot find -lstdc++\ncollect2: error: ld failed", "/usr/bin/ld: cannot find -lstdc++"),
    ],
)
def test_a_compiler_that_fails_is_no_error(
    said: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, f"echo '{said}' >&2; exit 1"))
    assert library.library() is None
    assert caplog.messages[-1].endswith(f": {reason}")
    assert not libraries(tmp_path / "kernels")


def test_a_compiler_that_hangs_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "TIMEOUT", 0.2)
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 'license server?' >&2; exec sleep 60"))
    assert library.library() is None
    assert "cannot be compiled" in caplog.text


def test_the_compilers_command_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, COPY) + " -m64")
    assert build.find_compiler() == [str(tmp_path / "compiler"), "-m64"]


@pytest.mark.usefixtures("loaded")
def test_libraries_are_compiled_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt = tmp_path / "prebuilt"
    monkeypatch.setattr(build, "PREBUILT", prebuilt)
    assert build.load_prebuilt(NAME) is None
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, COPY))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    build.main([])
    assert {build.path(prebuilt, name) for name in build.COMMON["x86_64"]} == set(prebuilt.iterdir())
    assert str(build.load_prebuilt(NAME)) == "made\n"
    assert build.is_built(NAME)
    assert not build.is_built("aarch64")
    build.main(["aarch64", "x86-64-v2"])
    added = (*build.COMMON["aarch64"], "x86-64-v2")
    assert {build.path(prebuilt, name) for name in (*build.COMMON["x86_64"], *added)} == set(prebuilt.iterdir())
    prebuilt.chmod(0o777)
    assert build.load_prebuilt(NAME) is None


def test_common_instruction_sets_are_known() -> None:
    for machine, names in build.COMMON.items():
        for name in names:
            level, *additions = name.split("+")
            assert level.startswith(machine.replace("_", "-"))
            assert set(additions) <= set(instruction_set.ADDITIONS[level])


def test_a_library_compiled_beforehand_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = instruction_set.instruction_set()
    if build.find_compiler() is None:
        pytest.skip("no compiler is installed")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(KEPT.parent))
    library.library()
    made = build.path(KEPT, name)
    library.library.cache_clear()
    monkeypatch.setattr(build, "PREBUILT", made.parent)
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "empty"))
    native = library.library()
    assert native is not None
    assert native.instruction_set == name
    assert not build.cache_folder().exists()


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    assert library.library() is None
    assert "no C++ compiler is installed" in caplog.text


V3 = "avx avx2 bmi1 bmi2 cx16 f16c fma movbe popcnt sse4_1 sse4_2 ssse3"
SAPPHIRE_RAPIDS = (
    f"flags\t\t: fpu {V3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16 avx512_vnni "
    "amx_bf16 amx_int8 amx_tile\n"
)
ZEN_3 = f"flags\t\t: fpu {V3}\n"


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "name", "options"),
    [
        ("x86_64", ZEN_3, "x86-64-v3", ["-march=x86-64-v3"]),
        ("x86_64", ZEN_3[:-1] + " avx_vnni\n", "x86-64-v3+avxvnni", ["-march=x86-64-v3", "-mavxvnni"]),
        (
            "x86_64", SAPPHIRE_RAPIDS, "x86-64-v4+avx512vnni+avx512bf16+amx",
            ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
        ),
        ("x86_64", "flags\t\t: fpu sse2\n", "x86-64", ["-march=x86-64"]),
        ("aarch64", "Features\t: fp asimd\n", "aarch64", ["-march=armv8-a"]),
        (
            "aarch64", "Features\t: fp asimd asimddp bf16\n", "aarch64+dotprod+bf16",
            ["-march=armv8.2-a+dotprod+bf16"],
        ),
        (
            "aarch64", "Features\t: fp asimd asimddp i8mm bf16\n", "aarch64+dotprod+bf16+i8mm",
            ["-march=armv8.2-a+dotprod+bf16+i8mm"],
        ),
        ("riscv64", "isa\t: rv64gc\n", "riscv64", ["-march=native"]),
    ],
)  # fmt: skip
def test_the_cpus_own_instruction_set(
    machine: str, cpuinfo: str, name: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(instruction_set, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    assert instruction_set.instruction_set() == name
    assert instruction_set.compiler_options(name) == options


def test_the_instruction_set_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "".join(f"hw.optional.arm.FEAT_{name}: {has}\n" for name, has in (("DotProd", 1), ("BF16", 0), ("I8MM", 1)))
    done = subprocess.CompletedProcess([], 0, shown)
    monkeypatch.setattr("subprocess.run", lambda *_, **options: done)
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    instruction_set._macos_features.cache_clear()
    assert instruction_set.instruction_set() == "aarch64+dotprod+i8mm"
    instruction_set._macos_features.cache_clear()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("avx2", "must be one of x86-64-v4"),
        ("x86-64-v3+neon", "must be one of"),
        ("x86-64-v4", "this CPU has no avx512bw, avx512cd, .*it has x86-64-v3"),
        ("x86-64-v3+avxvnni", "this CPU has no avx_vnni"),
        ("aarch64", "this CPU has no aarch64"),
    ],
)
def test_an_instruction_set_that_cannot_be_used_is_an_error(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(ZEN_3)
    monkeypatch.setattr(instruction_set, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("QUIRE_CPU_ISA", name)
    with pytest.raises(ValueError, match=reason):
        library.library()


def test_large_pages_keep_copies_apart() -> None:
    pages = library.LargePages()
    tensors = [torch.arange(7), torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(9).double()]
    kept = [pages.keep(tensor) for tensor in tensors]
    assert all(torch.equal(*pair) for pair in zip(kept, tensors, strict=True))
    assert kept[0].data_ptr() % pages.PAGE == 0
    assert kept[1].data_ptr() == kept[0].data_ptr() + 64
    large = pages.keep(torch.zeros(pages.CHUNK + 1, dtype=torch.uint8))
    assert large.data_ptr() % pages.PAGE == 0
    assert torch.equal(pages.keep(tensors[1].T), tensors[1].T)
