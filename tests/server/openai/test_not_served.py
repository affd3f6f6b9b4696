"""Endpoints that OpenAI's API has for other kinds of models."""

import io

import openai
import pytest

from tests.support.live_server import Live


def test_other_kinds_of_models_are_refused_at_once(live: Live) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="none") as client:
        with pytest.raises(openai.APIStatusError, match="it supports no audio") as caught:
            client.audio.transcriptions.create(model="toy", file=("a.wav", io.BytesIO(bytes(1000))))
        assert caught.value.status_code == 501
        with pytest.raises(openai.APIStatusError, match="Use another server"):
            client.audio.speech.create(model="toy", voice="alloy", input="Hi")
        with pytest.raises(openai.APIStatusError, match="it makes no images"):
            client.images.generate(model="toy", prompt="Hi")
    line = next(
        line for line in live.http.get("/metrics").text.splitlines() if "/v1/audio" in line and "_total" in line
    )
    assert line.endswith(" 2.0"), "the client has tried again"
