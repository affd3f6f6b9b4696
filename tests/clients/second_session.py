"""Time to first token of two sessions of Claude Code: both begin with the same 34,000 tokens of tools and system
prompt.

    python -m tests.clients.second_session
    python -m tests.clients.second_session --device cuda --model Qwen/Qwen3-0.6B

As Claude Code does, each session puts a billing line of its own at the head of the system prompt. The server is started
here, with a context of 64k tokens, which the bundled model was not made for: its answers mean nothing, its times do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.served import ROOT, serve

CONTEXT = 65_536
SECONDS = 1800
SENTENCE = "Reads files, runs commands and edits what it is told to, and says in one line what it has done. "


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "configs" / "demo"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=34_000, help="of tools and system prompt")
    parser.add_argument(
        "--at-most", type=float, default=0.1, metavar="FRACTION", help="of the first time; else an error"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = with_context(Path(args.model), Path(folder)) if Path(args.model).is_dir() else Path(args.model)
        flags = ("--served-model-name", "model", "--device", args.device, "--max-model-len", str(CONTEXT))
        with serve(model, *flags) as url, httpx.Client(base_url=url, timeout=SECONDS) as client:
            ask(client, "warm-up", 100)
            num_characters = round(100_000 * args.tokens / num_tokens(client, 100_000))
            found = [ask(client, question, num_characters) for question in ("Say hello.", "What is in this folder?")]
            count = num_tokens(client, num_characters)
    first, second = found
    print(f"{count:,} tokens; time to first token {first:.2f} s, then {second:.3f} s: {second / first:.2%}")
    return int(second > args.at_most * first)


def with_context(model: Path, folder: Path) -> Path:
    """The model with a longer context."""
    for file in model.iterdir():
        if file.is_file() and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)  # a link out of the folder would be refused
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}), encoding="utf-8")
    return folder


def request(question: str, num_characters: int) -> dict[str, Any]:
    """A session's first request: two thirds of it are tools."""
    part = SENTENCE * (num_characters // 30 // len(SENTENCE) + 1)
    path = {"type": "string", "description": "Where."}
    tools = [
        {
            "name": f"tool_{i}",
            "description": part[: num_characters // 30],
            "input_schema": {"type": "object", "properties": {"path": path}, "required": ["path"]},
        }
        for i in range(20)
    ]
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197; cch={hash(question):x};"},
        {"type": "text", "text": (SENTENCE * num_characters)[: num_characters // 3]},
    ]
    messages = [{"role": "user", "content": question}]
    return {"model": "model", "system": system, "tools": tools, "messages": messages}


def num_tokens(client: httpx.Client, num_characters: int) -> int:
    body = request("Say hello.", num_characters)
    count: int = client.post("/v1/messages/count_tokens", json=body).raise_for_status().json()["input_tokens"]
    return count


def ask(client: httpx.Client, question: str, num_characters: int) -> float:
    """Seconds until something of the answer is there."""
    body = {**request(question, num_characters), "max_tokens": 4, "stream": True, "temperature": 0}
    start = time.perf_counter()
    with client.stream("POST", "/v1/messages", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith(("event: content_block_delta", "event: message_delta")):
                return time.perf_counter() - start
    raise RuntimeError("there was no answer")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
