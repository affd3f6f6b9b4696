"""A newer GPU can run the kernels of older ones."""

import pytest
import torch

from kernels.data.capability import PORTABLE_SHARED_MEMORY, compute_capability, shared_memory
from kernels.gpu import device


@pytest.mark.parametrize(("own", "asked", "expected"), [
    ((9, 0), "", (9, 0)), ((9, 0), "0", (9, 0)), ((9, 0), "1", (8, 0)), ((12, 0), "1", (8, 0)), ((7, 5), "1", (7, 5)),
])  # fmt: skip
def test_portable_kernels_are_those_of_capability_8_0(
    own: tuple[int, int], asked: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PORTABLE", asked)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: own)
    assert compute_capability() == expected
    gpu = torch.device("cuda", 0)
    assert device.is_hopper.__wrapped__(gpu) == (expected[0] == 9)
    assert device.multiplies_e4m3.__wrapped__(gpu) == (expected >= (8, 9))


@pytest.mark.parametrize(("own", "expected"), [(232448, PORTABLE_SHARED_MEMORY), (101376, 101376)])
def test_portable_kernels_have_no_more_shared_memory(own: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        shared_memory_per_block_optin = own

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    found = shared_memory.__wrapped__
    assert found(torch.device("cuda", 0)) == own
    monkeypatch.setenv("QUIRE_PORTABLE", "1")
    assert found(torch.device("cuda", 0)) == expected
    assert found(torch.device("cpu")) == 160 << 10
