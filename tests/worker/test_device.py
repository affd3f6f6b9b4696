"""The devices: which one is found, and what each promises."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.worker import device
from engine.worker.device import CpuDevice, CudaDevice, DeviceNotFoundError, Memory, find_device

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_device_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert find_device("cpu") == CpuDevice()
    assert find_device("cuda") == find_device("auto") == CudaDevice(3)
    assert find_device("auto").torch_device == torch.device("cuda", 3)


def test_a_machine_without_a_gpu_has_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == CpuDevice()
    for name in ("cuda", "tpu"):
        with pytest.raises(DeviceNotFoundError, match=rf"must be cpu .* got '{name}'"):
            find_device(name)


def test_the_cpu_needs_no_waiting() -> None:
    device = CpuDevice()
    event = device.record_event()
    event.synchronize()
    assert event.query()
    device.synchronize()
    device.reset_peak_memory()
    tensor = torch.arange(3)
    assert device.upload(tensor) is tensor
    pinned = device.pinned(2, 3, dtype=torch.int32)
    assert (pinned.shape, pinned.dtype, pinned.device.type) == ((2, 3), torch.int32, "cpu")
    with pytest.raises(NotImplementedError, match="captures no graphs"):
        device.capture(lambda: None)


def test_the_cpus_memory() -> None:
    memory = CpuDevice().memory()
    assert 0 < memory.used <= memory.peak < memory.total
    assert 0 < memory.free < memory.total


def test_memory_that_holds_copies_of_files_is_free_within_a_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.device.MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("engine.worker.device.CGROUP", tmp_path)
    monkeypatch.setattr("engine.worker.device.OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "meminfo").write_text("MemTotal: 64 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n")
    assert CpuDevice().memory().free == 40 << 10
    (tmp_path / "memory.current").write_text(f"{20 << 10}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {4 << 10}\n")
    for limit, free in (("max", 40), (str(32 << 10), 16), (str(100 << 10), 40), ("0", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert CpuDevice().memory().free == free << 10, limit


def test_the_memory_of_a_service_ends_at_the_nearest_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group has a limit, or one around it, in both versions of control groups."""
    monkeypatch.setattr("engine.worker.device.MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("engine.worker.device.CGROUP", tmp_path)
    monkeypatch.setattr("engine.worker.device.OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "meminfo").write_text("MemTotal: 64 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n")
    (tmp_path / "own").write_text("4:memory:/jobs/7\n1:cpu:/jobs\n0::/system.slice/quire.service\n")

    def limit(group: str, names: tuple[str, str, str], kibibytes: int) -> None:
        folder = tmp_path / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in zip(names[:2], (kibibytes, 20), strict=True):
            (folder / name).write_text(f"{size << 10}\n")
        (folder / "memory.stat").write_text(f"cache 9\n{names[2]} {4 << 10}\n")

    second = "memory.max", "memory.current", "inactive_file"
    first = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    for group, names, limit_of_group, free in (
        ("system.slice/other.service", second, 17, 40),
        ("system.slice/quire.service", second, 50, 34),
        ("system.slice", second, 48, 32),
        ("memory/jobs/8", first, 18, 32),
        ("memory/jobs/7", first, 44, 28),
        ("memory", first, 40, 24),
    ):
        limit(group, names, limit_of_group)
        assert CpuDevice().memory().free == free << 10, group


@pytest.mark.parametrize(
    ("capability", "supported"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]
)
def test_fp8_caches_need_ada(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], supported: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert CudaDevice(0).capability == capability
    assert CudaDevice(0).supports_fp8_cache is supported
    assert CpuDevice().supports_fp8_cache


def test_memory_of_a_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n" + "".join(
        f"Pages {kind}: {count}.\n"
        for kind, count in (("free", 5), ("active", 90), ("inactive", 3), ("speculative", 2))
    )
    answers = {"whole": shown + "Pages purgeable: 1.\n", "in part": shown}
    monkeypatch.setattr(device, "MEMINFO", tmp_path / "absent")
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    monkeypatch.setattr("sys.platform", "darwin")
    page = os.sysconf("SC_PAGE_SIZE")
    for kind, want in (("whole", 11 * page), ("in part", os.sysconf("SC_PHYS_PAGES") * page // 2)):
        done = subprocess.CompletedProcess([], 0, answers[kind])
        monkeypatch.setattr("subprocess.run", lambda *_, done=done, **options: done)
        assert CpuDevice().memory().free == want


@pytest.mark.parametrize(("avx512", "amx"), [(True, False), (False, True), (False, False)])
def test_cpus_that_multiply_bfloat16(monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert CpuDevice().multiplies_bfloat16 is (avx512 or amx)
    assert CudaDevice(0).multiplies_bfloat16


def test_a_gpus_memory_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 30 + index)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: 40 + index)
    assert CudaDevice(2).memory() == Memory(total=100, free=12, used=32, peak=42)


def test_graphs_share_the_memory_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def pool(self) -> int:
            return id(self)

    pools: list[object] = []

    class Capturing:
        def __init__(self, graph: Graph, pool: object, capture_error_mode: str) -> None:
            pools.append(pool)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(
        torch, "cuda", SimpleNamespace(CUDAGraph=Graph, graph=Capturing, synchronize=lambda index: None)
    )
    device = CudaDevice(0)
    first, result = device.capture(lambda: "one")
    second, other = device.capture(lambda: "two", first)
    assert (result, other) == ("one", "two")
    assert pools == [None, id(first)]
    assert first is not second


@CUDA
@pytest.mark.gpu
def test_a_gpu() -> None:
    device = find_device("cuda")
    assert "NVIDIA" in device.name
    assert device.is_accelerator
    source = device.pinned(1000, dtype=torch.float32).fill_(2)
    x = device.upload(source)
    assert x.device == device.torch_device
    assert float(device.upload(torch.tensor([3.0]))) == 3
    out = device.pinned(1000, dtype=torch.float32)

    def double() -> torch.Tensor:
        return x * 2

    double()
    graph, doubled = device.capture(double)
    more, plus_one = device.capture(lambda: doubled + 1, graph)
    x.fill_(5)
    graph.replay()
    more.replay()
    out.copy_(plus_one, non_blocking=True)
    event = device.record_event()
    event.synchronize()
    assert event.query()
    assert (out == 11).all()
    before = device.memory()
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device.torch_device)
    assert device.memory().used >= before.used
    peak = device.memory().peak
    assert peak >= 64 << 20
    del held
    device.reset_peak_memory()
    assert device.memory().peak < peak
