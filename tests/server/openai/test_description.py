"""Every answer and every event is what OpenAI's and Anthropic's descriptions say, as their clients have these as types.

Quire adds the fields named here, and no others.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types import ModelInfo as AnthropicModel
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem, ConversationItemList
from openai.types.responses import CompactedResponse, Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse

from tests.support.described import additions
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, Serve
from tests.support.templates import QWEN3

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = "<think>\nHm.\n</think>\n\nI look." + CALL
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
MESSAGES = [{"role": "user", "content": "Hi"}]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
UNKNOWN = {"colour": "red"}  # a field that comes back as a warning
ADDED = frozenset(
    """ChatCompletion.metrics ChatCompletion.prompt_logprobs ChatCompletion.prompt_token_ids ChatCompletion.warnings
    ChatCompletionChunk.metrics ChatCompletionChunk.prompt_token_ids ChatCompletionChunk.warnings
    ChatCompletionMessage.reasoning ChatCompletionMessage.reasoning_content ChoiceDelta.reasoning
    ChoiceDelta.reasoning_content Choice.stop_reason Choice.token_ids
    Completion.metrics Completion.warnings CompletionChoice.prompt_logprobs CompletionChoice.prompt_token_ids
    CompletionChoice.stop_reason CompletionChoice.token_ids
    CreateEmbeddingResponse.created CreateEmbeddingResponse.id CreateEmbeddingResponse.warnings
    Usage.completion_tokens Usage.prompt_tokens_details
    Model.input_modalities Model.max_model_len Model.output_modalities Model.parent Model.permission Model.root
    Response.store Response.warnings ResponseCustomToolCall.status ResponseFunctionCallArgumentsDoneEvent.name
    Logprob.bytes LogprobTopLogprob.bytes Message.warnings""".split()  # noqa: SIM905
)


@pytest.fixture
def thinker(serve: Serve) -> Live:
    live = serve(FakeEngine(template=QWEN3, max_model_len=4096))
    live.engine.answer = ANSWER
    return live


def streamed(live: Live, path: str, **body: Any) -> Iterator[Any]:
    for line in live.post(path, **body).text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [CHAT_TOOL]},
    "all": {"tools": [CHAT_TOOL], "logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True, **UNKNOWN},
    "cut": {"max_tokens": 3},
}


@pytest.mark.parametrize("name", CHATS)
def test_chat(thinker: Live, name: str) -> None:
    body = {"messages": MESSAGES, **CHATS[name]}
    found = additions(ChatCompletion, thinker.post("/v1/chat/completions", **body).json())
    for chunk in streamed(thinker, "/v1/chat/completions", **body, **WITH_USAGE):
        found |= additions(ChatCompletionChunk, chunk)
    assert found <= ADDED, found - ADDED


@pytest.mark.parametrize("more", [{}, {"logprobs": 2, "echo": True, "return_token_ids": True, **UNKNOWN}], ids=str)
def test_completions(thinker: Live, more: dict[str, Any]) -> None:
    found = additions(Completion, described(thinker.complete("Hi", **more).json()))
    for chunk in streamed(thinker, "/v1/completions", prompt="Hi", **more, **WITH_USAGE):
        found |= additions(Completion, described(chunk))
    assert found <= ADDED, found - ADDED


def described(body: dict[str, Any]) -> dict[str, Any]:
    """Without the nulls that OpenAI's own servers send, too: before the end, and for the first token of a prompt."""
    for choice in body["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        for name in ("token_logprobs", "top_logprobs") if choice["logprobs"] else ():
            choice["logprobs"][name] = [each for each in choice["logprobs"][name] if each is not None]
    return body


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [TOOL], "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], **UNKNOWN},
        {"tools": [TOOL], "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {"tools": [{"type": "custom", "name": "weather"}, {"type": "web_search"}]},
        {"max_output_tokens": 3},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
    ],
    ids=lambda more: " ".join(more),
)
def test_responses(thinker: Live, more: dict[str, Any]) -> None:
    if "text" in more:
        thinker.engine.answer = '{"a": 1}'
    body = thinker.post("/v1/responses", input="Hi", **more).json()
    found = additions(Response, body)
    kept = thinker.http.get(f"/v1/responses/{body['id']}").json()
    items = thinker.http.get(f"/v1/responses/{body['id']}/input_items").json()
    found |= additions(Response, kept) | additions(ResponseItemList, items)
    for event in streamed(thinker, "/v1/responses", input="Hi", stream=True, **more):
        found |= additions(ResponseStreamEvent, event)
    assert found <= ADDED, found - ADDED


