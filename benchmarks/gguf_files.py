"""Models of random weights as llama.cpp reads them. Needs `pip install gguf`, and llama.cpp's llama-quantize."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.hybrid_gguf import HYBRIDS, layer_shapes, plain_config, write_settings
from engine.errors import ConfigError

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", **HYBRIDS}


def gguf_file(folder: Path, kind: str, quantize: Path, into: Path) -> Path:
    """GGUF file in `into` of the model in `folder`, in a type of llama-quantize or "f32"; made if absent."""
    path = into / f"{folder.name}-{kind}.gguf"
    if path.exists():
        return path
    into.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    if kind == "f32":
        _write(json.loads((folder / "config.json").read_text(encoding="utf-8")), part)
    else:
        floats = gguf_file(folder, "f32", quantize, into)
        made = subprocess.run([str(quantize), str(floats), str(part), kind.upper()], capture_output=True, text=True)
        if made.returncode:
            raise ConfigError(f"llama-quantize cannot make {path}: {made.stderr.strip()[-300:]}")
    return part.replace(path)


def _write(config: dict[str, Any], path: Path) -> None:
    """Float32 weights of standard deviation 0.02, and no tokenizer."""
    try:
        import gguf
        import numpy as np
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install gguf") from None
    name = config["architectures"][0]
    if name not in ARCHITECTURES:
        raise ConfigError(f"GGUF files can be made of {', '.join(ARCHITECTURES)}, not of {name}")
    writer, random = gguf.GGUFWriter(path, ARCHITECTURES[name]), np.random.default_rng(0)
    if name in HYBRIDS:
        config = plain_config(config)
        write_settings(writer, config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("kv_counts", config["num_key_value_heads"]))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(config.get("rotary_dim", head_dim))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for tensor, shape in _shapes(config, head_dim):
        values = (
            random.standard_normal(shape, dtype=np.float32) * np.float32(0.02) if len(shape) > 1 else np.ones(shape)
        )
        sign = -1 if tensor.endswith("ssm_a") else 1  # a decay
        writer.add_tensor(tensor, (sign * values).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(config: dict[str, Any], head_dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names of tensors and their shapes. config: of hybrids, as `plain_config` returns it."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "attn_q": (query, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
        "attn_output": (hidden, query), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip
    if config["architectures"][0] == "Qwen3ForCausalLM":
        layer |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    name, plain = config["architectures"][0], [(f"{name}.weight", shape) for name, shape in layer.items()]
    yield "token_embd.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        own = layer_shapes(config, i, head_dim) if name in HYBRIDS else plain
        yield from ((f"blk.{i}.{part}", shape) for part, shape in own)
    yield "token_embd_norm.weight" if name == "Lfm2ForCausalLM" else "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (vocab, hidden)
