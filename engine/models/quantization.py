"""Converts config.json's quantization_config to a scheme for each matrix. Does not import PyTorch.

One short function per `quant_method`. `ModelError` names the unsupported key and the closest supported alternative.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from engine.models.errors import ModelError

WHERE = "quantization_config"


# Parts of names in the checkpoint, and Quire's names for them. "^": only at the beginning of a name.
Renames: TypeAlias = tuple[tuple[str, str], ...]


def renamed(name: str, names: Renames) -> str:
    """Return Quire's name of a tensor."""
    for theirs, ours in names:
        if not theirs.startswith("^"):
            name = name.replace(theirs, ours)
        elif name.startswith(theirs[1:]):
            name = ours + name[len(theirs) - 1 :]
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Storage of a quantised matrix [N, K] in a checkpoint."""

    layout: Literal[
        "plain",
        "packed",
        "gptq",
        "awq",
        "gemv",
        "fp4",
        "blocks",
        "gguf",
        "torchao",
        "torchao-int4",
        "torchao-tiles",
        "online",
    ]  # the stored tensors, see the classes in `formats`
    kind: Literal["e4m3", "int8", "int4", "e2m1"]  # the values of codes, see `kernels.QuantizedWeight`
    group: int = 0  # number of channels that share a scale; 0: all
    rows: int = 1  # number of rows that share a scale; 0: all
    symmetric: bool = True  # False: there are zero points
    reordered: bool = False  # the group of each channel is stored too (GPTQ's desc_act, actorder)
    activations: bool = False  # activations may be quantised to the codes' dtype if that is faster
    zero_offset: int = 0  # added to stored zero points
    global_scale: str = ""  # tensor with a factor of all scales; "": none
    divided: bool = False  # scales are divided by the global scale instead of multiplied
    block: str = ""  # the type of GGUF's blocks
    minima: bool = False  # groups have minima
    bits: int = 0  # of stored codes; 0: those of `kind`


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The schemes of linear layers by their names in the checkpoint."""

    method: str  # its name in --quantization
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]  # targets → scheme: the first that matches
    ignored: tuple[str, ...] = ()
    names: Renames = ()  # see `ModelSpec.names`

    def scheme(self, name: str) -> Scheme | None:
        """Return the scheme of a module; None: float weights."""
        if any(self._matches(pattern, name) for pattern in self.ignored):
            return None
        return next((scheme for targets, scheme in self.schemes if any(self._matches(t, name) for t in targets)), None)

    def _matches(self, pattern: str, name: str) -> bool:
        """Match Quire's name of a module with a pattern for the checkpoint's names."""
        if not self.names or pattern == "Linear":
            return _matches(pattern, name)
        if pattern.startswith("re:"):
            theirs = (f"{name}.".replace(ours, their.removeprefix("^"))[:-1] for their, ours in self.names if ours)
            return any(_matches(pattern, each) for each in (name, *theirs))
        return _matches(renamed(f"{pattern}.", self.names)[:-1], name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedQuantization(Quantization):
    """Schemes whose targets are whole names of modules, "*" for the number of an expert."""

    def scheme(self, name: str) -> Scheme | None:
        found = _by_name(self.schemes, self.names)
        return found.get(re.sub(r"\.experts\.\d+\.", ".experts.*.", name))


@functools.lru_cache(maxsize=4)
def _by_name(schemes: tuple[tuple[tuple[str, ...], Scheme], ...], renames: Renames) -> dict[str, Scheme]:
    return {renamed(f"{name}.", renames)[:-1]: scheme for names, scheme in schemes for name in names}


ONLINE = {  # formats to which a float checkpoint can be quantised at load time
    "fp8": Scheme(layout="online", kind="e4m3", activations=True),
    "int8": Scheme(layout="online", kind="int8", activations=True),
    "int4": Scheme(layout="online", kind="int4", group=32),
}


# Matrices that stay floats: latent attention reads the first as floats, and the others, of a delta net's few gates, are
# too small to gain.
# Encoders of images do, too: their sizes often are no multiples of a group, and their weights are few.
FLOATS = (
    "kv_b_proj",
    "in_proj_a",
    "in_proj_b",
    "in_proj_ba",
    "visual",
    "vision_tower",
    "multi_modal_projector",
    "embed_vision",
)


def choose_quantization(
    stored: Quantization | None,
    method: str | None,
    *,
    rounds_head: bool = False,
    decodes: bool = False,
) -> Quantization | None:
    """Return the quantization of the weights in memory if `method` was requested; None: as in the checkpoint.

    A GGUF file's blocks can also be decoded: by `decodes`, or to quantise them by another method.

    The weights of a float checkpoint are quantised at load time, per row, or to int4 in groups of channels, except
    `FLOATS`. `rounds_head`: int8 and int4 also quantise the output head, to int8.
    """
    if isinstance(stored, NamedQuantization) and (decodes if method is None else method in ONLINE):
        stored = None
    if method is None or (stored is not None and stored.method == method):
        return stored
    if stored is not None:
        raise ModelError(
            f"the checkpoint is quantised by {stored.method!r}: quantization must be that or none, got {method!r}"
        )
    if method not in ONLINE:
        raise ModelError(f"the checkpoint is not quantised: quantization must be {', '.join(ONLINE)}, got {method!r}")
    body = (("Linear",), ONLINE[method])
    if rounds_head and method != "fp8":
        schemes = ((("lm_head",), ONLINE["int8"]), body)
        return Quantization(method=method, schemes=schemes, ignored=FLOATS)
    return Quantization(method=method, schemes=(body,), ignored=("lm_head", *FLOATS))


def read_quantization(config: Any) -> Quantization | None:
    """Read the quantization of the weights. None: float weights, or only the KV cache is quantised."""
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ModelError(f"'{WHERE}' must be an object, got {config!r}")
    method, producer = config.get("quant_method"), config.get("producer")
    if method is None and isinstance(producer, dict):  # as ModelOpt's own files have it
        method = producer.get("name")
    if not isinstance(method, str) or method not in METHODS:
        raise _unsupported("quant_method", method, tuple(METHODS))
    return METHODS[method](config)


def _matches(pattern: str, name: str) -> bool:
    """Match a name with a pattern: "Linear" (all), "re:" and a regular expression, wildcards, or parts of a name."""
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise ModelError(f"'{WHERE}': {pattern!r} is no regular expression ({error})") from None
    return fnmatch.fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


def _unsupported(key: str, value: object, supported: Sequence[object], advice: str = "") -> ModelError:
    advice = advice or f"supported: {', '.join(map(str, supported))}"
    return ModelError(f"'{WHERE}': {key!r} {value!r} is not supported; {advice}")


def _choice(
    config: Mapping[str, Any], key: str, supported: Sequence[Any], *, default: Any = None, path: str = ""
) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, list | dict) or value not in supported:
        raise _unsupported(path + key, value, supported)
    return value


