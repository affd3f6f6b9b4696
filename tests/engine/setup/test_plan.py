"""Needs of a model on a GPU: as much as the engine takes, never less speed than was measured."""

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.model_shapes import model_folder
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.families import read_spec
from engine.models.hub import resolve_model
from engine.models.matrix import Matrix
from engine.models.shard import Shard
from engine.models.weights import bytes_of_parts, decoder_of_shapes
from engine.setup import plan as planning
from engine.setup.gpu_specs import GPUS, find_gpu
from engine.setup.options import runner_options
from engine.setup.plan import Plan, alternatives, gpu_here, make_plan, on_all_devices
from engine.worker.cuda_graphs import graph_sizes
from engine.worker.device import CpuDevice, CudaDevice, Memory
from engine.worker.startup import build_runner
from tests.engine.test_encoders import reference
from tests.oracles.families import make_checkpoint
from tests.oracles.gguf_files import write_gguf
from tests.oracles.quantised import make_quantised
from tests.support.loaded import load as load_model

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
GIB = 1 << 30


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models' folders: the weights of each are counted once."""
    return tmp_path_factory.mktemp("shapes")


@pytest.fixture
def plan_of(shapes: Path) -> Any:
    def plan_of(shape: str, gpu: str = "h200", **settings: Any) -> Plan:
        return make_plan(EngineConfig(model=str(model_folder(shape, shapes)), **settings), find_gpu(gpu))

    return plan_of


def test_weights_are_counted_as_they_are_loaded(tiny_model: Path) -> None:
    spec = read_spec(tiny_model)
    loaded = load_model(tiny_model, spec, dtype=torch.float32, device="cpu")
    held = sum(parameter.nbytes for parameter in {id(p): p for p in loaded.parameters()}.values())
    counted = bytes_of_parts(decoder_of_shapes(spec, torch.float32, tiny_model), None)
    assert sum(counted.values()) == held
    assert counted["head"] == 0, "it is the embedding"
    assert min(counted[part] for part in ("embedding", "attention", "mlp", "norms")) > 0


def held(value: Any) -> int:
    """Return the bytes of all tensors of a weight."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(held(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else 0


def kept_bytes(model: Any) -> int:
    """Pack the layers' matrices into the common forms, and return their bytes."""
    found = 0
    for matrix in (module for module in model.layers.modules() if isinstance(module, Matrix)):
        matrix.format.pack(matrix)
        found += held(matrix.weight)
    return found


WIDE = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "head_dim": 32}


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 2) for name in ("gptq-int3", "torchao-int8", "torchao-fp8", "torchao-int4")), ("awq-gemv", 1)],
)
def test_quantised_weights_are_counted_as_they_are_kept(name: str, size: int, tmp_path: Path) -> None:
    """Nearly: in memory scales have 16 bits. Codes of three bits take four."""
    make_quantised(name, tmp_path, shape=WIDE)
    plan = make_plan(EngineConfig(model=str(tmp_path), tensor_parallel_size=size, max_model_len=64), GPUS["h200"])
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "max_model_len": 64, "shard": Shard(0, size)}
    found = kept_bytes(load_model(tmp_path, read_spec(tmp_path), **options))
    counted = plan.weights["attention"] + plan.weights["mlp"]
    assert 0.98 * found <= counted <= 1.1 * found, (counted, found)


def test_blocks_of_gguf_files_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "hf", WIDE)
    path = write_gguf(model, tmp_path / "model.gguf", lambda name: "Q4_0" if "attn" in name else "Q8_0")
    plan = make_plan(EngineConfig(model=str(path), device="cpu", max_model_len=64), planning.cpu_here())
    folder = resolve_model(str(path))
    found = kept_bytes(load_model(folder, read_spec(folder), dtype=torch.float32, device="cpu", max_model_len=64))
    counted = plan.weights["attention"] + plan.weights["mlp"]
    assert 0.98 * found <= counted <= 1.1 * found, (counted, found)


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3", "internvl", "glm4v", "gemma3n", "albert"])
def test_all_parts_are_counted_as_they_are_loaded(name: str, tmp_path: Path) -> None:
    """Encoders of images have a part of their own; layers that share weights are counted once."""
    if name == "albert":
        reference(tmp_path, "Albert")
    else:
        make_checkpoint(name, tmp_path)
    spec = read_spec(tmp_path)
    loaded = load_model(tmp_path, spec, dtype=torch.bfloat16, device="cpu")
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=64)
    plan = make_plan(config, GPUS["h200"])
    unused = ("lm_head." if spec.tie_word_embeddings else "-", "-" if spec.final_norm else "norm.")
    parts = {id(each): each.nbytes for name, each in loaded.named_parameters() if not name.startswith(unused)}
    assert plan.weight_bytes == sum(parts.values())
    vision = 0 if loaded.vision is None else sum(each.nbytes for each in loaded.vision.parameters())
    assert plan.weights["vision"] == vision
    assert (vision > 0) == (name not in ("albert", "gemma3n"))


