"""GGUF files: blocks, headers of damaged files, the folder made of a file, and finding files."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kernels
from engine.models.checkpoints import GGUFCheckpoint, SafetensorsFolder, open_checkpoint
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.files import fingerprint
from engine.models.formats import weight_formats
from engine.models.formats.gguf import SIX_BITS, GGUFBlocks, rounded, with_zero_points
from engine.models.gguf import folder as gguf_folder
from engine.models.gguf.architectures import ARCHITECTURES
from engine.models.gguf.blocks import TYPES
from engine.models.gguf.header import read_header, split_files
from engine.models.hub import resolve_model, short_name
from engine.models.matrix import FLOAT_DTYPES, CheckpointTensor, Matrix, Part, Scope
from engine.models.quantization import GGUF_SCHEMES, read_quantization
from engine.models.shard import Span
from kernels import QuantizedWeight
from kernels.reference.quantized import dequantize


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def blocks_of(kind: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random blocks whose scales are finite and not tiny."""
    of = TYPES[kind]
    data = np.random.default_rng(seed).integers(0, 256, (rows, columns // of.values, of.num_bytes), dtype=np.uint8)
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "MXFP4": ()}
    for at in scales.get(kind, (0, 2) if kind in ("Q4_K", "Q5_K") else (0,)):
        data[..., at : at + 2] = np.frombuffer(struct.pack("<e", 0.0123), np.uint8)
    if kind == "MXFP4":
        data[..., 0] = 120
    return torch.from_numpy(data)


@pytest.mark.parametrize("kind", [name for name, of in TYPES.items() if of.unpack is not None])
def test_blocks_equal_the_published_reference(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    of, number = TYPES[kind], gguf.GGMLQuantizationType[kind]
    assert (of.values, of.num_bytes) == gguf.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(1).integers(0, 256, (37, 3 * of.num_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        want = gguf.dequantize(data, number)
    got = of.decode(torch.from_numpy(data)).numpy()
    same = want.view(np.uint32) == got.view(np.uint32)
    assert (same | (np.isnan(want) & np.isnan(got))).all()


def test_blocks_are_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = blocks_of("Q4_K", 9, 512).flatten(1)
    whole = TYPES["Q4_K"].decode(data)
    monkeypatch.setattr("engine.models.gguf.blocks.DECODED_AT_ONCE", 1024)
    assert torch.equal(TYPES["Q4_K"].decode(data), whole)
    assert torch.equal(TYPES["Q4_K"].decode(data, torch.bfloat16), whole.bfloat16())


@pytest.mark.parametrize("kind", GGUF_SCHEMES)
@pytest.mark.parametrize("stacked", [0, 2])
def test_kept_blocks_have_their_exact_values(kind: str, stacked: int) -> None:
    """The common form of quantised weights, which kernels read, holds the same numbers."""
    names = [f"m.experts.{i}.up" for i in range(stacked)] or ["m.up"]
    config = {"quant_method": "gguf", "types": {kind: ["m.experts.*.up" if stacked else "m.up"]}}
    scope = Scope(torch.bfloat16, torch.device("cpu"), weight_formats(read_quantization(config)))
    matrix = Matrix(
        scope, [Part(name=name, rows=Span.whole(6)) for name in names], Span.whole(512), num_stacked=stacked
    )
    assert isinstance(matrix.format, GGUFBlocks)
    stored = [blocks_of(kind, 6, 512, seed) for seed in range(len(names))]
    for tensor, blocks in zip(matrix.tensors(), stored, strict=True):
        assert tensor.name.endswith(".blocks")
        tensor.fill(blocks)
    before = sum(blocks.nbytes for blocks in stored) + matrix.format.growth(matrix, (8, 0))
    matrix.format.pack(matrix)
    assert isinstance(matrix.weight, QuantizedWeight)
    assert matrix.weight.nbytes == before
    for i, blocks in enumerate(stored):
        one = matrix.weight[i] if stacked else matrix.weight
        got, want = dequantize(one.codes, one, torch.float32), TYPES[kind].decode(blocks.flatten(1))
        if one.minimum is None or one.kind == "int8":
            assert torch.equal(got, want)
        else:  # the minimum is that of codes less 8, and is rounded
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())


@pytest.mark.skipif(not kernels.has_cpu_kernels(), reason="no C++ compiler")
@pytest.mark.parametrize(
    "kinds", [*((kind, kind) for kind in SIX_BITS), ("Q4_K", "Q6_K"), ("Q5_K", "Q3_K"), ("Q2_K", "Q4_K")]
)
def test_bytes_on_cpus_are_those_that_products_read(kinds: tuple[str, str]) -> None:
    types: dict[str, list[str]] = {}
    for name, kind in zip(("m.q", "m.k"), kinds, strict=True):
        types.setdefault(kind, []).append(name)
    formats = weight_formats(read_quantization({"quant_method": "gguf", "types": types}))
    scope = Scope(torch.bfloat16, torch.device("cpu"), formats)
    matrix = Matrix(scope, [Part(name=name, rows=Span.whole(64)) for name in ("m.q", "m.k")], Span.whole(512))
    stored = [blocks_of(kind, 64, 512, seed) for seed, kind in enumerate(kinds)]
    for tensor, blocks in zip(matrix.tensors(), stored, strict=True):
        tensor.fill(blocks)
    counted = sum(blocks.nbytes for blocks in stored) + matrix.format.growth(matrix, None)
    matrix.pack()
    weight: Any = matrix.weight
    assert counted == weight.nbytes + sum(each.nbytes for each in weight.others if each is not None)


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q3_K", "Q5_K"), ("Q4_0", "Q8_0"), ("Q2_K", "Q4_K")]
)
def test_types_that_are_multiplied_at_once(kinds: tuple[str, str]) -> None:
    """Query and key of one type, value of another, as in files of mixtures such as Q4_K_M."""
    names = {"m.q": kinds[0], "m.k": kinds[0], "m.v": kinds[1]}
    types = {kind: [name for name, its in names.items() if its == kind] for kind in kinds}
    scope = Scope(
        torch.bfloat16,
        torch.device("cpu"),
        weight_formats(read_quantization({"quant_method": "gguf", "types": types})),
    )
    matrix = Matrix(scope, [Part(name=name, rows=Span.whole(6)) for name in names], Span.whole(512))
    stored = [blocks_of(kind, 6, 512, seed) for seed, kind in enumerate(names.values())]
    for tensor, blocks in zip(matrix.tensors(), stored, strict=True):
        tensor.fill(blocks)
    most = sum(blocks.nbytes for blocks in stored) + matrix.format.growth(matrix, (8, 0))
    matrix.format.pack(matrix)
    assert isinstance(matrix.weight, QuantizedWeight)
    assert matrix.weight.nbytes <= most
    got = dequantize(matrix.weight.codes, matrix.weight, torch.float32)
    want = torch.cat(
        [TYPES[kind].decode(blocks.flatten(1)) for kind, blocks in zip(names.values(), stored, strict=True)]
    )
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("kinds", "in_order"), [(("Q4_K", "Q6_K"), True), (("Q3_K", "Q5_K"), False)])
def test_blocks_that_gpus_read_as_they_are(
    kinds: tuple[str, str], in_order: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of a mixture, and a rank's rows and channels; where one type is not read so, none is."""
    block_linear = pytest.importorskip("kernels.cuda.block_linear")
    weight_only = pytest.importorskip("kernels.triton.weight_only")
    monkeypatch.setattr(
        kernels, "pack_blocks", lambda first, others, kinds, _: block_linear.packed([first, *others], kinds)
    )
    names = {"m.q": kinds[0], "m.k": kinds[0], "m.v": kinds[1]}
    types = {kind: [name for name, its in names.items() if its == kind] for kind in kinds}
    formats = weight_formats(read_quantization({"quant_method": "gguf", "types": types}))
    rows, columns = (Span.whole(6), Span.whole(512)) if whole else (Span(6, 3, 6), Span(512, 256, 512))
    scope = Scope(torch.bfloat16, torch.device("cpu"), formats)
    matrix = Matrix(scope, [Part(name=name, rows=rows) for name in names], columns)
    stored = [blocks_of(kind, 6, 512, seed) for seed, kind in enumerate(names.values())]
    for tensor, blocks in zip(matrix.tensors(), stored, strict=True):
        tensor.fill(blocks)
    grown = matrix.format.growth(matrix, (9, 0))
    assert matrix.format.growth(matrix, (8, 9)) > 0  # blocks are unpacked there
    matrix.format.pack(matrix)
    assert not matrix.stored
    assert isinstance(matrix.weight, kernels.BlockWeight) is in_order
    assert (grown == 0) is in_order
    if isinstance(matrix.weight, kernels.BlockWeight):
        assert matrix.weight.nbytes == sum(blocks.nbytes for blocks in stored) // (1 if whole else 4)
        got = weight_only.dequantize(matrix.weight.codes, matrix.weight, torch.float32)
        want = [TYPES[kind].decode(blocks.flatten(1)) for kind, blocks in zip(names.values(), stored, strict=True)]
        want = [each[rows.start : rows.stop, columns.start : columns.stop] for each in want]
        torch.testing.assert_close(got, torch.cat(want), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "none"), [("Q4_K", 8), ("Q4_1", 8), ("Q5_K", 0), ("Q5_1", 0)])
def test_gpus_take_minima_as_fractional_zero_points(kind: str, none: int) -> None:
    unpack = TYPES[kind].unpack
    assert unpack is not None
    codes, scale, minimum = unpack(blocks_of(kind, 64, 512).flatten(0, 1))
    assert minimum is not None
    scale[0] = 0.0  # a group whose values are all alike
    scale[1], minimum[1] = 0.0, 0.0
    want = codes * scale.unsqueeze(2) - minimum.unsqueeze(2)
    minimum = minimum - none * scale
    scale = rounded(scale)
    assert scale.dtype == torch.float16
    codes, scale, zero = with_zero_points(codes.to(torch.uint8), scale, minimum, none)
    got = (codes.float() - none - zero.float().unsqueeze(2)) * scale.float().unsqueeze(2)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3 * want.abs().max().item())
    assert torch.equal(got[:2], want[:2].half().float())