def test_calls_of_coding_agents(thinker: Live) -> None:
    shell, space = {"type": "local_shell"}, {"type": "namespace", "name": "mcp", "description": "", "tools": [TOOL]}
    thinker.engine.answer = CALL.replace("weather", "mcp__weather") + CALL.replace("weather", "local_shell")
    body = {"input": "Hi", "tools": [shell, space]}
    response = thinker.post("/v1/responses", **body).json()
    assert [item["type"] for item in response["output"]] == ["function_call", "local_shell_call"]
    found = additions(Response, response)
    for event in streamed(thinker, "/v1/responses", stream=True, **body):
        found |= additions(ResponseStreamEvent, event)
    assert found <= ADDED, found - ADDED


def test_responses_in_the_background(thinker: Live) -> None:
    thinker.engine.holds_after = 3
    body = thinker.post("/v1/responses", input="Hi", background=True).json()
    path = f"/v1/responses/{body['id']}"
    found = additions(Response, body) | additions(Response, thinker.post(f"{path}/cancel").json())
    lines = thinker.http.get(path, params={"stream": "true", "starting_after": 0}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events
    for event in events:
        found |= additions(ResponseStreamEvent, event)
    found |= additions(InputTokenCountResponse, thinker.post("/v1/responses/input_tokens", input="Hi").json())
    assert found <= ADDED, found - ADDED


def test_conversations(thinker: Live) -> None:
    conversation = thinker.post("/v1/conversations", items=[{"role": "user", "content": "Hi"}]).json()
    path = f"/v1/conversations/{conversation['id']}"
    thinker.post("/v1/responses", input="And?", conversation=conversation["id"], tools=[TOOL])
    items = thinker.http.get(f"{path}/items").json()
    found = additions(Conversation, conversation) | additions(ConversationItemList, items)
    found |= additions(ConversationItem, thinker.http.get(f"{path}/items/{items['data'][0]['id']}").json())
    found |= additions(Conversation, thinker.post(path, metadata={"topic": "rain"}).json())
    added = thinker.post(f"{path}/items", items=[{"role": "user", "content": "Oh"}]).json()
    found |= additions(ConversationItemList, added)
    found |= additions(Conversation, thinker.http.delete(f"{path}/items/{added['data'][0]['id']}").json())
    compacted = thinker.post("/v1/responses/compact", model="toy", input="A long story.").json()
    first, *compacted["output"] = compacted["output"]  # the user's, which OpenAI's own servers give back, too
    assert first["role"] == "user"
    found |= additions(CompactedResponse, compacted)
    found |= additions(ConversationDeletedResource, thinker.http.delete(path).json())
    assert found <= ADDED, found - ADDED


def test_models_and_embeddings(thinker: Live) -> None:
    models = thinker.http.get("/v1/models").json()
    assert models["object"] == "list"
    models["data"].append(thinker.http.get("/v1/models/toy").json())
    found = {each for model in models["data"] for each in additions(Model, model)}
    found |= additions(CreateEmbeddingResponse, thinker.post("/v1/embeddings", input="Hi", **UNKNOWN).json())
    assert found <= ADDED, found - ADDED


@pytest.mark.parametrize("more", [{}, {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]}], ids=str)
def test_messages(thinker: Live, more: dict[str, Any]) -> None:
    body = {"model": "toy", "max_tokens": 100, "messages": MESSAGES, **UNKNOWN, **more}
    found = additions(Message, thinker.post("/v1/messages", **body).json())
    for event in streamed(thinker, "/v1/messages", stream=True, **body):
        found |= additions(RawMessageStreamEvent, event) if event["type"] != "ping" else set()
    counted = {name: value for name, value in body.items() if name in ("model", "messages", "tools")}
    found |= additions(MessageTokensCount, thinker.post("/v1/messages/count_tokens", **counted).json())
    refused = thinker.post("/v1/messages", **{**body, "max_tokens": 0})
    assert refused.status_code == 400
    found |= additions(ErrorResponse, refused.json())
    model = thinker.http.get("/v1/models/toy", headers={"anthropic-version": "2023-06-01"}).json()
    found |= additions(AnthropicModel, model) if model.get("type") == "model" else set()
    assert found <= ADDED, found - ADDED