def _names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the names of modules under the first existing key."""
    value: Any = next((config[key] for key in keys if config.get(key) is not None), [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelError(f"'{WHERE}': {keys[0]!r} must be a list of names, got {value!r}")
    return tuple(value)


def _group(config: Mapping[str, Any], key: str, default: int, path: str = "") -> int:
    """Read the number of channels per group; 0: all (-1 in the file)."""
    value = config.get(key, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and (value < 16 or value & (value - 1))):
        raise _unsupported(path + key, value, ("-1", 32, 64, 128))
    return max(value, 0)


def _fp8(config: Mapping[str, Any]) -> Quantization:
    """fp8 in blocks of 128 × 128 (DeepSeek, Qwen), or with one scale per matrix (Mistral, AutoFP8)."""
    _choice(config, "activation_scheme", ("dynamic", "static"), default="dynamic")
    _choice(config, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    block = config.get("weight_block_size")
    if block not in (None, [128, 128]):
        raise _unsupported("weight_block_size", block, (), "supported: [128, 128], or none")
    rows, group = (128, 128) if block else (0, 0)
    scheme = Scheme(layout="plain", kind="e4m3", rows=rows, group=group, activations=True)
    ignored = _names(config, "modules_to_not_convert", "ignored_layers")
    return Quantization(method="fp8", schemes=((("Linear",), scheme),), ignored=(*ignored, "lm_head"))


def _fbgemm(config: Mapping[str, Any]) -> Quantization:
    """fp8 with one scale per row."""
    scheme = Scheme(layout="plain", kind="e4m3", activations=True)
    ignored = _names(config, "modules_to_not_convert")
    return Quantization(method="fbgemm_fp8", schemes=((("Linear",), scheme),), ignored=(*ignored, "lm_head"))


def _awq(config: Mapping[str, Any]) -> Quantization:
    """int4 in groups of channels, with zero points; in the layouts gemm and gemv."""
    _choice(config, "bits", (4,), default=4)
    version = _choice(config, "version", ("gemm", "GEMM", "gemv", "GEMV"), default="gemm").lower()
    symmetric = not _choice(config, "zero_point", (True, False), default=True)
    group = _group(config, "group_size", 128)
    if version == "gemv" and (symmetric or group < 32):
        raise _unsupported("version", "gemv", (), "with 'zero_point' false or groups of no such size; supported: gemm")
    scheme = Scheme(layout="gemv" if version == "gemv" else "awq", kind="int4", group=group, symmetric=symmetric)
    ignored = _names(config, "modules_to_not_convert")
    return Quantization(method="awq", schemes=((("Linear",), scheme),), ignored=(*ignored, "lm_head"))


def _gptq(config: Mapping[str, Any]) -> Quantization:
    """3, 4 or 8 bits in groups of channels, with and without desc_act; `dynamic` may choose others for some modules."""
    dynamic = _objects(config, "dynamic")  # regular expression of names → settings; with "-:": stays floats
    ignored = [
        *_names(config, "modules_to_not_convert"),
        *(f"re:{name[2:]}" for name, _ in dynamic if name[:2] == "-:"),
    ]
    if not config.get("lm_head"):
        ignored.append("lm_head")
    schemes: list[tuple[tuple[str, ...], Scheme]] = []
    for name, settings in dynamic:
        if name[:2] != "-:":
            if unknown := settings.keys() - GPTQ_KEYS:
                raise _unsupported(f"dynamic.{name}", min(unknown), sorted(GPTQ_KEYS))
            schemes.append(((f"re:{name.removeprefix('+:')}",), _gptq_scheme({**config, **settings})))
    schemes.append((("Linear",), _gptq_scheme(config)))
    return Quantization(method="gptq", schemes=tuple(schemes), ignored=tuple(ignored))


GPTQ_KEYS = frozenset({"bits", "group_size", "desc_act", "sym"})


def _gptq_scheme(config: Mapping[str, Any]) -> Scheme:
    bits = _choice(config, "bits", (3, 4, 8), default=4)
    file_format = _choice(config, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    return Scheme(
        layout="gptq",
        kind="int8" if bits == 8 else "int4",
        bits=3 if bits == 3 else 0,
        group=_group(config, "group_size", 128),
        symmetric=False,  # zero points are always stored
        reordered=_choice(config, "desc_act", (True, False), default=False),
        zero_offset=1 if file_format == "gptq" else 0,
    )


MODELOPT = {
    "FP8": Scheme(layout="plain", kind="e4m3", rows=0, activations=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(layout="plain", kind="e4m3", activations=True),
    "FP8_PB_WO": Scheme(layout="plain", kind="e4m3", rows=128, group=128),
    "NVFP4": Scheme(layout="fp4", kind="e2m1", group=16, global_scale="weight_scale_2"),
}
MODELOPT["W4A16_NVFP4"] = MODELOPT["NVFP4"]  # weights only, as we compute both


def _modelopt(config: Mapping[str, Any]) -> Quantization:
    """NVIDIA's fp8 and nvfp4 (weights only), also mixed by modules; config.json or hf_quant_config.json says so."""
    inner = config.get("quantization")
    config = {**config, **inner} if isinstance(inner, dict) else config
    ignored = _names(config, "ignore", "exclude_modules")
    if config.get("quant_algo") != "MIXED_PRECISION":
        schemes = ((("Linear",), MODELOPT[_choice(config, "quant_algo", (*MODELOPT, "MIXED_PRECISION"))]),)
        return Quantization(method="modelopt", schemes=schemes, ignored=ignored)
    layers = config.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
        raise ModelError(f"'{WHERE}': 'quantized_layers' must be an object of objects, got {layers!r}")
    by_algorithm: dict[str, list[str]] = {}
    for name, layer in layers.items():
        algorithm = _choice(layer, "quant_algo", tuple(MODELOPT), path=f"quantized_layers.{name}.")
        by_algorithm.setdefault(algorithm, []).append(name)
    mixed = tuple((tuple(names), MODELOPT[algorithm]) for algorithm, names in by_algorithm.items())
    return Quantization(method="modelopt", schemes=mixed, ignored=ignored)