@pytest.mark.parametrize("kind", GGUF_SCHEMES)
def test_random_blocks_have_the_usual_deviation(kind: str) -> None:
    shape = (64, 1024 // TYPES[kind].values, TYPES[kind].num_bytes)
    blocks = GGUFBlocks(GGUF_SCHEMES[kind]).random(shape, None, torch.Generator())  # type: ignore[arg-type]
    assert 0.01 < TYPES[kind].decode(blocks.flatten(1)).std() < 0.04


# Files


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return text(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    kind, form = (6, "f") if isinstance(value, float) else (4, "I")
    return text(name) + struct.pack("<I" + form, kind, value)


LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
}
TENSORS = {
    "token_embd.weight": (8, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,),
    **{f"blk.0.{part}.weight": (32, 32) for part in ("attn_q", "attn_k", "attn_v", "attn_output")},
    **{f"blk.0.{part}.weight": (32, 32) for part in ("ffn_gate", "ffn_up", "ffn_down")},
}  # fmt: skip


def file_of(metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]], kind: int = 0, **header: Any) -> bytes:
    """A GGUF file of zeros. kind: the number of the tensors' type."""
    head = b"GGUF" + struct.pack("<IQQ", header.get("version", 3), len(tensors), len(metadata))
    head += b"".join(pair(name, value) for name, value in metadata.items())
    at = 0
    for name, shape in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1]) + struct.pack("<IQ", kind, at)
        at += int(np.prod(shape)) * 4
    return head + bytes(-len(head) % 32 + at)


