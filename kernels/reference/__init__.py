"""Every operation in plain PyTorch: its specification, and the oracle for the tests of all backends.

Values are computed in float32 (float64 for float64 inputs) and rounded where Hugging Face's models round. A layer's KV
cache is one tensor [2, num_blocks, num_kv_heads, block_size, head_dim]; its two halves are `key_cache` and
`value_cache`. A slot is block_id * block_size + offset; slot -1 means "do not write". Unwritten slots may hold
anything, including NaN.

A cache of torch.float8_e4m3fn holds K / kv_scale[0] and V / kv_scale[1], saturated at ±448, with a scale within
KV_SCALES for each KV head: kv_scale [2, Hkv] float32, which is None for caches of other dtypes.
`paged_attention_prefill` also takes it with wide pages: those that `widen_pages` and `rope_and_store` made with such a
cache hold the same numbers in another dtype.
"""

from kernels.reference.activation import (
    activation,
    add_scaled,
    gate_and_mul,
    gated,
    gelu_and_mul,
    scale,
    sigmoid,
    silu_and_mul,
)
from kernels.reference.attention import paged_attention_decode, paged_attention_prefill
from kernels.reference.blocks import gather_blocks, scatter_blocks
from kernels.reference.index import index_scores, store_index_keys
from kernels.reference.kda import kda
from kernels.reference.kv_cache import store_kv, to_e4m3, widen_pages
from kernels.reference.latent import (
    absorb_and_store,
    head_linear,
    latent_attention_decode,
    latent_attention_prefill,
    rotate_and_store,
)
from kernels.reference.lora import adapted_linear, adapter_slots, extended_weight, fuses_adapters, lora_add
from kernels.reference.mamba2 import grouped_rms_norm, mamba2
from kernels.reference.matmul import (
    linear,
    linear_add,
    linear_add_norm,
    linear_gated,
    norm_gated,
    norm_linear,
    norms_apart,
    pack_blocks,
    pack_weight,
    quantized_input,
)
from kernels.reference.moe import (
    adapted_experts,
    compress_experts,
    experts,
    experts_add_norm,
    norm_route,
    pack_experts,
    pack_router,
    route,
    route_norms_apart,
)
from kernels.reference.norm import add_rms_norm, rms_norm, rms_norm_add
from kernels.reference.quantized import dequantize, pack_e2m1, pack_nibbles, quantize_groups, quantize_rows
from kernels.reference.recurrent import causal_conv, delta_rule, gated_rms_norm, short_conv
from kernels.reference.rotary import rope, rope_and_store
from kernels.reference.sampling import (
    best_keys,
    best_tokens,
    greedy_sample,
    gumbel,
    mark_faults,
    mask_logits,
    random_bits,
    sample,
    sampling_thresholds,
    store_tokens,
    token_logprobs,
)
from kernels.reference.split_sums import (
    add_pieces,
    adds_split_sums,
    split_experts,
    split_linear,
    split_linear_add,
    split_weight,
)
from kernels.reference.step import embedding, plan_decode, plan_prefix, prepare_step
from kernels.reference.vision import full_attention, rotate_halves
from kernels.reference.vocab_lora import adapt_embedding, retrained_logits
