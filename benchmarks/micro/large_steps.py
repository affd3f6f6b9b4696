"""Times what stands between the products of a large step of Gemma-3-12B, and a layer of it, in CUDA graphs.

    python -m benchmarks.micro.large_steps [--tokens 16384] [--layer]

Beside the time of moving each kernel's bytes at the speed of a copy. "apart": the residual sum, then the next norm, in two
kernels. `--layer`: also a whole layer but for its attention, both ways, alternately.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import kernels
from benchmarks.gpu import microseconds, need_gpus

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 3840, 15360, 16, 8, 256, 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
BANDWIDTH = 4.3e12  # bytes a second that an H200 copies; reads and writes are both counted
EPS = 1e-6


class Layer:
    """A layer's weights and one step's inputs, all random."""

    def __init__(self, tokens: int) -> None:
        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device="cuda") * scale).bfloat16()

        self.hidden, self.out, self.normed = (random(tokens, HIDDEN) for _ in range(3))
        self.packed, self.gate_up_out = random(tokens, QKV), random(tokens, 2 * INNER)
        self.before, self.after = (torch.rand(HIDDEN, device="cuda") + 0.5 for _ in range(2))
        self.head_norm = torch.rand(HEAD_DIM, device="cuda") + 0.5
        self.qkv, self.o = random(QKV, HIDDEN, scale=0.02), random(HIDDEN, HEADS * HEAD_DIM, scale=0.02)
        self.gate_up, self.down = random(2 * INNER, HIDDEN, scale=0.02), random(HIDDEN, INNER, scale=0.02)
        num_blocks = -(-tokens // BLOCK_SIZE)
        self.cache = random(2, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.positions = torch.arange(tokens, device="cuda")
        self.table = torch.randn(tokens, HEAD_DIM, device="cuda")

    def norm(self) -> Tensor:
        return kernels.rms_norm(self.hidden, self.before, EPS)

    def add(self, out: Tensor) -> Tensor:
        return kernels.rms_norm_add(self.hidden, out, self.after, EPS)

    def add_and_norm(self, out: Tensor) -> Tensor:
        return kernels.add_rms_norm(self.hidden, out, self.before, EPS, self.after, EPS)

    def add_and_norm_apart(self, out: Tensor) -> Tensor:
        self.add(out)
        return self.norm()

    def sum_and_norm(self) -> Tensor:
        """Of a model without a norm after the sublayer, whose ranks have summed its output."""
        return kernels.add_rms_norm(self.hidden, self.out, self.before, EPS)

    def rotate(self, packed: Tensor) -> Tensor:
        return kernels.rope_and_store(
            packed, self.positions, self.table, self.cache[0], self.cache[1], self.positions, num_heads=HEADS,
            num_kv_heads=KV_HEADS, q_norm=self.head_norm, k_norm=self.head_norm, eps=EPS,
        )  # fmt: skip

    def whole(self, add_and_norm: Callable[[Tensor], Tensor]) -> None:
        """All but the attention."""
        query = self.rotate(kernels.linear(self.normed, self.qkv))
        normed = add_and_norm(kernels.linear(query.flatten(1), self.o))
        inner = kernels.linear_gated(normed, self.gate_up, None, "gelu_tanh")
        add_and_norm(kernels.linear(inner, self.down))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layer", action="store_true")
    args = parser.parse_args(argv)
    need_gpus("benchmarks.micro.large_steps")
    torch.manual_seed(0)
    device = torch.device("cuda")
    layer = Layer(args.tokens)
    row = layer.hidden.nbytes
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (partial(layer.normed.copy_, layer.out), 2 * row),
        "rms_norm": (layer.norm, 2 * row),
        "rms_norm_add": (partial(layer.add, layer.out), 3 * row),
        "add_rms_norm after a norm": (partial(layer.add_and_norm, layer.out), 4 * row),
        "the same, apart": (partial(layer.add_and_norm_apart, layer.out), 5 * row),
        "add_rms_norm": (layer.sum_and_norm, 4 * row),
        "gate_and_mul, gelu": (partial(kernels.gate_and_mul, layer.gate_up_out, "gelu_tanh"), args.tokens * INNER * 6),
        "rope_and_store": (partial(layer.rotate, layer.packed), 2 * layer.packed.nbytes),
    }
    print(f"{torch.cuda.get_device_name()}, {args.tokens} tokens")
    for name, (call, num_bytes) in cases.items():
        us = microseconds(call, device)
        print(f"{name:26} {us:8.1f} us, {num_bytes / us / 1e6:5.2f} TB/s, floor {1e6 * num_bytes / BANDWIDTH:8.1f} us")
    if args.layer:
        ways = {"one kernel": layer.add_and_norm, "apart": layer.add_and_norm_apart}
        for _, (name, way) in itertools.product(range(3), ways.items()):
            us = microseconds(partial(layer.whole, way), device, calls=4)
            print(f"layer without attention, {name:10} {us:9.1f} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
