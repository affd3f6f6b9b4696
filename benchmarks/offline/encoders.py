"""Encoders on a CPU beside sentence-transformers: 64 texts of 20 to 300 tokens, interleaved, the best of all rounds.

python -m benchmarks.offline.encoders
PYTHONPATH=FOLDER python -m benchmarks.offline.encoders    # FOLDER: where sentence-transformers is installed

Without sentence-transformers, what its `encode` does is written out: transformers' model, batches of 32 texts sorted by
length and padded. Models have random weights. CPU seconds are of all threads, so a busy machine changes them least.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch

from engine import LLM
from engine.flags import Parser, add_flags, flag, load

SHAPES: dict[str, dict[str, int]] = {
    "minilm-l6": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bge-small": {"hidden_size": 384, "num_hidden_layers": 12, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
}
NUM_WORDS = 30000


@dataclass(frozen=True)
class Flags:
    """Comparison."""

    shapes: tuple[str, ...] = flag(("bge-small", "bge-base"), f"of {', '.join(SHAPES)}")
    texts: int = flag(64, "texts of 20 to 300 tokens", at_least=1)
    rounds: int = flag(5, "how often each computes all texts, in turns", at_least=1)
    threads: int = flag(os.cpu_count() or 1, "of each", at_least=1)
    dtype: str = flag("float32", "of both", choices=("float32", "bfloat16"))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add_flags(parser, Flags)
    (flags,) = load(parser.parse_args(arguments), Flags)
    os.environ["OMP_NUM_THREADS"] = str(flags.threads)
    torch.set_num_threads(flags.threads)
    generator = random.Random(0)
    texts = [
        " ".join(f"w{generator.randrange(NUM_WORDS)}" for _ in range(generator.randint(18, 298)))
        for _ in range(flags.texts)
    ]
    print(f"{flags.texts} texts, {sum(len(text.split()) + 2 for text in texts)} tokens, {flags.threads} threads")
    for shape in flags.shapes:
        with tempfile.TemporaryDirectory() as folder:
            _write_model(Path(folder), SHAPES[shape])
            _compare(shape, folder, texts, flags)
    return 0


def _compare(shape: str, folder: str, texts: list[str], flags: Flags) -> None:
    other_name, other = _other(folder, flags.dtype)
    llm = LLM(model=folder, device="cpu", dtype=flags.dtype, max_num_batched_tokens=4096)

    def own(texts: list[str]) -> torch.Tensor:
        return torch.tensor([each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)])

    engines = {"quire": own, other_name: other}
    vectors = {name: engine(texts[:8]) for name, engine in engines.items()}
    difference = float((vectors["quire"] - vectors[other_name].float()).abs().max())
    wall, cpu = ({name: float("inf") for name in engines} for _ in range(2))
    for _ in range(flags.rounds):
        for name, engine in engines.items():
            begin, used = time.perf_counter(), time.process_time()
            engine(texts)
            wall[name] = min(wall[name], time.perf_counter() - begin)
            cpu[name] = min(cpu[name], time.process_time() - used)
    llm.close()
    for name in engines:
        print(f"{shape:10} {name:22} {len(texts) / wall[name]:7.1f} texts/s, {cpu[name]:6.2f} CPU s")
    ratios = wall[other_name] / wall["quire"], cpu[other_name] / cpu["quire"]
    print(f"{shape:10} quire ÷ {other_name}: {ratios[0]:.2f} by time, {ratios[1]:.2f} by CPU time; "
          f"largest difference {difference:.1e}")  # fmt: skip


def _other(folder: str, dtype: str) -> tuple[str, Callable[[list[str]], torch.Tensor]]:
    """Return sentence-transformers, or what it does, with its name."""
    if importlib.util.find_spec("sentence_transformers") is not None:
        library = importlib.import_module("sentence_transformers")
        model = library.SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
        return "sentence-transformers", lambda texts: model.encode(texts, convert_to_tensor=True)
    import transformers

    body = transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    backend = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

    @torch.inference_mode()
    def encode(texts: list[str]) -> torch.Tensor:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found: list[Any] = [None] * len(texts)
        for start in range(0, len(order), 32):
            ids = [torch.tensor(backend.encode(texts[i]).ids) for i in order[start : start + 32]]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
            states = body(padded, attention_mask=mask).last_hidden_state.float()
            means = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
            for i, vector in zip(order[start : start + 32], torch.nn.functional.normalize(means), strict=True):
                found[i] = vector
        return torch.stack(found)

    return "transformers, padded", encode


def _write_model(folder: Path, shape: dict[str, int]) -> None:
    """Write a random model and a tokenizer with a token for each word."""
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(NUM_WORDS))]
    config = transformers.BertConfig(
        **shape, vocab_size=len(words), num_attention_heads=shape["hidden_size"] // 32 if shape["hidden_size"] < 768
        else 12, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.save(str(folder / "tokenizer.json"))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizerFast", **special}))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": shape["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


if __name__ == "__main__":
    sys.exit(main())