def write(path: Path, *arguments: Any, **header: Any) -> Path:
    path.write_bytes(file_of(*arguments, **header))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        resolve_model(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_header(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {**LLAMA, "a.list": ["x", "ä"]}, TENSORS)
    header = read_header([path])
    assert header.metadata["a.list"] == ["x", "ä"]
    tensor = header.tensors["token_embd.weight"]
    assert (tensor.shape, tensor.type, tensor.num_bytes) == ((8, 32), "F32", 1024)
    assert tensor.start % 32 == 0


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = file_of({**LLAMA, "a.list": ["x"]}, TENSORS)
    path = tmp_path / "m.gguf"
    for size in [*range(0, 400, 7), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert "GGUF file" in refusal(path)


def test_every_damaged_byte_is_harmless(tmp_path: Path) -> None:
    """It is refused, or changes a name or a number; nothing else is raised, and no memory is taken."""
    whole = bytearray(file_of({**LLAMA, "a.list": ["x"]}, TENSORS))
    path = tmp_path / "m.gguf"
    for at in range(4, 700, 3):
        for value in (0xFF, 0x00):
            damaged = whole.copy()
            damaged[at] = value
            path.write_bytes(damaged)
            with contextlib.suppress(ModelError):
                read_header([path])


def test_damaged_settings_are_refused_in_one_line(tmp_path: Path) -> None:
    """Types and numbers of settings change; nothing but `ModelError` is raised on the way to a folder."""
    vocabulary = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "llama.rope.freq_base": 1e4, "llama.rope.dimension_count": 16, "llama.expert_count": 0,
    }  # fmt: skip
    path, refused = tmp_path / "m.gguf", 0
    for name in (names := {**LLAMA, **vocabulary}):
        for value in (0, 1, 2**32 - 1, 1e30, "x", ["x"], []):
            path.write_bytes(file_of({**names, name: value}, TENSORS))
            try:
                read_spec(resolve_model(str(path)))
            except ModelError:
                refused += 1
    assert refused > 40


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 1}, "version 1 are not supported"),
        ({"version": 3 << 24}, "big-endian files are not supported"),
        ({"kind": 16}, "'token_embd.weight' is stored as IQ2_XXS, which is not supported; supported: F32, F16"),
        ({"kind": 99}, "stored as type 99"),
        ({"metadata": {**LLAMA, "general.alignment": 7}}, "general.alignment is 7"),
        ({"metadata": {**LLAMA, "general.architecture": "clip"}}, "GGUF architecture 'clip' is not supported"),
        ({"metadata": {"general.architecture": "llama"}}, "llama.attention.head_count must be one integer"),
        ({"metadata": {**LLAMA, "llama.attention.head_count": 0}}, "0 heads"),
        ({"metadata": {**LLAMA, "llama.rope.scaling.type": "ntk"}}, "scaling.type 'ntk' is not supported"),
        ({"tensors": {"a": (32,)}}, "it has no token_embd.weight"),
        ({"tensors": {**TENSORS, "blk.0.ssm_a": (32,)}}, "holds 'blk.0.ssm_a', which architecture LlamaForCausalLM"),
        ({"tensors": {**TENSORS, "blk.0.attn_q.weight": (33, 32)}}, "'blk.0.attn_q.weight' has 33 rows for 2 heads"),
    ],
)
def test_refusals(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    change = {"metadata": LLAMA, "tensors": TENSORS, **change}
    path = write(tmp_path / "m.gguf", change.pop("metadata"), change.pop("tensors"), **change)
    message = refusal(path)
    assert message.startswith(str(path))
    assert said in message


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    assert "is not a GGUF file" in refusal(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"")
    assert "is not a GGUF file" in refusal(tmp_path / "m.gguf")
    (tmp_path / "m.bin").touch()
    assert "m.bin: is a file; give a .gguf file, or the folder" in refusal(tmp_path / "m.bin")


# The folder


def test_folder_is_made_once_for_each_version_of_a_file(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "m.gguf", LLAMA, TENSORS)
    folder = resolve_model(str(path))
    assert folder.parent == cache
    assert folder.stat().st_mode & 0o077 == cache.stat().st_mode & 0o077 == 0
    before = (folder / "config.json").stat().st_ino
    assert resolve_model(str(path)) == resolve_model(str(folder)) == folder
    assert (folder / "config.json").stat().st_ino == before
    assert isinstance(open_checkpoint(folder), GGUFCheckpoint)
    first = fingerprint(folder)
    os.utime(path, (1, 1))
    with pytest.raises(ModelError, match="has been changed since this start began"):
        open_checkpoint(folder).tensors()  # type: ignore[union-attr]
    other = resolve_model(str(path))
    assert other != folder
    assert fingerprint(other) != first
    assert len(list(cache.iterdir())) == 2


def test_no_other_folder_names_files(tmp_path: Path, cache: Path) -> None:
    """A downloaded folder with the same content is read as safetensors: its gguf.json could name any file."""
    folder = resolve_model(str(write(tmp_path / "m.gguf", LLAMA, TENSORS)))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert isinstance(open_checkpoint(copy), SafetensorsFolder)
    cache.chmod(0o777)
    assert isinstance(open_checkpoint(folder), SafetensorsFolder)
    os.utime(tmp_path / "m.gguf", (1, 1))
    assert "others may write to it; set QUIRE_CACHE_DIR" in refusal(tmp_path / "m.gguf")


def test_folder_that_another_process_makes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    path = write(tmp_path / "m.gguf", LLAMA, TENSORS)
    contents, made = gguf_folder._contents, []

    def slow(*arguments: Any) -> Any:
        found = dict(contents(*arguments))
        monkeypatch.undo()
        monkeypatch.setenv("QUIRE_CACHE_DIR", str(cache.parent))
        made.append(resolve_model(str(path)))
        return found.items()

    monkeypatch.setattr(gguf_folder, "_contents", slow)
    assert [resolve_model(str(path))] == made
    assert list(cache.iterdir()) == made


def test_tokenizer_that_is_not_known(tmp_path: Path) -> None:
    from engine.text.tokenizer import Tokenizer, TokenizerError

    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "new", "tokenizer.ggml.tokens": ["a"]}
    folder = resolve_model(str(write(tmp_path / "m.gguf", LLAMA | vocabulary, TENSORS)))
    with pytest.raises(TokenizerError, match=r"cut by 'new' \(tokenizer.ggml.pre\).*--tokenizer NAME"):
        Tokenizer.from_folder(folder)


