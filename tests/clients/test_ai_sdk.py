"""The AI SDK for JavaScript against Quire: `ai_sdk/client.test.js`, one test here for all of them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.table import Client

FOLDER = Path(__file__).with_name("ai_sdk")
CLIENTS = (Client("AI SDK", "ai", "text, streams, tools and objects with zod, embeddings, errors", FOLDER),)

pytestmark = pytest.mark.slow


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.skipif(not (FOLDER / "node_modules").is_dir(), reason="needs npm install in tests/clients/ai_sdk")
def test_ai_sdk(quire: str) -> None:
    done = subprocess.run(["node", "--test"], cwd=FOLDER, env={**os.environ, "QUIRE_URL": quire}, timeout=240)
    assert done.returncode == 0
