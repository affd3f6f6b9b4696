"""Makes a model folder of a GGUF file: config.json, the tokenizer's files, and where each tensor lies.

The folder lies in Quire's own cache, which only this user can write. Only such a folder may name other files: one from
elsewhere could name any file of this machine. Its name stands for the file's path, size and time of modification.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
import struct
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError
from engine.models.gguf.architectures import (
    LAYER,
    LONG_FACTORS,
    OUTSIDE,
    PLAIN_NORMS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Architecture,
    Settings,
    config_json,
    find_architecture,
)
from engine.models.gguf.header import Header, StoredBlocks, read_header, split_files
from engine.models.gguf.vocabulary import chat_templates, end_token_ids, special_token_id, tokenizer_files
from engine.models.quantization import GGUF_SCHEMES
from engine.utils.folder_files import open_file

VERSION = 6  # of the folder's content
TENSORS = "gguf.json"  # files and tensors, see `derived_tensors`
NO_TOKENIZER = "tokenizer.missing"  # why there is no tokenizer.json
FACTORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
# Matrices that are multiplied at once stay quantised only together.
FUSED = (
    ("attn_q", "attn_k", "attn_v"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
    ("attn_qkv", "attn_gate"),
    ("ssm_beta", "ssm_alpha"),
)
ALONE = (
    *("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp"),
    *("shortconv.in_proj", "shortconv.out_proj", "ssm_ba", "ssm_in", "ssm_out"),
    *("ffn_gate_up_exps", "ffn_latent_down", "ffn_latent_up", "inp_gate", "proj", "laurel_l", "laurel_r"),
)
# Names of these are not followed by the kind of tensor.
WHOLE = ("attn_sinks", "exp_probs_b", "ssm_a", "ssm_d", "ssm_dt", "layer_output_scale", "altup_correct_scale")
SETTINGS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
SETTINGS |= {"penalty_repeat": "repetition_penalty"}


def cache_folder() -> Path:
    """Return the folder of all such folders, in `QUIRE_CACHE_DIR` or the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QUIRE_CACHE_DIR") or Path(cache) / "quire") / "gguf"


def is_derived(folder: Path) -> bool:
    """Return whether a model folder was made by `model_folder`."""
    cache = cache_folder()
    return folder.resolve().parent == cache.resolve() and _is_own(cache) and (folder / TENSORS).is_file()


def model_folder(file: Path, chosen_from: Path | None = None) -> Path:
    """Return the folder of a GGUF file, or of one of a split model, made if absent. Raises `ModelError`.

    chosen_from: the folder that the user named, in which the files must lie; None: the user named the file.
    """
    found = split_files(file)
    if chosen_from is not None:
        for each in found:
            _check_place(each, chosen_from)
    files = [Path(os.path.realpath(each)) for each in found]
    stats = [each.stat() for each in files]
    named = [[str(each), found.st_size, found.st_mtime_ns] for each, found in zip(files, stats, strict=True)]
    cache = cache_folder()
    folder = cache / hashlib.sha256(json.dumps([VERSION, named]).encode()).hexdigest()[:32]
    if is_derived(folder):
        return folder
    try:
        contents = dict(_contents(read_header(files), named))
    except ModelError as error:
        raise ModelError(str(error) if str(error).startswith(str(files[0].parent)) else f"{file}: {error}") from None
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(cache):
            raise ModelError(f"{cache}: others may write to it; set QUIRE_CACHE_DIR to a folder of your own")
        made = Path(tempfile.mkdtemp(dir=cache))  # with mode 0700
        try:
            for name, content in contents.items():
                text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
                (made / name).write_text(text, encoding="utf-8")
            made.replace(folder)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not is_derived(folder):  # else another process was faster
                raise
    except OSError as error:
        raise ModelError(f"{cache}: cannot be written ({error.strerror}); set QUIRE_CACHE_DIR to a folder") from None
    return folder


def _check_place(file: Path, folder: Path) -> None:
    try:
        open_file(file, folder).close()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from None


