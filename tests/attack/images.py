"""Attacks by images, on a server of a small model that reads them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.processes import free_port
from tests.attack import imagined_web
from tests.attack.target import Target
from tests.support.fake_engine import make_tokenizer
from tests.support.image_models import IMAGE, make_case
from tests.support.images import TEMPLATE, data_url, saved

CHAT = "/v1/chat/completions"
LOCAL_NAMES = ("localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]")
ALLOWED = *(name.strip("[]") for name in LOCAL_NAMES), *imagined_web.DOMAINS
FLAGS = ("--allowed-media-domains", *ALLOWED, "--num-gpu-blocks-override", "256")
PORTS = free_port(), free_port()  # of the attacker's web server, and of one that may not be reached
# Path of the attacker's server → where it leads.
REDIRECTS = {
    "/this-machine": "http://127.0.0.1/a.png",
    "/this-machine-by-name": "http://localhost/a.png",
    "/metadata": "http://169.254.169.254/latest/meta-data/",
    "/private": "http://10.0.0.7/a.png",
    "/private-name": "http://inside.example.org/a.png",
    "/not-allowed": "http://other.example.org/a.png",
    "/file": "file:///etc/passwd",
    "/data": "data:image/png;base64,AAAA",
    "/round": "/round",
    "/again": "/picture.png",
}


def make_model(folder: Path) -> Path:
    """Save a random model of Qwen3-VL's kind that the server takes."""
    make_case("Qwen3VL", folder)
    special = [f"<{i}>" for i in range(259, IMAGE)]
    special += ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    make_tokenizer(TEMPLATE, special)._backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    limits = {"size": {"shortest_edge": 64, "longest_edge": 32_768}}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(limits))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder


def body(*urls: str, kind: str = "image_url") -> bytes:
    shown = [{"type": kind, kind: {"url": url}} for url in urls]
    content = [*shown, {"type": "text", "text": "?"}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2}).encode()


async def ask(target: Target, *urls: str) -> int:
    return (await target.post(CHAT, body(*urls))).status


