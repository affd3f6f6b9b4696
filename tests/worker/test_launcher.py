"""Processes of this machine as ranks."""

import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from engine.worker.parallel.launcher import LocalLauncher

CHECK = """
import sys
from datetime import timedelta
from torch.distributed import FileStore
store = FileStore(sys.argv[1], 2)
store.set_timeout(timedelta(seconds=5))
store.set("rank 1", "is here")
print(store.get("rank 0").decode(), store.check(["rank 2"]))
"""


def test_ranks_read_the_store_in_memory() -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    launcher = LocalLauncher(2)
    path = urlsplit(launcher.rendezvous()).path
    store = FileStore(path, 2)
    store.set("rank 0", "was first")
    command, inherited = [sys.executable, "-c", CHECK, path], [int(Path(path).name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=inherited)
    assert done.stdout == "was first False\n"
    assert store.get("rank 1") == b"is here"
    launcher.close()


def test_a_store_destroyed_after_the_launcher_is_closed_leaves_other_files_alone(tmp_path: Path) -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    launcher = LocalLauncher(2)
    store = FileStore(urlsplit(launcher.rendezvous()).path, 2)
    launcher.close()
    del launcher
    opened = [(tmp_path / str(i)).open("xb") for i in range(10)]  # the lowest numbers that are free
    del store
    for file in opened:
        file.close()
        assert Path(file.name).read_bytes() == b""
