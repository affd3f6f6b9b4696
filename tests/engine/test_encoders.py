"""Encoders: hidden states, scores and labels of transformers, whatever is beside a text in a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import LLM, ConfigError, EngineConfig
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.processing.input_processor import InputProcessor
from engine.setup.plan import cpu_here, make_plan
from engine.worker.forward_pass import StepSize
from engine.worker.startup import _packed_steps

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300,
    "max_position_embeddings": 256, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None, "dtype": "float32",
}  # fmt: skip
DISTILBERT = {"dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"max_position_embeddings": 258, "type_vocab_size": 1},
    "XLMRoberta": {"max_position_embeddings": 258},
    "DistilBert": DISTILBERT,
    "MPNet": {"max_position_embeddings": 258},
    "NomicBert": {},
    "JinaEmbeddingsV3": {},
    "Albert": {"embedding_size": 32, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
    "Electra": {"embedding_size": 32},
    "DebertaV2": {
        "relative_attention": True, "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
        "position_buckets": 16, "position_biased_input": False, "tie_word_embeddings": False,
    },
    "ModernBert": {"local_attention": 32, "num_hidden_layers": 4, "cls_token_id": None, "sep_token_id": None},
    "EuroBert": {"mask_token_id": 2},
    "Gemma3Text": {
        "use_bidirectional_attention": True, "sliding_window": 32, "head_dim": 16, "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
DEBERTA = {"architectures": ["DebertaV2Model"]} | FAMILIES["DebertaV2"]
# transformers' DeBERTa scripts functions.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
PROMPTS = [[(7 * i + k * k) % 250 + 3 for k in range(n)] for i, n in enumerate((1, 16, 33, 200, 90, 2, 64))]


def reference(folder: Path, family: str, head: str = "Model", **changes: Any) -> Any:
    """Save a random model of transformers in `folder` and return it."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SMALL | FAMILIES[family] | changes)
    torch.manual_seed(0)
    model = getattr(transformers, family + head)(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1  # biases too
    model.save_pretrained(folder)
    return model.eval()


def states(model: Any, prompt: list[int], **inputs: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([prompt]), **inputs)[0][0]
    return found


def start(folder: Path, **settings: Any) -> LLM:
    return LLM(model=str(folder), device="cpu", dtype="float32", **{"skip_tokenizer_init": True, **settings})


def embedded(llm: LLM, prompts: list[list[int]], **params: Any) -> list[Tensor]:
    found = llm.embed(prompts, use_tqdm=False, **{"normalize": False, **params})  # type: ignore[arg-type]
    return [torch.tensor(result.outputs.embedding) for result in found]


def close(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, atol=1e-5 * float(want.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """The first and last tokens' and the mean, in steps that hold some of the prompts."""
    model = reference(tmp_path, family)
    llm = start(tmp_path, max_num_batched_tokens=256)
    want = [states(model, prompt) for prompt in PROMPTS]
    for pooling in ("cls", "mean", "last"):
        for found, own in zip(embedded(llm, PROMPTS, pooling=pooling), want, strict=True):
            close(found, {"cls": own[0], "mean": own.mean(0), "last": own[-1]}[pooling])
    close(embedded(llm, PROMPTS[2:3])[0], want[2].mean(0))  # the default, as sentence-transformers'
    assert llm._engine.scheduler.blocks.num_free_blocks == llm._engine.scheduler.blocks.num_blocks
    with pytest.raises(ValueError, match="is an embedding model: it cannot generate text"):
        llm.generate([[1, 2]])
    llm.close()


@pytest.mark.parametrize(
    ("family", "num_labels"),
    [
        ("Bert", 1),
        ("XLMRoberta", 1),
        ("DistilBert", 3),
        ("ModernBert", 3),
        ("MPNet", 2),
        ("Albert", 2),
        ("Electra", 1),
        ("DebertaV2", 1),
    ],
)
def test_scores_of_texts(family: str, num_labels: int, tmp_path: Path) -> None:
    labels = {"id2label": {i: f"label {i}" for i in range(num_labels)}}
    pooling = {"classifier_pooling": "mean"} if family == "ModernBert" else {}
    model = reference(tmp_path, family, "ForSequenceClassification", **labels, **pooling)
    classifier = InputProcessor.load(EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)).classifier
    assert classifier is not None
    assert classifier.labels == list(labels["id2label"].values())
    llm = start(tmp_path)
    for prompt, logits in zip(PROMPTS, embedded(llm, PROMPTS), strict=True):
        want = states(model, prompt)
        close(logits, want)
        expected = want.sigmoid() if num_labels == 1 else want.softmax(0)
        assert classifier.scores(logits.tolist()) == pytest.approx(expected.tolist(), abs=1e-5)
        (labelled,) = llm.classify([prompt])
        assert labelled.outputs.probs == pytest.approx(expected.tolist(), abs=1e-5)
        assert labelled.outputs.label == classifier.labels[int(expected.argmax())]
    with pytest.raises(ValueError, match="is a classifier: its outputs are logits"):
        llm.embed(PROMPTS[:1], normalize=True)
    llm.close()


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_labels_of_tokens(family: str, tmp_path: Path) -> None:
    model = reference(tmp_path, family, "ForTokenClassification", id2label={0: "O", 1: "PERSON", 2: "PLACE"})
    llm = start(tmp_path)
    for prompt, logits in zip(PROMPTS, embedded(llm, PROMPTS), strict=True):
        close(logits.view(len(prompt), 3), states(model, prompt))
    llm.close()


def write_tokenizer(folder: Path) -> Any:
    """Write a WordPiece tokenizer with BERT's frame, whose second text has tokens of the second type."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghij", *(f"##{each}" for each in "abcdefghij")]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **special}))
    return backend


def test_the_second_text_of_a_pair_has_another_type(tmp_path: Path) -> None:
    model, backend = reference(tmp_path, "Bert", "ForSequenceClassification", num_labels=1), write_tokenizer(tmp_path)
    llm, pairs = start(tmp_path, skip_tokenizer_init=False), [("abc de", "fgh"), ("i", "j a b"), ("a", "a")]
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode_pair(*pair, llm._input_processor.info.type_offset) for pair in pairs]
    for pair, logits in zip(pairs, embedded(llm, prompts), strict=True):
        encoding = backend.encode(*pair)
        assert {0, 1} == set(encoding.type_ids)
        close(logits, states(model, encoding.ids, token_type_ids=torch.tensor([encoding.type_ids])))
    assert tokenizer.decode(backend.encode("abc de").ids) == "abc de"
    want = [states(model, each.ids, token_type_ids=torch.tensor([each.type_ids])).sigmoid().item() for each in
            (backend.encode("abc de", "fgh"), backend.encode("abc de", "i"))]  # fmt: skip
    scores = llm.score("abc de", ["fgh", "i"])
    assert [each.outputs.score for each in scores] == pytest.approx(want, abs=1e-5)
    assert scores[0].prompt_token_ids == prompts[0]
    assert [each.outputs.score for each in llm.score(["abc de"] * 2, ["fgh", "i"])] == pytest.approx(want, abs=1e-5)
    with pytest.raises(ValueError, match=r"as many as second ones \(3\), got 2"):
        llm.score(["a", "b"], ["a", "b", "c"])
    llm.close()


def write_modules(folder: Path, kinds: list[str], pooling: str) -> None:
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}" if i else ""}
               for i, kind in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))


def test_modules_and_prompts_of_sentence_transformers(tmp_path: Path) -> None:
    model, backend = reference(tmp_path, "Bert"), write_tokenizer(tmp_path)
    write_modules(tmp_path, ["Transformer", "Pooling", "Dense", "Dense", "Normalize"], "cls_token")
    torch.manual_seed(1)
    weights, bias = (torch.randn(96, 64), torch.randn(32, 96)), torch.randn(96)
    for i, (weight, activation) in enumerate(zip(weights, ("activation.Tanh", "linear.Identity"), strict=True)):
        (folder := tmp_path / f"{i + 2}_Dense").mkdir()
        kind = {"out_features": len(weight), "bias": i == 0, "activation_function": f"torch.nn.modules.{activation}"}
        (folder / "config.json").write_text(json.dumps({"in_features": weight.shape[1], **kind}))
        save_file({"linear.weight": weight} | ({"linear.bias": bias} if i == 0 else {}), folder / "model.safetensors")
    prompts = {"prompts": {"query": "ab: ", "document": ""}, "default_prompt_name": "document"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    llm = start(tmp_path, skip_tokenizer_init=False)
    assert llm._input_processor.max_model_len == 20
    for name, text in (("query", "ab: cde f"), (None, "cde f")):
        first = states(model, backend.encode(text).ids)[0]
        want = torch.tanh(first @ weights[0].T + bias) @ weights[1].T
        for size in (None, 8):
            (found,) = llm.embed("cde f", prompt_name=name, dimensions=size, use_tqdm=False)
            close(torch.tensor(found.outputs.embedding), torch.nn.functional.normalize(want[:size], dim=0))
    with pytest.raises(ValueError, match="must be one of query, document, got 'passage'"):
        llm.embed("a", prompt_name="passage")
    llm.close()


def test_embeddings_keep_their_length_without_a_normalize_module(tmp_path: Path) -> None:
    model = reference(tmp_path, "Bert")
    write_modules(tmp_path, ["Transformer", "Pooling"], "mean_tokens")
    llm = start(tmp_path)
    close(embedded(llm, PROMPTS[1:2], normalize=None)[0], states(model, PROMPTS[1]).mean(0))
    llm.close()


def test_files_of_jina_are_those_of_roberta(tmp_path: Path) -> None:
    """With other names, and query, key and value in one tensor."""
    model = reference(tmp_path, "XLMRoberta", "ForSequenceClassification", num_labels=1)
    tensors, renamed = load_file(tmp_path / "model.safetensors"), {}
    names = {
        "embeddings.LayerNorm": "emb_ln", "encoder.layer.": "encoder.layers.",
        "attention.output.dense": "mixer.out_proj", "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2", "output.LayerNorm": "norm2",
    }  # fmt: skip
    for name, tensor in tensors.items():
        if ".attention.self." in name:
            if ".query." in name:
                parts = [tensors[name.replace(".query.", f".{part}.")] for part in ("query", "key", "value")]
                whole = name.replace("encoder.layer.", "encoder.layers.").replace("attention.self.query", "mixer.Wqkv")
                renamed[whole] = torch.cat(parts)
            continue
        for theirs, jinas in names.items():
            name = name.replace(theirs, jinas)
        renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    auto_map = {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaFlashModel"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    llm = start(tmp_path)
    for prompt, logits in zip(PROMPTS, embedded(llm, PROMPTS), strict=True):
        close(logits, states(model, prompt))
    llm.close()


@pytest.mark.parametrize("family", ["Bert", "Electra", "Albert"])
def test_models_saved_with_what_they_were_trained_with(family: str, tmp_path: Path) -> None:
    model = reference(tmp_path, family, "ForPreTraining")
    llm = start(tmp_path)
    for prompt, found in zip(PROMPTS, embedded(llm, PROMPTS), strict=True):
        close(found, states(model.base_model, prompt).mean(0))
    llm.close()


@pytest.mark.parametrize("scores", [False, True])
def test_llama_in_both_directions(scores: bool, tmp_path: Path) -> None:
    """NVIDIA's files: EuroBERT's layers under other names of architecture and head."""
    model = reference(tmp_path, "EuroBert")
    config = json.loads((tmp_path / "config.json").read_text()) | {"pooling": "avg", "id2label": {"0": "LABEL_0"}}
    config["architectures"] = ["LlamaBidirectionalForSequenceClassification" if scores else "LlamaBidirectionalModel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight = torch.randn(1, 64)
    if scores:
        tensors = {f"model.{name}": each for name, each in load_file(tmp_path / "model.safetensors").items()}
        save_file(tensors | {"score.weight": weight}, tmp_path / "model.safetensors")
    llm = start(tmp_path)
    for prompt, found in zip(PROMPTS, embedded(llm, PROMPTS), strict=True):
        want = states(model, prompt).mean(0)
        close(found, weight @ want if scores else want)
    llm.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"position_buckets": -1, "max_relative_positions": 40},  # distances have vectors of their own, up to 40
        {"position_biased_input": True, "type_vocab_size": 2, "norm_rel_ebd": "none"},
    ],
    ids=["no buckets", "positions added"],
)
def test_relative_positions_of_deberta(changes: dict[str, Any], tmp_path: Path) -> None:
    model = reference(tmp_path, "DebertaV2", "ForTokenClassification", num_labels=3, **changes)
    llm = start(tmp_path, max_num_batched_tokens=256)
    prompts = [*PROMPTS, PROMPTS[0]]
    for prompt, logits in zip(prompts, embedded(llm, prompts), strict=True):
        close(logits.view(len(prompt), 3), states(model, prompt))
    llm.close()


def test_deberta_has_no_distances_in_a_step_of_empty_texts(tmp_path: Path) -> None:
    """Such a step compiles the kernels when a GPU's engine starts."""
    reference(tmp_path, "DebertaV2")
    llm = start(tmp_path)
    runner: Any = llm._engine._runner._runner
    with torch.inference_mode():
        hidden = runner.forward.run(_packed_steps(runner, 4), StepSize(num_seqs=4, num_tokens=4, num_decodes=4))
    assert hidden.shape == (4, 64)
    llm.close()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("family", "settings"),
    [("Albert", {"tensor_parallel_size": 2}), ("DebertaV2", {"tensor_parallel_size": 2}),
     ("DebertaV2", {"pipeline_parallel_size": 2})],
)  # fmt: skip
def test_two_ranks(family: str, settings: dict[str, int], tmp_path: Path) -> None:
    model = reference(tmp_path, family, "ForSequenceClassification", num_labels=3)
    llm = start(tmp_path, **settings)
    for prompt, logits in zip(PROMPTS, embedded(llm, PROMPTS), strict=True):
        close(logits, states(model, prompt))
    llm.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "generates no text"),
        ({"prefix_cache_file": "x"}, "an encoder caches nothing"),
        ({"kv_cache_dtype": "fp8"}, "an encoder caches nothing"),
        ({"enable_lora": True}, "adapters of encoders are not supported"),
        ({"max_num_batched_tokens": 100}, "max_num_batched_tokens must be at least max_model_len=256"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str, bert: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        start(bert, **settings)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    reference(folder, "Bert")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "'position_embedding_type' must be absolute"),
        ({"is_decoder": True}, "'is_decoder' must be false"),
        ({"hidden_act": "mish"}, "activation 'mish' is not supported"),
        ({"architectures": ["DebertaModel"]}, "it needs attention by relative positions"),
        (DEBERTA | {"position_buckets": 2}, r"'position_buckets' \(2\) do not divide 256 distances"),
        (DEBERTA | {"conv_kernel_size": 3}, "'conv_kernel_size' must be 0 for DeBERTa, got 3"),
        ({"architectures": ["DebertaV2Model"]}, "'relative_attention' must be True for DeBERTa"),
        ({"lora_adaptation": "a", "position_embedding_type": "rotary", "architectures": ["RobertaModel"]}, "'lora_ad"),
        ({"architectures": ["NomicBertModel"], "num_experts": 8}, "experts are not supported in NomicBERT"),
    ],
)
def test_what_an_encoder_cannot_be(changes: dict[str, Any], message: str, bert: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_spec(bert, changes)


def test_a_plan_counts_what_the_engine_allocates(bert: Path) -> None:
    config = EngineConfig(model=str(bert), device="cpu", dtype="float32", skip_tokenizer_init=True)
    plan, llm = make_plan(config, cpu_here(), offline=True), start(bert)
    assert plan.num_blocks == llm._engine.runner.num_blocks
    assert plan.kv_cache_bytes == llm._engine.runner.kv_cache_bytes
    assert plan.weights["norms"] == 4 * 64 * 2 * (1 + 2 * 2)  # of the embeddings, and two in each layer
    assert plan.weights["tables"] == 4 * 64 * (256 + 2)  # positions and types
    llm.close()


def test_weights_in_pytorchs_format(tmp_path: Path) -> None:
    """bge-m3 has no others."""
    model = reference(tmp_path, "XLMRoberta")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    llm = start(tmp_path)
    close(embedded(llm, PROMPTS[1:2])[0], states(model, PROMPTS[1]).mean(0))
    llm.close()


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Harmful(), "cannot be read"),
        ({"a": 1}, "must hold tensors by name"),
        (torch.ones(2), "must hold tensors by name"),
        (None, "cannot be read"),
    ],
    ids=["code", "numbers", "one tensor", "no archive"],
)
def test_files_of_pytorch_that_hold_more(
    content: Any, message: str, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((bert / "config.json").read_bytes())
    torch.save(content, tmp_path / "pytorch_model.bin")
    if content is None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"no archive")
    with pytest.raises(ModelError, match=message):
        start(tmp_path)
    assert "code ran" not in capsys.readouterr().out
