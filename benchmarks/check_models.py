"""Every model family against transformers on small random checkpoints: `python -m benchmarks.check_models`.

Knows both sides and a toy paged KV cache; no scheduler, no sampler. The tests use the same functions on the CPU.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report.result_files import save
from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.models.families import read_spec
from engine.models.weights import load_model

VOCAB = 384
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
# name → (transformers' model class without "ForCausalLM", what its configuration adds to SHAPE)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa4-llama3": ("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 80},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.2, "beta_fast": 16, "truncate": False}}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "mistral-window": ("Mistral", {"sliding_window": 24, "head_dim": 64}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen3-window": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
PROMPT_LENGTHS = (1, 13, 70, 33)  # one beyond the window; within 80, where the dynamic case begins to stretch
NUM_TOKENS = 64


# A decoder and a paged KV cache


@dataclass
class _Sequence:
    row: int
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class PagedRunner:
    """Runs ragged token sequences through a Decoder, over a paged KV cache that is made to find mistakes.

    Block ids and block-table rows are shuffled; slots that were never written, and the block that stands in the unused
    part of block tables, are NaN.
    """

    def __init__(self, model: Decoder, num_sequences: int, *, block_size: int = 16, max_len: int = 256) -> None:
        spec, weight = model.spec, model.norm.weight
        self.model, self.device, self.block_size = model, weight.device, block_size
        max_blocks = -(-max_len // block_size)
        num_blocks = num_sequences * max_blocks + 1
        shape = (2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self.kv_cache = [
            torch.full(shape, torch.nan, dtype=weight.dtype, device=self.device) for _ in range(spec.num_layers)
        ]
        shuffle = random.Random(0)
        self.free = shuffle.sample(range(num_blocks), num_blocks)
        self.rows = shuffle.sample(range(num_sequences + 2), num_sequences)
        self.block_tables = torch.full((num_sequences + 2, max_blocks), self.free.pop(), dtype=torch.int32)

    def start(self, token_ids: list[int]) -> _Sequence:
        return _Sequence(self.rows.pop(), list(token_ids))

    def step(self, shares: list[tuple[_Sequence, int]]) -> list[Tensor]:
        """Compute the next n tokens of each sequence, in one batch -> logits [n, vocab] of each."""
        shares = [share for share in shares if share[1]]
        order = sorted(range(len(shares)), key=lambda i: shares[i][1] > 1)  # single tokens first
        tokens, positions, slots, starts, lengths, rows = [], [], [], [0], [], []
        for sequence, count in (shares[i] for i in order):
            end = sequence.num_computed + count
            while len(sequence.blocks) * self.block_size < end:
                self.block_tables[sequence.row, len(sequence.blocks)] = self.free[-1]
                sequence.blocks.append(self.free.pop())
            for position in range(sequence.num_computed, end):
                block, offset = divmod(position, self.block_size)
                tokens.append(sequence.token_ids[position])
                positions.append(position)
                slots.append(sequence.blocks[block] * self.block_size + offset)
            sequence.num_computed = end
            starts.append(len(tokens))
            lengths.append(end)
            rows.append(sequence.row)
        metadata = AttentionMetadata(
            num_decodes=sum(count == 1 for _, count in shares),
            rows=self._tensor(rows),
            block_tables=self.block_tables.to(self.device),
            query_start=self._tensor(starts),
            context_lens=self._tensor(lengths),
            slot_mapping=self._tensor(slots, torch.int64),
        )
        with torch.inference_mode():
            hidden = self.model(self._tensor(tokens), self._tensor(positions), self.kv_cache, metadata)
            logits = self.model.logits(hidden).split([shares[i][1] for i in order])
        return [logits[order.index(i)] for i in range(len(shares))]

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass
class Decoded:
    """One prompt continued: the generated tokens, and the logits [len(prompt) + num_tokens - 1, vocab] on the way."""

    token_ids: list[int]
    logits: Tensor


def decode(
    model: Decoder,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    chunk: int = 10**9,
    forced: list[list[int]] | None = None,
    block_size: int = 16,
) -> list[Decoded]:
    """All prompts in one batch, at most `chunk` tokens of each in a step, continued greedily or by `forced` tokens."""
    longest = max(map(len, prompts)) + num_tokens
    runner = PagedRunner(model, len(prompts), block_size=block_size, max_len=longest)
    sequences = [runner.start(prompt) for prompt in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    while active := [i for i, s in enumerate(sequences) if len(s.token_ids) < len(prompts[i]) + num_tokens]:
        shares = [(s, min(chunk, len(s.token_ids) - s.num_computed)) for s in (sequences[i] for i in active)]
        for i, logits in zip(active, runner.step(shares), strict=True):
            sequence, generated = sequences[i], len(sequences[i].token_ids) - len(prompts[i])
            rows[i].append(logits)
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(forced[i][generated] if forced else int(logits[-1].argmax()))
    tokens = [s.token_ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
    return [Decoded(token_ids, torch.cat(logits)) for token_ids, logits in zip(tokens, rows, strict=True)]


# transformers


def make_checkpoint(name: str, folder: Path, **save_options: Any) -> Any:
    """The random transformers model of a case, in float32 on the CPU, also saved in `folder`. Logits are about 1."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, changes = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.2 if parameter.dim() == 1 else parameter.shape[1] ** -0.5)
    model.save_pretrained(folder, **save_options)
    return model


