"""Specifications of GPUs for plans: memory, memory bandwidth and speed, by the names that people write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.flags import parse_size


@dataclass(frozen=True, slots=True)
class GPU:
    """The specification of a GPU, or of a CPU."""

    title: str
    memory: int  # bytes
    capability: tuple[int, int] | None  # None: a CPU
    bandwidth: float = 0.0  # bytes per second; 0: not known
    flops: float = 0.0  # per second, dense bfloat16; 0: not known

    @property
    def is_cpu(self) -> bool:
        return self.capability is None

    @property
    def has_fp8(self) -> bool:
        return self.capability is not None and self.capability >= (8, 9)


def _gpu(title: str, mebibytes: int, capability: tuple[int, int], terabytes: float, teraflops: float) -> GPU:
    return GPU(f"NVIDIA {title}", mebibytes << 20, capability, terabytes * 1e12, teraflops * 1e12)


GPUS: Mapping[str, GPU] = {
    "b200": _gpu("B200", 182642, (10, 0), 8.0, 2250),
    "gh200": _gpu("GH200 96GB", 96768, (9, 0), 4.0, 989),
    "h200": _gpu("H200", 143156, (9, 0), 4.8, 989),
    "h100": _gpu("H100 80GB", 81079, (9, 0), 3.35, 989),
    "a100": _gpu("A100 80GB", 81154, (8, 0), 2.04, 312),
    "a100-40gb": _gpu("A100 40GB", 40442, (8, 0), 1.56, 312),
    "l40s": _gpu("L40S", 45589, (8, 9), 0.864, 362),
    "a6000": _gpu("RTX A6000", 48676, (8, 6), 0.768, 155),
    "l4": _gpu("L4", 22563, (8, 9), 0.3, 121),
    "a10g": _gpu("A10G", 22515, (8, 6), 0.6, 70),
    "a10": _gpu("A10", 22515, (8, 6), 0.6, 125),
    "5090": _gpu("RTX 5090", 32109, (12, 0), 1.79, 210),
    "4090": _gpu("RTX 4090", 24077, (8, 9), 1.01, 165),
    "4080": _gpu("RTX 4080", 16072, (8, 9), 0.717, 97),
    "3090": _gpu("RTX 3090", 24135, (8, 6), 0.936, 71),
}
# Parts of product names that say nothing about the chip; the memory's size only matters where the table has several.
_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|rtx|gpu|pcie|sxm\d?|hbm\d?e?")
_MEMORY = re.compile(r"(\d+)g(?:i?b)?")


def find_gpu(name: str) -> GPU:
    """Find a GPU by name, or create one by memory size, such as "24GB". Raises `ConfigError` with the valid names.

    Spaces, dashes, capitals and makers' words do not matter: "rtx4090" is "NVIDIA GeForce RTX 4090".
    """
    if (gpu := known_gpu(name)) is not None:
        return gpu
    try:
        memory = parse_size(name.upper().removesuffix("IB").removesuffix("B"))
    except ValueError:
        raise ConfigError(f"gpu must be cpu, one of {', '.join(GPUS)}, or a size such as 24GB, got {name!r}") from None
    return GPU(f"a GPU of {memory / 2**30:g} GiB", memory, (8, 9))


def known_gpu(name: str, memory: int | None = None) -> GPU | None:
    """Return the GPU of the table with this name, None if there is none.

    Of several with different memory, the nearest to `memory` (bytes), or to the size in the name, else the largest.
    """
    words = re.findall(r"[a-z0-9]+", _MAKERS.sub(" ", name.lower()))
    sizes = [int(found[1]) << 30 for word in words if (found := _MEMORY.fullmatch(word))]
    chip, memory = "".join(word for word in words if not _MEMORY.fullmatch(word)), memory or next(iter(sizes), None)
    alike = [gpu for key, gpu in GPUS.items() if key.partition("-")[0] == chip]
    return min(alike, key=lambda gpu: abs(gpu.memory - memory) if memory else -gpu.memory, default=None)
