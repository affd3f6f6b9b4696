"""Processes of this machine as ranks."""

import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from engine.worker.launcher import LocalLauncher

CHECK = """
import sys
from datetime import timedelta
from torch.distributed import FileStore
store = FileStore(sys.argv[1], 2)
store.set_timeout(timedelta(seconds=5))
store.set("rank 1", "is here")
print(store.get("rank 0").decode(), store.check(["rank 2"]))
"""


def test_ranks_can_read_their_store_until_the_launcher_is_closed() -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    launcher = LocalLauncher(2)
    path = urlsplit(launcher.rendezvous()).path
    store = FileStore(path, 2)
    store.set("rank 0", "was first")
    command, inherited = [sys.executable, "-c", CHECK, path], [int(Path(path).name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=inherited)
    assert done.stdout == "was first False\n"
    assert store.get("rank 1") == b"is here"
    del store
    inode = Path(path).stat().st_ino
    launcher.close()
    assert not Path(path).exists() or Path(path).stat().st_ino != inode  # else it is another file of this process
