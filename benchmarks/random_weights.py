"""A checkpoint of random weights, for engines that are compared with the same numbers.

What dummy weights are, each engine decides for itself. Low-bit codes may be left as zeros, with which a GPU draws
less power and so multiplies faster. And where norms' weights are tiny, a router's bias alone chooses the experts: the
same few for all tokens.
"""

from __future__ import annotations

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.counting import counting_tensors
from engine.models.checkpoints.safetensors import INDEX
from engine.models.families import read_spec
from engine.models.weights import EMBEDDING, LM_HEAD, checkpoint_tensors, decoder_of_shapes

SHARD_BYTES = 1 << 30
DTYPES = {  # by safetensors' names; the first that a tensor may be stored in
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32,
}  # fmt: skip


def write_random_weights(folder: Path, seed: int = 0, counts: bool = False) -> None:
    """Beside the folder's config.json, unless weights are there. In shards of at most 1 GiB, larger tensors aside.

    Shards are made side by side, on the CPU: no process but an engine's own may hold GPU memory. `counts`: the model's
    greedy text does, see `benchmarks.counting`; its output head is not tied to its embedding.
    """
    if any(folder.glob("*.safetensors")):
        return
    spec = read_spec(folder)
    wanted = checkpoint_tensors(decoder_of_shapes(spec, torch.bfloat16, folder))
    if spec.tie_word_embeddings:
        del wanted[LM_HEAD]
    quantization = spec.quantization
    if quantization and quantization.method == "fp8" and any(scheme.rows > 1 for _, scheme in quantization.schemes):
        # Blocks' scales are published under their alias, the only name that vLLM loads.
        wanted = {next(iter(tensor.aliases), name): tensor for name, tensor in wanted.items()}
    dtypes = {
        name: next(dtype for stored, dtype in DTYPES.items() if stored in tensor.dtypes)
        for name, tensor in wanted.items()
    }
    nbytes = {name: math.prod(tensor.shape) * dtypes[name].itemsize for name, tensor in wanted.items()}
    shards: list[list[str]] = [[]]
    for name, size in nbytes.items():
        if shards[-1] and sum(map(nbytes.__getitem__, shards[-1])) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    files = [f"model-{i + 1:05}.safetensors" for i in range(len(shards))]

    own = counting_tensors(wanted[EMBEDDING].shape, dtypes[EMBEDDING], seed) if counts else {}

    def write(i: int) -> None:
        generator = torch.Generator().manual_seed(seed + i)
        values = {
            name: own[name] if name in own else _random(name, wanted[name].shape, dtypes[name], generator)
            for name in shards[i]
        }
        save_file(values, folder / files[i], metadata={"format": "pt"})

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        list(pool.map(write, range(len(shards))))
    weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _random(name: str, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Norms 1, integers any, scales that leave low-bit weights near 0.02, all else normal with that deviation."""
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
