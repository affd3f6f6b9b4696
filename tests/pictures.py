"""Takes the pictures of the chat page for README and docs: a screenshot, and an answer as it streams.

    python -m tests.pictures                                  # the page over canned answers
    python -m tests.pictures --url http://127.0.0.1:8000      # over a server with a model

Needs Chromium, playwright and Pillow.
"""

from __future__ import annotations

import argparse
import io
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright

from tests.support.chat_page import ChatPage
from tests.support.page_stub import Stub, build_app

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE = "Show me a table of two ways to keep the KV cache, and code that finds a token's slot."
STORY = "Tell me a short story about a lighthouse."
FRAME_SECONDS = 0.35
MAX_FRAMES = 24


@contextmanager
def stand_in(port: int) -> Iterator[str]:
    """The page over canned answers, at reading speed."""
    server = uvicorn.Server(uvicorn.Config(build_app(Stub(delay=0.05)), port=port, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(60)


def screenshot(tab: Any, url: str) -> None:
    page = ChatPage(tab).open(url)
    page.ask(TABLE)
    tab.mouse.move(760, 400)  # over the conversation, which the wheel then turns back to the question
    tab.mouse.wheel(0, -10_000)
    tab.wait_for_timeout(300)
    tab.screenshot(path=DOCS / "chat.png")


def film(tab: Any, url: str) -> None:
    """A frame every third of a second, from the question to the end of the answer."""
    page = ChatPage(tab).open(url)
    tab.fill("#prompt", STORY)
    tab.press("#prompt", "Enter")
    frames: list[Image.Image] = []
    done = "document.querySelector('.answer')?.dataset.state === 'done'"
    while len(frames) < MAX_FRAMES:
        ended = page.run(done)
        frames.append(Image.open(io.BytesIO(tab.screenshot())).convert("P", palette=Image.Palette.ADAPTIVE, colors=48))
        if ended:
            break
        tab.wait_for_timeout(1000 * FRAME_SECONDS)
    durations = [int(1000 * FRAME_SECONDS)] * (len(frames) - 1) + [2500]
    frames[0].save(
        DOCS / "streaming.gif", save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server, instead of canned answers")
    parser.add_argument("--port", type=int, default=8765, help="of the canned answers")
    args = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with stand_in(args.port) as canned, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        url = args.url or canned
        for take, size in ((screenshot, (1280, 960)), (film, (760, 460))):
            context = browser.new_context(viewport={"width": size[0], "height": size[1]})
            take(context.new_page(), url)
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