def _mxfp4(config: Mapping[str, Any]) -> Quantization:
    """mxfp4 of gpt-oss: the experts, in stacked tensors."""
    scheme = Scheme(layout="blocks", kind="e2m1", group=32)
    return Quantization(method="mxfp4", schemes=((("re:.*\\.mlp\\.experts\\.",), scheme),))


def _bitsandbytes(config: Mapping[str, Any]) -> None:
    """nf4, fp4 and int8 of bitsandbytes: become floats; --quantization int4 or int8 quantises them once more."""


def _torchao(config: Mapping[str, Any]) -> Quantization:
    """torchao's int8, float8 and int4 (plain or in tiles), in safetensors."""
    types = config.get("quant_type")
    default = types.get("default") if isinstance(types, dict) else None
    if not isinstance(default, dict) or not isinstance(types, dict) or types.keys() != {"default"}:
        raise _unsupported("quant_type", types, (), "supported: an object whose 'default' is one of torchao's classes")
    name, path = _choice(default, "_type", tuple(TORCHAO), path="quant_type.default."), "quant_type.default._data."
    data = default.get("_data")
    if not isinstance(data, dict):
        raise ModelError(f"'{WHERE}': '{path[:-1]}' must be an object, got {data!r}")
    if config.get("include_input_output_embeddings"):
        raise _unsupported("include_input_output_embeddings", True, (False,))
    scheme = TORCHAO[name]
    if scheme.kind == "int4":
        packing = data.get("int4_packing_format", "plain")
        packing = packing.get("_data") if isinstance(packing, dict) else packing
        packings = {"plain": scheme, "tile_packed_to_4d": replace(scheme, layout="torchao-tiles")}
        found = {"int4_packing_format": str(packing).lower()}
        scheme = packings[_choice(found, "int4_packing_format", tuple(packings), path=path)]
        _choice(data, "int4_tile_packed_ntile", (8,), default=8, path=path)
        scheme = replace(scheme, group=_group(data, "group_size", 128, path))
        if not 32 <= scheme.group <= 1024:
            raise _unsupported(f"{path}group_size", scheme.group, (32, 64, 128, 256))
    else:
        scheme = _of_granularity(scheme, data.get("granularity"), path + "granularity")
    ignored = _names(config, "modules_to_not_convert")
    return Quantization(method="torchao", schemes=((("Linear",), scheme),), ignored=(*ignored, "lm_head"))


