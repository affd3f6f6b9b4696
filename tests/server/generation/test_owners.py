"""Whose a request is, for fairness: the key's, else the user's that it names, else the client's address."""

from collections.abc import Callable

from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_without_keys_users_and_addresses_are_owners(live: Live) -> None:
    live.complete(max_tokens=1)
    live.complete(max_tokens=1, user="ann")
    live.chat(max_tokens=1, user="ann", safety_identifier="bob", n=2)
    live.post("/v1/responses", input="Hi", user="cid")
    live.post("/v1/messages", model="toy", max_tokens=1, messages=MESSAGES, metadata={"user_id": "dora"})
    live.post("/v1/embeddings", input=["a", "b"], user="x" * 1000)
    users = ["", *(f"/user {name}" for name in ("ann", "bob", "bob", "cid", "dora", "x" * 256, "x" * 256))]
    assert live.engine.owners == [f"address 127.0.0.1{user}" for user in users]


def test_a_key_is_one_owner_whatever_users_it_names(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("first", "second")))
    for key in ("first", "second"):
        live.http.headers["Authorization"] = f"Bearer {key}"
        for user in ({}, {"user": "ann"}):
            assert live.complete(max_tokens=1, **user).status_code == 200
    assert live.engine.owners == ["key key-1"] * 2 + ["key key-2"] * 2