@torch.inference_mode()
def transformers_decode(model: Any, prompt: list[int], num_tokens: int, forced: list[int] | None = None) -> Decoded:
    """The same by transformers, alone and token by token over its own cache."""
    tokens: list[int] = []
    rows: list[Tensor] = []
    inputs, cache = prompt, None
    while True:
        ids = torch.tensor([inputs], device=model.device)
        output = model(ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        rows.append(output.logits[0])
        tokens.append(forced[len(tokens)] if forced else int(rows[-1][-1].argmax()))
        if len(tokens) == num_tokens:
            return Decoded(tokens, torch.cat(rows))
        inputs = tokens[-1:]


# The comparison


def make_prompts() -> list[list[int]]:
    shuffle = random.Random(1)
    return [[shuffle.randrange(VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]


def check_family(name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One case on `device` in `dtype`, ragged prompts in one batch, whole and chunked, against transformers in float32.

    error, transformers_error: relative RMS of the logits' error, ours and that of transformers in the same dtype, both
    fed the tokens of the float32 run. max_error: our largest absolute one. greedy_equal: our own tokens are those of
    the float32 run.
    """
    import transformers

    prompts = make_prompts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model32 = make_checkpoint(name, folder).to(device)
        expected = [transformers_decode(model32, prompt, NUM_TOKENS) for prompt in prompts]
        tokens = [e.token_ids for e in expected]
        if dtype is torch.float32:
            theirs = expected
        else:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
            theirs = [transformers_decode(loaded, p, NUM_TOKENS, t) for p, t in zip(prompts, tokens, strict=True)]
        model = load_model(folder, read_spec(folder), dtype=dtype, device=device, progress=False, max_model_len=256)
    runs = [decode(model, prompts, NUM_TOKENS, chunk=chunk, forced=tokens) for chunk in (256, 11)]
    greedy = [d.token_ids for d in decode(model, prompts, NUM_TOKENS, block_size=64)]
    return {
        "error": max(_relative_error(run, expected) for run in runs),
        "transformers_error": _relative_error(theirs, expected),
        "max_error": max((_joined(run) - _joined(expected)).abs().max().item() for run in runs),
        "greedy_equal": greedy == tokens,
    }


def _joined(decoded: list[Decoded]) -> Tensor:
    return torch.cat([d.logits for d in decoded]).float()


def _relative_error(decoded: list[Decoded], expected: list[Decoded]) -> float:
    want = _joined(expected)
    return ((_joined(decoded) - want).norm() / want.norm()).item()


def passes(result: dict[str, Any], dtype: torch.dtype) -> bool:
    """float32: logits within 1e-4 and equal greedy tokens. Else: error at most 1.5 times transformers' own."""
    if dtype is torch.float32:
        return result["max_error"] <= 1e-4 and result["greedy_equal"]
    return result["error"] <= 1.5 * result["transformers_error"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--save", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    results = {}
    for name in arguments.cases:
        result = check_family(name, arguments.device, dtype)
        results[name] = {**result, "passes": passes(result, dtype)}
        print(f"{name:20}", *(f"{k}={v:.2e}" if isinstance(v, float) else f"{k}={v}" for k, v in results[name].items()))
    if arguments.save:
        save({"dtype": arguments.dtype, "results": results}, arguments.save)
    return 0 if all(result["passes"] for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
