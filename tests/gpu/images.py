"""Checks of images: encoders and whole models beside transformers', and the time of a photograph."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.models.decoder import pack_weights
from engine.models.formats import weight_formats
from engine.models.matrix import Scope
from engine.models.spec import VisionSpec
from engine.models.vision.kinds import make_encoder
from engine.models.vision.layers import EncodedImages
from kernels import reference
from tests.gpu.checks import BF16, Checks, relative_error
from tests.support.image_models import FAMILIES, NUM_TOKENS, Case, encoded, make_case

VARIANTS: dict[str, dict[str, Any]] = {  # by constants of `kernels.cuda.choice`
    "PyTorch rotates": {"rotated_patches": 1 << 30, "cudnn_attention": False},
    "one kernel rotates": {"rotated_patches": 0, "cudnn_attention": False},
    "and cuDNN attends": {"rotated_patches": 0, "cudnn_attention": True},
}
PHOTOGRAPH = (48, 64)  # rows and columns of patches of 1,024 x 768 pixels
QWEN3_VL_8B = VisionSpec(
    hidden_size=1152, intermediate_size=4304, num_layers=27, num_heads=16, patch_size=16, merge_size=2,
    num_positions=2304, image_token_id=0, placeholder=(0,), rope_sections=(24, 20, 20), deepstack=(8, 16, 24),
)  # fmt: skip


def check_image_models(checks: Checks) -> None:
    """Tokens in float32, whole and in chunks, with a request of text beside; encoded images in both dtypes."""
    for family in FAMILIES:
        if not checks.wants(f"images {family}"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            case = make_case(family, Path(folder))
            both_ways = case.images[0].sees_both_ways  # then no step cuts an image
            least = max(image.num_tokens for image in case.images) if both_ways else 7
            chunks = {"max_num_batched_tokens": least, "max_num_seqs": 3}
            for name, settings in (("whole", {}), ("chunks", chunks)):
                found = _tokens(case, checks.device, settings)
                wrong = sum(a != b for a, b in zip(found, case.answer, strict=True))
                checks.add(f"images {family} float32 {name}: other tokens", wrong, 0)
            for dtype in ("float32", "bfloat16"):
                _compare_encoded(checks, family, case, dtype)


def _engine(case: Case, device: str, dtype: str, settings: dict[str, Any]) -> Engine:
    config = EngineConfig(
        model=str(case.folder), dtype=dtype, device=device, skip_tokenizer_init=True, max_model_len=256,
        num_gpu_blocks_override=96, **settings,
    )  # fmt: skip
    return Engine(config)


def _tokens(case: Case, device: str, settings: dict[str, Any]) -> list[int]:
    engine = _engine(case, device, "float32", settings)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.add_request(EngineRequest("images", list(case.prompt), sampling, images=case.images))
    engine.add_request(EngineRequest("text", case.prompt[:5], sampling))
    found: list[int] = []
    while engine.has_work():
        found += [token for output in engine.step() if output.request_id == "images" for token in output.new_token_ids]
    engine.close()
    return found


def _compare_encoded(checks: Checks, family: str, case: Case, dtype: str) -> None:
    engine = _engine(case, checks.device, dtype, {"enforce_eager": True})
    with torch.inference_mode():
        got = torch.cat([each.embeddings for each in engine.runner.images._run(case.images)])  # type: ignore[attr-defined]
    engine.close()
    want = encoded(case.model.double(), case)
    limit = 1e-4
    if dtype == "bfloat16":
        limit = 1.5 * relative_error(encoded(case.model.to(checks.device, BF16), case), want.to(checks.device))
        limit = max(limit, 1e-3)
    case.model.float().cpu()
    checks.add(f"images {family} encoder {dtype}", relative_error(got, want.to(got.device)), limit)


@torch.inference_mode()
def check_image_speed(checks: Checks) -> None:
    """The time of the encoder of Qwen3-VL-8B in each form: one image of 1,024 x 768 pixels, and eight at once."""
    if checks.device == "cpu" or not checks.wants("images: speed"):
        return
    from kernels.cuda import vision
    from kernels.cuda.choice import CHOICE

    torch.manual_seed(0)
    encoder = make_encoder(QWEN3_VL_8B, 4096, Scope(BF16, torch.device(checks.device), weight_formats(None)))
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, 0, 0.02)
    pack_weights(encoder)
    for count in (1, 8):
        grids = [PHOTOGRAPH] * count
        num_patches = sum(rows * columns for rows, columns in grids)
        patches = torch.randint(0, 256, (num_patches, 3, 16, 16), dtype=torch.uint8, device=checks.device)
        plain = None
        for name, changes in VARIANTS.items():
            try:
                vars(vision)["CHOICE"] = replace(CHOICE, **changes)
                found, seconds = _timed(partial(encoder, patches, grids))
            finally:
                vars(vision)["CHOICE"] = CHOICE
            print(f"images: speed, {count} of 1,024 x 768, {name}: {1e3 * seconds / count:.1f} ms each", flush=True)
            checks.add(f"images: speed, {count}, {name}: not finite", int((~found.isfinite()).sum()), 0)
            plain = found if plain is None else plain
            checks.add(f"images: speed, {count}, {name}: beside the plain one", relative_error(found, plain), 3e-2)


def _timed(encode: Callable[[], EncodedImages]) -> tuple[torch.Tensor, float]:
    """Return the embeddings, and the median of five times."""
    encode()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        found = encode()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return found.embeddings, sorted(seconds)[2]


def check_rotations(checks: Checks) -> None:
    """The kernel that rotates queries and keys in place, beside the computation in float64."""
    if checks.device == "cpu" or not checks.wants("images: rotations"):
        return
    from kernels.triton import rotation

    for dtype in (torch.float32, BF16):
        qkv = torch.randn(3000, 3 * 16 * 72, device=checks.device).to(dtype)
        angles = torch.randn(3000, 36, device=checks.device) * 10
        query, rest = qkv[:, : 16 * 72].unflatten(1, (16, 72)), qkv[:, 16 * 72 :].clone()
        want = reference.rotate_halves(query.double(), angles.cos(), angles.sin())
        limit = 1e-6 if dtype == torch.float32 else 3e-3
        found = rotation.rotate_halves(query, angles.cos(), angles.sin())
        checks.add(f"images: rotations {dtype}", relative_error(found, want), limit)
        changed = int((qkv[:, 16 * 72 :] != rest).sum())
        checks.add(f"images: rotations {dtype}: other columns", changed, 0)
