"""BlockManager: each verb and its edges. Token ids stand for content; nothing is stored here."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

import pytest

from engine.core.engine_request import EngineRequest
from engine.core.kv.block_manager import BlockManager
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.block_pools import UNHELD
from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request

SIZE = 4


def request(tokens: list[int] | int, salt: str = "") -> Request:
    tokens = list(range(tokens)) if isinstance(tokens, int) else tokens
    return Request(EngineRequest("r", tokens, SamplingParams(), cache_salt=salt), frozenset(), seed=0)


def compute(blocks: BlockManager, request: Request) -> Request:
    """Run a request as the scheduler does if it is alone: match, grow, compute all, publish."""
    cached = blocks.match_prefix(request)
    assert blocks.grow(request, request.num_tokens, cached) is not None
    request.num_computed_tokens = request.num_tokens
    blocks.commit(request)
    return request


def test_grow_gives_the_blocks_that_are_lacking() -> None:
    blocks, r = BlockManager(8, SIZE), request(5)
    assert blocks.grow(r, 5) == [[0, 1]]
    assert r.num_slots == 8
    assert blocks.grow(r, 8) == [[]]
    assert blocks.grow(r, 17) == [[2, 3, 4]]
    assert r.block_tables[0] == [0, 1, 2, 3, 4]
    assert blocks.num_free_blocks == 3
    blocks.check([r])


def test_grow_is_all_or_nothing() -> None:
    blocks, r = BlockManager(3, SIZE), request(4)
    assert blocks.grow(r, 4) == [[0]]
    assert blocks.grow(r, 16) is None
    assert r.block_tables[0] == [0]
    assert blocks.num_free_blocks == 2
    assert blocks.grow(r, 12) == [[1, 2]]
    blocks.check([r])


def test_grow_leaves_spare_blocks() -> None:
    blocks, r = BlockManager(4, SIZE), request(8)
    assert blocks.grow(r, 8, num_spare=3) is None
    assert blocks.grow(r, 8, num_spare=2) == [[0, 1]]


def test_a_prefix_is_matched_up_to_the_first_difference() -> None:
    blocks = BlockManager(16, SIZE)
    first = compute(blocks, request(13))
    assert blocks.match_prefix(request(13)) == [first.block_tables[0][:3]]
    assert blocks.match_prefix(request([*range(8), 99, *range(9, 13)])) == [first.block_tables[0][:2]]
    assert blocks.match_prefix(request([99, *range(1, 13)])) == [[]]
    assert blocks.match_prefix(request([*range(4, 8), *range(4)])) == [[]], (
        "the same tokens elsewhere are another prefix"
    )
    assert blocks.match_prefix(request(3)) == [[]]


def test_names_are_those_of_cache_files() -> None:
    """A change of names would make every prefix cache file worthless."""
    blocks = BlockManager(16, SIZE)
    r = compute(
        blocks, Request(EngineRequest("a", [*range(8), 2**31], SamplingParams(), cache_salt="x"), frozenset(), 0)
    )
    name = sha256(b"x").digest()
    for first in (0, SIZE):
        name = sha256(name + b"".join(token.to_bytes(8, "little") for token in range(first, first + SIZE))).digest()
    assert r.block_hashes[1] == name
    assert name.hex() == "57b7edcc6c3f41b7c9e8e1aa5e9f8a9beb1e7ede350c25a6a9301a1e99dea7f8"
    assert blocks.pools.pools[0].name_of(r.block_tables[0][1]) == (0, name)


def test_placeholders_are_named_by_their_content() -> None:
    """The same tokens in front of other contents are another prefix; generated tokens name themselves."""
    blocks, image, other = BlockManager(16, SIZE), 2**62 + 5, 2**62 + 6

    def of_content(content: int, *more: int) -> Request:
        tokens = [1, 2, 3, 4, 5, 7, 7, 8, *more]
        names = [1, 2, 3, 4, 5, content, content + 1, 8, *more]
        return Request(EngineRequest("a", tokens, SamplingParams(), name_ids=names), frozenset(), 0)

    first = of_content(image, 9, 10)
    first.append([11, 12])
    first.num_tokens = 12
    compute(blocks, first)
    table = first.block_tables[0]
    assert blocks.match_prefix(of_content(image, 9, 10, 11, 12, 13)) == [table[:3]]
    assert blocks.match_prefix(of_content(image, 9, 10, 11, 13, 13)) == [table[:2]]
    assert blocks.match_prefix(of_content(other, 9, 10)) == [table[:1]]
    assert blocks.match_prefix(request([1, 2, 3, 4, 5, 7, 7, 8, 9])) == [table[:1]], "tokens alone name no content"


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    blocks = BlockManager(16, SIZE)
    first = compute(blocks, request(12))
    assert blocks.match_prefix(request(12)) == [first.block_tables[0][:2]]
    assert blocks.match_prefix(request(13)) == [first.block_tables[0][:3]]
    assert blocks.match_prefix(request(4)) == [[]]
    assert blocks.match_prefix(request(5)) == [first.block_tables[0][:1]]


def test_salts_are_worlds_apart() -> None:
    blocks = BlockManager(16, SIZE)
    plain, salted = compute(blocks, request(9)), compute(blocks, request(9, salt="tenant"))
    assert not set(plain.block_tables[0]) & set(salted.block_tables[0])
    assert blocks.match_prefix(request(9, salt="tenant")) == [salted.block_tables[0][:2]]
    assert blocks.match_prefix(request(9, salt="another")) == [[]]


def test_python_hash_collisions_are_no_hits() -> None:
    assert hash((-1,)) == hash((-2,))
    blocks = BlockManager(8, 1)
    compute(blocks, request([2**61, 7]))
    assert hash(2**61) == hash(1)
    assert blocks.match_prefix(request([1, 7])) == [[]]
    compute(blocks, request([-1, 7]))
    assert blocks.match_prefix(request([-2, 7])) == [[]]


def test_shared_blocks_are_held_until_the_last_holder_leaves() -> None:
    blocks = BlockManager(4, SIZE)
    a = compute(blocks, request(9))
    b = compute(blocks, request(9))
    assert b.block_tables[0][:2] == a.block_tables[0][:2]
    assert b.block_tables[0][2] != a.block_tables[0][2]
    assert blocks.num_free_blocks == 0
    blocks.check([a, b])
    blocks.release(a)
    assert blocks.num_free_blocks == 1
    blocks.check([b])
    blocks.release(b)
    assert blocks.num_free_blocks == 4
    blocks.check([])


def test_only_known_and_computed_tokens_are_published() -> None:
    blocks, r = BlockManager(8, SIZE), request(6)
    blocks.grow(r, 12)
    r.num_computed_tokens = 3
    blocks.commit(r)
    assert blocks.match_prefix(request(9)) == [[]]
    r.num_computed_tokens = 8  # two tokens are computed that the CPU does not know
    blocks.commit(r)
    assert blocks.match_prefix(request(9)) == [r.block_tables[0][:1]]
    r.token_ids += [6, 7, 8]
    blocks.commit(r)
    assert blocks.match_prefix(request(9)) == [r.block_tables[0][:2]]
    blocks.check([r])


def test_released_blocks_stay_findable_until_evicted_tail_first() -> None:
    blocks = BlockManager(4, SIZE)
    a = compute(blocks, request(16))
    chain = list(a.block_tables[0])
    blocks.release(a)
    assert a.block_tables == []
    other = request([99])
    for left in (3, 2, 1):
        blocks.grow(other, other.num_slots + 1)
        assert other.block_tables[0][-1] == chain[left]
        assert blocks.match_prefix(request(17)) == [chain[:left]]
        blocks.check([other])


def test_the_longest_unused_chain_is_evicted_first() -> None:
    blocks = BlockManager(4, SIZE)
    old, new = compute(blocks, request(8)), compute(blocks, request(list(range(50, 58))))
    blocks.release(old)
    blocks.release(new)
    compute(blocks, used_again := request(8))  # its second block is computed anew: the last token is in it
    blocks.release(used_again)
    blocks.grow(other := request([99]), 8)
    assert len(blocks.match_prefix(request(9))[0]) == 2
    assert blocks.match_prefix(request(list(range(50, 59)))) == [[]]
    blocks.check([other])


def test_empty_blocks_are_handed_out_before_cached_ones() -> None:
    blocks = BlockManager(6, SIZE)
    a, partial = compute(blocks, request(8)), request([50, 51])
    blocks.grow(partial, 2)
    blocks.release(a)
    blocks.release(partial)
    assert blocks.grow(other := request([99]), 16) is not None
    assert set(other.block_tables[0]) == {2, 3, 4, 5}
    assert blocks.match_prefix(request(9)) == [[0, 1]]


def test_hits_are_not_evicted_by_their_own_growth() -> None:
    blocks = BlockManager(3, SIZE)
    blocks.release(compute(blocks, request(8)))
    b = request(12)
    cached = blocks.match_prefix(b)
    assert len(cached[0]) == 2
    assert blocks.grow(b, 16, cached) is None, "revived blocks are no longer free"
    assert blocks.num_free_blocks == 3
    assert blocks.grow(b, 12, cached) is not None
    assert b.block_tables[0][:2] == cached[0]
    b.num_computed_tokens = 8
    blocks.check([b])


def test_equal_content_computed_twice_at_once() -> None:
    blocks = BlockManager(8, SIZE)
    a, b = request(9), request(9)
    for r in (a, b):
        blocks.grow(r, 9)
    for r in (a, b):
        r.num_computed_tokens = 9
        blocks.commit(r)
    assert blocks.match_prefix(request(9)) == [a.block_tables[0][:2]], "the first one is published"
    blocks.check([a, b])
    blocks.release(a)
    assert blocks.match_prefix(request(9)) == [[0, 1]]
    blocks.release(b)
    blocks.check([])
    assert blocks.num_free_blocks == 8


def test_a_chain_survives_the_loss_of_its_head() -> None:
    blocks = BlockManager(8, SIZE)
    head, a = request(4), request(9)
    blocks.grow(head, 4)
    blocks.grow(a, 9)  # computes the same first block, which stays private
    for r in (head, a):
        r.num_computed_tokens = r.num_tokens
        blocks.commit(r)
    blocks.release(head)
    blocks.grow(other := request([99]), 5 * SIZE)  # evicts the published head
    assert blocks.match_prefix(request(9)) == [[]]
    blocks.release(other)
    compute(blocks, again := request(4))
    assert blocks.match_prefix(request(9)) == [[again.block_tables[0][0], a.block_tables[0][1]]]
    blocks.check([a, again])


def test_reset_waits_until_nothing_is_held() -> None:
    blocks = BlockManager(4, SIZE)
    a = compute(blocks, request(9))
    assert not blocks.reset()
    assert len(blocks.match_prefix(request(9))[0]) == 2
    blocks.release(a)
    assert blocks.reset()
    assert blocks.match_prefix(request(9)) == [[]]
    blocks.check([])


def test_without_prefix_caching_nothing_is_ever_found() -> None:
    blocks = BlockManager(4, SIZE, enable_prefix_caching=False)
    a = compute(blocks, request(9))
    assert blocks.match_prefix(request(9)) == [[]]
    blocks.check([a])
    blocks.release(a)
    assert blocks.match_prefix(request(9)) == [[]]
    assert blocks.num_free_blocks == 4


def _two_holders() -> tuple[BlockManager, Request, Request]:
    blocks = BlockManager(8, SIZE)
    return blocks, compute(blocks, request(9)), compute(blocks, request(9))


def test_check_finds_what_is_wrong() -> None:
    blocks, a, b = _two_holders()
    blocks.check([a, b])
    with pytest.raises(AssertionError, match="miscounted"):
        blocks.check([a])
    blocks, a, b = _two_holders()
    b.block_tables[0][2] = a.block_tables[0][2]
    with pytest.raises(AssertionError):
        blocks.check([a, b])
    blocks, a, b = _two_holders()
    a.num_computed_tokens = 3
    with pytest.raises(AssertionError):
        blocks.check([a, b])
    blocks, a, b = _two_holders()
    a.token_ids[0] = b.token_ids[0] = 99
    a.block_hashes.clear()
    with pytest.raises(AssertionError, match="other tokens"):
        blocks.check([a, b])
    blocks, a, b = _two_holders()
    blocks.pools.pools[0]._free.popitem()
    with pytest.raises(AssertionError, match="lost"):
        blocks.check([a, b])


WINDOWED = (FULL, CacheGroup(window=6))  # of a query at position p it keeps p - 5 .. p


def windowed(num_blocks: int, max_chunk: int = 100) -> BlockManager:
    return BlockManager(num_blocks, SIZE, groups=WINDOWED, max_chunk=max_chunk)


def advance(blocks: BlockManager, request: Request, num_tokens: int) -> list[list[int]] | None:
    """Decode until the CPU knows and the device has computed `num_tokens` tokens."""
    new = None
    while request.num_computed_tokens < num_tokens:
        new = blocks.grow(request, request.num_computed_tokens + 1)
        request.num_computed_tokens += 1
        while len(request.token_ids) <= request.num_computed_tokens:
            request.token_ids.append(len(request.token_ids))
        blocks.commit(request)
    return new


def test_a_window_gives_blocks_back_and_keeps_their_entries() -> None:
    blocks, r = windowed(12), request(4)
    compute(blocks, r)
    advance(blocks, r, 21)
    full, window = r.block_tables
    assert len(full) == len(window) == 6
    # The query at position 21 reads from 16 on; one that is retracted, at 20, from 15 on.
    assert r.num_passed == [0, 3]
    assert blocks.num_free_blocks == 12 - 6 - 3
    assert advance(blocks, r, 25) == [[full[6]], [window[6]]]
    assert r.num_passed == [0, 4]
    blocks.check([r])
    blocks.release(r)
    assert blocks.num_free_blocks == 12


def test_admission_takes_blocks_for_a_chunk_in_a_window_group() -> None:
    blocks, r = windowed(20, max_chunk=8), request(32)
    assert blocks.grow(r, 32) is not None
    assert [len(table) for table in r.block_tables] == [8, 2]
    assert r.num_slots == 8
    for end in (8, 16, 24, 32):
        assert blocks.grow(r, end) is not None
        r.num_computed_tokens = end
        blocks.commit(r)
        blocks.check([r])
        assert 20 - blocks.num_free_blocks <= sum(blocks.most_held(32))
    assert [len(table) for table in r.block_tables] == [8, 8]


def test_a_window_group_hits_with_the_end_of_the_prefix_alone() -> None:
    blocks, first = windowed(16), request(4)
    compute(blocks, first)
    advance(blocks, first, 21)
    blocks.release(first)
    takes_the_oldest = request([99])
    blocks.grow(takes_the_oldest, (16 - 11) * SIZE // 2)
    again = request(21)
    full, window = blocks.match_prefix(again)
    assert len(full) == len(window) == 5
    assert window[:3] == [UNHELD] * 3, "the query at position 20 reads from 15 on"
    assert blocks.grow(again, 21, [full, window]) is not None
    assert again.num_passed == [0, 3]
    again.num_computed_tokens = 20
    blocks.check([again, takes_the_oldest])


def test_a_prefix_whose_window_was_evicted_is_shorter() -> None:
    blocks, first = windowed(16), request(4)
    compute(blocks, first)
    advance(blocks, first, 21)
    gone = blocks.pools.pools[0].finder(1)(first.block_hashes[3])
    assert gone is not None
    blocks.pools.pools[0]._names[gone] = None
    del blocks.pools.pools[0]._published[1][first.block_hashes[3]]
    full, window = blocks.match_prefix(request(21))
    assert len(full) == len(window) == 3, "blocks 3 and 4 end in a window that reaches into block 3"


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 40, 100])
@pytest.mark.parametrize("max_chunk", [1, 7, 64])
def test_what_a_request_holds_at_most_is_known(num_tokens: int, max_chunk: int) -> None:
    blocks = windowed(200, max_chunk)
    (most,) = blocks.most_held(num_tokens)
    assert most <= 2 * -(-num_tokens // SIZE)
    small = windowed(most, max_chunk)
    assert small.longest(1000) >= num_tokens
    r = request(num_tokens)
    assert small.grow(r, num_tokens) is not None
    for end in range(min(max_chunk, num_tokens), num_tokens + max_chunk, max_chunk):
        assert small.grow(r, min(end, num_tokens)) is not None
        r.num_computed_tokens = min(end, num_tokens)
        small.commit(r)
        small.check([r])


def test_a_table_may_have_holes() -> None:
    """They are neither held nor released."""
    blocks, r = BlockManager(4, SIZE), request(9)
    assert blocks.grow(r, 9) == [[0, 1, 2]]
    blocks.pools.release(0, r.block_tables[0][:1])
    r.block_tables[0][0] = UNHELD
    blocks.check([r])
    assert blocks.num_free_blocks == 2
    blocks.release(r)
    assert blocks.num_free_blocks == 4


def test_a_pool_is_not_reset_while_a_block_is_held() -> None:
    pool = BlockPool(2)
    pool.publish(0, b"name", pool.take(1)[0])
    version = pool.version
    assert not pool.reset()
    assert (pool.version, pool.name_of(0)) == (version, (0, b"name"))
    pool.release([0])
    assert pool.reset()
    assert pool.name_of(0) is None
    assert pool.version != version


STATES = (FULL, CacheGroup(pool=1, is_state=True))


def with_states(num_states: int = 20, **options: bool) -> BlockManager:
    return BlockManager([40, num_states], SIZE, groups=STATES, max_chunk=100, **options)


def test_a_state_group_holds_the_ends_of_prompt_and_step() -> None:
    blocks, r = with_states(), request(30)  # the prompt's last full block before its last token is the seventh
    assert blocks.grow(r, 30, step_end=18) is not None
    assert [i for i, block_id in enumerate(r.block_tables[1]) if block_id != UNHELD] == [3, 4]
    assert r.num_slots == 20
    r.num_computed_tokens = 18
    blocks.commit(r)
    assert blocks.grow(r, 30) is not None
    assert [i for i, block_id in enumerate(r.block_tables[1]) if block_id != UNHELD] == [3, 4, 6, 7]
    blocks.check([r])


def test_without_a_prefix_cache_a_state_group_holds_the_newest_states() -> None:
    blocks, r = with_states(enable_prefix_caching=False), request(33)
    assert blocks.grow(r, 33) is not None
    assert [i for i, block_id in enumerate(r.block_tables[1]) if block_id != UNHELD] == [7, 8]
    r.num_computed_tokens = 33
    r.num_tokens += 1
    r.token_ids.append(1)
    assert blocks.grow(r, 37) is not None
    assert r.num_passed == [0, 8]
    blocks.release(r)
    assert blocks.num_free_states == blocks.num_states == 20


def test_passed_states_of_an_output_are_emptied() -> None:
    blocks, r = with_states(), request(9)
    compute(blocks, r)
    for token in range(41):
        r.token_ids.append(token)
        r.num_tokens += 1
        if r.num_tokens > r.num_slots:
            assert blocks.grow(r, r.num_tokens) is not None
        r.num_computed_tokens = r.num_tokens
        blocks.commit(r)
        if len(r.token_ids) >= r.next_return:
            blocks.give_back_passed(r)
        blocks.check([r])
    pool = blocks.pools.of_group[1]
    published = [block_id for block_id in range(20) if pool.name_of(block_id) is not None]
    assert len(published) == 2, "the end of the prompt, and the last full block"
    assert blocks.num_free_states == blocks.num_states - 1, "neither is held"
    blocks.release(r)
    blocks.start_step()
    assert len(blocks.match_prefix(request(r.token_ids))[0]) == 12


def test_states_of_nan_are_forgotten_though_they_were_passed() -> None:
    blocks, r = with_states(), request(40)
    assert blocks.grow(r, 40, step_end=16) is not None
    r.num_computed_tokens = 16
    blocks.commit(r)
    assert blocks.grow(r, 40) is not None
    r.num_computed_tokens = 40
    blocks.commit(r)
    assert blocks.grow(r, 41) is not None
    assert r.num_passed[1] > 3
    blocks.unpublish(r)
    blocks.release(r)
    pool = blocks.pools.of_group[1]
    assert len(pool.free_and_empty()) == pool.num_blocks
    pool.check(Counter())
