"""One engine, in this process, measured on given prompts: what `benchmarks.offline.engines` starts for each engine.

    python -P benchmarks/offline/one_engine.py JOB.json EVENTS.jsonl

Imports nothing of ours but the engine under test, so that every engine gets the same clean process. JOB is a dictionary
with `engine`, `model` (a folder), `settings` (keywords of the engine's LLM class), `temperature` (of Quire and vLLM;
else 0.6), `started` (time.time() of the process's start), `deadline` (time.time() after which nothing more is begun)
and `works`: [{name, prompts, output_lens, repeat, reset, adapters}]. Perhaps also with

- `adapters`: folders of LoRA adapters. A work's requests use the first ones alternately, as many as its `adapters`.
- `compared`: prompts. Quire and vLLM report the first greedy token of each.

Quire and vLLM embed the prompts of a work whose output lengths are all 0. A work of theirs may have `next`, token ids.
Then the first token of a second turn is timed: its prompt is the first prompt, its answer and these.

Each line of EVENTS is a dictionary with `event`: ready, greedy, begin, run or done.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TEMPERATURE = 0.6
Generate = Callable[[list[list[int]], list[int]], int]  # prompts, output lengths → number of tokens made


def load_llm(name: str, model: str, settings: dict[str, Any]) -> tuple[Callable[[], Any], type, str]:
    """vLLM and quire have the same interface: a constructor, its SamplingParams, its version."""
    if name == "vllm":
        if importlib.util.find_spec("flashinfer") is None:  # vLLM's start would end without it
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        import vllm as module
    else:
        import engine as module
    cls = module.LLM  # found here, where some modules do their real import, and not in the time of the start
    return lambda: cls(model=model, **settings), module.SamplingParams, module.__version__


def lora_requests(name: str, folders: list[str]) -> list[Any]:
    """The adapters in these folders, as quire and vLLM name them."""
    if not folders:
        return []
    if name == "vllm":
        from vllm.lora.request import LoRARequest
    else:
        from engine import LoRARequest
    return [LoRARequest(os.path.basename(folder), index + 1, folder) for index, folder in enumerate(folders)]


class LLMEngine:
    """quire or vllm."""

    adapters: Sequence[Any] = ()  # that requests use alternately

    def __init__(self, name: str, model: str, settings: dict[str, Any], temperature: float) -> None:
        self._construct, self._params, self.version = load_llm(name, model, settings)
        self._temperature = temperature

    def start(self) -> None:
        self._llm = self._construct()

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        if not any(output_lens):
            self._llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
            return 0
        return sum(map(len, self._answers(prompts, output_lens, self._temperature)))

    def greedy(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each answer."""
        return [tokens[0] for tokens in self._answers(prompts, [1] * len(prompts), 0.0)]

    def _answers(self, prompts: list[list[int]], output_lens: list[int], temperature: float) -> list[list[int]]:
        params = [
            self._params(temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False) for n in output_lens
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        options: dict[str, Any] = {}
        if self.adapters:
            options["lora_request"] = [self.adapters[index % len(self.adapters)] for index in range(len(prompts))]
        results = self._llm.generate(inputs, params, use_tqdm=False, **options)
        return [list(result.outputs[0].token_ids) for result in results]

    def next_turn(self, prompts: list[list[int]], output_lens: list[int], more: list[int]) -> list[list[int]]:
        """The prompts of the second turn, once the first one's answers are there."""
        answers = self._answers(prompts, output_lens, self._temperature)
        return [[*prompt, *answer, *more] for prompt, answer in zip(prompts, answers, strict=True)]

    def reset(self) -> None:
        self._llm.reset_prefix_cache()


class Replicas:
    """Several engines of quire behind one door, which its LLM class does not have."""

    def __init__(self, model: str, settings: dict[str, Any], temperature: float) -> None:
        import asyncio

        import engine
        from engine.async_engine import AsyncEngine
        from engine.config import EngineConfig
        from engine.core.engine_request import EngineRequest

        self.version, self._params, self._request = engine.__version__, engine.SamplingParams, EngineRequest
        self._config, self._temperature = EngineConfig(model=model, **settings), temperature
        self._launch, self._gather, self._loop = AsyncEngine.start, asyncio.gather, asyncio.new_event_loop()
        self._count = 0

    def start(self) -> None:
        self._engine = self._loop.run_until_complete(self._launch(self._config))

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        async def answer(request_id: str, prompt: list[int], length: int) -> int:
            params = self._params(temperature=self._temperature, ignore_eos=True, max_tokens=length, detokenize=False)
            made = 0
            async for update in self._engine.generate(self._request(request_id, prompt, params)):
                made += len(update.token_ids)
            return made

        async def all_answers() -> list[int]:
            first, self._count = self._count, self._count + len(prompts)
            pairs = zip(prompts, output_lens, strict=True)
            return list(await self._gather(*(answer(str(first + i), *pair) for i, pair in enumerate(pairs))))

        return sum(self._loop.run_until_complete(all_answers()))

    def close(self) -> None:
        self._engine.close()


class Transformers:
    """transformers with random weights: `generate`, one request after another."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        self.version = transformers.__version__
        self._torch, self._transformers = torch, transformers
        self._model_folder, self._dtype = model, getattr(torch, settings["dtype"])

    def start(self) -> None:
        torch, transformers = self._torch, self._transformers
        config = transformers.AutoConfig.from_pretrained(self._model_folder)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        with self._device:
            self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=self._dtype).eval()
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=True, temperature=TEMPERATURE, top_k=0, pad_token_id=0
        )

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        total = 0
        for prompt, length in zip(prompts, output_lens, strict=True):
            ids = self._torch.tensor([prompt], device=self._device)
            made = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=length)
            total += made.shape[1] - len(prompt)
        return total

    def reset(self) -> None:
        pass


class TransformersBatching(Transformers):
    """transformers' own continuous batching, with its defaults."""

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        total, left = 0, len(prompts)
        with self._model.continuous_batching_context_manager() as manager:
            for prompt, length in zip(prompts, output_lens, strict=True):
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    total, left = total + len(result.generated_tokens), left - 1
                elif result is None and not manager.is_running():
                    raise RuntimeError("the generation thread of transformers ended early")
        return total


class LlamaServer:
    """llama.cpp by its server, each request in a thread."""

    version = "server"

    def __init__(self, settings: dict[str, Any], temperature: float) -> None:
        self._settings, self._temperature = settings, temperature

    def start(self) -> None:
        settings, seqs = self._settings, self._settings["max_num_seqs"]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        command = [settings["llama_server"], "-m", settings["gguf"], "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["-np", str(seqs), "-c", str(seqs * settings["context"]), "--offline", "--cache-ram", "0"]
        libraries = os.path.dirname(os.path.abspath(settings["llama_server"]))
        self.process = subprocess.Popen(command, env={**os.environ, "LD_LIBRARY_PATH": libraries})
        self._threads = ThreadPoolExecutor(seqs)
        while not self._is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.process.returncode}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            self._ask("GET", "/health")
        except (OSError, http.client.HTTPException, RuntimeError):
            return False
        return True

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            connection.request(method, path, json.dumps(body or {}), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        if response.status != 200:
            raise RuntimeError(f"llama-server answers {response.status}: {text[:300]!r}")
        return json.loads(text)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        sampling = {"temperature": self._temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}

        def answer(prompt: list[int], length: int) -> int:
            body = {"prompt": prompt, "n_predict": length, "cache_prompt": False, **sampling}
            return int(self._ask("POST", "/completion", body)["tokens_predicted"])

        return sum(self._threads.map(answer, prompts, output_lens))

    def reset(self) -> None:
        pass


def build(name: str, model: str, settings: dict[str, Any], temperature: float) -> Any:
    if name == "transformers":
        return Transformers(model, settings)
    if name == "transformers-batching":
        return TransformersBatching(model, settings)
    if name == "quire-replicas":
        return Replicas(model, settings, temperature)
    if name == "llama.cpp":
        return LlamaServer(settings, temperature)
    return LLMEngine(name, model, settings, temperature)


def measure(engine: Any, work: dict[str, Any], deadline: float, say: Callable[..., None]) -> None:
    """A small warm-up, then timed repetitions; at least one, more while there is time."""
    prompts, output_lens = work["prompts"], work["output_lens"]
    say("begin", work=work["name"])
    few = max(4, work.get("adapters", 0))  # all adapters are loaded then
    engine.generate(prompts[:few], [min(8, length) for length in output_lens[:few]])
    for _ in range(work["repeat"]):
        if work["reset"]:
            engine.reset()
        if more := work.get("next"):
            prompts, output_lens = engine.next_turn(work["prompts"], work["output_lens"], more), [1] * len(prompts)
        begin = time.perf_counter()
        num_output_tokens = engine.generate(prompts, output_lens)
        seconds = time.perf_counter() - begin
        say("run", work=work["name"], seconds=seconds, num_output_tokens=num_output_tokens)
        if time.time() + seconds > deadline:
            break


def main(job_path: str, events_path: str) -> None:
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    with open(events_path, "a", encoding="utf-8") as events:

        def say(event: str, **more: Any) -> None:
            events.write(json.dumps({"event": event, **more}) + "\n")
            events.flush()

        begin = time.perf_counter()
        engine = build(job["engine"], job["model"], job["settings"], job.get("temperature", TEMPERATURE))
        imported = time.perf_counter()
        engine.start()
        say(
            "ready",
            version=engine.version,
            import_seconds=imported - begin,
            init_seconds=time.perf_counter() - imported,
            process_seconds=time.time() - job["started"],
        )
        gc.collect()
        gc.freeze()
        if job.get("compared") and isinstance(engine, LLMEngine):
            say("greedy", tokens=engine.greedy(job["compared"]))
        adapters = lora_requests(job["engine"], job.get("adapters", []))
        for work in job["works"]:
            if time.time() < job["deadline"]:
                if adapters:
                    engine.adapters = adapters[: work["adapters"]]
                measure(engine, work, job["deadline"], say)
        say("done")
        if isinstance(engine, Replicas):
            engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
