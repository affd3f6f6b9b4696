"""Options of `vllm serve` that Quire does not have: what to do instead."""

from __future__ import annotations

_ALWAYS = "it always does that; leave it out"
_ITSELF = "Quire chooses that itself; leave it out"
_NOT_YET = "not supported yet"

ADVICE = {
    "--trust-remote-code": "code that comes with models is never run; leave it out",
    "--hf-token": "set HF_TOKEN in the environment",
    "--tokenizer-mode": "there is one tokenizer; leave it out",
    "--override-generation-config": "give the parameters in requests, or a folder to --generation-config",
    "--enable-chunked-prefill": _ALWAYS,
    "--async-scheduling": _ALWAYS,
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-per-request-metrics": _ALWAYS,
    "--enable-reasoning": "answers are parsed by the model's format; see --reasoning-parser",
    "--scheduling-policy": "a request's priority is always heeded; leave it out",
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
    "--api-server-count": "one API process serves the engine; leave it out",
    "--cpu-offload-gb": "use --quantization fp8, --kv-cache-dtype fp8 or --tensor-parallel-size",
    "--swap-space": "preempted requests are computed again; leave it out",
    "--enable-expert-parallel": "ranks hold whole experts with --tensor-parallel-size; leave it out",
    "--enable-lora": _NOT_YET,
    "--lora-modules": _NOT_YET,
    "--speculative-config": _NOT_YET,
    "--speculative-model": _NOT_YET,
    "--enable-sleep-mode": _NOT_YET,
    "--limit-mm-per-prompt": "models take text only; leave it out",
    "--disable-fastapi-docs": "/docs needs a key where the server asks for keys",
}
