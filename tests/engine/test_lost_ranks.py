"""Ranks that fail in an offline process: the call that needs them raises an error, and the process goes on."""

from __future__ import annotations

import logging
import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from engine import LLM, EngineDeadError, EngineError, LoRARequest, SamplingParams
from engine.models.errors import ModelError
from engine.offline import lost_rank
from engine.offline.lost_rank import LostRank
from engine.worker.parallel import losses as losses_module
from engine.worker.parallel.adapter_reads import AdapterReads, report_read
from engine.worker.parallel.losses import Answers, Losses, RankLostError

# Python runs it at its start, before a follower begins.
FAULTS = """
import os, sys
if "engine.worker.parallel.follower" in sys.orig_argv:
    fault = os.environ["QUIRE_TEST_FAULT"]
    if fault == "start":
        os._exit(3)
    from engine.models.adapters import AdapterLayout
    from engine.models.errors import ModelError
    from engine.worker import startup
    from engine.worker.parallel import ranks
    def fail(*args, **kwargs):
        raise ModelError("the disk of this rank is gone")
    if fault == "weights":
        startup.load_model = fail
    AdapterLayout.read = fail
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which followers take their faults."""
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def start(model: Path, **settings: Any) -> LLM:
    return LLM(
        str(model), device="cpu", dtype="float32", tensor_parallel_size=2, max_num_seqs=2, max_model_len=64,
        num_gpu_blocks_override=20, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("start", r"the process of rank 1 ended with exit code 3: pid \d+"),
        ("weights", r"the process of rank 1 ended with exit code 1 \(the disk of this rank is gone\): pid \d+"),
    ],
)
def test_a_rank_that_fails_at_the_start_is_an_error_of_the_start(
    faulty: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setenv("QUIRE_TEST_FAULT", fault)
    with pytest.raises(EngineError, match=f"^{reason}$"):
        start(demo_model)
    assert not dist.is_initialized()


def test_a_rank_that_cannot_read_an_adapter_fails_its_requests_only_and_a_lost_rank_the_call(
    faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    from tests.oracles.peft_adapters import base_model, make_adapter

    make_adapter(base_model("qwen3", faulty / "model"), faulty / "adapter", 1, r=4, target_modules=["q_proj"])
    monkeypatch.setenv("QUIRE_TEST_FAULT", "adapter")
    prompts, params = [{"prompt_token_ids": [1, 2, 3]}] * 2, SamplingParams(max_tokens=4, ignore_eos=True)
    llm = start(faulty / "model", skip_tokenizer_init=True, enable_lora=True)
    try:
        adapter = LoRARequest("a", 1, str(faulty / "adapter"))
        refused, plain = llm.generate(prompts, params, use_tqdm=False, lora_request=[adapter, None])
        assert refused.outputs[0].error == "the adapter 'a' cannot be used: rank 1: the disk of this rank is gone"
        assert len(plain.outputs[0].token_ids) == 4
        follower: Any = llm._engine.runner.followers[0]  # type: ignore[attr-defined]
        os.kill(follower.popen.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"^the process of rank 1 was killed by SIGKILL: pid \d+$"):
            llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.close()
    assert not dist.is_initialized()


def test_a_loss_ends_the_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses_module, "POLL_SECONDS", 0.01)
    losses = Losses(lambda reason: True)
    answers = Answers(losses)
    answers.put([1])
    assert answers.get() == [1]
    assert not losses
    threading.Timer(0.01, losses, ["rank 3 is lost"]).start()
    with pytest.raises(RankLostError, match=r"^rank 3 is lost$"):
        answers.get()
    assert losses
    assert losses("another reason")
    with pytest.raises(RankLostError, match=r"^rank 3 is lost$"):
        losses.check()


def test_a_loss_that_ends_the_process_is_no_error_before() -> None:
    reasons: list[str] = []
    losses = Losses(reasons.append)
    assert not losses("rank 1 is lost")
    losses.check()
    assert reasons == ["rank 1 is lost"]


def test_a_call_that_waits_for_a_lost_rank_forever_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(lost_rank, "STUCK_SECONDS", 0)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    lost = LostRank()

    def wait() -> None:
        with lost.raised():
            assert lost("rank 1 is lost")
            assert ended.wait(60)
            raise RankLostError("it is gone")

    with pytest.raises(EngineDeadError, match="it is gone"):
        wait()
    ended.clear()
    with lost.raised():
        call = lost._call
    lost._end_if_stuck("rank 1 is lost", call)  # the call has ended
    lost._end_if_stuck("rank 1 is lost", None)  # there was none
    assert not ended.is_set()


@pytest.fixture
def reads() -> AdapterReads:
    return AdapterReads(3)


@pytest.mark.parametrize("failed", [None, ModelError("it is damaged"), OSError("disk")])
def test_an_adapter_is_ready_when_all_ranks_have_read_it(reads: AdapterReads, failed: Exception | None) -> None:
    (first, ready), (second, other) = reads.begin(), reads.begin()
    futures = [Future[None]() for _ in range(4)]
    reads.finish_own(first, futures[0])
    report_read(first, 1, reads.receive, futures[1])
    report_read(first, 2, reads.receive, futures[2])
    reads.finish_own(second, futures[3])
    futures[3].set_result(None)
    for future in futures[1::-1]:
        future.set_result(None)
        assert not ready.done()
    if failed is None:
        futures[2].set_result(None)
        assert ready.result() is None
    else:
        futures[2].set_exception(failed)
        error = ready.exception()
        assert type(error) is (ModelError if isinstance(failed, ModelError) else RuntimeError)
        assert str(error) == f"rank 2: {failed}"
    assert not other.done()
