"""When an operation changes its kernel: the one version gate, and every limit on sizes by which the operations choose.

A kernel says what it can compute (`supports`) and how it cuts a shape into tiles (`config`); the modules beside this
one say which kernel computes what. Limits were measured on an H200 in CUDA graphs of whole layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

GLUON = triton.__version__.startswith(
    ("3.6.", "3.7.")
)  # Gluon's interface is not stable: the versions that were checked


@dataclass(frozen=True, slots=True)
class Choice:
    """Numbers of tokens are those of a step; each limit is the last size at which the kernel that it names runs."""

    # Linear layers.
    small_batch_tokens: int = 16  # Gluon's small-batch kernels: one tile of the tensor core
    small_batch_weight: int = 1 << 24  # elements of a float weight, from 9 tokens on: every program reads all of x
    small_batch_outputs: int = 32768  # beyond (output heads) these kernels save little beside the time of the GEMM
    cuda_core_tokens: int = 2  # the Triton kernel for float weights on CUDA cores; then cuBLAS
    # With LoRA adapters. What is off was slower, or waits for a check: `python -m tests.gpu lora`.
    adapted_tokens: int = 8  # Gluon's small-batch kernel with LoRA adapters; then these have kernels of their own
    adapted_rank: int = 16  # of adapters in that kernel
    adapted_tokens_first: bool = False  # that kernel where weights are the columns of a tile (small layers)
    extended_tokens: int = 1023  # the GEMM computes that of all slots: weights of layers are stored with their rows
    extended_wide: bool = True  # then the programs that are left compute more outputs
    extended_share: float = 0.26  # at most so many rows for each of the weight's
    add_norm_tokens: int = 512  # after cuBLAS, the norm's kernel adds to the residual stream; then cuBLAS does
    # Deterministic mode. Checked by `python -m tests.gpu determinism`.
    fixed_ranges: bool = True  # attention by ranges of keys, which programs share in decodes of few sequences
    fixed_row_tokens: int = 8  # Gluon's GEMM whose warps multiply eight rows; then Triton's
    fixed_few_tokens: int = 64  # Triton's GEMM with one order of sums; then Gluon's of many
    fixed_small_weight: int = 1 << 23  # elements of a weight whose rows are divided among more programs for few tokens
    # Forms that are off until they ran: `tests.gpu.deterministic_speed.FORMS_BY_NAME`.
    fixed_overlaps: bool = False  # Gluon's GEMM of many tokens overlaps a step with the one before
    fixed_early: bool = False  # decodes ask for keys before the kernel ahead has ended
    fixed_prompt_stages: int = 3  # of a tile of queries of a prompt
    fixed_stages: int = 2  # of a program that has a sequence's ranges alone
    fixed_shared_stages: int = 2  # of those that share them
    # Quantised weights.
    scaled_tokens: int = 256  # Gluon's GEMM of e4m3 codes; then cuBLAS
    scaled_min_tiles: int = 66  # with SwiGLU, whose K is not split: fewer leave too many multiprocessors idle
    weight_only_tokens: int = 512  # Gluon's weight-only GEMM; then cuBLAS on the dequantised weight
    weight_only_swiglu_tokens: int = 2048  # with SwiGLU, which cuBLAS leaves to another kernel
    portable_weight_only_tokens: int = 64  # Triton's weight-only GEMM; then cuBLAS on the dequantised weight
    block_order: bool = True  # GGUF's blocks as they are in the file, in another order
    block_small_batch_tokens: int = 8  # the kernel for few tokens with these; then Gluon's weight-only GEMM for them
    block_gemm_tokens: int = 128  # Triton's GEMM with these blocks; then cuBLAS on the dequantised weight
    # MoE. Limits of Gluon's small-batch kernel depend on what comes after it.
    experts_small_batch_tokens: int = 8  # the columns of one tile of the tensor core
    experts_float_tokens: int = 3  # float weights; then Triton's grouped GEMM
    experts_e2m1_tokens: int = 4  # e2m1 codes; then Gluon's weight-only GEMM
    experts_panel_tokens: int = 1  # weights in panels; then Gluon's GEMM of codes by codes
    experts_compressed_small_batch_tokens: int = 4  # compressed weights; then Gluon's grouped GEMM for them
    experts_compressed_tokens: int = 4096  # that one; then all weights are decompressed first
    experts_float32_tokens: int = 32  # experts' outputs stay float32 until they are summed
    # Encoders of images: `python -m tests.gpu images --match "images: speed"`.
    rotated_patches: int = 4096  # from here one kernel rotates queries and keys in place, instead of nine of PyTorch
    cudnn_attention: bool = False  # cuDNN's attention instead of PyTorch's own choice: slower for one image
    # Routers.
    router_cuda_core_tokens: int = 16  # not worth a tile of the tensor core
    router_triton_tokens: int = 512  # then cuBLAS, which interrupts the chain of dependent launches


CHOICE = Choice()
