"""A checkpoint of random weights, for engines that are compared with the same numbers.

What dummy weights are, each engine decides for itself: codes of few bits may be left as zeros, with which a GPU draws less
power and so multiplies faster.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.families import read_spec
from engine.models.weights import INDEX, checkpoint_tensors, decoder_of_shapes

SHARD_BYTES = 4 << 30
DTYPES = {  # by safetensors' names; the first that a tensor may be stored in
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32,
}  # fmt: skip


def write_random_weights(folder: Path, seed: int = 0) -> None:
    """Beside the folder's config.json, unless weights are there. In shards of at most 4 GiB, larger tensors aside."""
    if any(folder.glob("*.safetensors")):
        return
    generator = torch.Generator().manual_seed(seed)  # on the CPU: no process but an engine's own may hold GPU memory
    wanted = checkpoint_tensors(decoder_of_shapes(read_spec(folder), torch.bfloat16, folder))
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def write() -> None:
        if shard:
            name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
            save_file(shard, folder / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, name))
            shard.clear()

    for name, tensor in wanted.items():
        dtype = next(dtype for stored, dtype in DTYPES.items() if stored in tensor.dtypes)
        value = _random(name, tensor.shape, dtype, generator)
        if sum(each.nbytes for each in shard.values()) + value.nbytes > SHARD_BYTES:
            write()
        shard[name] = value
    write()
    total = sum(tensor.memory.nbytes for tensor in wanted.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _random(name: str, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Norms 1, integers any, scales around what leaves weights of few bits near 0.02, all else normal of that deviation."""
    made = torch.empty(shape)
    if "scale" in name:
        if dtype == torch.uint8:  # exponents
            return made.uniform_(119, 122, generator=generator).to(dtype)
        return made.uniform_(0.002, 0.004, generator=generator).to(dtype)
    if name.endswith("norm.weight"):
        return made.fill_(1).to(dtype)
    if dtype == torch.float8_e4m3fn:
        return made.normal_(0, 4, generator=generator).to(dtype)
    if dtype.is_floating_point:
        return made.normal_(0, 0.02, generator=generator).to(dtype)
    bytes_ = torch.empty([*shape, dtype.itemsize], dtype=torch.uint8)
    return bytes_.random_(generator=generator).view(dtype).reshape(shape)
