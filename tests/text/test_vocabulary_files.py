"""Vocabularies of other tokenizers: the ids are those of the tokenizer that was trained on the same merges."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from engine.text.tokenizer import Tokenizer, TokenizerError
from engine.text.vocabulary_files import BYTE, CL100K, CONTROL, KIMI, NORMAL, TEKKEN_SPECIAL, UNKNOWN, USER_DEFINED

ROOT = Path(__file__).resolve().parents[2]
CORPUS = [path.read_text("utf-8") for path in (ROOT / "README.md", ROOT / "docs" / "api.md")]
TEXTS = (
    "The capital of France is Paris.",
    "  two  spaces\n\n\tand a tab ",
    "ÀÉ ß 東京都 🙂",
    "x=1234567; don't I'LL",
    "",
    "a\r\nb",
    "混合 text 文字テスト",
)
TEKKEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(pattern: str) -> tokenizers.Tokenizer:
    """Train byte-level BPE, whose ids are the order of merges."""
    trained = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    return trained


def bytes_of(trained: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of each token by its id."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    of_char = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    vocab = trained.get_vocab()
    return [bytes(of_char[char] for char in text) for text in sorted(vocab, key=lambda text: vocab[text])]


def tekken(trained: tokenizers.Tokenizer, **more: Any) -> bytes:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(bytes_of(trained))]
    unused = {"rank": len(vocab), "token_bytes": base64.b64encode(b"The capital").decode()}  # beyond the model's
    size = {"pattern": TEKKEN, "default_vocab_size": len(vocab) + 30, "default_num_special_tokens": 30}
    return json.dumps({"config": size, "vocab": [*vocab, unused], **more}).encode()


def test_tekken(tmp_path: Path) -> None:
    trained = byte_level(TEKKEN)
    (tmp_path / "tekken.json").write_bytes(tekken(trained))
    got = Tokenizer.from_folder(tmp_path)
    assert got.vocab_size == trained.get_vocab_size() + 30
    for text in TEXTS:
        ids = [30 + token for token in trained.encode(text).ids]
        assert got.encode(text, add_special_tokens=False) == ids, text
        assert got.encode(text) == [1, *ids]
    assert (got.bos_token, got.eos_token_id) == ("<s>", 2)
    assert got.encode("[INST]a", add_special_tokens=False)[0] == TEKKEN_SPECIAL.index("[INST]")
    assert got.token_to_id("<SPECIAL_29>") == 29
    named = [{"rank": i, "token_str": f"<{i}>", "is_control": True} for i in range(30)]
    (tmp_path / "tekken.json").write_bytes(tekken(trained, special_tokens=named))
    assert Tokenizer.from_folder(tmp_path).token_to_id("<7>") == 7


def test_kimis_tiktoken_model(tmp_path: Path) -> None:
    trained = byte_level(KIMI)
    lines = [base64.b64encode(token) + b" %d" % i for i, token in enumerate(bytes_of(trained))]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    size = len(lines)
    entries = {size: {"content": "[BOS]", "special": True}, size + 1: {"content": "<|im_end|>"}}
    config = {
        "added_tokens_decoder": {str(index): entry for index, entry in entries.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
    }
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    got = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert got.encode(text) == trained.encode(text).ids, text
    assert got.encode("a<|im_end|>")[-1] == size + 1
    assert (got.bos_token_id, got.token_to_id(f"<|reserved_token_{size + 5}|>")) == (size, size + 5)
    path.write_text("{}")
    with pytest.raises(TokenizerError, match="only Kimi's is known; convert the tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_phi_3_smalls_cl100k(tmp_path: Path) -> None:
    trained = byte_level(CL100K)
    lines = [base64.b64encode(token) + b" %d" % i for i, token in enumerate(bytes_of(trained))]
    (tmp_path / "cl100k_base.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_phi3_small.Phi3SmallTokenizer", None]}}))
    got = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert got.encode(text) == trained.encode(text).ids, text
    assert got.encode("<|user|>\na<|end|>")[::3] == [100262, 100266]
    assert (got.bos_token, got.eos_token_id) == ("<|endoftext|>", 100257)
    dummies = {0: 100264, 1: 100265, 2: 100256, 3: 100267, 11: 100275, 12: 100277, 86: 100351}
    assert [got.token_to_id(f"<|dummy_id_{i}|>") for i in dummies] == list(dummies.values())
    path.write_text("{}")
    with pytest.raises(TokenizerError, match="only Phi-3-small's are known; convert the tokenizer"):
        Tokenizer.from_folder(tmp_path)


def message(fields: list[tuple[int, Any]]) -> bytes:
    """Write a message of Protocol Buffers."""

    def varint(value: int) -> bytes:
        found = b""
        while value > 0x7F:
            found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
        return found + bytes([value])

    written = b""
    for field, value in fields:
        if isinstance(value, int):
            written += varint(field << 3) + varint(value)
        elif isinstance(value, float):
            written += varint(field << 3 | 5) + struct.pack("<f", value)
        else:
            written += varint(field << 3 | 2) + varint(len(value)) + value
    return written


def sentencepiece(*, prefix: bool, kind: int = 2) -> tuple[bytes, tokenizers.Tokenizer]:
    """Train BPE as SentencePiece's, and write it in both forms."""
    special = ["<unk>", "<s>", "</s>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    trained.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # so that no piece crosses words
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=1200, special_tokens=special, limit_alphabet=80))
    vocab = trained.get_vocab()
    pieces = []
    for text in sorted(vocab, key=lambda text: vocab[text]):
        i = vocab[text]
        which = {0: UNKNOWN, 1: CONTROL, 2: CONTROL, 3: USER_DEFINED}.get(i, BYTE if i < 260 else NORMAL)
        pieces.append((1, message([(1, text.encode()), (2, 0.0 if i < 260 else -float(i)), (3, which)])))
    normalizer = message([(1, b"identity"), (3, int(prefix)), (4, 0)])
    data = message([*pieces, (2, message([(3, kind)])), (3, normalizer)])
    content = json.loads(trained.to_str())
    content["pre_tokenizer"] = None
    added = [token for token in content["added_tokens"] if token["id"] < 4]
    content["added_tokens"] = [token | {"special": token["id"] < 3} for token in added]
    return data, tokenizers.Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    data, trained = sentencepiece(prefix=prefix)
    (tmp_path / "tokenizer.model").write_bytes(data)
    got = Tokenizer.from_folder(tmp_path)
    for text in (*TEXTS, "a<mask> b"):
        ids = trained.encode(text).ids
        assert got.encode(text, add_special_tokens=False) == ids, text
        assert got.encode(text) == [1, *ids]
        assert "<mask>" in text or got.decode(ids) == text
    assert (got.bos_token, got.eos_token) == ("<s>", "</s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert Tokenizer.from_folder(tmp_path).encode("a")[:1] != [1]


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"strip_accents": False, "sep_token": "[END]"}])
def test_words_of_bert(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The ids are those of transformers' tokenizer of the same file."""
    transformers = pytest.importorskip("transformers")
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", settings.get("sep_token", "[SEP]"), "[MASK]"]
    trained.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=700, special_tokens=special))
    vocab = trained.get_vocab()
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(vocab, key=vocab.__getitem__)), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    theirs, ours = transformers.BertTokenizerFast.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode_pair(text, "other") == theirs.encode(text, "other")
    assert ours.decode(ours.encode("the capital of")) == "the capital of"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tekken.json", b"{}", "tekken.json cannot be converted: 'config'; convert"),
        ("tekken.json", b"[", "cannot be converted: Expecting value"),
        ("tokenizer.model", b"", "it is no BPE model of SentencePiece"),
        ("tokenizer.model", b"\x0a\xff", "it is truncated"),
        ("tokenizer.model", b"\x0b", "it is no message of Protocol Buffers"),
        ("tokenizer.model", sentencepiece(prefix=True, kind=1)[0], "it is no BPE model of SentencePiece"),
    ],
    ids=["no config", "broken JSON", "empty", "truncated", "no message", "unigram"],  # bytes differ between processes
)  # fmt: skip
def test_what_cannot_be_converted(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
