"""Choice of the replica that takes a request."""

import random

import pytest

from benchmarks.micro.routing import compare
from engine.replicas.routing import ANSWER_TOKENS, CHUNK_TOKENS, MOST_LOAD, SLACK, Router, chunk_names

CAPACITY = 100 * CHUNK_TOKENS


def prompt(seed: int, num_chunks: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(num_chunks * CHUNK_TOKENS + 1)]


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    router = Router(4, CAPACITY)
    first = {seed: router.choose(f"first-{seed}", prompt(seed, 20), "", range(4)) for seed in range(4)}
    assert sorted(first.values()) == [0, 1, 2, 3], "nothing is cached: the idle ones are used"
    for seed in (2, 0, 3, 1):
        longer = [*prompt(seed, 20), *prompt(9, 2)]
        assert router.choose(f"second-{seed}", longer, "", range(4)) == first[seed]


def test_another_salt_shares_nothing() -> None:
    router = Router(2, CAPACITY)
    chosen = router.choose("a", prompt(1, 20), "mine", range(2))
    assert router.choose("b", prompt(1, 20), "", range(2)) == 1 - chosen


def test_other_contents_of_the_same_tokens_share_nothing() -> None:
    """Placeholders of an image are all one token; what names them is 63 bits of the image's hash."""
    router, tokens = Router(2, CAPACITY), prompt(1, 20)
    one, other = ([2**62 + content, *tokens[1:]] for content in (1, 2))
    chosen = router.choose("a", one, "", range(2))
    assert router.choose("b", other, "", range(2)) == 1 - chosen
    assert router.choose("c", one, "", range(2)) == chosen


def test_only_eligible_replicas_are_chosen() -> None:
    router = Router(3, CAPACITY)
    router.choose("a", prompt(1, 20), "", [1])
    assert router.choose("b", prompt(1, 20), "", [0, 2]) != 1
    assert router.choose("c", prompt(1, 20), "", [1]) == 1, "the only one takes it, however busy"


def test_a_prefix_that_all_share_is_soon_everywhere() -> None:
    router = Router(4, CAPACITY)
    for i in range(200):
        router.choose(str(i), [*prompt(1, 30), i], "", range(4))
    assert max(router.loads) <= MOST_LOAD * sum(router.loads) / 4 + SLACK + ANSWER_TOKENS
    assert min(router.loads) > 0


def test_what_the_cache_forgets_the_router_forgets() -> None:
    router = Router(2, CAPACITY)
    there = router.choose("a", prompt(1, 40), "", range(2))
    router.end("a", num_generated=100 * CHUNK_TOKENS)
    assert router.choose("b", prompt(2, 1), "", [1 - there]) == 1 - there
    router.end("b")
    router.choose("c", prompt(3, 2), "", [there])
    assert router.choose("d", prompt(1, 40), "", range(2)) == 1 - there, "the answer has displaced the prompt"


def test_a_replica_that_lost_its_cache_is_not_preferred() -> None:
    router = Router(2, CAPACITY)
    there = router.choose("a", prompt(1, 40), "", range(2))
    router.choose("b", prompt(2, 40), "", [1 - there])
    router.forget(there)
    router.end("b")
    assert router.choose("c", prompt(1, 40), "", range(2)) == 1 - there


def test_new_conversations_begin_where_less_was_done_and_long_ones_stay() -> None:
    router = Router(2, CAPACITY)
    shared = prompt(1, 8)
    router.choose("a", prompt(2, 60), "", [0])
    router.choose("b", shared, "", [0])
    for request_id in "ab":
        router.end(request_id)
    assert router.loads == [0, 0]
    for i in range(20):  # as many answers as make up for the prompts
        router.choose(f"busy-{i}", shared, "", [0])
        router.end(f"busy-{i}")
    assert router.ranked(chunk_names([*shared, 5], ""), range(2))[0] == 1, "its system prompt is computed again"
    assert router.ranked(chunk_names(prompt(2, 60), ""), range(2))[0] == 0


def test_work_of_late_counts_for_more_than_old_work_and_for_a_new_replica_as_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.replicas.routing.MOST_WEIGHT", 2.0)
    router = Router(2, CAPACITY)
    for i in range(400):
        router.choose(str(i), prompt(i % 7, 4), "", [i // 200])
        router.end(str(i))
    assert router.ranked([], range(2)) == [0, 1], "what it did is long ago"
    number = router.add_replica()
    assert router.ranked([], range(3)) == [0, number, 1]


def test_names_stand_for_whole_prefixes() -> None:
    tokens = prompt(1, 5)
    names = chunk_names(tokens, "")
    assert len(names) == 5
    assert chunk_names(tokens[:-1], "") == names[:4], "the last token is computed always"
    other = [tokens[0] + 1, *tokens[1:]]
    assert not set(chunk_names(other, "")) & set(names)
    assert chunk_names([], "") == []


@pytest.mark.parametrize("seed", range(20))
def test_loads_are_those_of_unfinished_requests(seed: int) -> None:
    draw = random.Random(seed)
    router, running = Router(3, 10 * CHUNK_TOKENS), dict[str, int]()
    for i in range(300):
        if running and draw.random() < 0.45:
            request_id = draw.choice(list(running))
            router.end(request_id, draw.randrange(300))
            router.end(request_id)  # and nothing happens
            del running[request_id]
        elif draw.random() < 0.05:
            router.forget(draw.randrange(3))
        else:
            eligible = draw.sample(range(3), draw.randint(1, 3))
            tokens = prompt(draw.randrange(5), draw.randrange(6))[: draw.randrange(1, 400)]
            running[str(i)] = router.choose(str(i), tokens, "", eligible)
            assert running[str(i)] in eligible
        assert all((router.loads[replica] > 0) == (replica in running.values()) for replica in range(3))


@pytest.mark.parametrize(("num_replicas", "num_requests"), [(4, 1_000), (16, 1_600)])
def test_conversations_find_their_caches(num_replicas: int, num_requests: int) -> None:
    found = compare(num_replicas, num_requests)
    routed, joint = found["by prefix and load"], found["one cache"]
    assert routed.hit_rate >= 0.95 * joint.hit_rate
    assert routed.imbalance <= 1.15
    assert routed.hit_rate > found["round robin"].hit_rate + 0.1


def test_an_adapter_stays_where_it_is_until_that_replica_is_busier() -> None:
    router, short = Router(3, 100_000, 2), [1] * 8
    first = router.choose("0", short, "", range(3), "sql")
    router.end("0")
    assert router.choose("1", short, "", range(3), "sql") == first
    router.end("1")
    chosen = [router.choose(f"more {i}", short, "", range(3), "sql") for i in range(300)]
    assert chosen[0] == first
    assert set(chosen) == {0, 1, 2}, "one adapter's requests do not stay on one replica"


def test_adapters_that_have_left_their_slots_are_forgotten() -> None:
    router, short = Router(2, 100_000, 1), [1] * 8

    def chosen(adapter: str) -> int:
        replica = router.choose(adapter, short, "", range(2), adapter)
        router.end(adapter)
        return replica

    first = chosen("a")
    assert chosen("a") == first
    other = chosen("b")
    assert chosen("a") == first
    assert chosen("b") == other != first
    router.forget(first)
    assert not router._adapters[first]
    assert [len(each) for each in router._adapters] == [0, 1]
