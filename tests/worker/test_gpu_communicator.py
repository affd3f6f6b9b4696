"""What connects GPUs, as far as it needs none."""

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from engine.worker.gpu_communicator import RenumberedStore


def exchange(store: Store, number: int, rank: int, value: str) -> str:
    """As PyTorch's symmetric memory does it, in C++ (so through another store here)."""
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
