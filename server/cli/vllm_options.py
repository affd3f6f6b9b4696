"""Advice for options of `vllm serve` that Quire does not have."""

from __future__ import annotations

_ALWAYS = "Quire always does this; leave it out"
_ITSELF = "Quire chooses this automatically; leave it out"

ADVICE = {
    "--trust-remote-code": "code that comes with models is never executed; leave it out",
    "--hf-token": "set HF_TOKEN in the environment",
    "--tokenizer-mode": "there is only one mode; leave it out",
    "--override-generation-config": "set the parameters in requests, or give --generation-config a folder",
    "--enable-chunked-prefill": _ALWAYS,
    "--async-scheduling": _ALWAYS,
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-per-request-metrics": _ALWAYS,
    "--enable-reasoning": "the reasoning format is detected from the model; see --reasoning-parser",
    "--scheduling-policy": "scheduling always respects priorities; leave it out",
    "--disable-log-requests": "requests are not logged unless --enable-log-requests is given; leave it out",
    "--prefix-caching-hash-algo": _ITSELF,
    "--attention-backend": _ITSELF,
    "--compilation-config": _ITSELF,
    "-cc": _ITSELF,
    "-O": _ITSELF,
    "--guided-decoding-backend": _ITSELF,
    "--structured-outputs-config": _ITSELF,
    "--max-seq-len-to-capture": _ITSELF,
    "--num-scheduler-steps": _ITSELF,
    "--use-v2-block-manager": _ITSELF,
    "--cpu-offload-gb": "use --quantization fp8, --kv-cache-dtype fp8 or --tensor-parallel-size",
    "--swap-space": "preempted requests are recomputed; leave it out",
    "--enable-expert-parallel": "with --tensor-parallel-size, each rank holds whole experts; leave it out",
    "--fully-sharded-loras": _ITSELF,
    "--enable-lora-bias": "biases of adapters are always served; leave it out",
    "--lora-dtype": "adapters have the data type of the model; leave it out",
    "--speculative-model": "drafts, and the model that makes them, are set by --speculative-config (docs/drafts.md)",
    "--disable-fastapi-docs": "/docs requires an API key if the server does",
}
