"""Trains the demo model from scratch on text made up on the fly, and writes its folder.

python -m demo.train --minutes 5 --out out/demo        # one GPU
python -m demo.train --device cpu --tiny --minutes 3 --out out/tiny
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import shutil
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo.data import ALL_SKILLS, FOLDER, LENGTHS, TARGET, Encoder, Weights, make_rows
from demo.model import TINY, Model, Shape, finish, load, project, save, write_json


def data_worker(
    seed: int, chats: int, tokenizer_file: str, more: dict[str, float], results: multiprocessing.Queue[Any]
) -> None:
    """Makes rows for ever; the main process ends it."""
    encoder, weights = Encoder(Tokenizer.from_file(tokenizer_file)), Weights(more)
    while True:
        results.put(make_rows(encoder, seed, chats, weights))
        seed += 1


class Pool:
    """Rows of the workers, by length. A batch takes new rows; where they run short, an old batch is read again."""

    def __init__(
        self, workers: int, seed: int, batch_tokens: int, ahead: int, chats: int, more: dict[str, float]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.results: multiprocessing.Queue[Any] = context.Queue(maxsize=2 * workers)
        tokenizer_file = str(FOLDER / "tokenizer.json")
        self.workers = [
            context.Process(
                target=data_worker,
                args=((seed + index) * 1_000_000, chats, tokenizer_file, more, self.results),
                daemon=True,
            )
            for index in range(workers)
        ]
        for worker in self.workers:
            worker.start()
        self.batch_tokens = batch_tokens
        self.ahead = ahead  # how many new tokens to hold at most, give or take one delivery
        self.new = {length: np.empty((0, length), np.uint16) for length in LENGTHS}
        self.old: dict[int, deque[np.ndarray]] = {length: deque(maxlen=2000) for length in LENGTHS}
        self.made = dict.fromkeys(LENGTHS, 0)  # tokens
        self.random = random.Random(seed)

    @property
    def num_made(self) -> int:
        return sum(self.made.values())

    def receive(self, wait: float = 0.0) -> None:
        """Takes what the workers have made, as far as there is room. Raises RuntimeError if one of them has died."""
        while sum(rows.size for rows in self.new.values()) < self.ahead:
            try:
                made = self.results.get(timeout=wait) if wait else self.results.get_nowait()
            except queue.Empty:
                if any(worker.exitcode is not None for worker in self.workers):
                    raise RuntimeError("a data worker has ended; its error is printed above") from None
                return
            for length, rows in made.items():
                self.made[length] += rows.size
                self.new[length] = np.concatenate([self.new[length], rows])

    def fill(self, tokens: int) -> None:
        while self.num_made < tokens:
            self.receive(wait=0.5)

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """ids [B, T], and positions in ids.reshape(-1) whose next token is to be predicted; B * T is batch_tokens."""
        length = self.random.choices(LENGTHS, list(self.made.values()))[0]
        size = max(1, self.batch_tokens // length)
        new = self.new[length]
        if len(new) >= size:
            stored, self.new[length] = new[:size].copy(), new[size:]
            self.old[length].append(stored)
        elif self.old[length]:
            stored = self.random.choice(self.old[length])
        else:
            stored = np.resize(new, (size, length))
        is_target = np.zeros(stored.shape, bool)
        is_target[:, :-1] = stored[:, 1:] >= TARGET
        return (stored & (TARGET - 1)).astype(np.int64), np.flatnonzero(is_target)

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal by a Newton-Schulz iteration; all matrices of one shape at once."""

    def __init__(
        self, weights: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                by_shape[weight.shape].append(weight)
            for shape, weights in by_shape.items():
                grads = torch.stack([weight.grad for weight in weights if weight.grad is not None])
                state = self.state[weights[0]]
                if not state:
                    state["momentum"] = torch.zeros_like(grads)
                momentum = state["momentum"].lerp_(grads, 1 - group["momentum"])
                update = orthogonal(grads.lerp(momentum, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list(update.to(weights[0].dtype).unbind()), alpha=-scale)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrices [N, a, b] with singular values near one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(torch.bfloat16)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if tall else x
    return result


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def warm_up(model: Model, batch_tokens: int, device: torch.device) -> None:
    """Compiles the model, or goes on without where that is not possible."""
    begin = time.monotonic()
    model.compile_halves()
    try:
        ids = torch.zeros(batch_tokens // LENGTHS[0], LENGTHS[0], dtype=torch.int64, device=device)
        model(ids).sum().backward()
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    except Exception as error:  # any failure of the compiler means the same here
        print(f"torch.compile does not work here ({type(error).__name__}: {error}); going on without it", flush=True)
        model.project, model.finish = project, finish
    model.zero_grad(set_to_none=True)


def learning_rate(progress: float) -> float:
    """Warm-up, a plateau, and a fall to zero over the last half, as a factor."""
    return min(1.0, 0.01 + progress / 0.03) * min(1.0, (1.0 - progress) / 0.5)


def make_optimizers(
    model: Model, args: argparse.Namespace
) -> tuple[list[nn.Parameter], list[tuple[torch.optim.Optimizer, float]]]:
    """Return the weights that are no matrices of layers, and the optimizers of all weights, with their rates."""
    weights = model.named_weights()
    matrices = [weight for name, weight in weights.items() if name.endswith("proj.weight")]
    others = [weight for name, weight in weights.items() if not name.endswith("proj.weight")]
    fused = others[0].device.type == "cuda"
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)
    return others, [(adam, args.adam_lr), (Muon(matrices, args.muon_lr, weight_decay=0.05), args.muon_lr)]


def train(
    model: Model, pool: Pool, args: argparse.Namespace, device: torch.device, deadline: float
) -> dict[str, object]:
    """Trains until the deadline (time.monotonic). Returns what it has measured."""
    others, optimizers = make_optimizers(model, args)

    def loss_of(drawn: np.ndarray, drawn_positions: np.ndarray) -> Tensor:
        ids, positions = to_device(drawn, device), to_device(drawn_positions, device)
        # Only the positions that count go through the large matrix of the vocabulary.
        logits = model.logits(model(ids).index_select(0, positions))
        return F.cross_entropy(logits, ids.reshape(-1)[positions + 1], reduction="sum")

    begin = last_print = time.monotonic()
    if begin >= deadline:
        raise RuntimeError("no time is left for training: give it more --minutes")
    step = tokens = 0
    curve = []
    halfway = False
    while True:
        now = time.monotonic()
        progress = (now - begin) / (deadline - begin)
        if progress >= 1 or (args.steps and step >= args.steps):
            break
        if args.steps:
            progress = step / args.steps
        pool.receive()
        batches = [pool.draw() for _ in range(args.accumulate)]
        count = sum(len(positions) for _, positions in batches)
        total = torch.zeros((), device=device)
        for ids, positions in batches:
            loss = loss_of(ids, positions) / count
            loss.backward()
            total += loss.detach()
            tokens += ids.size
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * learning_rate(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:  # also keeps the device from falling behind the clock
            value = total.item()
            if not math.isfinite(value):
                raise RuntimeError(f"the loss is {value} at step {step}")
            curve.append(value)
            if step == 0 or now - last_print > args.print_every:
                last_print = now
                made = f"made {pool.num_made / 1e6:.0f}M  read {tokens / 1e6:.0f}M"
                speed = f"{tokens / max(now - begin, 1.0):,.0f} tokens/s"
                print(f"{progress:4.0%}  step {step:5d}  loss {value:.4f}  {speed}  {made}", flush=True)
        if progress > 0.5 and not halfway:
            halfway = True
            save(model, Path(args.out))
        step += 1
    seconds = time.monotonic() - begin
    return {"steps": step, "tokens_read": tokens, "tokens_made": pool.num_made, "seconds": round(seconds, 1),
            "first_loss": round(curve[0], 4), "last_loss": round(sum(curve[-5:]) / len(curve[-5:]), 4)}  # fmt: skip


def more(text: str) -> dict[str, float]:
    """quire_topic=3,tell_and_ask=5 → how many times as often each of these skills is drawn."""
    factors = {name: float(factor) for name, _, factor in (each.partition("=") for each in text.split(","))}
    unknown = factors.keys() - {skill.__name__ for skill in ALL_SKILLS}
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no skill {min(unknown)}")
    return factors


def arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=5.0, help="time for data and training together")
    parser.add_argument("--start", type=Path, help="go on from the model in this folder")
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps; the time still limits")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a smaller model and batch, to try the script")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that make data; 0: all cores but one, 15 at most"
    )
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="tokens of one batch")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument(
        "--more", type=more, default={}, metavar="SKILL=N,…", help="functions of demo.skills, drawn N times as often"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of activations; else bfloat16 on a GPU")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-every", type=float, default=10.0)
    return parser.parse_args()


