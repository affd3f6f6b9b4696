"""LangChain's own integration tests for chat models and embeddings, with its OpenAI clients pointed at Quire."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_tests")
pytest.importorskip("langchain_openai")

from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.integration_tests.chat_models import magic_function, unicode_customer

from engine.text.chat_template import ChatTemplate
from tests.clients.table import Client
from tests.support.served import blocks_in_use, serve
from tests.support.taught import teach
from tests.support.templates import HERMES

CLIENTS = (Client("LangChain", "langchain-openai", "its own integration tests for chat models and embeddings"),)
pytestmark = pytest.mark.slow

NAMES = ("demo", "the-same-demo")
JOKE = '{"setup": "What do cats read?", "punchline": "Mewspapers."}'


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return "It's sunny."


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def customer(name: str) -> str:
    return call("unicode_customer", f'{{"customer_name": "{name}", "description": "a company"}}')


# What the suite asks where it looks at the words of the answer.
LESSONS: list[tuple[list[Any], str, str]] = [
    ([magic_function], "What is the value of magic_function(3)? Use the tool.", call("magic_function", '{"input": 3}')),
    ([get_weather], "What is the weather in San Francisco, CA?", call("get_weather", '{"location": "San Francisco"}')),
    (
        [unicode_customer],
        "Create a customer named '你好啊集团' (Hello Group) - a Chinese technology company",
        customer("你好啊集团"),
    ),
    (
        [unicode_customer],
        "Create a customer named 'こんにちは株式会社' (Hello Corporation) - a Japanese company",
        customer("こんにちは株式会社"),
    ),
    ([], "Tell me a joke about cats.", JOKE),
    (
        [],
        "Tell me a joke about cats. Return the result as a JSON with 'setup' and 'punchline' keys. "
        "Return nothing other "
        "than JSON.",
        JOKE,
    ),
]


def prompt(tools: list[Any], question: str) -> str:
    messages = [{"role": "user", "content": question}]
    described = [convert_to_openai_tool(each) for each in tools] or None
    return ChatTemplate(HERMES, {}).render(messages, tools=described, add_generation_prompt=True)


@pytest.fixture(scope="module")
def quire(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the bundled model, which has learned to answer as the suite expects it."""
    lessons = [(prompt(tools, question), answer) for tools, question, answer in LESSONS]
    model = teach(demo_model, tmp_path_factory.mktemp("models") / "taught", lessons)
    with serve(model, "--served-model-name", *NAMES, "--chat-template", HERMES) as url:
        yield url
        assert blocks_in_use(url) == 0


class OfQuire:
    @pytest.fixture(autouse=True)
    def _server(self, quire: str) -> None:
        self.client = {"base_url": f"{quire}/v1", "api_key": "none", "model": NAMES[0]}


class TestChatOpenAI(OfQuire, ChatModelIntegrationTests):
    """Six of its tests are skipped: five send pictures, sound or PDFs, one times LangChain itself on recorded
    answers.
    """

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.client, "max_tokens": 300, "stream_usage": True}

    @property
    def model_override_value(self) -> str:
        return NAMES[1]

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True


class TestOpenAIEmbeddings(OfQuire, EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {**self.client, "check_embedding_ctx_length": False}  # else it sends OpenAI's own token ids
