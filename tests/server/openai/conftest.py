"""OpenAI's own client, which refuses responses that its types do not have."""

from typing import Any

import openai
import pytest

from tests.support.live_server import Live


@pytest.fixture
def client(live: Live) -> Any:
    base_url = f"http://127.0.0.1:{live.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client
