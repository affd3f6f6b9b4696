"""Roles of messages that are no role of OpenAI's."""

from __future__ import annotations

import pytest

from tests.support.fake_engine import TEMPLATE, FakeEngine
from tests.support.live_server import Live, Serve


@pytest.mark.parametrize(("role", "near"), [("usr", "user"), ("User", "user"), ("asistant", "assistant")])
def test_a_misspelt_role_is_refused_with_the_near_one(live: Live, role: str, near: str) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": role, "content": "b"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        response = live.post(path, messages=messages)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages[1].role")
        assert f"did you mean {near}?" in error["message"]
    response = live.post("/api/chat", model="toy", messages=messages)
    assert response.status_code == 400
    assert f"did you mean {near}?" in response.text


@pytest.mark.parametrize("role", ["ipython", "query", "user2", "bot", "model", "function"])
def test_other_roles_reach_the_template(live: Live, role: str) -> None:
    assert live.post("/v1/chat/completions", messages=[{"role": role, "content": "a"}]).status_code == 200


def test_a_role_that_the_template_names_is_its_own(serve: Serve) -> None:
    live = serve(FakeEngine(template=f"{{% if messages[0].role == 'User' %}}human{{% endif %}}{TEMPLATE}"))
    assert live.post("/v1/chat/completions", messages=[{"role": "User", "content": "a"}]).status_code == 200
