"""Weight formats: how matrices are stored in a checkpoint and repacked in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.models.errors import ModelError
from engine.models.formats.compressed import COMPRESSED_EXPERTS
from engine.models.formats.compressed import log_compression as log_compression
from engine.models.formats.floats import FLOATS, FloatFormat
from engine.models.formats.gguf import GGUFBlocks, MixedBlocks
from engine.models.formats.layouts import (
    AWQ,
    FP4,
    GEMV,
    GPTQ,
    Blocks,
    Online,
    Packed,
    Plain,
    Shared,
)
from engine.models.formats.torchao import TorchAO, TorchAOInt4, TorchAOTiles
from engine.models.matrix import WeightFormat, WeightFormats
from engine.models.quantization import Quantization, Scheme

LAYOUTS: dict[str, Callable[[Scheme], WeightFormat]] = {
    "plain": Plain,
    "packed": Packed,
    "gptq": GPTQ,
    "awq": AWQ,
    "gemv": GEMV,
    "torchao": TorchAO,
    "torchao-int4": TorchAOInt4,
    "torchao-tiles": TorchAOTiles,
    "fp4": FP4,
    "blocks": Blocks,
    "gguf": GGUFBlocks,
    "online": Online,
}


@dataclass(frozen=True, slots=True)
class QuantizedFormats:
    """The formats of a quantised checkpoint."""

    quantization: Quantization
    floats: FloatFormat = FLOATS  # the format of matrices that are not quantised

    def of(self, names: Sequence[str]) -> WeightFormat:
        schemes = [self.quantization.scheme(name) for name in names]
        if any(scheme != schemes[0] for scheme in schemes):
            blocks = {name: scheme for name, scheme in zip(names, schemes, strict=True) if scheme and scheme.block}
            if len(blocks) == len(names) and all(scheme.kind in ("int4", "int8") for scheme in blocks.values()):
                return MixedBlocks(blocks)
            raise ModelError(
                f"'quantization_config': {', '.join(names)} must be stored alike: they are multiplied at once"
            )
        return self.floats if schemes[0] is None else LAYOUTS[schemes[0].layout](schemes[0])


def formats_of_tied_head(formats: WeightFormats, name: str) -> WeightFormats:
    """Return the formats for an output head tied to the embedding, independent of other matrices."""
    own = formats.of([name])
    return Shared(own) if isinstance(own, Online) else FLOATS


def weight_formats(quantization: Quantization | None, *, compress_experts: bool = False) -> WeightFormats:
    """Return the formats of a checkpoint's matrices. `compress_experts`: of floats, see `CompressedExperts`."""
    floats = COMPRESSED_EXPERTS if compress_experts else FLOATS
    return floats if quantization is None else QuantizedFormats(quantization, floats)
