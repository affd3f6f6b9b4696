"""Communication between GPUs, as far as it needs none."""

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from engine.worker.parallel.gpu_communicator import LARGE_BYTES, RenumberedStore, channel_capacity, chunks


def exchange(store: Store, number: int, rank: int, value: str) -> str:
    """Exchange as PyTorch's symmetric memory does it, in C++ (so through another store here)."""
    outer = PrefixStore("outer", store)
    outer.set(f"memory/{number}/{rank}", value)
    outer.wait([f"memory/{number}/{1 - rank}"])
    return outer.get(f"memory/{number}/{1 - rank}").decode()


def test_a_process_that_had_other_peers_finds_new_ones() -> None:
    shared = HashStore()
    old, new = RenumberedStore(shared), RenumberedStore(shared)
    for number in range(2):
        shared.set(f"outer/memory/{number}/1", f"new {number}")
        assert exchange(old, 7 + number, 0, f"old {number}") == f"new {number}"
    for number in range(2):
        assert exchange(new, number, 1, f"new {number}") == f"old {number}"


@pytest.mark.parametrize("num_rows", [1, 5, 1000, 2048, 2049, 3001, 16384, 16385, 16500])
@pytest.mark.parametrize("most", [1, 300, 2048, 4096])
def test_chunks_are_all_rows_in_order_and_none_is_too_large(num_rows: int, most: int) -> None:
    found = list(chunks(num_rows, most))
    assert [row for chunk in found for row in range(num_rows)[chunk]] == list(range(num_rows))
    lengths = [chunk.stop - chunk.start for chunk in found]
    assert max(lengths) <= most
    assert len(lengths) <= -(-num_rows // most) + 2


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8, 16])
def test_a_channel_holds_what_sums_need_and_no_more_memory_than_that_of_eight_ranks(num_ranks: int) -> None:
    capacity = channel_capacity(num_ranks)
    assert capacity >= LARGE_BYTES
    assert capacity % 16 == 0
    assert capacity * num_ranks <= max(8, num_ranks) * LARGE_BYTES


def test_two_ranks_gather_the_logits_of_256_rows_at_once() -> None:
    assert channel_capacity(2) >= 256 * (128_256 // 2) * 2