TORCHAO = {  # `rows`: of the default granularity
    "Int8WeightOnlyConfig": Scheme(layout="torchao", kind="int8"),
    "Int8DynamicActivationInt8WeightConfig": Scheme(layout="torchao", kind="int8", activations=True),
    "Float8WeightOnlyConfig": Scheme(layout="torchao", kind="e4m3"),
    "Float8DynamicActivationFloat8WeightConfig": Scheme(layout="torchao", kind="e4m3", rows=0, activations=True),
    "Int4WeightOnlyConfig": Scheme(layout="torchao-int4", kind="int4"),
}


def _of_granularity(scheme: Scheme, granularity: Any, path: str) -> Scheme:
    """Return the scheme with torchao's granularity of weights, the second of two."""
    found = granularity[-1] if isinstance(granularity, list) and granularity else granularity
    if found is None:
        return scheme
    kind = found.get("_type") if isinstance(found, dict) else found
    data = found.get("_data") if isinstance(found, dict) else None
    if kind == "PerGroup" and isinstance(data, dict):
        return replace(scheme, rows=1, group=_group(data, "group_size", 128, f"{path}.PerGroup."))
    if kind not in ("PerRow", "PerTensor"):
        raise _unsupported(path, kind, ("PerRow", "PerTensor", "PerGroup"))
    return replace(scheme, rows=1 if kind == "PerRow" else 0)