def _is_own(path: Path) -> bool:
    """Return whether only this user and root can change a folder."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _contents(header: Header, files: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Any]]:
    """Return the files of a model folder: name → content, JSON or text."""
    metadata, stored = header.metadata, header.tensors
    factors = {name: _floats(stored[f"{name}.weight"]) for name in FACTORS if f"{name}.weight" in stored}
    settings = Settings(metadata, {name: tensor.shape for name, tensor in stored.items()}, factors)
    config, of = config_json(settings), find_architecture(settings)
    kept = _kept(stored)
    tensors = dict(_tensors(stored, of, config, kept))
    embedding = stored.get("token_embd.weight")
    if (
        config["tie_word_embeddings"] and embedding and embedding.type in GGUF_SCHEMES
    ):  # the head stays quantised: each step reads it
        config["tie_word_embeddings"] = False
        tensors["lm_head"] = {**embedding._asdict(), "blocks": True}
    config |= {
        "bos_token_id": special_token_id(metadata, "bos"),
        "eos_token_id": end_token_ids(metadata) if "tokenizer.ggml.tokens" in metadata else [],
        "dtype": "float32" if {tensor.type for tensor in stored.values()} == {"F32"} else "bfloat16",
    }
    types = defaultdict[str, list[str]](list)
    for name, tensor in tensors.items():
        if tensor["blocks"]:
            types[tensor["type"]].append(name.replace("{}", "*"))
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    yield "config.json", config
    yield TENSORS, {"files": files, "tensors": tensors}
    said = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in SETTINGS.items()}
    yield "generation_config.json", {name: value for name, value in said.items() if value is not None}
    try:
        found = tokenizer_files(metadata)
    except ModelError as error:
        yield NO_TOKENIZER, str(error)
        return
    if templates := chat_templates(metadata):
        found["tokenizer_config.json"]["chat_template"] = templates
    yield from found.items()


def _floats(tensor: StoredBlocks) -> list[float]:
    if tensor.type != "F32":
        raise ModelError(f"its RoPE factors are stored as {tensor.type}, not F32; download it again")
    with open(tensor.file, "rb") as file:
        file.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))


def _kept(stored: Mapping[str, StoredBlocks]) -> set[str]:
    """Return the tensors that stay quantised in memory. What is multiplied at once may mix types of integers."""
    layers = {name.split(".")[1] for name in stored if name.startswith("blk.")}
    groups = [[f"blk.{layer}.{part}.weight" for part in parts] for layer in layers for parts in FUSED]
    groups += [[f"blk.{layer}.{part}.weight"] for layer in layers for part in ALONE]
    groups += [["output.weight"], ["per_layer_model_proj.weight"]]
    kept: set[str] = set()
    for names in groups:
        types = {stored[name].type for name in names if name in stored}
        if types and types <= GGUF_SCHEMES.keys() and (len(types) == 1 or "MXFP4" not in types):
            kept |= {name for name in names if name in stored}
    return kept


def _tensors(
    stored: Mapping[str, StoredBlocks], of: Architecture, config: Mapping[str, Any], kept: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each tensor's name in the checkpoint, "{}" for the number of an expert, and how it is read.

    `blocks`: the name is that of a matrix, whose blocks may stay as they are. `heads`, `offset`, `log`, `stride`: see
    `checkpoints.gguf`.
    """
    num_experts = config.get("num_experts", config.get("num_local_experts", config.get("n_routed_experts")))
    for name, tensor in stored.items():
        part, _, what = name.rpartition(".")
        if what not in ("weight", "bias"):
            part, what = name, ""
        if part in FACTORS:
            continue
        prefix, ours = "", OUTSIDE.get(part)
        if match := re.fullmatch(r"blk\.(\d+)\.(.+)", part):
            if of.skips_drafts and int(match[1]) >= config["num_hidden_layers"]:
                continue
            prefix, part = LAYER.format(match[1]), match[2]
            ours = of.part_name(part)
        entry = {**tensor._asdict(), "blocks": name in kept}
        if part == "ffn_gate_up_exps" and len(tensor.shape) == 3:
            halves = zip(("ffn_gate_exps", "ffn_up_exps"), _halves(entry), strict=True)
            found = [(of.part_name(each), half) for each, half in halves]
        else:
            found = [(ours, entry)]
        for ours, entry in found:
            if ours is None:
                raise ModelError(f"it holds {name!r}, which architecture {of.name} has no place for")
            if part.endswith("_exps") and tensor.shape[0] != num_experts:
                raise ModelError(f"{name!r} has {tensor.shape[0]} experts of {num_experts}; download it again")
            named = ours if entry["blocks"] or part in WHOLE or not what else f"{ours}.{what}"
            yield prefix + named, entry | _changes(name, part, tensor, of, config)


def _halves(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the entries of the gates and of the ups of a tensor [experts, gate and up, hidden]."""
    count, rows, width = entry["shape"]
    for half in range(2):
        yield {
            **entry,
            "shape": (count, rows // 2, width),
            "num_bytes": entry["num_bytes"] // 2,
            "start": entry["start"] + half * (entry["num_bytes"] // count // 2),
            "stride": entry["num_bytes"] // count,
        }


def _changes(name: str, part: str, tensor: StoredBlocks, of: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a tensor's values differ from the checkpoint's. Raises `ModelError`."""
    if of.permutes and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if not heads or tensor.shape[0] % (2 * heads):
            raise ModelError(f"{name!r} has {tensor.shape[0]} rows for {heads} heads; download it again")
        return {"heads": heads}
    if part == "ssm_a":
        return {"log": True}
    if part in PLAIN_NORMS:
        return {"shape": (math.prod(tensor.shape),)}  # groups of channels stand in rows
    return {"offset": of.norm_offset} if of.norm_offset and part.endswith("norm") else {}
