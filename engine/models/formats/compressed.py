"""Float checkpoints whose experts are compressed in memory, without loss."""

from __future__ import annotations

import logging

from torch import nn

import kernels
from engine.models.formats.floats import FloatFormat
from engine.models.matrix import Matrix

logger = logging.getLogger(__name__)


class CompressedExperts(FloatFormat):
    """Float weights; experts in bfloat16 take 12 bits a weight where there are kernels for that."""

    def pack_experts(self, gate_up: Matrix, down: Matrix) -> None:
        super().pack_experts(gate_up, down)
        compressed = kernels.compress_experts(gate_up.uncompressed, down.uncompressed)
        if compressed is not None:
            gate_up.set_weight(compressed[0])
            down.set_weight(compressed[1])


COMPRESSED_EXPERTS = CompressedExperts()


def log_compression(model: nn.Module) -> None:
    """Log in how many layers experts are compressed. Warns if in none."""
    stacks = [module for module in model.modules() if isinstance(module, Matrix) and module.num_stacked]
    num_compressed = sum(isinstance(stack.weight, kernels.CompressedWeight) for stack in stacks if stack.is_here)
    if num_compressed:  # a layer has two stacks
        logger.info(
            "Compressed the experts of %d of %d layers to 12 bits a weight", num_compressed // 2, len(stacks) // 2
        )
    else:
        logger.warning("compress_experts has no effect: none of the model's experts can be compressed")