async def ask_about_videos(target: Target, files: Callable[[], list[str]]) -> Counter[int]:
    """Ask about one after the other. Behind each file is another end, so that none is known."""
    found = Counter[int]()
    for url in await asyncio.to_thread(files):
        end = base64.b64encode(os.urandom(9)).decode()
        found[(await target.post(CHAT, body(url if url.endswith("=") else url + end, kind="video_url"))).status] += 1
    return found


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A black file of 8 bits a pixel, whose rows take hardly a byte each. `chunks`: before its pixels."""
    packer, rows = zlib.compressobj(9), []
    for _ in range(height):
        rows.append(packer.compress(bytes(width + 1)))
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = _chunk(b"IDAT", b"".join(rows) + packer.flush())
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + data + _chunk(b"IEND", b"")


@cache
def noise(width: int, height: int, number: int = 0, format: str = "JPEG") -> bytes:
    pixels = os.urandom(3 * (width // 8) * (height // 8))
    return saved(Image.frombytes("RGB", (width // 8, height // 8), pixels).resize((width, height)), format)


@cache
def bombs() -> list[str]:
    return [data_url(png(30_000, 30_000)), data_url(png(50_001, 1000))]


@cache
def largest() -> str:
    return data_url(png(7000, 7000))


@cache
def animated() -> str:
    """500 frames: only the first one is read."""
    frames = [Image.frombytes("P", (100, 75), os.urandom(7500)) for _ in range(500)]
    file = BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return data_url(file.getvalue())


@cache
def much_metadata() -> list[str]:
    """EXIF data of megabytes, and texts that unpack to gigabytes."""
    text = zlib.compress(bytes(200_000_000), 9)
    segments = b"".join(b"\xff\xe1\xff\xffExif\0\0MM\0*" + b"\xff" * (65_533 - 10) for _ in range(150))
    jpeg = noise(400, 300)
    return [
        data_url(png(100, 100, _chunk(b"eXIf", b"MM\0*" + b"\xff" * 8_000_000))),
        data_url(png(100, 100, *[_chunk(b"zTXt", b"a\0\0" + text)] * 10)),
        data_url(png(100, 100, _chunk(b"iCCP", b"a\0\0" + text))),
        data_url(jpeg[:2] + segments + jpeg[2:]),
    ]


def polyglots() -> list[str]:
    jpeg, script = noise(400, 300), b"<script>alert(1)</script>"
    return [data_url(each) for each in (script + jpeg, b"PK\3\4" + jpeg, b"%PDF-1.7\n" + jpeg, b"GIF89a=1;" + script)]


def damaged() -> list[str]:
    png_file, jpeg = noise(400, 300, format="PNG"), noise(400, 300)
    broken = bytearray(png_file)
    broken[len(broken) // 2] ^= 255
    return [data_url(each) for each in (png_file[:-2000], jpeg[: len(jpeg) // 2], bytes(broken), jpeg[:30], b"")]


def film(count: int, width: int, height: int, format: str = "GIF", **more: Any) -> bytes:
    """Return an animated file of so many frames, each another one: a point of it moves."""

    def frame(index: int) -> Image.Image:
        found = Image.new("L", (width, height))
        found.putpixel((index % width, index // width % height), 1 + index % 255)
        return found

    frames = (frame(index) for index in range(count))
    file = BytesIO()
    next(frames).save(file, format, save_all=True, append_images=frames, **more)
    return file.getvalue() + bytes(-file.tell() % 3)  # so that its base64 can go on


def _frames_url(*files: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in files)


@cache
def many_frames() -> list[str]:
    """10,000 frames and more: in one file, and as pictures."""
    return [
        data_url(film(10_000, 8, 8, duration=20)), data_url(film(10_001, 8, 8)),
        _frames_url(*[noise(32, 32)] * 10_000),
    ]  # fmt: skip


@cache
def large_videos() -> list[str]:
    """More pixels than are taken: of a frame, and of all together."""
    return [
        data_url(film(2, 9000, 9000)), data_url(film(12, 5000, 5000)), _frames_url(*[png(8000, 6000)] * 5),
    ]  # fmt: skip


@cache
def largest_video() -> list[str]:
    """Nearly all the pixels and frames that are taken."""
    return [data_url(film(700, 560, 500, duration=500))]


@cache
def damaged_videos() -> list[str]:
    """Files that end too early or are none, and pictures of which one is damaged."""
    files = [film(40, 200, 150, format) for format in ("GIF", "PNG")]
    return [
        *(data_url(each[: len(each) // 2]) for each in files), data_url(b"\0\0\0\x20ftypisom" + os.urandom(4000)),
        _frames_url(noise(400, 300), noise(400, 300)[:3000]), _frames_url(noise(400, 300), noise(300, 400)),
        "data:video/jpeg;fps=0;base64,AAAA", _frames_url(b"", b""),
    ]  # fmt: skip


async def in_turn(target: Target, urls: list[str]) -> Counter[int]:
    return Counter([await ask(target, url) for url in urls])


async def narrow(target: Target) -> Counter[int]:
    return await in_turn(target, [data_url(png(10_000, 1)), data_url(png(1, 10_000))])


async def many_at_once(target: Target) -> Counter[int]:
    """200 requests, each with an image of its own."""
    urls = [data_url(noise(1024, 768, number)) for number in range(200)]
    return Counter(await asyncio.gather(*(ask(target, url) for url in urls)))


async def many_in_one(target: Target) -> Counter[int]:
    return Counter([await ask(target, *[data_url(noise(400, 300))] * 200)])


async def from_this_machine(target: Target) -> Counter[int]:
    """URLs of this machine by every name, all allowed: no connection may be made."""
    reached: list[Any] = []

    async def canary(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(writer.get_extra_info("peername"))
        writer.close()

    try:
        server = await asyncio.start_server(canary, "127.0.0.1", 80)
    except OSError:  # another server has the port, or it takes more rights: the statuses say enough
        server = None
    urls = [f"{scheme}://{name}/a.png" for name in LOCAL_NAMES for scheme in ("http", "https")]
    urls += [f"http://localhost:{target.port}/v1/models", "file:///etc/passwd", "file://localhost/etc/passwd"]
    statuses = await in_turn(target, urls)
    if server is not None:
        server.close()
    assert not reached, reached
    return statuses


@asynccontextmanager
async def attackers_web() -> AsyncIterator[list[str]]:
    """A web server that redirects, and one that may not be reached. Yields the paths that were asked of the first."""
    asked: list[str] = []
    reached: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            asked.append((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode())
            if asked[-1] in REDIRECTS:
                head, data = f"302 Found\r\nLocation: {REDIRECTS[asked[-1]]}", b""
            else:
                head, data = "200 OK", noise(400, 300)
            writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
        writer.close()

    async def canary(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(writer.get_extra_info("peername"))
        writer.close()

    web = await asyncio.start_server(answer, "127.0.0.1", PORTS[0])
    unreachable = await asyncio.start_server(canary, "127.0.0.1", PORTS[1])
    async with web, unreachable:
        yield asked
    assert not reached, "a private address was asked"


async def redirects(target: Target) -> Counter[int]:
    """An allowed web server redirects to this machine, to private addresses and to names that are not allowed."""
    async with attackers_web() as asked:
        assert await ask(target, "http://pictures.example.org/picture.png") == 200, "the attacker's server works"
        asked.clear()
        paths = [path for path in REDIRECTS if path != "/again"]
        statuses = await in_turn(target, [f"http://pictures.example.org{path}" for path in paths])
        assert set(asked) == set(paths), "and no other file was asked for"
    return statuses


async def names_that_change(target: Target) -> Counter[int]:
    """Names of private addresses, and one whose address is another one at each look-up: public, then private."""
    statuses = Counter[int]()
    async with attackers_web() as asked:
        statuses += await in_turn(target, ["http://inside.example.org/", "http://10.0.0.7/", "http://169.254.169.254/"])
        assert not asked
        served = [await ask(target, "http://rebound.example.org/picture.png") for _ in range(6)]
        assert served.count(200) == 2, f"only while its address is public, not {served}"
        # The redirect leads to the same name, whose address is private by then.
        changed = [await ask(target, "http://rebound.example.org/again") for _ in range(3)]
        assert changed.count(400) == len(changed), changed
    return statuses + Counter(each for each in [*served, *changed] if each != 200)