def test_settings(tmp_path: Path) -> None:
    folder = resolve_model(
        str(write(tmp_path / "m.gguf", {**LLAMA, "general.sampling.temp": 0.5, "general.sampling.top_k": 7}, TENSORS))
    )
    assert json.loads((folder / "generation_config.json").read_text()) == {"temperature": 0.5, "top_k": 7}


def test_memory_of_decoded_types_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(resolve_model(str(write(tmp_path / "m.gguf", LLAMA, TENSORS))))
    assert isinstance(checkpoint, GGUFCheckpoint)
    with caplog.at_level("INFO"):
        checkpoint.log_decoding(torch.bfloat16)
        assert not caplog.messages
        checkpoint._stacks["lm_head.weight"] = {
            "type": "Q4_K", "blocks": False, "shape": [2**15, 2**15], "num_bytes": 9 << 26
        }  # fmt: skip
        checkpoint.log_decoding(torch.bfloat16)
    assert caplog.messages == ["GGUF: matrices of the types Q4_K become bfloat16 and take 2.00 GiB, 0.56 in the file"]


def test_decoded_values_are_rounded_once_to_their_memory(tmp_path: Path) -> None:
    data = bytearray(file_of(LLAMA, TENSORS, kind=8))  # Q8_0
    at = len(data) - 4 * 32 * 32  # of the last tensor, 32 blocks
    data[at : at + 32 * 34] = np.random.default_rng(1).integers(0, 60, 32 * 34, dtype=np.uint8).tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    checkpoint = open_checkpoint(resolve_model(str(tmp_path / "m.gguf")))
    assert isinstance(checkpoint, GGUFCheckpoint)
    stored = checkpoint.tensors()
    exact = {name: value.clone() for name, value in checkpoint.read(stored)}
    assert any(bool((value != value.bfloat16()).any()) for value in exact.values())
    for take in (None, lambda part: None):  # what takes a part itself may compute with it
        declared = {
            name: CheckpointTensor(
                name, tuple(map(Span.whole, each.shape)), torch.empty(each.shape, dtype=torch.bfloat16), take=take
            )
            for name, each in stored.items()
        }
        for name, value in checkpoint.read_for(declared):
            assert torch.equal(value, exact[name] if take else exact[name].bfloat16())


