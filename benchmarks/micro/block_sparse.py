"""Block-sparse attention through Phi-3-small's layers beside dense attention: decode and prefill at a long context.

    python -m benchmarks.micro.block_sparse                       32k, a quarter of the blocks (22.5 %)
    python -m benchmarks.micro.block_sparse --stride 8 --each-head    the published pattern, in all layers

Weights are random, and all layers attend alike. What attention takes is what a step takes at the long context, less
what one with as many tokens and short contexts takes: everything else is the same in both. Times are the least of
several.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import SHAPES, model_folder
from benchmarks.workloads import MAX_TOKEN_ID
from engine import LLM, SamplingParams

SHORT = 128  # tokens of a short context


@dataclass(frozen=True, slots=True)
class Seconds:
    """Least times of one model."""

    decode: float  # of a step at the long context
    decode_short: float
    prefill: float  # of one prompt
    prefill_short: float  # of as many tokens, as short prompts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="phi-3-small", help="a shape, or a folder with a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--requests", type=int, default=16, help="that decode at once")
    parser.add_argument("--steps", type=int, default=64, help="of decode that are timed")
    parser.add_argument("--local", type=int, default=16, help="newest blocks that each query sees")
    parser.add_argument("--stride", type=int, default=5, help="of the older blocks, every so many-th is seen")
    parser.add_argument("--each-head", action="store_true", help="each head sees other older blocks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    args = parser.parse_args(argv)
    sparse = {
        "blocksparse_num_local_blocks": args.local,
        "blocksparse_vert_stride": args.stride,
        "blocksparse_homo_head_pattern": not args.each_head,
    }
    found = {
        name: _measure(args, changes | {"num_hidden_layers": args.layers})
        for name, changes in {
            "dense": {"dense_attention_every_n_layers": 1},
            "sparse": sparse | {"dense_attention_every_n_layers": args.layers + 1},
        }.items()
    }
    size = int(SHAPES["phi-3-small"]["blocksparse_block_size"])
    blocks = -(-args.context // size)
    seen = min(blocks, args.local) + max(blocks - args.local, 0) / args.stride
    print(f"{args.layers} layers, {args.context:,} tokens, a head sees {seen / blocks:.1%} of the blocks")
    for work, what in (("decode", f"a step of {args.requests} requests"), ("prefill", "a prompt")):
        whole = {name: getattr(each, work) for name, each in found.items()}
        rest = {name: getattr(each, f"{work}_short") for name, each in found.items()}
        attention = {name: max(whole[name] - rest[name], 1e-9) for name in found}
        print(
            f"{work}: {what} dense {1e3 * whole['dense']:.2f} ms, sparse {1e3 * whole['sparse']:.2f} ms: "
            f"{whole['dense'] / whole['sparse']:.2f} times as fast; attention {1e3 * attention['dense']:.2f} and "
            f"{1e3 * attention['sparse']:.2f} ms: {attention['dense'] / attention['sparse']:.2f} times"
        )
    return 0


def _measure(args: argparse.Namespace, changes: dict[str, Any]) -> Seconds:
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(args.model, Path(root))
        llm = LLM(
            model=str(folder), device=args.device, load_format="dummy", skip_tokenizer_init=True, hf_overrides=changes,
            max_model_len=args.context + args.steps + 16, max_num_seqs=max(args.requests, args.context // SHORT),
            gpu_memory_utilization=args.gpu_memory_utilization, enable_prefix_caching=True,
            speculative_config={"num_speculative_tokens": 0},
        )  # fmt: skip
        try:
            times = _Times(llm, args)
            return Seconds(
                times.decode(args.context),
                times.decode(SHORT),
                times.prefill([args.context]),
                times.prefill([SHORT] * (args.context // SHORT)),
            )
        finally:
            llm.close()


class _Times:
    """Times work on one engine."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self._llm, self._args, self._ids = llm, args, random.Random(0)

    def decode(self, context: int) -> float:
        """Return the seconds of a step: what more tokens take once the prompts are in the prefix cache."""
        prompts, steps = self._prompts([context] * self._args.requests), int(self._args.steps)
        self._run(prompts, 1 + steps)
        pairs = [(self._run(prompts, 1), self._run(prompts, 1 + steps)) for _ in range(self._args.rounds)]
        return (min(more for _, more in pairs) - min(one for one, _ in pairs)) / steps

    def prefill(self, lens: list[int]) -> float:
        """Return the seconds until prompts of these lengths, which are new each time, have their first token."""
        self._run(self._prompts(lens), 1)
        return min(self._run(self._prompts(lens), 1) for _ in range(self._args.rounds))

    def _run(self, prompts: list[list[int]], output_len: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin

    def _prompts(self, lens: list[int]) -> list[list[int]]:
        return [[self._ids.randint(0, MAX_TOKEN_ID) for _ in range(n)] for n in lens]


if __name__ == "__main__":
    sys.exit(main())
