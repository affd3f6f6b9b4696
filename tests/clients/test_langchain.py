"""LangChain's own integration tests for chat models and embeddings, with its OpenAI clients pointed at Quire."""

from typing import Any

import pytest

pytest.importorskip("langchain_tests")
pytest.importorskip("langchain_openai")

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

pytestmark = pytest.mark.slow


class OfQuire:
    @pytest.fixture(autouse=True)
    def _server(self, quire: str) -> None:
        self.client = {"base_url": f"{quire}/v1", "api_key": "none", "model": "demo"}


class TestChatOpenAI(OfQuire, ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.client, "max_tokens": 300, "stream_usage": True}

    @property
    def model_override_value(self) -> str:
        return "the-same-demo"

    has_tool_calling = has_tool_choice = has_structured_output = False


class TestOpenAIEmbeddings(OfQuire, EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {**self.client, "check_embedding_ctx_length": False}  # else it sends OpenAI's own token ids
