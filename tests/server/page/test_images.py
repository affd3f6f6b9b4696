"""Images on the chat page: attached, pasted, dropped, removed, kept, exported; models that read text only."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.chat_page import SIZES, ChatPage
from tests.support.images import data_url, in_base64, picture, saved
from tests.support.page_stub import Stub

pytestmark = pytest.mark.heavy
FILE = saved(picture(160, 120))
PUT = """([kind, data, name]) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], name, { type: "image/png" }));
  const event = kind === "paste"
    ? new ClipboardEvent("paste", { clipboardData: files, bubbles: true })
    : new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
  document.getElementById("prompt").dispatchEvent(event);
}"""


@pytest.fixture
def page(context: Any, url: str, stub: Stub) -> ChatPage:
    stub.reads = ["text", "image"]
    return ChatPage(context.new_page()).open(url)


def attach(page: ChatPage, name: str = "a.png", data: bytes = FILE) -> None:
    page.tab.set_input_files("#file", {"name": name, "mimeType": f"image/{name[-3:]}", "buffer": data})
    page.see(".chip bdi", name)


def sent(stub: Stub) -> Any:
    return [message["content"] for message in stub.requests[-1]["messages"] if message["role"] == "user"]


def image(data: bytes = FILE) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def test_attached_pasted_dropped_and_removed(page: ChatPage, stub: Stub) -> None:
    attach(page)
    page.run(PUT, ["paste", in_base64(FILE), "pasted.png"])
    page.see(".chip bdi", "pasted.png")
    page.run(PUT, ["drop", in_base64(FILE), "dropped.png"])
    page.see(".chip bdi", "dropped.png")
    assert page.tab.locator(".chip img").count() == 3
    page.tab.click("[aria-label='Remove pasted.png']")
    page.ask("echo what is this?")
    assert sent(stub) == [[image(), image(), {"type": "text", "text": "echo what is this?"}]]
    assert page.tab.locator(".question .thumb img").count() == 2
    assert page.tab.locator(".chip").count() == 0
    attach(page)
    page.tab.click("#send")
    page.tab.locator(".question").nth(1).wait_for()
    page.wait("done")
    assert sent(stub)[1:] == [[image()]], "an image needs no text; earlier ones go along"


def test_kept_enlarged_edited_and_exported(page: ChatPage, stub: Stub) -> None:
    attach(page)
    page.ask("1 and 2")
    page.tab.reload()
    thumb = page.tab.locator(".question .thumb")
    thumb.wait_for()
    before = thumb.bounding_box()["width"]
    thumb.click()
    assert thumb.get_attribute("aria-expanded") == "true"
    assert thumb.bounding_box()["width"] >= before
    page.tab.locator(".question").hover()
    page.tab.click(".question .edit-button")
    page.tab.fill(".edit-text", "3 and 4")
    page.tab.press(".edit-text", "Enter")
    page.see(".prose", "3 plus 4 is 7.")
    assert sent(stub) == [[image(), {"type": "text", "text": "3 and 4"}]]
    with page.tab.expect_download() as exported:
        page.tab.click("#export-all")
    given = json.loads(Path(exported.value.path()).read_text())
    found = [each["attachments"] for each in given["conversations"][0]["messages"] if each["role"] == "user"]
    assert found == [[{"name": "a.png", "image": data_url(FILE)}]] * 2
    page.tab.set_input_files("#import-file", exported.value.path())
    page.see("#conversations a", "1 and 2")


def test_large_and_broken_files(page: ChatPage, stub: Stub) -> None:
    large = Image.new("RGB", (4100, 1000), "red")
    page.tab.set_input_files("#file", {"name": "a.bmp", "mimeType": "image/bmp", "buffer": saved(large, "BMP")})
    page.see(".chip bdi", "a.bmp")
    page.ask("1 and 2")
    url = sent(stub)[0][0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,")
    shown = Image.open(BytesIO(base64.b64decode(url.partition(",")[2])))
    assert (shown.format, shown.size) == ("JPEG", (2048, 500))
    page.tab.set_input_files("#file", {"name": "b.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\0\0"})
    page.see("#toast-text", "b.png cannot be read.")


def test_a_text_model_says_so_before_sending(page: ChatPage, stub: Stub, url: str) -> None:
    attach(page)
    stub.reads = ["text"]
    page.open(url)
    page.see(".chip bdi", "a.png")  # the draft
    page.tab.click("#send")
    page.see("#toast-text", "This model reads text only")
    assert stub.requests == []
    page.tab.click("[aria-label='Remove a.png']")
    page.tab.set_input_files("#file", {"name": "c.png", "mimeType": "image/png", "buffer": FILE})
    page.see("#toast-text", "c.png is not a text file: this model reads text only.")


def test_an_encoder_says_so_before_sending(page: ChatPage, stub: Stub, url: str) -> None:
    stub.writes = ["embeddings"]
    page.open(url)
    page.tab.fill("#prompt", "hello")
    page.tab.click("#send")
    page.see("#toast-text", "This model computes embeddings and writes no answers")
    assert stub.requests == []
    assert page.tab.input_value("#prompt") == "hello", "it is kept"


def test_the_camera_of_a_phone(browser: Any, url: str, stub: Stub, tmp_path: Path) -> None:
    stub.reads = ["text", "image"]
    context = browser.new_context(viewport=SIZES["phone"], has_touch=True, is_mobile=True)
    page = ChatPage(context.new_page()).open(url)
    page.tab.locator("#take-photo").wait_for()
    page.tab.set_input_files("#camera", {"name": "photo.png", "mimeType": "image/png", "buffer": FILE})
    page.see(".chip bdi", "photo.png")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.ask("1 and 2")
    assert sent(stub) == [[image(), {"type": "text", "text": "1 and 2"}]]
    context.close()
