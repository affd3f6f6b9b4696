"""`python -m tests.support.forked_quire ADDRESS WORD …` is `quire WORD …` whose engine processes are forks.

ADDRESS: of the process of `fork_server`, which has imported everything.
"""

from __future__ import annotations

import sys

from engine.replicas import engine_process
from server.cli.main import main
from tests.support.fork_server import Forks

if __name__ == "__main__":
    engine_process.subprocess = Forks(sys.argv[1]).as_subprocess()  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[2:]))
