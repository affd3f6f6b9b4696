"""The encoders by their kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.models.matrix import Scope
from engine.models.shard import SINGLE, SingleRank
from engine.models.spec import VisionSpec
from engine.models.vision.gemma4 import Gemma4Encoder
from engine.models.vision.gemma4_unified import Gemma4Projector
from engine.models.vision.glm import GlmEncoder
from engine.models.vision.intern import InternEncoder
from engine.models.vision.layers import VisionEncoder
from engine.models.vision.moonvit import MoonEncoder
from engine.models.vision.pixtral import PixtralEncoder
from engine.models.vision.qwen import QwenEncoder
from engine.models.vision.siglip import SiglipEncoder

KINDS: dict[str, Callable[[VisionSpec, int, Scope], VisionEncoder]] = {
    "qwen": QwenEncoder,
    "qwen2": QwenEncoder,
    "pixtral": PixtralEncoder,
    "siglip": SiglipEncoder,
    "intern": InternEncoder,
    "intern_chat": InternEncoder,
    "glm": GlmEncoder,
    "gemma4": Gemma4Encoder,
    "gemma4_unified": Gemma4Projector,
    "kimi_vl": MoonEncoder,
    "kimi_k25": MoonEncoder,
}


def make_encoder(spec: VisionSpec, out_size: int, scope: Scope) -> VisionEncoder:
    """Create the encoder for a text model of the hidden size `out_size`. Each rank has it whole.

    scope: of the model's parts, as "model.visual".
    """
    return KINDS[spec.kind](spec, out_size, replace(scope, shard=SINGLE, communicator=SingleRank()))
