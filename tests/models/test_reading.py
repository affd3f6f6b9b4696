"""Tensors read by several threads, here to the CPU: the same as safetensors reads, in regions that begin anywhere."""

import itertools
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import save_file

from engine.models import weights
from engine.models.checkpoints import SafetensorsFolder, safetensors
from engine.models.checkpoints import threaded_reading as reading
from engine.models.checkpoints.threaded_reading import read_tensors, regions, tensor_ranges
from engine.models.families import read_spec
from engine.models.matrix import CheckpointTensor
from engine.models.shard import Span
from engine.models.weights import checkpoint_tensors
from engine.utils.folder_files import open_file
from tests.models.test_weights import CONFIG
from tests.support.loaded import load as load_model

CPU = torch.device("cpu")


@pytest.fixture
def tensors() -> Any:
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int32)
    shapes = ((3, 50), (7,), (), (0, 4), (129, 3), (1, 1, 5))
    return {f"{i}.{dtype}": torch.randn(shape).to(dtype) for dtype in dtypes for i, shape in enumerate(shapes)}


@pytest.mark.parametrize(("piece", "region"), [(1 << 20, 1 << 20), (100, 700), (64, 1)])
def test_values_are_those_of_the_file(
    tensors: Any, piece: int, region: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a few of its tensors, between which others lie."""
    monkeypatch.setattr(reading, "PIECE_BYTES", piece)
    monkeypatch.setattr(reading, "REGION_BYTES", region)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    for wanted in (list(tensors), list(tensors)[::3]):
        with file.open("rb") as opened:
            ranges = tensor_ranges(opened)
            read = read_tensors(opened, [ranges[name] for name in wanted], CPU, {})
            got = {name: value.clone() for name, value in read}
        assert got.keys() == set(wanted)
        for name, value in got.items():
            assert value.dtype == tensors[name].dtype
            assert torch.equal(value.view(-1).view(torch.uint8), tensors[name].view(-1).view(torch.uint8))
            assert value.shape == tensors[name].shape


def test_a_region_ends_where_its_bytes_do_or_where_others_lie(
    tensors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REGION_BYTES", 700)
    save_file(tensors, tmp_path / "a")
    with (tmp_path / "a").open("rb") as opened:
        ranges = tensor_ranges(opened)
    for region in regions(list(ranges.values())):
        assert len(region) == 1 or region[-1].stop - region[0].start <= 700
        assert all(a.stop == b.start for a, b in itertools.pairwise(region))


def test_a_file_that_was_cut_off_ends_early(tensors: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    with file.open("rb") as opened:
        ranges = list(tensor_ranges(opened).values())
        os.truncate(file, file.stat().st_size - 9)
        with pytest.raises(EOFError):
            list(read_tensors(opened, ranges, CPU, {}))


@pytest.mark.parametrize("reads", ["mapped", "by threads"])
def test_a_file_exchanged_for_a_link_after_its_check_is_not_read(
    reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    file = folder / "model.safetensors"
    save_file({"x": torch.ones(8)}, secret)
    save_file({"x": torch.zeros(8)}, file)
    checkpoint = SafetensorsFolder(folder)
    checkpoint.tensors()

    def exchange(path: Path, inside: Path) -> BinaryIO:
        opened = open_file(path, inside)
        path.unlink()
        path.symlink_to(secret)
        return opened

    monkeypatch.setattr(safetensors, "open_file", exchange)
    wanted = {"x": CheckpointTensor("x", (Span(0, 8, 8),), torch.empty(8))}
    values = checkpoint.read(["x"]) if reads == "mapped" else checkpoint.read_to(CPU, wanted)
    assert [value is not None and value.tolist() for _, value in values] == [[0.0] * 8]


@pytest.mark.parametrize("region", [1 << 20, 2000])
def test_a_model_is_the_same_however_it_is_read(region: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small regions: larger tensors are read straight into their memory, or mapped if they must be cast."""
    monkeypatch.setattr(reading, "REGION_BYTES", region)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = read_spec(tmp_path)
    named = checkpoint_tensors(load_model(tmp_path, spec, dtype=torch.float32, device="cpu", load_format="dummy"))
    save_file({name: torch.randn(tensor.shape) for name, tensor in named.items()}, tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        mapped = load_model(tmp_path, spec, dtype=dtype, device="cpu")
        with monkeypatch.context() as patch:
            patch.setattr(weights, "_reads_whole", lambda scope: True)
            read = load_model(tmp_path, spec, dtype=dtype, device="cpu")
        for a, b in zip(mapped.parameters(), read.parameters(), strict=True):
            assert torch.equal(a, b)
