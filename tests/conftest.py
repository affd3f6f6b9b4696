"""Fixtures that every test may use. Triton kernels run in its interpreter here, so a machine without a GPU tests
them.
"""

import contextlib
import gc
import importlib
import logging
import os
import random
import signal
import sys
import tempfile
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests share the cores with each other
os.environ.setdefault("QUIRE_CACHE_DIR", os.path.join(tempfile.gettempdir(), "quire-tests"))  # not the user's own
os.environ.setdefault("QUIRE_CPU_KERNELS", "native")  # not what happens to be faster

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the many processes that tests start compile each module once

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SLOW_FOLDERS = "clients", "ray"  # of tests
sys.dont_write_bytecode = False  # whatever the variable said: assertions are rewritten once, too

# In the background Ctrl-C is ignored, also by what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_whole(config: pytest.Config) -> bool:
    """Return whether all tests are collected, not a selection."""
    return [Path(path).resolve() for path in config.args] == [ROOT / "tests"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is slow throughout: to import others' clients takes seconds."""
    is_slow = collection_path.parent == ROOT / "tests" and collection_path.name in SLOW_FOLDERS
    return True if is_slow and config.getoption("markexpr") == "not slow" and _is_whole(config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Collect without the garbage collector, and let the workers of a whole run share the compilation of modules.

    Each worker imports other tests first. If all imported the same ones in the same order, each would compile all
    modules, always a little too early to find what another has compiled.
    """
    gc.disable()
    number, count = (os.environ.get(name, "") for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"))
    if not count or not _is_whole(session.config):
        return
    folders = [each for each in (ROOT / "tests").iterdir() if each.is_dir() and each.name not in SLOW_FOLDERS]
    files = sorted(file for each in folders for file in each.rglob("test_*.py"))
    files = [file for file in files if not file.with_name("__init__.py").exists()]  # pytest names packages otherwise
    for file in files[int(number.removeprefix("gw")) :: int(count)]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collection tells the reason
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays: the modules, and thousands of tests.

    Engines of this process that sleep or take other weights would search it, too: to them nothing is frozen, as in a
    user's process.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.unfreeze, gc.get_freeze_count = lambda: None, lambda: 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Make a test's random numbers and log levels independent of the tests before it."""
    for package in ("engine", "kernels", "server", "uvicorn"):
        logger = logging.getLogger(package)
        if logger.level != logging.NOTSET:  # a command has set it; to set it again empties the caches of all loggers
            logger.setLevel(logging.NOTSET)
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def own_forms() -> None:
    """Engines that other modules left in this process do not keep the forms of kernels that they had."""
    if "kernels" in sys.modules:
        forms = sys.modules["kernels"].FORMS
        for engine in [*forms._holders]:
            forms.release(engine)
        forms.choose(False)


@pytest.fixture
def own_cpu_kernels() -> None:
    """Skip without the CPU's own kernels, which deterministic mode needs."""
    if importlib.import_module("kernels.cpu.library").library() is None:
        pytest.skip("without the CPU's own kernels the mode is refused")


@pytest.fixture
def deterministic(own_cpu_kernels: None) -> Iterator[None]:
    """Kernels of this process have the forms of deterministic mode."""
    forms = importlib.import_module("kernels").FORMS
    forms.choose(True)
    yield
    forms.choose(False)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ROOT / "configs" / "demo"


@pytest.fixture(scope="session")
def story_model() -> Path:
    """A small real Llama with its expected greedy output; it lives beside the repository and is not part of it."""
    folder = ROOT.parent / "shared" / "models" / "story"
    if not folder.is_dir():
        pytest.skip("the story model is not on this machine")
    return folder


@pytest.fixture(scope="session")
def make_model() -> Callable[[Path], Path]:
    """A tiny random model in a folder; to have one that may be damaged."""
    from tests.support.tiny_model import write_model  # brings torch

    return write_model


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ranks are forks of this process: they have its patches, and start without importing anything."""
    from tests.support.forks import fork_ranks

    fork_ranks(monkeypatch, tmp_path_factory.mktemp("meetings"))


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.support.fork_server import ForkServer

    server = ForkServer(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()


def _can_fork() -> bool:
    """Return False where coverage follows each process."""
    return sys.platform == "linux" and not any(name.startswith("COV") for name in os.environ)


@pytest.fixture(scope="session")
def quick_quire(request: pytest.FixtureRequest) -> list[str]:
    """The words of the command `quire` whose engine processes are forks of one that has imported everything."""
    if not _can_fork():
        return [sys.executable, "-m", "quire"]
    return [sys.executable, "-m", "tests.support.forked_quire", request.getfixturevalue("fork_server").address]


@pytest.fixture(scope="module")
def forked_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engine processes are forks of one that has imported everything."""
    if not _can_fork():
        yield
        return
    server = request.getfixturevalue("fork_server")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine.replicas.engine_process", "engine.worker.parallel.launcher"):
            patch.setattr(f"{module}.subprocess", server.as_subprocess())
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--experts", action="store_true", help="the tiny model of tests is a mixture of experts")


@pytest.fixture(scope="session")
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_model import write_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_model(folder, experts=request.config.getoption("--experts"))


@pytest.fixture(scope="session")
def shallow_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` with one layer, for where each layer takes long."""
    from tests.support.tiny_model import write_model

    folder = tmp_path_factory.mktemp("models") / "shallow"
    return write_model(folder, experts=request.config.getoption("--experts"), num_layers=1)


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    from tests.support.tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("models") / "experts", experts=True)


@pytest.fixture
def exact_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter converts float8 without rounding and without NaN: let PyTorch convert it. And it rounds
    twice in a fused multiplication and addition: let float64 hold the product.
    """
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    tl = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    theirs = interpreter._convert_float
    dtypes = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
    }

    def convert(array: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return theirs(array, source, target, rounding)
        raw = torch.from_numpy(np.ascontiguousarray(array).view(f"i{source.primitive_bitwidth // 8}").copy())
        to = raw.view(dtypes[source]).float().to(dtypes[target])
        bits = getattr(torch, f"int{target.primitive_bitwidth}")
        return to.view(bits).numpy().view(f"u{target.primitive_bitwidth // 8}").reshape(array.shape)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
