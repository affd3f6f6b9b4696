"""Families of Deci and NVIDIA's Puzzle, whose layers differ: some lack attention, an MLP, or both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.models.errors import ModelError
from engine.models.families.common import MAX_LAYERS, attention, decoder, dense, num_layers, with_names
from engine.models.families.fields import Config, flag, integer, number
from engine.models.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, Norms

NO_MLP = Norms(before_mlp="")
MLP, NORM = ".mlp.", ".post_attention_layernorm."


def deci(config: Config) -> ModelSpec:
    """Llama-Nemotron (Super, Ultra) and DeciLM: Llama's layers with KV heads and sizes of their own, or left out.

    The MLP of a layer without attention becomes a further one of the layer before it.
    """
    blocks = _blocks(config)
    usual = {**config, "num_hidden_layers": len(blocks), "num_key_value_heads": 1, "intermediate_size": 1}
    kept: list[LayerSpec] = []
    names: list[tuple[str, str]] = []
    for i, block in enumerate(blocks):
        mixer, mlp = block.attention(usual), block.mlp(usual)
        source = f"^model.layers.{i}"
        if mixer is not None:
            names.append((f"{source}.", f"model.layers.{len(kept)}."))
            kept.append(LayerSpec(mixer=mixer, mlp=mlp, norms=NO_MLP if mlp is None else Norms()))
        elif mlp is not None:
            if not kept:
                raise ModelError("'block_configs': the first layer must have attention")
            before, last = f"model.layers.{len(kept) - 1}", kept[-1]
            if last.mlp is None:
                kept[-1] = replace(last, mlp=mlp, norms=Norms())
                names += [(source + MLP, before + MLP), (source + NORM, before + NORM)]
            else:
                further = f"{before}.further.{len(last.further)}"
                kept[-1] = replace(last, further=(*last.further, mlp))
                names += [(source + MLP, further + MLP), (source + NORM, f"{further}.norm.")]
    spec = decoder(
        {**usual, "num_hidden_layers": len(kept)}, [layer.mixer for layer in kept], [dense(usual)] * len(kept)
    )
    spec = replace(spec, layers=tuple(kept))
    return with_names(spec, tuple(pair for pair in names if pair[0] != f"^{pair[1]}"))


@dataclass(frozen=True, slots=True)
class _Block:
    """A layer: its KV heads and the size of its MLP; 0: there is none."""

    kv_heads: int
    size: int

    def attention(self, config: Config) -> AttentionSpec | None:
        bias = flag(config, "attention_bias")
        usual = {**config, "num_key_value_heads": self.kv_heads}
        return attention(usual, qkv_bias=bias, o_bias=bias) if self.kv_heads else None

    def mlp(self, config: Config) -> DenseSpec | None:
        usual = {**config, "intermediate_size": self.size}
        return dense(usual, bias=flag(config, "mlp_bias")) if self.size else None


def _blocks(config: Config) -> list[_Block]:
    blocks, heads = config.get("block_configs"), integer(config, "num_attention_heads")
    if blocks is None:  # DeciLM of 2023
        counts = config.get("num_key_value_heads_per_layer") or [integer(config, "num_key_value_heads", heads)] * (
            num_layers(config)
        )
        if not isinstance(counts, list) or not all(isinstance(n, int) and 0 < n <= heads for n in counts):
            raise ModelError(f"'num_key_value_heads_per_layer' must be a list of numbers of heads, got {counts!r}")
        return [_Block(n, integer(config, "intermediate_size")) for n in counts]
    if not isinstance(blocks, list) or not 0 < len(blocks) <= MAX_LAYERS:
        raise ModelError("'block_configs' must be a list of layers")
    return [_block(config, block, f"block_configs.{i}", heads) for i, block in enumerate(blocks)]


def _block(config: Config, block: Any, path: str, heads: int) -> _Block:
    parts: dict[str, Config] = {}
    for name in ("attention", "ffn"):
        part = block.get(name) if isinstance(block, dict) else None
        if not isinstance(part, dict):
            raise ModelError(f"'{path}.{name}' must be an object, got {part!r}")
        parts[name] = part
        for field in ("replace_with_linear", "window_length", "sparsify", "num_sink_tokens"):
            if part.get(field):
                raise ModelError(f"'{path}.{name}.{field}' is not supported")
    mixer, mlp = parts["attention"], parts["ffn"]
    size = kv_heads = 0
    if not flag(mixer, "no_op"):
        kv_heads, rest = divmod(heads, integer(mixer, "n_heads_in_group"))
        if rest or not kv_heads:
            raise ModelError(f"'{path}.attention.n_heads_in_group' must divide the number of heads, {heads}")
    if not flag(mlp, "no_op"):
        size = mlp.get("intermediate_size") or int(2 * number(mlp, "ffn_mult") * integer(config, "hidden_size") / 3)
        size = integer({"intermediate_size": size}, "intermediate_size")
        size = size if mlp.get("intermediate_size") else -(-size // 256) * 256
    return _Block(kv_heads, size)
