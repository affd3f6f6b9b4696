"""A model with several chat templates: a request's tools and documents choose one, and all that is derived from it."""

from tests.support.conversations import TOOL
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, Serve
from tests.support.templates import HERMES, THINKER

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Köln"}}\n</tool_call>'
RAG = "{% for d in documents %}<doc>{{ d.text }}</doc>{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


def start(serve: Serve) -> Live:
    return serve(FakeEngine(template={"default": THINKER, "tool_use": HERMES, "rag": RAG}, max_model_len=2048))


def prompt_text(live: Live, **body: object) -> str:
    tokens = live.post("/tokenize", messages=[{"role": "user", "content": "Hi"}], **body).json()["tokens"]
    return str(live.post("/detokenize", tokens=tokens).json()["prompt"])


def test_tools_and_documents_choose_the_template(serve: Serve) -> None:
    live = start(serve)
    assert prompt_text(live).endswith("<|im_start|>assistant\n<think>\n")
    assert "# Tools" in prompt_text(live, tools=[TOOL])
    assert prompt_text(live, documents=[{"text": "D"}]) == "<doc>D</doc>Hi"
    assert "# Tools" in prompt_text(live, tools=[TOOL], documents=[{"text": "D"}])


def test_formats_are_those_of_the_chosen_template(serve: Serve) -> None:
    live = start(serve)
    live.engine.answer = "Hm.</think>Four." + CALL
    message = live.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Four." + CALL)
    choice = live.chat(tools=[TOOL]).json()["choices"][0]
    assert choice["message"]["content"] == "Hm.</think>Four."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "lookup"
    assert (
        live.chat(tools=[TOOL], tool_choice="none").json()["choices"][0]["message"]["content"]
        == "Hm.</think>Four." + CALL
    )


def test_a_broken_template_leaves_the_others(serve: Serve) -> None:
    live = serve(FakeEngine(template={"default": THINKER, "tool_use": "{% if %}"}, max_model_len=2048))
    assert live.chat().status_code == 200
    assert live.chat(tools=[TOOL], tool_choice="none").status_code == 200
