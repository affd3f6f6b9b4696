"""The `prediction` of chat completions, and its counts in `usage`."""

from __future__ import annotations

from typing import Any

import pytest

from server.apis.openai.chat.protocol import ChatCompletionRequest
from server.apis.openai.usage import usage_object
from server.generation.usage import Usage
from tests.support.live_server import Live


@pytest.mark.parametrize(
    ("content", "text"),
    [("a b", "a b"), ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"), ("", "")],
)
def test_the_predicted_text_is_passed_on(content: Any, text: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prediction": {"type": "content", "content": content}}
    assert ChatCompletionRequest.model_validate(body).neutral().sampling["prediction"] == text


def test_its_tokens_are_counted_beside_reasoning() -> None:
    usage = Usage(3, 10, reasoning_tokens=2, predicted_tokens=(5, 4))
    assert usage_object(usage)["completion_tokens_details"] == {
        "reasoning_tokens": 2, "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 4,
    }  # fmt: skip
    assert "completion_tokens_details" not in usage_object(Usage(3, 10))


def test_a_request_with_a_prediction(live: Live) -> None:
    response = live.chat(prediction={"type": "content", "content": "some text"})
    assert response.status_code == 200
    assert "warnings" not in response.json()
    details = response.json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0, "without drafts"
    response = live.chat(prediction={"type": "content", "content": 3})
    assert response.status_code == 400
    assert "prediction" in response.json()["error"]["message"]
