"""Vocabularies of GGUF files become the tokenizers that they were made of."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from engine.models.errors import ModelError
from engine.models.gguf.header import read_header
from engine.models.gguf.vocabulary import PRE_TOKENIZERS, chat_templates, end_token_ids, tokenizer_files
from engine.text.tokenizer import Tokenizer

CORPUS = Path(__file__).read_text(encoding="utf-8")
CONTROL, USER_DEFINED, NORMAL, BYTE, UNKNOWN = 3, 4, 1, 6, 2
PIECES = ("the ", "Don't I'LL", "  ", "\n\n", "\t", "12345 67", "é", "naïve ", "x²½", "日本語", "🦙", "…", "<s>",
          "</s>", "<|im_end|>", "a-b_c", "\r\n", "ÀB cDe", "::", "   y", "▁", "<tool>")  # fmt: skip


def texts() -> list[str]:
    choice = random.Random(0)
    return ["".join(choice.choices(PIECES, k=choice.randrange(1, 12))) for _ in range(300)] + [CORPUS[:3000]]


def loaded(metadata: dict[str, Any]) -> Tokenizer:
    files = tokenizer_files(metadata)
    backend = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    return Tokenizer(backend, files["tokenizer_config.json"])


def trained_byte_level(*steps: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return tokenizer


def byte_level_metadata(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    state = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = {"<s>": CONTROL, "</s>": CONTROL, "<tool>": USER_DEFINED}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
    }


def byte_level(use_regex: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


# As in the published tokenizer.json files.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED: dict[str, tuple[tuple[Any, ...], Any]] = {
    "gpt-2": ((byte_level(use_regex=True),), None),
    "smollm": ((pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)), None),
    "llama-bpe": ((split(LLAMA3), byte_level()), None),
    "qwen2": ((split(LLAMA3.replace("{1,3}", "")), byte_level()), normalizers.NFC()),
    "gpt-4o": ((split(O200K), byte_level()), None),
    "deepseek-coder": (
        (
            split("[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
            pre_tokenizers.Digits(individual_digits=True),
            byte_level(),
        ),
        None,
    ),
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_equals_its_origin(pre: str) -> None:
    steps, normalizer = PUBLISHED[pre]
    origin = trained_byte_level(*steps, normalizer=normalizer)
    tokenizer = loaded(byte_level_metadata(origin, pre))
    for text in texts():
        ids = origin.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == origin.decode(ids, skip_special_tokens=False)
    assert tokenizer.special_ids == {origin.token_to_id("<s>"), origin.token_to_id("</s>")}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loses_nothing(pre: str) -> None:
    metadata = byte_level_metadata(trained_byte_level(byte_level(use_regex=True)), pre)
    tokenizer = loaded(metadata | {"tokenizer.ggml.add_bos_token": False})
    for text in texts()[:60]:
        want = text if tokenizer._backend.normalizer is None else tokenizer._backend.normalizer.normalize_str(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == want


def sentencepiece_metadata(prefix: bool) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A BPE with byte fallback, as transformers converts SentencePiece's, and its scores: a piece's rank."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        if prefix
        else normalizers.Replace(" ", "▁")
    )
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.train_from_iterator([CORPUS.replace(" ", "▁")], trainer)
    state = json.loads(tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    first: dict[str, int] = {}
    for left, right in merges:
        first.setdefault(left + right, len(first))
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | dict.fromkeys(bytes_, BYTE)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(first.get(token, 10**6)) for token in tokens],
        "tokenizer.ggml.token_type": [types.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    found = {(left, right) for left in vocab for right in vocab if left + right in first}
    state["model"]["merges"] = sorted(
        found, key=lambda pair: (-first["".join(pair)], len(pair[0]), len(pair[1])), reverse=True
    )
    state["pre_tokenizer"] = None
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_]
    return tokenizers.Tokenizer.from_str(json.dumps(state)), metadata


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_its_origin(prefix: bool) -> None:
    origin, metadata = sentencepiece_metadata(prefix)
    tokenizer = loaded(metadata)
    for text in texts():
        ids = origin.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [1, *ids]
        if "\ufffd" not in origin.decode(ids, skip_special_tokens=False):
            assert tokenizer.decode(ids, skip_special_tokens=False) == origin.decode(ids, skip_special_tokens=False)


def test_spaces_in_tokens_that_users_defined() -> None:
    _, metadata = sentencepiece_metadata(False)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "      "]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], -1000.0]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], USER_DEFINED]
    tokenizer = loaded(metadata)
    assert tokenizer.decode([len(metadata["tokenizer.ggml.tokens"]) - 1, 4]).startswith("      ")


def test_long_pieces_take_no_time() -> None:
    _, metadata = sentencepiece_metadata(False)
    metadata["tokenizer.ggml.tokens"][-1] = "a" * 10**6  # a million ways to divide it, each of a million characters
    assert loaded(metadata).encode("a")


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ],
)
def test_bos(pre: str, said: bool | None, adds: bool) -> None:
    metadata = byte_level_metadata(trained_byte_level(byte_level(use_regex=True)), pre)
    if said is not None:
        metadata["tokenizer.ggml.add_bos_token"] = said
    tokenizer = loaded(metadata)
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == adds


def test_end_tokens() -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": ["a", "</s>", "<|im_end|>", "<|end|>", "<|eot_id|>"],
        "tokenizer.ggml.token_type": [NORMAL, CONTROL, CONTROL, CONTROL, NORMAL],
        "tokenizer.ggml.eos_token_id": 1,
    }
    assert end_token_ids(metadata) == [1, 2, 3]
    assert end_token_ids(metadata | {"tokenizer.ggml.eot_token_id": 2}) == [1, 2]
    metadata["tokenizer.ggml.tokens"][0] = "<|return|>"
    assert end_token_ids(metadata) == [1, 2]  # harmony's <|end|> ends a message alone


def test_chat_templates() -> None:
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b", "tokenizer.chat_templates": []}
    assert chat_templates(metadata) == [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b"},
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "bert"}, "vocabularies of the kind 'bert' are not supported; give the original"),
        ({"tokenizer.ggml.pre": "new"}, "cut by 'new'"),
        ({"tokenizer.ggml.pre": ["x"]}, "which is not known; give the original model's tokenizer by --tokenizer NAME"),
        ({"tokenizer.ggml.merges": []}, "it has no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": [1]}, "it has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "it has 1 types of"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.token_type": [1]},
            "types",
        ),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    metadata = byte_level_metadata(trained_byte_level(byte_level(use_regex=True)), "qwen2")
    with pytest.raises(ModelError) as error:
        tokenizer_files(metadata | change)
    assert said in str(error.value)


@pytest.mark.slow
def test_published_vocabularies() -> None:
    """llama.cpp's test vectors, made by the original tokenizers, in its folder `models`."""
    folder = os.environ.get("QUIRE_TEST_GGUF_VOCABULARIES")
    if not folder:
        pytest.skip("QUIRE_TEST_GGUF_VOCABULARIES names no folder")
    checked = 0
    for path in sorted(Path(folder).glob("ggml-vocab-*.gguf")):
        metadata = read_header([path]).metadata
        known = metadata["tokenizer.ggml.model"] != "gpt2" or metadata.get("tokenizer.ggml.pre") in PRE_TOKENIZERS
        if metadata["tokenizer.ggml.model"] not in ("gpt2", "llama", "gemma4") or not known:
            continue
        tokenizer, inputs = loaded(metadata), path.with_suffix(".gguf.inp")
        if not inputs.is_file():
            continue
        given = inputs.read_text("utf-8").split("\n__ggml_vocab_test__\n")
        for text, ids in zip(given, path.with_suffix(".gguf.out").read_text().split("\n"), strict=False):
            assert tokenizer.encode(text, add_special_tokens=False) == [*map(int, ids.split())], (path.name, text)
            checked += 1
    assert checked > 500
