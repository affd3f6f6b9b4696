"""The store of responses: what it holds is counted, whatever the responses share, and callers do not push each other
out.
"""

import gc
import random
import tracemalloc

from server.apis.openai.responses.store import ResponseStore, StoredResponse, Turn
from server.generation.request import Message, ToolCall


def response(text: str = "", *, previous: Turn | None = None, items: int = 1, name: str = "") -> StoredResponse:
    output = [{"id": f"item {name} {number}", "text": text} for number in range(items)]
    messages = [Message(role="assistant", content=text + str(number)) for number in range(items)]
    return StoredResponse.of({"output": output}, {}, Turn(messages, previous))


def whole_bytes(stored: StoredResponse) -> int:
    return stored.num_bytes + stored.turn.num_bytes


def test_the_least_recently_used_go_first() -> None:
    size = whole_bytes(response(name="0"))
    store = ResponseStore(100, max_bytes=2 * size)
    for number in range(5):
        store.put("", str(number), response(name=str(number)))
    assert [store.get("", str(number)) is not None for number in range(5)] == [False, False, False, True, True]
    assert [store.item("", f"item {number} 0") is not None for number in range(5)] == [False, False, False, True, True]
    store.get("", "3")
    store.put("", "5", response(name="5"))
    assert [store.get("", str(number)) is not None for number in range(6)][3:] == [True, False, True]
    store.put("", "huge", response("x" * 2 * size))
    assert store.get("", "huge") is None
    assert store.num_bytes == 0
    assert not ResponseStore(0).remove("", "x")


def test_nothing_is_left_of_a_caller_without_responses() -> None:
    """Callers may be as many as there are addresses."""
    store = ResponseStore(100)
    for number in range(20):
        store.put(f"caller {number}", "a", response(name="a"))
        store.put(f"caller {number}", "a", response("again", name="a"))
        assert store.remove(f"caller {number}", "a")
        assert not store.remove(f"caller {number}", "a")
    assert not store._owners


def test_a_conversation_is_whole_after_its_beginning_was_removed() -> None:
    store = ResponseStore(2)
    call = Message(role="assistant", tool_calls=[ToolCall(id="1", name="f", arguments={"a": [1]})])
    previous = None
    for number in range(4):
        said = [Message(role="user", content=f"{number}"), call]
        stored = StoredResponse.of({"output": []}, {}, Turn(said, previous))
        store.put("", str(number), stored)
        previous = stored.turn
    assert store.get("", "0") is None
    newest = store.get("", "3")
    assert newest is not None
    messages = newest.turn.conversation()
    assert [message.content for message in messages[::2]] == ["0", "1", "2", "3"]
    assert messages[1] == call


def test_chains_that_share_a_beginning_hold_it_once_and_it_counts_as_long_as_it_is_held() -> None:
    store = ResponseStore(100)
    first = response("x" * 10_000)
    store.put("", "first", first)
    branches = [response("y", previous=first.turn, name=str(number)) for number in range(10)]
    for number, branch in enumerate(branches):
        store.put("", str(number), branch)
    assert store.num_bytes == whole_bytes(first) + sum(map(whole_bytes, branches))
    store.remove("", "first")
    assert store.num_bytes == first.turn.num_bytes + sum(map(whole_bytes, branches)), "they go on from it"
    for number in range(10):
        store.remove("", str(number))
    assert store.num_bytes == 0


def test_counts_stay_true_at_random() -> None:
    rng = random.Random(1)
    store = ResponseStore(30, max_bytes=200_000)
    turns: dict[str, list[Turn]] = {"a": [], "b": []}
    for step in range(2000):
        owner = rng.choice("ab")
        previous = rng.choice([None, *turns[owner][-10:]])
        stored = response("x" * rng.randrange(3000), previous=previous, name=str(step), items=rng.randrange(3))
        store.put(owner, str(rng.randrange(60)), stored)
        turns[owner].append(stored.turn)
        if rng.random() < 0.3:
            store.remove(owner, str(rng.randrange(60)))
        held: dict[int, int] = {}
        kept = [store.get(name, str(number)) for name in "ab" for number in range(60)]
        for each in filter(None, kept):
            turn: Turn | None = each.turn
            while turn is not None:
                held[id(turn)] = turn.num_bytes
                turn = turn.previous
        assert store.num_bytes == sum(held.values()) + sum(each.num_bytes for each in kept if each is not None)
        assert store.num_bytes <= 200_000


def test_memory_is_bounded_by_what_is_counted() -> None:
    """Long chains of many small messages, which cost far more as objects than as text."""
    bound = 1 << 18
    gc.collect()
    tracemalloc.start()
    try:
        store, previous = ResponseStore(10_000, max_bytes=bound), None
        for number in range(90):
            stored = response("ab", previous=previous, items=75, name=str(number))
            store.put("", str(number), stored)
            previous = stored.turn if number % 40 else None
        del stored, previous
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.num_bytes <= bound
    assert store.num_bytes > bound // 2, "the test fills it"
    assert held <= 1.2 * bound


def test_callers_do_not_push_each_other_out() -> None:
    small = whole_bytes(response(name="0"))
    store = ResponseStore(50, max_bytes=20 * small)
    store.put("quiet", "mine", response(name="q"))
    for number in range(100):
        store.put("loud", str(number), response(name=str(number)))
    store.put("huge", "one", response("x" * 100 * small))
    assert store.get("quiet", "mine") is not None
    assert store.get("huge", "one") is None
    assert store.get("loud", "99") is not None
    assert store.get("loud", "mine") is None
    assert store.item("loud", "item q 0") is None
    found = store.item("quiet", "item q 0")
    assert found == b'{"id":"item q 0","text":""}'
    counted = ResponseStore(10)
    counted.put("quiet", "mine", response("x" * 100_000))
    for number in range(100):
        counted.put("loud", str(number), response(name=str(number)))
    assert counted.get("quiet", "mine") is not None