def main() -> None:
    args, start = arguments(), time.monotonic()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: use --device cpu --tiny to try the script")
    device = torch.device(args.device)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (FOLDER / name).resolve() != (out / name).resolve():
            shutil.copy(FOLDER / name, out / name)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    if args.tiny:
        args.batch_tokens, args.accumulate = min(args.batch_tokens, 4096), 1
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = Model(TINY if args.tiny else Shape(), device, dtype, args.seed)
    assert model.shape.vocab_size == encoder.tokenizer.get_vocab_size()
    if args.start:
        load(model, args.start)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{num_parameters:,} parameters, {2 * num_parameters / 1e6:.2f} MB as bfloat16")
    save(model, out)  # whatever cannot be written should fail now

    workers = args.workers or max(1, min(16, len(os.sched_getaffinity(0))) - 1)
    ahead = 40 * args.batch_tokens * args.accumulate
    pool = Pool(workers, args.seed, args.batch_tokens, ahead, chats=300 if args.tiny else 2000, more=args.more)
    try:
        pool.fill(ahead // 2)
        print(
            f"{pool.num_made / 1e6:.1f}M tokens after {time.monotonic() - start:.0f} s from {workers} processes",
            flush=True,
        )
        if not (args.tiny or args.no_compile):
            warm_up(model, args.batch_tokens, device)
        measured = train(model, pool, args, device, start + 60 * args.minutes)
    finally:
        pool.close()

    model.round_to_bfloat16()
    save(model, out)
    measured["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    measured["parameters"] = num_parameters
    if args.start:
        measured["before"] = json.loads((args.start / "eval.json").read_text())["training"]
    print(json.dumps(measured))
    write_json(out / "eval.json", {"training": measured})
    print(f"all in {time.monotonic() - start:.0f} s; now test it: python -m demo.score {out}")


if __name__ == "__main__":
    main()