# Finding files


def test_short_names(tmp_path: Path) -> None:
    path = write(tmp_path / "m-Q8_0.gguf", LLAMA, TENSORS)
    assert [short_name(str(name)) for name in (path, tmp_path, "o/m:Q8_0")] == ["m-Q8_0", tmp_path.name, "o/m:Q8_0"]


def test_splits_and_folders(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    names = list(TENSORS)
    count = {"split.tensors.count": len(names)}
    one = write(models / "m-00001-of-00002.gguf", LLAMA | count, {name: TENSORS[name] for name in names[:4]})
    two = models / "m-00002-of-00002.gguf"
    assert "m-00002-of-00002.gguf are missing beside it" in refusal(one)
    write(two, {}, {name: TENSORS[name] for name in names[4:]})
    assert split_files(two) == [one, two]
    folder = resolve_model(str(one))
    assert resolve_model(str(two)) == resolve_model(str(models)) == folder
    (models / "mmproj-m.gguf").touch()
    assert resolve_model(str(models)) == folder
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, GGUFCheckpoint)
    stored = checkpoint.tensors()
    assert len(stored) == len(TENSORS)
    assert {tensor.dtype for tensor in stored.values()} <= FLOAT_DTYPES
    write(two, {}, {name: TENSORS[name] for name in names[5:]})
    assert f"hold {len(names) - 1} of {len(names)} tensors" in refusal(one)
    write(models / "other.gguf", LLAMA, TENSORS)
    assert "must hold one GGUF model in the folder, it holds m, other.gguf; give the file itself" in refusal(models)


