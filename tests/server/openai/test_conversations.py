"""/v1/conversations, and responses that go on from one; /v1/responses/compact."""

from typing import Any

import openai
import pytest

from server.apis.openai.responses.conversations import CONVERSATION_BYTES, ConversationStore, StoredConversation
from server.apis.openai.responses.store import encoded, items_bytes
from tests.server.openai.test_responses import PATH
from tests.support.fake_engine import ANSWER
from tests.support.live_server import Live, Serve
from tests.support.live_server import start_answering as start
from tests.support.templates import HERMES


def test_responses_add_to_a_conversation(client: openai.OpenAI, live: Live) -> None:
    first: Any = [{"type": "message", "role": "user", "content": "Be brief."}]
    conversation = client.conversations.create(items=first, metadata={"topic": "demo"})
    response = client.responses.create(model="toy", input="Hi", conversation=conversation.id)
    assert response.conversation is not None
    assert response.conversation.id == conversation.id
    client.responses.create(model="toy", input="And?", conversation={"id": conversation.id})
    assert live.prompt_text() == (
        "<|im_start|>user\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.role for item in items if item.type == "message"] == ["user", "user", "assistant", "user", "assistant"]
    assert client.conversations.items.retrieve(str(items[0].id), conversation_id=conversation.id) == items[0]
    client.conversations.items.delete(str(items[0].id), conversation_id=conversation.id)
    added = client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "Bye"}])
    assert [item.type for item in added.data] == ["message"]
    client.responses.create(model="toy", input="x", conversation=conversation.id)
    assert live.prompt_text().startswith("<|im_start|>user\nHi<|im_end|>")
    changed = client.conversations.update(conversation.id, metadata={"topic": "other"})
    assert client.conversations.retrieve(conversation.id) == changed
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="toy", input="x", conversation=conversation.id)
    assert caught.value.param == "conversation"


def test_what_is_wrong_is_named(live: Live) -> None:
    error = live.post("/v1/conversations", items=[{"role": "robot", "content": "a"}]).json()["error"]
    assert (error["code"], error["param"]) == (400, "items[0].role")
    error = live.post("/v1/conversations", items=[{"type": "item_reference", "id": "x"}]).json()["error"]
    assert (error["code"], error["param"]) == (400, "items[0]")
    made = live.post("/v1/conversations").json()
    for path in (f"/v1/conversations/{made['id']}/items/x", "/v1/conversations/x", "/v1/conversations/x/items"):
        assert live.http.get(path).status_code == 404
    assert live.http.get(f"/v1/conversations/{made['id']}/items").json()["data"] == []
    assert live.post("/v1/conversations/x/items", items=[{"role": "user", "content": "a"}]).status_code == 404
    live.engine.fail_after = 2
    assert live.post(PATH, input="Hi", conversation=made["id"]).status_code == 500
    assert live.http.get(f"/v1/conversations/{made['id']}/items").json()["data"] == [], "nothing was answered"


def test_conversations_are_bounded() -> None:
    store = ConversationStore(100, max_bytes=10_000)
    for owner in ("me", "me", "you"):
        store.put(owner, StoredConversation(f"c{owner}", 0, {}))
    for numbers in (range(3), range(2, 5)):
        store.append("me", "cme", encoded({"id": str(number), "text": "x" * 300} for number in numbers))
    found = store.get("me", "cme")
    found.remove("0")
    assert found.items.keys() == {"1", "2", "3", "4"}
    assert found.num_bytes == CONVERSATION_BYTES + len(b"{}") + items_bytes(found.items), "each is counted once"
    store.append("me", "cme", encoded({"id": str(number), "text": "x" * 300} for number in range(5, 20)))
    store.append("me", "gone", {"1": b"{}"})
    assert store.get("you", "cyou").items == {}, "another caller loses nothing"
    with pytest.raises(Exception, match="no stored conversation"):
        store.get("me", "cme")


def test_compacting(serve: Serve) -> None:
    live = start(serve, HERMES, "They said hi.")
    items: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    base_url = f"http://127.0.0.1:{live.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        done = client.responses.compact(model="toy", input=items)
        assert (done.object, [item.type for item in done.output]) == ("response.compaction", ["message", "compaction"])
        assert "<|im_start|>user\nSummarize the conversation" in live.prompt_text()
    output = live.post(f"{PATH}/compact", model="toy", input=items).json()["output"]
    live.post(PATH, input=[*output, {"role": "user", "content": "And?"}])
    assert live.prompt_text() == (
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>user\nSummary of the conversation so far:\nThey said hi.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    stored = live.post(PATH, input="Hi").json()["id"]
    assert live.post(f"{PATH}/compact", model="toy", previous_response_id=stored).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", PATH])
def test_verbosity_is_for_the_template(serve: Serve, path: str) -> None:
    def body(value: str) -> dict[str, Any]:
        text = {"text": {"verbosity": value}, "input": "Hi"}
        return text if path == PATH else {"verbosity": value, "messages": [{"role": "user", "content": "Hi"}]}

    live = start(serve, HERMES + "{{ 'Verbosity: ' + verbosity if verbosity }}", "Done.")
    assert "warnings" not in live.post(path, **body("low")).json()
    assert live.prompt_text().endswith("Verbosity: low")
    other = start(serve, HERMES, "Done.")
    assert "warnings" not in other.post(path, **body("medium")).json()
    assert "verbosity" in other.post(path, **body("low")).json()["warnings"][0]
    assert other.post(path, **body("huge")).status_code == 400