def test_scales_of_rounded_weights_are_counted(plan_of: Any) -> None:
    floats, rounded = (plan_of("llama-3.1-8b", quantization=method).weights for method in (None, "int4"))
    assert rounded["mlp"] == floats["mlp"] / 2 * (4 + 16 / 32) / 8


def test_slots_of_adapters_are_counted_as_they_are_allocated(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), device="cpu", enable_lora=True, max_loras=3, max_lora_rank=20)
    plan = make_plan(config, planning.cpu_here())
    runner = build_runner(tiny_model, read_spec(tiny_model), runner_options(config, read_spec(tiny_model), False))
    slots = runner.adapters
    assert slots is not None
    assert plan.adapters == slots._values.nbytes + slots._floats.nbytes
    runner.close()


def test_memory_for_blocks_on_their_way_to_the_host_is_counted(plan_of: Any) -> None:
    plain, tiered = plan_of("qwen3-8b", kv_offloading_size=0), plan_of("qwen3-8b", kv_offloading_size=16)
    assert tiered.kv_cache_bytes == pytest.approx(plain.kv_cache_bytes - (256 << 20), abs=plain.layout.block_bytes)


def test_host_memory_by_default(plan_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU has a quarter of what is free, replicas share it; half of it is left to other programs."""
    memory = Memory(total=512 << 30, free=200 << 30, used=0, peak=0)
    monkeypatch.setattr(CpuDevice, "memory", lambda self: memory)
    options = plan_of("qwen3-8b").options
    assert (options.host_cache_bytes, options.host_reserve_bytes) == (50 << 30, 100 << 30)
    assert plan_of("qwen3-8b", data_parallel_size=2).options.host_cache_bytes == 25 << 30
    memory = Memory(total=512 << 30, free=500 << 30, used=0, peak=0)
    assert plan_of("qwen3-8b").options.host_cache_bytes == 64 << 30
    given = plan_of("qwen3-8b", kv_offloading_size=70).options
    assert (given.host_cache_bytes, given.host_reserve_bytes) == (70 << 30, 0)
    assert plan_of("qwen3-8b", tensor_parallel_size=2).options.host_cache_bytes == 0
    assert plan_of("qwen3-8b", enable_sleep_mode=True).options.host_cache_bytes == 0
    assert plan_of("qwen3-8b", enable_prefix_caching=False).options.host_cache_bytes == 0
    assert plan_of("qwen3-0.6b", "8GB").options.host_cache_bytes == 0


def test_compressed_experts_are_counted(plan_of: Any) -> None:
    floats, compressed = (plan_of("qwen3-30b-a3b", compress_experts=on) for on in (False, True))
    assert compressed.weights["experts"] == pytest.approx(0.755 * floats.weights["experts"])
    assert compressed.num_blocks > floats.num_blocks
    assert compressed.num_parameters == floats.num_parameters
    with pytest.raises(ConfigError, match=r"compress_experts needs a Hopper GPU .* and this is NVIDIA A100 80GB"):
        plan_of("qwen3-30b-a3b", "a100", compress_experts=True)
    with pytest.raises(ConfigError, match="compress_experts needs dtype bfloat16, got float16"):
        plan_of("qwen3-30b-a3b", dtype="float16", compress_experts=True)
    assert plan_of("qwen3-32b", compress_experts=True).weights == plan_of("qwen3-32b").weights


def test_compressed_experts_are_suggested(tmp_path: Path) -> None:
    """On Hopper, for a mixture of experts that is not quantised."""

    def suggested(shape: str, gpu: str, **settings: Any) -> bool:
        folder = model_folder(shape, tmp_path)
        fewer_layers = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2, "layer_types": None}
        (folder / "config.json").write_text(json.dumps(fewer_layers))
        config = EngineConfig(model=str(folder), **settings)
        return "--compress-experts" in dict(alternatives(config, GPUS[gpu]))

    assert suggested("qwen3-30b-a3b", "h200")
    assert not suggested("qwen3-30b-a3b", "h200", compress_experts=True)
    assert not suggested("qwen3-30b-a3b", "h200", quantization="fp8")
    assert not suggested("qwen3-30b-a3b", "b200")
    assert not suggested("qwen3-32b", "h200")
    assert not suggested("gpt-oss-20b", "h200")


def test_plans_of_a_model_count_its_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one rank, whole and in fp8, and for a rank of two, four and eight, whatever the GPU."""
    count = Mock(side_effect=decoder_of_shapes)
    planning._weight_bytes.cache_clear()
    monkeypatch.setattr(planning, "decoder_of_shapes", count)
    config = EngineConfig(model=str(model_folder("llama-3.1-8b", tmp_path)))
    for gpu in (GPUS["h100"], GPUS["h200"]):
        make_plan(config, gpu)
        assert len(dict(alternatives(config, gpu))) == 5
    assert count.call_count == 5


def test_offline_steps_that_decompress_experts_are_larger(shapes: Path) -> None:
    folder = str(model_folder("qwen3-30b-a3b", shapes))

    def size(gpu: str, offline: bool, **settings: Any) -> int:
        config = EngineConfig(model=folder, **settings)
        return make_plan(config, GPUS[gpu], offline=offline).options.max_num_batched_tokens

    assert [size("h200", offline) for offline in (False, True)] == [8192, 16384]
    assert [size("h200", offline, compress_experts=True) for offline in (False, True)] == [8192, 262144]
    assert size("h100", True, compress_experts=True) == 65536


def test_the_cache_is_laid_out_as_the_runner_does(demo_model: Path) -> None:
    config = EngineConfig(model=str(demo_model), device="cpu", num_gpu_blocks_override=200, dtype="bfloat16")
    spec = read_spec(demo_model)
    plan, runner = make_plan(config, GPUS["h200"]), build_runner(demo_model, spec, runner_options(config, spec, False))
    assert (plan.num_blocks, plan.kv_cache_bytes) == (runner.num_blocks, runner.kv_cache_bytes)
    assert plan.max_model_len == runner.max_model_len
    assert plan.kv_bytes(16) == runner.kv_layout.block_bytes


def test_what_a_well_known_model_needs(plan_of: Any) -> None:
    plan = plan_of("llama-3.1-8b")
    assert plan.num_parameters == 8_030_261_248
    assert plan.weight_bytes == 2 * plan.num_parameters
    assert plan.kv_bytes(1) == 128 << 10
    assert plan.max_model_len == 131072
    assert plan_of("llama-3.1-8b", kv_cache_dtype="fp8").kv_bytes(1) == 64 << 10
    plan = plan_of("llama-3.1-8b", kv_offloading_size=0)  # several ranks have no host memory by default
    two = plan_of("llama-3.1-8b", tensor_parallel_size=2)
    assert two.num_parameters == plan.num_parameters
    assert two.weight_bytes == pytest.approx(plan.weight_bytes / 2, rel=1e-3)
    assert two.kv_bytes(1) == plan.kv_bytes(1) / 2
    logits = 2 * graph_sizes(plan.options.max_num_seqs)[-1] * plan.spec.vocab_size  # and a rank's own, half of them
    assert two.buffers == plan.buffers + logits / 2
    assert plan_of("gemma-3-12b").kv_bytes(100_000) < 0.2 * 100_000 * plan_of("gemma-3-12b").kv_bytes(1)


def test_experts_that_no_token_chooses_are_not_read(plan_of: Any) -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.3 for each token; many tokens together read nearly all."""
    plan = plan_of("qwen3-30b-a3b")
    assert plan.num_parameters == pytest.approx(30.5e9, rel=0.01)
    assert plan.num_active == pytest.approx(3.0e9, rel=0.05)  # without the embedding
    assert plan.bytes_read(1, 1) == pytest.approx(2 * plan.num_active, rel=0.01)
    assert plan.bytes_read(64, 1) == pytest.approx(plan.weight_bytes, rel=0.05)
    two = plan_of("qwen3-30b-a3b", tensor_parallel_size=2)
    assert two.bytes_read(1, 1) == pytest.approx(plan.bytes_read(1, 1) / 2, rel=0.01)


def test_no_speed_is_above_what_the_launches_of_a_step_allow(demo_model: Path) -> None:
    """The bundled model's weights are read in microseconds; its steps take longer."""
    plans = [make_plan(EngineConfig(model=str(demo_model), tensor_parallel_size=size), GPUS["b200"]) for size in (1, 2)]
    assert all(plan.tokens_per_second(1, 1) < 1 / (100e-6 + 7 * 10e-6) for plan in plans)
    assert plans[1].tokens_per_second(1, 1) < plans[0].tokens_per_second(1, 1), (
        "sums over ranks take longer than reading"
    )
    assert plans[0].tokens_per_second(256, 1) < 1 / 2e-6


def test_a_context_that_does_not_fit_is_shortened_unless_it_was_asked_for(plan_of: Any) -> None:
    assert 30_000 < plan_of("llama-3.1-8b", "24GB").max_model_len < 60_000
    assert plan_of("llama-3.1-8b", "24GB", max_model_len=100_000).max_model_len == 0
    assert plan_of("llama-3.1-8b", "16GB").max_model_len == 0


def test_flags_that_make_it_fit(shapes: Path) -> None:
    config = EngineConfig(model=str(model_folder("qwen3-32b", shapes)))
    fits = {flags: plan.max_model_len > 0 for flags, plan in alternatives(config, GPUS["l40s"])}
    assert fits == {
        "--kv-cache-dtype fp8": False,
        "--quantization fp8": True,
        "--tensor-parallel-size 2": True,
        "--tensor-parallel-size 4": True,
        "--tensor-parallel-size 8": True,
    }
    assert "--kv-cache-dtype fp8" not in dict(alternatives(config, GPUS["a100"])), "an A100 has no fp8"
    sizes = {plan.gpu.title: plan.options.num_ranks_per_stage for plan in on_all_devices(config)}
    assert (sizes["NVIDIA H200"], sizes["NVIDIA A100 40GB"], sizes["NVIDIA RTX 4090"]) == (1, 2, 4)


def measured() -> list[Any]:
    """(shape, settings, requests at once, tokens of each at the begin, tokens a second) on H200."""
    found = []
    for path in sorted(RESULTS.glob("*/*-h200.json")):
        content = json.loads(path.read_text())
        if content.get("benchmark") != "engines":
            continue
        settings = (content["settings"]["engine_args"] or {}).get("quire", {})
        if "speculative_config" in settings:  # a step yields several tokens
            continue
        for run in content["runs"]:
            if run["work"] in ("latency1", "latency8", "decode"):
                n = run["num_requests"]
                rate = (n, run["num_prompt_tokens"] // n, run["output_tokens_per_second"])
                found.append(
                    pytest.param(run["model"], settings, *rate, id=f"{path.stem}-{run['engine']}-{run['work']}")
                )
    return found


@pytest.fixture(scope="module")
def h200_plan(shapes: Path) -> Any:
    """Plans by shape and settings, made once."""
    made: dict[str, Plan] = {}

    def plan(shape: str, settings: dict[str, Any]) -> Plan:
        key = f"{shape} {sorted(settings.items())}"
        if key not in made:
            made[key] = make_plan(EngineConfig(model=str(model_folder(shape, shapes)), **settings), GPUS["h200"])
        return made[key]

    return plan


def test_results_are_found() -> None:
    assert len(measured()) > 50


@pytest.mark.parametrize(("shape", "settings", "num_requests", "context", "rate"), measured())
def test_no_engine_was_faster(
    h200_plan: Any, shape: str, settings: dict[str, Any], num_requests: int, context: int, rate: float
) -> None:
    limit = h200_plan(shape, settings).tokens_per_second(num_requests, context)
    assert rate < limit < 8 * rate


def test_gpus_by_name_and_by_size(plan_of: Any) -> None:
    assert find_gpu("H200") is GPUS["h200"]
    assert find_gpu("24GB").memory == find_gpu("24GiB").memory == find_gpu("24G").memory == 24 * GIB
    assert plan_of("qwen3-0.6b", "24GB").tokens_per_second(1, 1024) == 0, "its speed is not known"
    with pytest.raises(ConfigError, match=r"gpu must be cpu, one of b200, .* or a size such as 24GB, got 'h300'"):
        find_gpu("h300")


@pytest.mark.parametrize(
    ("names", "key"),
    [
        (("rtx4090", "RTX 4090", "4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "4090 24GB"), "4090"),
        (("a10g", "NVIDIA A10G"), "a10g"),
        (("A10",), "a10"),
        (("b200", "B200"), "b200"),
        (("gh200", "NVIDIA GH200 480GB"), "gh200"),
        (("h100", "H100 80GB", "h100-sxm5", "NVIDIA H100 PCIe"), "h100"),
        (("A100", "a100-80gb", "NVIDIA A100-SXM4-80GB"), "a100"),
        (("a100-40gb", "A100 40GB", "NVIDIA A100-PCIE-40GB"), "a100-40gb"),
        (("RTX A6000", "a6000"), "a6000"),
    ],
)
def test_gpus_are_found_by_the_names_that_people_write(names: Sequence[str], key: str) -> None:
    assert [find_gpu(name) for name in names] == [GPUS[key]] * len(names)


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H200", 139, "h200"),
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA A100-PCIE-80GB", 79, "a100"),
        ("NVIDIA GeForce RTX 4090", 23, "4090"),
        ("NVIDIA L4", 22, "l4"),
        ("NVIDIA T1000", 8, None),
    ],
)
def test_the_gpu_here_is_known_by_its_name(
    name: str, gib: int, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDevice, "is_available", lambda: True)
    monkeypatch.setattr(CudaDevice, "current", lambda: CudaDevice(0))
    monkeypatch.setattr(CudaDevice, "name", name)
    monkeypatch.setattr(CudaDevice, "capability", (9, 0))
    monkeypatch.setattr(CudaDevice, "memory", lambda self: Memory(gib * GIB, 0, 0, 0))
    gpu = gpu_here()
    assert gpu is not None
    assert (gpu.title, gpu.memory) == (name, gib * GIB)
    assert (gpu.bandwidth, gpu.flops) == ((GPUS[known].bandwidth, GPUS[known].flops) if known else (0, 0))


def test_settings_of_the_cache_count(plan_of: Any) -> None:
    plan = plan_of("qwen3-0.6b")
    half = plan_of("qwen3-0.6b", gpu_memory_utilization=0.46)
    assert plan.kv_cache_bytes - half.kv_cache_bytes == pytest.approx(0.46 * plan.gpu.memory, rel=1e-3)
    assert plan_of("qwen3-0.6b", num_gpu_blocks_override=77).num_blocks == 77
    assert plan_of("qwen3-0.6b", kv_cache_memory_bytes=GIB).kv_cache_bytes == pytest.approx(GIB, rel=0.01)
    assert plan_of("qwen3-0.6b", max_num_batched_tokens=65536).activations > plan.activations
    assert replace(plan, num_blocks=0).max_model_len == 0


def test_an_indexer_is_counted(tmp_path: Path) -> None:
    """A key behind each latent, and the choice, unless all contexts are short enough to attend to all tokens."""
    make_checkpoint("deepseek_v32", tmp_path)

    def plan(**settings: Any) -> Plan:
        config = EngineConfig(model=str(tmp_path), device="cpu", skip_tokenizer_init=True, **settings)
        return make_plan(config, planning.cpu_here())

    assert plan(max_model_len=64).kv_bytes(1) == 3 * (40 + 16 + 24) * 4
    most = [plan(max_model_len=length, max_num_batched_tokens=512).activations for length in (16, 17, 64)]
    assert most[0] < most[1] - 512 * 4 * 16 * 24 < most[2]


def test_latents_are_all_that_is_cached(plan_of: Any, shapes: Path) -> None:
    plan = plan_of("glm-4.7-flash")
    assert plan.kv_bytes(1) == 47 * (512 + 64) * 2
    config = EngineConfig(model=str(model_folder("glm-4.7-flash", shapes)))
    flags = [flags for flags, _ in alternatives(config, GPUS["h200"])]
    assert "--tensor-parallel-size 4" in flags
    assert "--kv-cache-dtype fp8" not in flags, "it is refused for latents"
