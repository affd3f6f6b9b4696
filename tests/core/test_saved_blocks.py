"""Blocks of the prefix cache that are saved, and their slots; and that the blocks of one run serve the next."""

from __future__ import annotations

from itertools import islice
from random import Random

from engine.core.kv.block_pool import BlockPool, Name
from engine.core.kv.saved_blocks import Save, SavedBlocks
from tests.core.test_scheduler_fuzz import Workload


def name(i: int) -> Name:
    return 0, bytes([i]) * 32


def blocks(*numbers: int) -> list[tuple[int, Name]]:
    """Published blocks, the hottest first: block 10 + i has name i."""
    return [(10 + i, name(i)) for i in numbers]


def sweep(saved: SavedBlocks, published: list[tuple[int, Name]]) -> list[Save]:
    return [save for save in saved.sweep(published) if save is not None]


def test_only_what_is_not_saved_yet_is_written_the_hottest_first() -> None:
    saved = SavedBlocks(8)
    saves = sweep(saved, blocks(3, 1, 2))
    assert [save.block_id for save in saves] == [13, 11, 12]
    assert len({save.slot for save in saves}) == 3
    assert [save.heat for save in saves] == sorted((save.heat for save in saves), reverse=True)
    assert [save.block_id for save in sweep(saved, blocks(4, 3, 1, 2))] == [14]
    assert list(saved.sweep(blocks(2, 4))) == [None, None]


def test_a_sweep_can_be_left() -> None:
    saved = SavedBlocks(8)
    first = next(saved.sweep(blocks(3, 1, 2)))
    assert first is not None
    assert first.block_id == 13
    assert [save.block_id for save in sweep(saved, blocks(3, 1, 2))] == [11, 12]


def test_the_coldest_give_way_but_not_what_the_sweep_has_come_by() -> None:
    saved = SavedBlocks(3)
    sweep(saved, blocks(1, 2, 3))
    assert [save.block_id for save in sweep(saved, blocks(2, 4))] == [14], "for 3, the coldest"
    assert [save.block_id for save in sweep(saved, blocks(3))] == [13], "for 1, the coldest by now"
    assert len(sweep(saved, blocks(5, 6, 7, 8, 9))) == 3, "no more than there are slots"
    assert list(saved.sweep(blocks(5, 6, 7))) == [None, None, None]
    assert list(SavedBlocks(0).sweep(blocks(1))) == []


def test_slots_that_are_empty_cost_nothing() -> None:
    saved = SavedBlocks(10**15, [(name(1), 1, 5)])
    assert [(save.block_id, save.slot) for save in sweep(saved, blocks(3, 1, 2, 4))] == [(13, 0), (12, 2), (14, 3)]


def test_after_a_sweep_the_hottest_are_saved_each_in_a_slot_of_its_own() -> None:
    for seed in range(200):
        rng = Random(seed)
        num_slots = rng.randint(1, 12)
        saved, content = SavedBlocks(num_slots), dict[int, Name]()
        for _ in range(6):
            published = blocks(*rng.sample(range(20), rng.randint(0, 16)))
            stop = rng.choice([1, 3, 100])
            for save in islice(saved.sweep(published), stop):
                if save is not None:
                    content[save.slot] = save.name
            if stop == 100:
                assert {found for _, found in published[:num_slots]} <= set(content.values())
            assert len(set(content.values())) == len(content)
            assert {slot for slot, _ in saved.heats()} == content.keys() <= set(range(num_slots))


def test_heat_grows_over_restarts() -> None:
    first = SavedBlocks(3)
    saves = sweep(first, blocks(1, 2))
    again = SavedBlocks(3, [(save.name, save.slot, save.heat) for save in saves])
    sweep(again, blocks(3))
    (fourth,) = sweep(again, blocks(4))
    assert fourth.slot == saves[1].slot, "block 2 was the coldest"
    sweep(again, blocks(1))
    assert max(again.heats(), key=lambda pair: pair[1])[0] == saves[0].slot


def test_a_pool_lists_its_blocks_by_heat_and_is_restored() -> None:
    pool = BlockPool(6, 2)
    ids = pool.take(5)
    for group, block_id in zip((0, 1, 0, 0), ids, strict=False):
        pool.publish(group, bytes([block_id]), block_id)
    assert pool.num_publications == 4
    pool.release([ids[4], ids[2], ids[0], ids[1]])
    order = list(pool.published())
    assert order[0][0] == ids[3], "the one that a request holds"
    assert [block_id for block_id, _ in order[1:]] == [ids[1], ids[0], ids[2]]
    other = BlockPool(6, 2)
    free = other.free_and_empty()
    restored = [(free[i], found) for i, (_, found) in enumerate(order)]
    other.restore(restored)
    assert list(other.published()) == restored
    assert other.finder(1)(bytes([ids[1]])) == restored[1][0]
    assert other.num_free == 6
    other.take(3)
    assert list(other.published()) == restored[:3], "empty blocks are taken first, then the coldest"


def test_saved_blocks_hold_what_their_names_say_in_the_next_run() -> None:
    """The toy model finds any wrong content; each workload runs twice, the second time with what the first one left."""
    hits_before = hits_after = 0
    for seed in range(150):
        first, second, rng = Workload(seed), Workload(seed), Random(seed)
        first.run()
        pool = second.scheduler.blocks.pools.pools[0]
        saved = SavedBlocks(rng.randint(1, first.num_blocks))
        kept: dict[int, tuple[Name, list[int]]] = {}
        for save in sweep(saved, list(first.scheduler.blocks.pools.pools[0].published())):
            content = first.runner.read_block(save.block_id)
            kept[save.slot] = save.name, content
        restored = list(zip(pool.free_and_empty(), kept.values(), strict=False))
        for block_id, (_, content) in restored:
            second.runner.write_block(block_id, content)
        pool.restore([(block_id, found) for block_id, (found, _) in restored])
        second.published = {found: block_id for block_id, (found, _) in restored}
        second.scheduler.check()
        second.run()
        hits_before += first.scheduler.stats().prefix_hits
        hits_after += second.scheduler.stats().prefix_hits
    assert hits_after > hits_before
