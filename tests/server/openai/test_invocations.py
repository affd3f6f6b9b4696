"""/invocations: chats, completions and embeddings at one path, as SageMaker sends them."""

import json

import pytest

from tests.support.live_server import Live

HI = [{"role": "user", "content": "Hi"}]


def test_the_body_says_which_endpoint_it_is_for(live: Live) -> None:
    chat = live.post("/invocations", messages=HI, max_tokens=4).json()
    assert (chat["object"], chat["choices"][0]["message"]["content"]) == (
        "chat.completion",
        "Gr\N{LATIN SMALL LETTER U WITH DIAERESIS}",
    )
    completion = live.post("/invocations", prompt="Hi", max_tokens=2).json()
    assert (completion["object"], completion["choices"][0]["text"]) == ("text_completion", "Gr")
    assert live.post("/invocations", input="Hi").json()["object"] == "list"
    stream = live.post("/invocations", prompt="Hi", max_tokens=2, stream=True).text
    assert stream.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body", [{}, {"text": "Hi"}, {"messages": []}])
def test_other_bodies_are_refused(live: Live, body: object) -> None:
    response = live.http.post("/invocations", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "messages" in response.json()["error"]["message"]
