"""Weights that another process sends: texts are those of an engine that starts with them.

python -m tests.gpu.weights FOLDER ADDRESS    sends a checkpoint's tensors, from the last GPU if there is one
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.setup.weight_transfer import BACKENDS, receive_weights, send_weights
from tests.gpu.checks import Checks
from tests.oracles.families import VOCAB, make_checkpoint

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
FAMILIES = ("qwen3", "lfm2")
LARGE = {"large": (8, 4096, 32768)}  # 2 GiB in bfloat16
LEAST_RATE = 1e9  # bytes a second


def check_sent_weights(checks: Checks) -> None:
    """By NCCL from one GPU to another, where there are two, and by gloo."""
    if importlib.util.find_spec("transformers") is None:
        print("left out: weights from another process (transformers is not installed)")
        return
    for backend in BACKENDS:
        if backend == "nccl" and torch.cuda.device_count() < 2:
            print("left out: weights over NCCL (there are no two GPUs)")
            continue
        for name in FAMILIES:
            if checks.wants(f"weights by {backend}: {name}"):
                _check_texts(checks, backend, name)
        if checks.device != "cpu" and checks.wants(f"weights by {backend}: speed"):
            _check_speed(checks, backend)


def _check_texts(checks: Checks, backend: str, name: str) -> None:
    prompts = [{"prompt_token_ids": [(7 * i * i + n) % VOCAB for i in range(50 + n)]} for n in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        for path in (first, second):
            path.mkdir()
            make_checkpoint(name, path)
        stored = load_file(second / "model.safetensors")
        changed = {key: tensor.flip(0).contiguous() for key, tensor in stored.items()}
        save_file(changed, second / "model.safetensors", {"format": "pt"})
        found = []
        for path in (second, first):
            llm = LLM(
                model=str(path), device=checks.device, dtype="float32", skip_tokenizer_init=True, max_model_len=256,
                max_num_seqs=4, num_gpu_blocks_override=64,
            )  # fmt: skip
            if path == first:
                with _sender(backend, second) as address:
                    llm.update_weights(address)
            found.append([list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY, use_tqdm=False)])
            llm.close()
    differing = sum(a != b for a, b in zip(*found, strict=True)) / len(prompts)
    checks.add(f"weights by {backend}: {name}, texts differ", differing, 0.0)


def _check_speed(checks: Checks, backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in LARGE.items()}
        save_file(tensors, Path(folder, "model.safetensors"))
        with _sender(backend, Path(folder)) as address:
            while not _listens(address):
                time.sleep(0.05)
            start = time.perf_counter()
            num_bytes = sum(tensor.nbytes for tensor in receive_weights(address).values())
            seconds = time.perf_counter() - start
    what = f"{num_bytes / seconds / 1e9:.2f} GB/s to the CPU's memory, with the connection ({seconds:.1f} s)"
    checks.saw(f"weights by {backend}: speed", num_bytes / seconds >= LEAST_RATE, what)


def _listens(address: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0


@contextmanager
def _sender(backend: str, folder: Path) -> Iterator[str]:
    """Send a checkpoint's tensors from a process. Yields the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{backend}://127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen([sys.executable, "-m", "tests.gpu.weights", str(folder), address])
    try:
        yield address
        assert process.wait(60) == 0
    finally:
        process.kill()


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(torch.cuda.device_count() - 1)
    send_weights(load_file(Path(sys.argv[1], "model.safetensors")), sys.argv[2])
