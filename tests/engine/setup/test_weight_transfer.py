"""Weights from another process, over gloo."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from engine.setup import weight_transfer
from engine.setup.weight_source import is_address
from engine.setup.weight_transfer import receive_weights, send_weights


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"gloo://127.0.0.1:{listener.getsockname()[1]}"


def test_an_address_is_no_folder() -> None:
    assert is_address("nccl://10.0.0.5:29600")
    assert is_address("gloo://[::1]:29600")
    assert not any(map(is_address, ("/models/step-200", "nccl", "nccl:/a", "gloo/nccl://a:1", "http://a:1")))


def test_tensors_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several pieces, of all kinds of numbers, views of others, scalars and empty ones."""
    monkeypatch.setattr(weight_transfer, "PIECE_BYTES", 1000)
    values = torch.randn(300, 7)
    sent = {
        "bfloat16": values.bfloat16(), "float8": values.to(torch.float8_e4m3fn), "transposed": values.t(),
        "part": values[:, 2], "integers": torch.arange(5), "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4),
    }  # fmt: skip
    address = free_address()
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send_weights, sent, address)
        received = receive_weights(address)
        sending.result()
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name].float(), tensor.float())


def test_a_sender_that_does_not_come() -> None:
    with pytest.raises(RuntimeError):
        receive_weights(free_address(), seconds=0.1)


@pytest.mark.parametrize("address", ["gloo://127.0.0.1", "http://127.0.0.1:80", "gloo://:80"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="an address is nccl://HOST:PORT or gloo://HOST:PORT"):
        receive_weights(address)


def test_dtypes_of_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimpleNamespace(get=lambda key: json.dumps([("head", "float3_e1m1", [2, 3])]))
    connection = SimpleNamespace(store=store, device=torch.device("cpu"))
    monkeypatch.setattr(weight_transfer, "_Connection", lambda *_: connection)
    with pytest.raises(ValueError, match="tensor head has the dtype float3_e1m1, which this version of PyTorch"):
        receive_weights("gloo://127.0.0.1:1")
