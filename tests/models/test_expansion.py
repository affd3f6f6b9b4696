"""Latent attention of prompts with keys and values of each head, against attention over latents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models.expansion import LatentExpansion
from engine.models.families import read_spec
from tests.oracles.families import VOCAB, make_checkpoint
from tests.oracles.paged_runner import PagedRunner
from tests.support.loaded import load as load_model
from tests.support.unwritten import unwritten_is_nan

pytest.importorskip("transformers")

# Tokens of each sequence in each step: prompts, whole and in chunks, beside decodes; contexts end around a page's end.
STEPS = [(70, 5, 0, 0), (1, 9, 63, 64), (58, 1, 1, 2), (1, 1, 65, 1), (1, 50, 1, 0), (129, 3, 2, 61)]


def logits(runner: PagedRunner) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (4, 300), generator=generator).tolist()
    sequences = [runner.start(each) for each in tokens]
    return [torch.cat(runner.step(list(zip(sequences, counts, strict=True)))) for counts in STEPS]


def test_no_kernel_is_compiled_anew_for_other_lengths() -> None:
    """Triton does so where a stride becomes a multiple of 16, or no longer is one."""
    rows, tables = torch.arange(3, dtype=torch.int32), torch.zeros(3, 99, dtype=torch.int32)
    for lens in ([1, 64, 65], [700, 1300, 2], [1024, 1, 1]):
        expansion = LatentExpansion.of_step(lens, lens, rows, tables, 16, lambda tensor: tensor)
        assert expansion.block_tables.stride(0) % 16 == 0


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("glm4_moe_lite", {}),
        ("glm4_moe_lite", {"v_head_dim": 40}),  # as wide as keys
        ("deepseek_v2", {"qk_nope_head_dim": 32, "v_head_dim": 48}),  # a width that C++ computes
        ("deepseek_v3", {"num_attention_heads": 5, "num_key_value_heads": 5}),
    ],
)
@pytest.mark.parametrize("block_size", [16, 8])
def test_logits_are_those_of_attention_over_latents(
    tmp_path: Path, name: str, shape: dict[str, int], block_size: int
) -> None:
    """Unused slots of the cache are NaN, and so is what an expansion has not written."""
    make_checkpoint(name, tmp_path, shape)
    model = load_model(tmp_path, read_spec(tmp_path), dtype=torch.float32, device="cpu", max_model_len=300)
    model.pack_weights()
    with unwritten_is_nan():
        expanded, absorbed = (
            logits(PagedRunner(model, 4, block_size=block_size, max_len=300, expands=expands))
            for expands in (True, False)
        )
    for got, want in zip(expanded, absorbed, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert any(not torch.equal(got, want) for got, want in zip(expanded, absorbed, strict=True))
