"""Checks every kernel and model family on the GPU at hand: `python -m tests.gpu`, or `make gpu`.

    python -m tests.gpu                                    everything
    python -m tests.gpu attention products                 some parts, such as fit a limit of time
    python -m tests.gpu attention --match "head_dim 128"   those checks of a part whose name contains a text
    python -m tests.gpu attention --shard 1/4              a quarter of them: four processes compile at the same time
    python -m tests.gpu faults                             processes killed and stopped, on two GPUs (or --device cpu)
    python -m tests.gpu --json gpu.json                    results as JSON, too

Prints a line for each check: its error, and for many the time beside that in which the device could move the bytes that
the operation must move. The last line counts; the exit code is 1 when a check failed. Needs neither network nor pytest.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.gpu import need_gpus
from benchmarks.result_files import save
from engine.setup.machine import environment
from tests.gpu.attention import check_attention, check_many, check_rounding
from tests.gpu.blocks import check_blocks
from tests.gpu.checks import Checks
from tests.gpu.collectives import check_collectives
from tests.gpu.determinism import check_deterministic_engine, check_forms
from tests.gpu.deterministic_speed import (
    check_deterministic_decode_rows,
    check_deterministic_layer_times,
    check_deterministic_parts,
    check_deterministic_speed,
    check_deterministic_tiles,
    check_norms_of_sums,
)
from tests.gpu.drafters import check_drafter_speed, check_drafter_texts
from tests.gpu.drafts import check_draft_speed, check_draft_texts
from tests.gpu.elementwise import check_activation, check_norms, check_rotary
from tests.gpu.encoders import check_bidirectional, check_encoder_models
from tests.gpu.experts import check_experts
from tests.gpu.faults import check_lost_processes
from tests.gpu.formats import check_formats
from tests.gpu.gguf import check_block_layers
from tests.gpu.host_tier import check_file_texts, check_host_speed, check_host_texts
from tests.gpu.hybrids import check_hybrid_families, check_hybrids, check_recurrent
from tests.gpu.images import check_image_models, check_image_speed, check_rotations
from tests.gpu.latent import check_latent
from tests.gpu.lora import (
    check_expert_adapters,
    check_extended_weights,
    check_fused_adapters,
    check_lora_engine,
    check_lora_kernels,
    check_vocab_adapters,
)
from tests.gpu.models import check_families, check_graphs, check_phi3_small, check_story, check_windows
from tests.gpu.moe import check_expert_products, check_routers, check_sorted_pairs
from tests.gpu.neighbours import check_neighbours
from tests.gpu.plan import check_plan
from tests.gpu.prefill import check_codes, check_prefill
from tests.gpu.products import check_products
from tests.gpu.ranks import check_guided_stages, check_rank_files, check_ranks
from tests.gpu.sampling import check_distribution, check_faults, check_sampling
from tests.gpu.shared_attention import check_shared_attention
from tests.gpu.shared_prefix import check_shared_prefix
from tests.gpu.sleep import check_sleep_speed, check_sleep_texts
from tests.gpu.sparse import check_index, check_sparse_engines
from tests.gpu.weights import check_sent_weights
from tests.support.unwritten import unwritten_is_nan

PARTS: dict[str, tuple[Callable[[Checks], None], ...]] = {
    "attention": (check_attention, check_many, check_rounding),
    "prefill": (check_codes, check_prefill),
    "products": (check_products,),
    "formats": (check_formats,),
    "gguf": (check_block_layers,),
    "norms": (check_norms, check_activation),
    "rotary": (check_rotary,),
    "sampling": (check_sampling, check_faults, check_distribution),
    "blocks": (check_blocks,),
    "sleep": (check_sleep_texts, check_sleep_speed),
    "weights": (check_sent_weights,),
    "host": (check_host_texts, check_file_texts, check_host_speed),
    "families": (check_families, check_phi3_small),
    "moe": (check_routers, check_sorted_pairs, check_expert_products),
    "experts": (check_experts,),
    "latent": (check_latent,),
    "sparse": (check_index, check_sparse_engines),
    "lora": (
        check_fused_adapters,
        check_extended_weights,
        check_vocab_adapters,
        check_expert_adapters,
        check_lora_kernels,
        check_lora_engine,
    ),
    "windows": (check_windows,),
    "determinism": (
        check_forms,
        check_norms_of_sums,
        check_deterministic_parts,
        check_deterministic_tiles,
        check_deterministic_decode_rows,
        check_deterministic_layer_times,
        check_deterministic_engine,
        check_deterministic_speed,
    ),
    "drafters": (check_drafter_texts, check_drafter_speed),
    "shared": (check_shared_attention, check_shared_prefix),
    "drafts": (check_draft_texts, check_draft_speed),
    "hybrids": (check_recurrent, check_hybrid_families, check_hybrids),
    "images": (check_rotations, check_image_models, check_image_speed),
    "encoders": (check_bidirectional, check_encoder_models),
    "graphs": (check_graphs,),
    "story": (check_story,),
    "neighbours": (check_neighbours,),
    "collectives": (check_collectives,),
    "ranks": (check_ranks, check_rank_files, check_guided_stages),
    "faults": (check_lost_processes,),
    "plan": (check_plan,),
}


def shard_of(text: str) -> tuple[int, int]:
    """Parse I/N. Raises ValueError for anything but 1 ≤ I ≤ N."""
    this, count = map(int, text.split("/"))
    if not 1 <= this <= count:
        raise ValueError(text)
    return this, count


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (else all)")
    parser.add_argument("--match", default="", metavar="TEXT", help="only checks whose name contains it")
    parser.add_argument(
        "--shard", type=shard_of, default=(1, 1), metavar="I/N", help="of the checks, the I-th of N parts"
    )
    parser.add_argument(
        "--device",
        default="cuda",
        help="cpu: attention, prefill, products, formats, families, experts, lora, windows, drafters, drafts, story, "
        "ranks and faults only",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--json", metavar="FILE", help="where to save the results")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if args.device != "cpu":
        need_gpus("tests.gpu")
    checks = Checks(args.device, args.match, args.shard)
    for part in args.parts or PARTS:
        begin = time.perf_counter()
        torch.manual_seed(args.seed)
        with unwritten_is_nan():
            for check in PARTS[part]:
                check(checks)
        if args.device != "cpu":
            torch.cuda.empty_cache()
        print(f"part {part}: {time.perf_counter() - begin:.0f} s", flush=True)
    if args.json:
        results = [{**dataclasses.asdict(result), "passed": result.passed} for result in checks.results]
        save({"seed": args.seed, "results": results, "environment": environment()}, args.json)
    failed = [result for result in checks.results if not result.passed]
    for result in failed:
        print(f"FAILED: {result.name}: error {result.error:.1e}, at most {result.limit:.1e}")
    print(f"{len(checks.results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed or not checks.results else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
