"""Encoders of images in plans: as many weights as are loaded, and as much memory as encoding takes, for each kind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import EngineConfig
from engine.models.families import read_spec
from engine.models.families.vision import VISION
from engine.models.formats import weight_formats
from engine.models.matrix import Scope
from engine.models.norms import UnitRMSNorm
from engine.models.vision.kinds import make_encoder
from engine.models.vision.layers import VisionEncoder
from engine.setup.plan import cpu_here, make_plan
from engine.worker.images import image_bytes, most_patches
from tests.support.image_models import FAMILIES, make_case
from tests.support.loaded import load

pytest.importorskip("transformers")

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "Qwen2_5_VLForConditionalGeneration": ({}, {}, 3584),
    "Qwen3VLForConditionalGeneration": ({}, {"deepstack_visual_indexes": [0, 0, 0]}, 4096),
    "Mistral3ForConditionalGeneration": ({}, {}, 5120),
    "Gemma3ForConditionalGeneration": ({"mm_tokens_per_image": 16}, {"image_size": 224}, 3840),
    "Gemma4ForConditionalGeneration": ({}, {}, 2560),
    "Gemma4UnifiedForConditionalGeneration": ({}, {}, 3840),
    "KimiVLForConditionalGeneration": ({}, {}, 2048),
    "InternVLForConditionalGeneration": ({}, {}, 4096),
    "Glm4vForConditionalGeneration": ({}, {}, 4096),
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_weights_of_encoders_are_counted_as_they_are_loaded(family: str, tmp_path: Path) -> None:
    case = make_case(family, tmp_path, answers=False)
    plan = make_plan(EngineConfig(model=str(case.folder), dtype="float32", device="cpu"), cpu_here())
    model = load(case.folder, read_spec(case.folder), dtype=torch.float32, device="cpu")
    assert model.vision is not None
    held = sum(each.nbytes for each in model.vision.parameters())
    held -= _ones(model.vision)
    assert plan.weights["vision"] == held > 0
    whole = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    assert plan.weight_bytes == sum(whole.values()) - _ones(model)
    assert plan.parameters["vision"] == held // 4
    only_text = EngineConfig(model=str(case.folder), dtype="float32", device="cpu", language_model_only=True)
    less = make_plan(only_text, cpu_here())
    assert less.weights["vision"] == 0
    assert less.activations < plan.activations


def _ones(module: nn.Module) -> int:
    """Bytes of norms whose weights are ones, which no checkpoint has."""
    norms = (each for each in module.modules() if isinstance(each, UnitRMSNorm))
    return sum(parameter.nbytes for norm in norms for parameter in norm.parameters())


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that live at the same time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self.live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, list | tuple) else [found]:
            if isinstance(each, Tensor):
                self._add(each.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.most = max(self.most, self.live)
        finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_memory_of_encoding_is_estimated(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of published shapes, on few patches: as `ImageReader.reserve` encodes. Of GEMMs and attention only the
    memory of results counts.
    """
    config, vision, hidden = CONFIGS[architecture]
    layers = {"depth": 1, "num_hidden_layers": 1}
    spec = VISION[architecture](config | {"vision_config": vision | layers}, {})
    assert spec is not None
    encoder = make_encoder(spec, hidden, Scope(torch.float32, torch.device("cpu"), weight_formats(None)))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *_, **__: torch.empty_like(q))
    monkeypatch.setattr(F, "linear", lambda x, weight, *_: x.new_empty(*x.shape[:-1], len(weight)))
    peaks = [_peak(encoder, [spec.tile or (24, 24)] * count) for count in (1, 2)]
    # What does not grow with the number of patches is left out.
    num_patches = math.prod(spec.tile or (24, 24))
    needed = (peaks[1] - peaks[0]) * most_patches(spec) // num_patches
    _, estimate = image_bytes(spec, hidden, 4)
    assert 0.9 <= estimate / needed <= 3, f"{estimate >> 20} MiB for {needed >> 20}"


def _peak(encoder: VisionEncoder, grids: list[tuple[int, int]]) -> int:
    side = encoder.spec.patch_size
    patches = torch.zeros(sum(map(math.prod, grids)), 3, side, side, dtype=torch.uint8)
    with torch.inference_mode(), encoder.few_layers():
        encoder(patches, grids)
        with Peak() as peak:
            encoder(patches, grids)
    return peak.most