def _auto_round(config: Mapping[str, Any]) -> Quantization:
    """int4 and int8 of Intel's auto-round, packed as GPTQ's or AWQ's."""
    packing = _choice(config, "packing_format", tuple(AUTO_ROUND))
    whole = {name for name, extra in _objects(config, "extra_config") if extra.get("bits", 4) >= 16}
    for name, extra in _objects(config, "extra_config"):
        if name not in whole and any(extra.get(key, config.get(key)) != config.get(key) for key in AUTO_ROUND_KEYS):
            raise _unsupported(f"extra_config.{name}", extra, (), "supported: modules of 16 bits")
    zero_point = not config.get("sym", True)
    found = AUTO_ROUND[packing]({**config, "zero_point": zero_point, "modules_to_not_convert": sorted(whole)})
    return replace(found, method="auto-round")


AUTO_ROUND = {"auto_round:auto_gptq": _gptq, "auto_round:gptq": _gptq, "auto_round:auto_awq": _awq}
AUTO_ROUND_KEYS = ("bits", "group_size", "sym", "data_type")


def _objects(config: Mapping[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    value = config.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise ModelError(f"'{WHERE}': {key!r} must be an object of objects, got {value!r}")
    return list(value.items())


def _check_transforms(config: Mapping[str, Any]) -> None:
    """Raise `ModelError` if a transform is computed while the model runs; others are part of the weights."""
    transforms = config.get("transform_config")
    groups = _objects(transforms, "config_groups") if isinstance(transforms, dict) else []
    for name, group in groups:
        locations = [each.get("location") if isinstance(each, dict) else each for each in group.get("apply") or ()]
        if online := [location for location in locations if location not in ("weight_input", "weight_output")]:
            path = f"transform_config.config_groups.{name}.location"
            raise _unsupported(path, online[0], (), "supported: weight_input and weight_output, part of the weights")


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization | None:
    """fp8, int8, int4, nvfp4 and mxfp4 of llm-compressor (the last three: weights only), also mixed by modules."""
    _check_transforms(config)
    sparsity = config.get("sparsity_config") or {}
    sparse_format = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if sparse_format != "dense":
        raise _unsupported("sparsity_config", sparse_format, ("dense",))
    groups = config.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ModelError(f"'{WHERE}': 'config_groups' must be an object of objects, got {groups!r}")
    schemes = []
    for name, group in groups.items():
        if group.get("weights") is None:  # concerns the KV cache
            continue
        targets = _names(group, "targets")
        file_format = group.get("format") or config.get("format")
        schemes.append((targets, _group_scheme(group, file_format, f"config_groups.{name}.")))
    if not schemes:
        return None
    return Quantization(method="compressed-tensors", schemes=tuple(schemes), ignored=_names(config, "ignore"))


PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
FP4_FORMATS = {  # group → format, the tensor of the global scale
    16: ("nvfp4-pack-quantized", "weight_global_scale"),
    32: ("mxfp4-pack-quantized", ""),
}


def _group_scheme(group: Mapping[str, Any], file_format: Any, path: str) -> Scheme:
    weights, at = group["weights"], path + "weights."
    if not isinstance(weights, dict):
        raise ModelError(f"'{WHERE}': '{path}weights' must be an object, got {weights!r}")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if (kind, bits) not in (("float", 8), ("int", 8), ("int", 4), ("float", 4)):
        raise _unsupported(at + "num_bits", bits, (), f"of type {kind!r}; supported: 4 and 8 of type int or float")
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = _choice(
        weights, "strategy", strategies, default="group" if weights.get("group_size") else "tensor", path=at
    )
    symmetric = _choice(weights, "symmetric", (True, False), default=True, path=at)
    inputs = group.get("input_activations")
    activations = isinstance(inputs, dict) and inputs.get("num_bits") == 8
    width = _group(weights, "group_size", -1, at) if strategy in ("group", "tensor_group") else 0
    if (kind, bits) == ("float", 4):
        if width not in FP4_FORMATS:
            raise _unsupported(at + "group_size", width, (), "supported: 16 (nvfp4) and 32 (mxfp4)")
        _choice({"format": file_format}, "format", FP4_FORMATS[width][:1], path=path)
        return Scheme(layout="fp4", kind="e2m1", group=width, global_scale=FP4_FORMATS[width][1], divided=True)
    if strategy == "block" and weights.get("block_structure") not in ([128, 128], "128x128"):
        raise _unsupported(at + "block_structure", weights.get("block_structure"), (), "supported: [128, 128]")
    rows = {"tensor": 0, "block": 128}.get(strategy, 1)
    if file_format == "pack-quantized":
        if kind != "int" or rows != 1:
            raise _unsupported(at + "strategy", strategy, ("channel", "group"))
        return Scheme(
            layout="packed",
            kind="int4" if bits == 4 else "int8",
            group=width,
            symmetric=symmetric,
            reordered=weights.get("actorder") in ("group", "dynamic"),
            activations=activations and bits == 8,
        )
    if bits != 8:
        raise _unsupported("format", file_format, PACKED)
    return Scheme(
        layout="plain",
        kind="e4m3" if kind == "float" else "int8",
        group=128 if strategy == "block" else width,
        rows=rows,
        symmetric=symmetric,
        activations=activations,
    )


_Kind: TypeAlias = Literal["int8", "int4"]
# name, kind, values of a group
_WITH_MINIMA: tuple[tuple[str, _Kind, int], ...] = (
    ("Q2_K", "int8", 16), ("Q4_1", "int4", 32), ("Q4_K", "int4", 32), ("Q5_1", "int8", 32), ("Q5_K", "int8", 32),
)  # fmt: skip
# Types of GGUF that stay quantised in memory.
GGUF_SCHEMES = (
    {name: Scheme(layout="gguf", kind="int8", group=32, block=name) for name in ("Q8_0", "Q5_0", "IQ4_NL", "IQ4_XS")}
    | {
        "Q4_0": Scheme(layout="gguf", kind="int4", group=32, block="Q4_0"),
        "MXFP4": Scheme(layout="gguf", kind="e2m1", group=32, block="MXFP4"),
        "Q3_K": Scheme(layout="gguf", kind="int8", group=16, block="Q3_K"),
        "Q6_K": Scheme(layout="gguf", kind="int8", group=16, block="Q6_K"),
    }
    | {
        name: Scheme(layout="gguf", kind=kind, group=group, block=name, minima=True)
        for name, kind, group in _WITH_MINIMA
    }
)


def _gguf(config: Mapping[str, Any]) -> Quantization:
    """The blocks of GGUF files that are kept as they are, by module."""
    types = config.get("types")
    if not isinstance(types, dict):
        raise ModelError(f"'{WHERE}': 'types' must be an object, got {types!r}")
    if unknown := types.keys() - GGUF_SCHEMES.keys():
        raise _unsupported("types", min(unknown), tuple(GGUF_SCHEMES))
    return NamedQuantization(
        method="gguf", schemes=tuple((_names(types, name), scheme) for name, scheme in GGUF_SCHEMES.items())
    )


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
    "gguf": _gguf,
}
