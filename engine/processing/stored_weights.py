"""The size and kind of a model's weights, for lists of models. PyTorch is imported when a figure is first computed."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from engine.models.errors import ModelError
from engine.models.files import PICKLED, WEIGHT_FILES, read_json
from engine.models.gguf.folder import TENSORS, is_derived
from engine.models.spec import ModelSpec

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_GGUF_TYPE = re.compile(r"(?i)(?:^|[-._])((?:i?q|tq)\d\w*|bf16|f16|f32|mxfp4\w*)(?=[-.])")  # in a file's name


@dataclass(frozen=True)
class StoredWeights:
    """The weights in a model's folder. The figures are computed when they are first asked for: it may take seconds."""

    folder: Path
    spec: ModelSpec
    quantization: str | None = None  # at load time, of weights that are stored as floats
    device: str = "auto"  # as configured

    @property
    def format(self) -> str:
        """Return "gguf", "safetensors" or "pytorch"."""
        if is_derived(self.folder):
            return "gguf"
        return "pytorch" if self._files and all(file.name == PICKLED for file in self._files) else "safetensors"

    @property
    def quantization_level(self) -> str:
        """Return the type of most weights as it is usually written: BF16, Q4_K_M, FP8, GPTQ."""
        if self.format == "gguf" and self._files and (found := _GGUF_TYPE.findall(self._files[0].name)):
            return str(found[-1]).upper()
        method = self.spec.quantization.method if self.spec.quantization is not None else self.quantization
        return method.upper() if method else _DTYPES[self.spec.dtype]

    def count(self) -> None:
        """Compute all figures. They are kept."""
        _ = self.num_bytes, self.num_parameters

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of the files; without files (random weights), those of the tensors."""
        if self._files:
            return sum(file.stat().st_size for file in self._files)
        import torch

        itemsize: int = getattr(torch, self.spec.dtype).itemsize
        return self.num_parameters * itemsize

    @property
    def num_bytes_on_gpu(self) -> int:
        if self.device == "cpu":
            return 0
        from engine.worker.device import DEVICES

        return self.num_bytes if DEVICES["cuda"].is_available() else 0

    @cached_property
    def num_parameters(self) -> int:
        import torch

        from engine.models.weights import bytes_of_parts, decoder_of_shapes

        is_tied = self.spec.tie_word_embeddings or self._is_head_stored_as_embedding
        spec = replace(self.spec, quantization=None, tie_word_embeddings=is_tied)
        decoder = decoder_of_shapes(spec, torch.bfloat16, self.folder)
        return sum(bytes_of_parts(decoder, None).values()) // torch.bfloat16.itemsize

    @cached_property
    def _is_head_stored_as_embedding(self) -> bool:
        """Return whether a GGUF file has one tensor for both; in memory each has a form of its own."""
        if not is_derived(self.folder):
            return False
        tensors = read_json(self.folder / TENSORS, self.folder)["tensors"]
        head, embedding = tensors.get("lm_head"), tensors.get("model.embed_tokens.weight")
        return bool(head and embedding) and all(head[key] == embedding[key] for key in ("file", "start"))

    @cached_property
    def _files(self) -> list[Path]:
        if is_derived(self.folder):
            return [Path(name) for name, *_ in read_json(self.folder / TENSORS, self.folder)["files"]]
        if (pickled := self.folder / PICKLED).is_file() and not any(self.folder.glob(WEIGHT_FILES)):
            return [pickled]
        from engine.models.checkpoints.safetensors import weight_files

        with contextlib.suppress(ModelError):  # no files: the weights are random
            return weight_files(self.folder)[0]
        return []
