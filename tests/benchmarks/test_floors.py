"""The least time of decoding is that of the bytes that steps must move."""

from pathlib import Path

import pytest

from benchmarks.floors import decode_seconds
from benchmarks.model_shapes import model_folder
from benchmarks.workloads import named

H200 = {"gpu": "NVIDIA H200", "copy_TB_per_s": 4.49}
SETTINGS = {"dtype": "bfloat16", "max_model_len": 4096}


# Tokens a second at 1,000 tokens of context, computed by hand from the published sizes.
@pytest.mark.parametrize(
    ("model", "num", "expected"),
    [("qwen3.8-27b", 1, 87), ("qwen3.8-27b", 8, 663), ("qwen3.6-35b-a3b", 1, 744), ("qwen3.6-35b-a3b", 8, 1842)],
)
def test_floors_of_hybrids(model: str, num: int, expected: float, tmp_path: Path) -> None:
    folder, work = model_folder(model, tmp_path), named(f"{num}x960x129", 10000)
    seconds = decode_seconds(folder, SETTINGS | {"language_model_only": True}, work, H200)
    assert seconds is not None
    assert num * 128 / seconds == pytest.approx(expected, rel=0.05)


def test_states_of_16_bits_are_half_as_much(tmp_path: Path) -> None:
    folder, work = model_folder("qwen3.8-27b", tmp_path), named("256x1x3", 10000)
    whole, half = (
        decode_seconds(folder, SETTINGS | {"mamba_ssm_cache_dtype": dtype}, work, H200)
        for dtype in ("float32", "bfloat16")
    )
    assert whole is not None
    assert half is not None
    spared = 2 * 256 * 2 * 151e6 / 2  # in two steps, read and written
    assert whole - half == pytest.approx(spared / 4.49e12, rel=0.05)


def test_no_floor_is_known(tmp_path: Path) -> None:
    folder, work = model_folder("qwen3-0.6b", tmp_path), named("latency1", 10000)
    assert decode_seconds(folder, SETTINGS, work, H200) is not None
    assert decode_seconds(folder, SETTINGS, work, {"cpu_cores": 2}) is None
    assert decode_seconds(folder, SETTINGS, work, H200 | {"gpu": "an unknown GPU"}) is None
    assert decode_seconds(folder, SETTINGS, named("nano", 10000), H200) is None