def test_a_folder_shows_no_file_from_elsewhere(tmp_path: Path) -> None:
    """A folder may come from anyone; a file that the user names may be a link."""
    models, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    models.mkdir()
    elsewhere.mkdir()
    names = list(TENSORS)
    count = {"split.tensors.count": len(names)}
    write(elsewhere / "whole.gguf", LLAMA, TENSORS)
    write(elsewhere / "part", {}, {name: TENSORS[name] for name in names[4:]})
    (models / "m.gguf").symlink_to(elsewhere / "whole.gguf")
    assert "outside the model's folder" in refusal(models)
    assert resolve_model(str(models / "m.gguf")) == resolve_model(str(elsewhere / "whole.gguf"))
    (models / "m.gguf").unlink()
    write(models / "m-00001-of-00002.gguf", LLAMA | count, {name: TENSORS[name] for name in names[:4]})
    (models / "m-00002-of-00002.gguf").symlink_to(elsewhere / "part")
    assert "outside the model's folder" in refusal(models)
    (models / "m-00002-of-00002.gguf").unlink()
    (models / "m-00001-of-00002.gguf").unlink()
    os.mkfifo(models / "m.gguf")
    assert "is no regular file" in refusal(models)


@pytest.mark.parametrize(
    ("name", "patterns", "chosen"),
    [
        ("o/m:Q4_K_M", ["*[qQ]4_[kK]_[mM]*.gguf"], "m.q4_k_m.gguf"),
        ("o/m:q8_0", ["*[qQ]8_0*.gguf"], "Q8_0/m-Q8_0-00001-of-00002.gguf"),
        ("o/m:m.q4_k_m.gguf", ["m.q4_k_m.gguf"], "m.q4_k_m.gguf"),
        ("o/m/Q8_0/m-Q8_0-00001-of-00002.gguf", ["Q8_0/m-Q8_0-*-of-00002.gguf"], "Q8_0/m-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_files_of_the_hub(
    name: str, patterns: list[str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    (snapshot / "Q8_0").mkdir(parents=True)
    for file in ("m.q4_k_m.gguf", "m.UD-q4_k_m_xl.gguf", "mmproj-Q8_0.gguf"):
        (snapshot / file).touch()
    for i in (1, 2):
        (snapshot / f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf").touch()
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(snapshot)

    monkeypatch.setattr("engine.models.download.snapshot_download", download)
    monkeypatch.setattr("engine.models.hub.model_folder", lambda file, folder: file)
    assert resolve_model(name, revision="r") == snapshot / chosen
    assert (asked["repo"], asked["revision"], asked["allow_patterns"]) == ("o/m", "r", patterns)
    with pytest.raises(ModelError, match="must hold one GGUF model of type Q2_K, it holds none"):
        resolve_model("o/m:Q2_K")


def test_documentation_names_every_architecture_and_type() -> None:
    said = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8").partition("## GGUF")[2]
    assert not [name for name in ARCHITECTURES if f"`{name}`" not in said]
    assert not [name for name in GGUF_SCHEMES if name not in said]
