"""Images in the requests of every API: what reaches the engine, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.core.engine_request import EngineRequest
from engine.vision import loader as loading
from engine.vision.decode import decode
from engine.vision.loader import ImageLayout
from server.app import create_app
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine, make_tokenizer
from tests.support.images import TEMPLATE, data_url, in_base64, loader, picture, saved
from tests.support.live_server import Live, run_server, wait_until

PLAIN = TEMPLATE.partition("{% if m.content is string %}")[0] + "{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
START, PAD, END = 259, 260, 261
TOKENIZER = make_tokenizer(TEMPLATE, SPECIAL)
FILES = [saved(picture(40, 24)), saved(picture(17, 33), "JPEG"), saved(picture(30, 30), "WEBP")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    engine, folder = FakeEngine(max_model_len=600), tmp_path_factory.mktemp("media")
    engine.tokenizer = make_tokenizer(TEMPLATE, SPECIAL)
    engine.images = loader(PAD, "".join(SPECIAL), folder=folder)
    (folder / "a picture.png").write_bytes(FILES[0])
    with run_server(engine) as live:
        yield live


@pytest.fixture
def live(server: Live) -> Live:
    server.engine.with_images.clear()
    return server


def expected(*parts: str | bytes) -> list[int]:
    """The tokens of these texts and files."""
    own = loader(PAD, "")
    found: list[int] = []
    for part in parts:
        found += TOKENIZER.encode(part) if isinstance(part, str) else [START, *[PAD] * tokens_of(own, part), END]
    return found


def tokens_of(own: Any, file: bytes) -> int:
    count: int = own.load_file(file).num_tokens
    return count


def asked(live: Live) -> EngineRequest:
    [request] = live.engine.with_images
    return request


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))


def part(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file), "detail": "auto"}}


def block(file: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64(file)}}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "See "}, part(FILES[0]), {"type": "text", "text": " and "}, part(FILES[1]),
            {"type": "text", "text": "?"},
        ]}]},
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "See "}, {"type": "input_image", "image_url": data_url(FILES[0])},
            {"type": "input_text", "text": " and "}, {"type": "input_image", "image_url": data_url(FILES[1])},
            {"type": "input_text", "text": "?"},
        ]}]},
    ),
    "messages": (
        "/v1/messages",
        {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": [
            {"type": "text", "text": "See "}, block(FILES[0]), {"type": "text", "text": " and "}, block(FILES[1]),
            {"type": "text", "text": "?"},
        ]}]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("api", BODIES)
def test_images_stand_where_they_were_sent(live: Live, api: str) -> None:
    path, body = BODIES[api]
    response = live.post(path, **body)
    assert response.status_code == 200, response.text
    assert "warnings" not in response.json()
    request = asked(live)
    assert contains(request.prompt_token_ids, expected("See ", FILES[0], " and ", FILES[1], "?"))
    own = loader(PAD, "")
    for image, file in zip(request.images, FILES, strict=False):
        wanted = own.processor(decode(file))
        assert (image.grid, image.patches, image.digest) == (wanted.grid, wanted.patches, wanted.digest)
        assert request.prompt_token_ids[image.start : image.stop] == [PAD] * image.num_tokens
    names = request.name_ids
    assert names is not None
    assert [name for name in names if name < 2**62] == [each for each in request.prompt_token_ids if each != PAD]
    placeholders = [name for name in names if name >= 2**62]
    assert len(placeholders) == len({*placeholders}) == request.prompt_token_ids.count(PAD)
    counts = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    usage = response.json()["usage"]
    assert sum(usage.get(name, 0) for name in counts) == len(request.prompt_token_ids), "placeholders count"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "See", "images": [in_base64(FILES[0])]}]}),
        ("/api/generate", {"prompt": "See", "images": [in_base64(FILES[0])]}),
    ],
)
def test_images_of_ollama_come_first(live: Live, path: str, body: dict[str, Any]) -> None:
    assert live.post(path, model="toy", stream=False, **body).status_code == 200
    assert contains(asked(live).prompt_token_ids, expected(FILES[0], "See"))
    assert "vision" in live.post("/api/show", model="toy").json()["capabilities"]


def test_images_of_several_turns_and_tools(live: Live) -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "Here "}, block(FILES[2])],
    }
    messages = [
        {"role": "user", "content": [block(FILES[0]), {"type": "text", "text": "One?"}]},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": [{"type": "text", "text": "Two?"}, block(FILES[1])]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    response = live.post("/v1/messages", model="toy", max_tokens=5, messages=messages)
    assert response.status_code == 200, response.text
    request = asked(live)
    own = loader(PAD, "")
    assert [image.digest for image in request.images] == [own.load_file(file).digest for file in FILES]
    for piece in (expected(FILES[0], "One?"), expected("Two?", FILES[1]), expected("Here ", FILES[2])):
        assert contains(request.prompt_token_ids, piece)
    counted = live.post("/v1/messages/count_tokens", model="toy", messages=messages).json()
    assert counted["input_tokens"] == len(request.prompt_token_ids)


def test_a_template_that_knows_no_images() -> None:
    engine = FakeEngine(max_model_len=600)
    engine.tokenizer = make_tokenizer(PLAIN, SPECIAL)
    engine.images = loader(PAD, "".join(SPECIAL))
    with run_server(engine) as live:
        assert live.post(*BODIES["chat"][:1], **BODIES["chat"][1]).status_code == 200
        assert contains(asked(live).prompt_token_ids, expected("See ", FILES[0], " and ", FILES[1], "?"))


def test_what_a_model_has_around_images() -> None:
    """Texts beside them before tokenisation, and tokens."""
    engine = FakeEngine(max_model_len=600)
    engine.tokenizer = make_tokenizer(TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", ""), SPECIAL)
    layout = ImageLayout(PAD, before=(START,), behind=(END,), marker="<|image_pad|>", margin="~~")
    engine.images = loader(PAD, "<|image_pad|>", layout=layout)
    with run_server(engine) as live:
        assert live.post(*BODIES["chat"][:1], **BODIES["chat"][1]).status_code == 200
        asked_for = expected("See ~~", FILES[0], "~~ and ~~", FILES[1], "~~?")
        assert contains(asked(live).prompt_token_ids, asked_for)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,!!", "image 2: its base64 is not valid"),
        (data_url(b"text"), "image 2: it is no PNG"),
        (data_url(FILES[0][:-50]), "image 2: the file is damaged"),
        ("https://example.org/a.png", "--allowed-media-domains"),
        ("file:///etc/passwd", "there is no such file"),
        ("a.png", "must be a data URL"),
    ],
)
def test_what_is_refused(live: Live, url: str, reason: str) -> None:
    content = [part(FILES[0]), {"type": "image_url", "image_url": url}]
    response = live.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
    assert not live.engine.with_images


def test_limits_of_a_request(live: Live) -> None:
    def refusal(content: list[dict[str, Any]], **body: Any) -> str:
        response = live.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)
        assert response.status_code == 400
        message: str = response.json()["error"]["message"]
        return message

    assert "at most 3" in refusal([part(FILES[0])] * 4)
    assert "placeholders" in refusal([part(FILES[0]), {"type": "text", "text": "<|image_pad|>"}])
    assert "cannot be truncated" in refusal([part(FILES[0])], truncate_prompt_tokens=5)
    live.engine.max_model_len = 20
    try:
        assert "the first 2 images have" in refusal([part(FILES[0])] * 3)
    finally:
        live.engine.max_model_len = 600


def test_files_of_the_allowed_folder(live: Live) -> None:
    content = [{"type": "image_url", "image_url": {"url": "file:///nowhere/a%20picture.png"}}]
    folder = live.engine.images._media.folder  # type: ignore[union-attr]
    content[0]["image_url"] = {"url": f"file://{folder}/a%20picture.png"}
    response = live.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert response.status_code == 200, response.text
    assert asked(live).images[0].digest == loader(PAD, "").load_file(FILES[0]).digest


def test_requests_and_metrics_count_images(live: Live) -> None:
    path, body = BODIES["chat"]
    response = live.post(path, **body)
    found = live.http.get(f"/requests/{response.json()['id']}").json()
    images = asked(live).images
    assert found["num_images"] == len(images) > 0
    assert found["image_tokens"] == sum(image.num_tokens for image in images)
    known = live.http.get("/metrics").text
    assert "vllm:mm_cache_queries_total" in known
    assert "quire:encoder_seconds_total" in known


def test_memory_of_images_is_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    images: Any = live.engine.images
    path, body = BODIES["chat"]
    live.engine.with_images.clear()
    wait_until(lambda: images.held.total == 0)
    assert live.post(path, **body).status_code == 200
    held = sum(len(image.patches) for image in asked(live).images)
    assert images.held.total == held > 0, "the fake engine remembers the request"
    monkeypatch.setattr(images, "max_held_bytes", 2 * held)
    refused = live.post(path, **body)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    assert live.chat("Hi").status_code == 200, "texts go on"
    live.engine.with_images.clear()
    wait_until(lambda: images.held.total == 0)
    assert live.post(path, **body).status_code == 200


def test_api_processes_divide_the_memory() -> None:
    engine: Any = FakeEngine()
    engine.images = loader(PAD, "")
    for count in (1, 4):
        create_app(engine, ServerConfig(api_server_count=count), log_stats=False)
        assert engine.images.max_held_bytes * count == loading.MAX_HELD_BYTES
        assert engine.images.max_cached_bytes * count == loading.MAX_CACHED_BYTES


def test_many_at_once_are_answered_in_bounds(live: Live) -> None:
    def ask(number: int) -> int:
        data = saved(picture(30 + number, 20))
        content = [part(data if number % 4 else data[:-30]), {"type": "text", "text": "?"}]
        return live.post("/v1/chat/completions", messages=[{"role": "user", "content": content}]).status_code

    with ThreadPoolExecutor(20) as threads:
        statuses = list(threads.map(ask, range(200)))
    assert statuses == [200 if number % 4 else 400 for number in range(200)]
    live.wait_idle()
    images: Any = live.engine.images
    assert images._num_bytes == sum(len(each.patches) for each in images._kept.values()) <= images.max_cached_bytes
    live.engine.with_images.clear()
    wait_until(lambda: images.held.total == 0)
    assert not images._loading


def test_files_of_two_formats_are_what_their_beginning_says(live: Live) -> None:
    script = b"<script>alert(1)</script>"
    for file, status in ((FILES[0] + script, 200), (script + FILES[0], 400), (b"PK\3\4" + FILES[0], 400)):
        content = [part(file)]
        response = live.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])
        assert response.status_code == status, response.text


def test_a_text_model_says_so() -> None:
    with run_server(FakeEngine()) as live:
        for path, body in BODIES.values():
            response = live.post(path, **body)
            assert response.status_code == 400
            assert "reads text only" in response.text


def test_each_file_is_decoded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, decoded = loader(PAD, ""), []
    begun, go = threading.Event(), threading.Event()

    def slow(data: bytes) -> Any:
        decoded.append(data)
        begun.set()
        assert go.wait(60)
        return decode(data)

    monkeypatch.setattr(loading, "decode", slow)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(own.load_file(FILES[0]))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go.set()
    for thread in threads:
        thread.join(60)
    assert len(decoded) == 1
    assert len({id(each) for each in found}) == 1
    assert (own.num_loads, own.num_hits) == (5, 4)
    monkeypatch.setattr(own, "max_cached_bytes", len(found[0].patches))
    own.load_file(FILES[1])
    own.load_file(FILES[0])
    assert decoded == [FILES[0], FILES[1], FILES[0]], "the cache is bounded"
