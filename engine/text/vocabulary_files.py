"""Converts vocabularies of other tokenizers to the content of tokenizer.json.

`tekken.json` (Mistral), `tiktoken.model` (Kimi), `cl100k_base.tiktoken` (Phi-3-small), SentencePiece's BPE in
`tokenizer.model`, and the words of BERT in `vocab.txt`.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MAX_PIECE = 256  # characters of a token that is joined of others
SPACE = "▁"  # of SentencePiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # SentencePiece's types of pieces
_HAN_FREE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = (  # as in the code that comes with Kimi
    rf"[\p{{Han}}]+|{_HAN_FREE}{_UPPER}*{_LOWER}+{_SUFFIXES}|{_HAN_FREE}{_UPPER}+{_LOWER}*{_SUFFIXES}|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (  # of tiktoken
    rf"{_SUFFIXES[:-1]}|{_HAN_FREE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_SPECIAL = range(100256, 100352)
PHI3_SMALL = {  # special tokens; the other ids of `CL100K_SPECIAL` stand for nothing
    100257: "<|endoftext|>",
    100258: "<|fim_prefix|>",
    100259: "<|fim_middle|>",
    100260: "<|fim_suffix|>",
    100261: "<|system|>",
    100262: "<|user|>",
    100263: "<|assistant|>",
    100266: "<|end|>",
    100276: "<|endofprompt|>",
}
# Special tokens of tekken files that do not name theirs.
TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class Vocabulary(NamedTuple):
    """The content of tokenizer.json, and what tokenizer_config.json leaves out."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]


def tekken(data: bytes, config: Mapping[str, Any]) -> Vocabulary:
    """Convert tekken.json. Raises `ValueError`, `KeyError` or `TypeError` if it is malformed."""
    content = json.loads(data.decode("utf-8-sig"))
    settings = content["config"]
    count = int(settings["default_num_special_tokens"])
    named = {int(token["rank"]): str(token["token_str"]) for token in content.get("special_tokens") or ()}
    named = named or dict(enumerate(TEKKEN_SPECIAL))
    special = {named.get(i, f"<SPECIAL_{i}>"): i for i in range(count)}
    ranks = [base64.b64decode(token["token_bytes"], validate=True) for token in content["vocab"]]
    ranks = ranks[: int(settings["default_vocab_size"]) - count]
    found = _byte_level({token: rank + count for rank, token in enumerate(ranks)}, settings["pattern"], special)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Vocabulary(found, {"add_bos_token": True, "add_eos_token": False, **names})


def tiktoken(data: bytes, config: Mapping[str, Any]) -> Vocabulary:
    """Convert tiktoken.model. Raises `ValueError` if it is malformed, or if its words are cut in an unknown way."""
    if "tokenization_kimi" not in json.dumps(config.get("auto_map")):
        raise ValueError("its words are cut by code that comes with the model, and only Kimi's is known")
    ranks = _ranks(data)
    entries = config.get("added_tokens_decoder") or {}
    named = {int(index): entry["content"] for index, entry in entries.items()}
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + 256)}
    return Vocabulary(_byte_level(ranks, KIMI, special), {"add_bos_token": False, "add_eos_token": False})


def cl100k(data: bytes, config: Mapping[str, Any]) -> Vocabulary:
    """Convert cl100k_base.tiktoken. Raises `ValueError` if it is malformed, or not of Phi-3-small."""
    if "phi3_small" not in json.dumps(config.get("auto_map")):
        raise ValueError("its special tokens come with the model's code, and only Phi-3-small's are known")
    unused = iter(range(2, len(CL100K_SPECIAL)))
    dummies = {100264: 0, 100265: 1}  # the order in which the published code numbers them
    dummies |= {i: next(unused) for i in CL100K_SPECIAL if i not in PHI3_SMALL and i not in dummies}
    special = {PHI3_SMALL.get(i, f"<|dummy_id_{dummies.get(i)}|>"): i for i in CL100K_SPECIAL}
    names = {"bos_token": PHI3_SMALL[100257], "eos_token": PHI3_SMALL[100257]}
    found = _byte_level(_ranks(data), CL100K, special)
    return Vocabulary(found, {"add_bos_token": False, "add_eos_token": False, **names})


def sentencepiece(data: bytes, config: Mapping[str, Any]) -> Vocabulary:
    """Convert SentencePiece's BPE. Raises `ValueError` if it is malformed, or of another kind."""
    model = _fields(data)
    pieces = [_piece(each) for each in model.get(1, ())]
    trainer, normalizer = (_fields(b"".join(model.get(field, ()))) for field in (2, 3))
    if not pieces or trainer.get(3, [1])[0] != 2:
        raise ValueError("it is no BPE model of SentencePiece")
    if normalizer.get(4, [1])[0]:
        raise ValueError("it removes repeated spaces, which is not supported")
    texts = [piece.text for piece in pieces]
    vocab = {text: i for i, text in reversed(list(enumerate(texts)))}
    first = [1e9 if piece.kind == USER_DEFINED else piece.score for piece in pieces]
    merges = _joined({text: i for text, i in vocab.items() if len(text) <= MAX_PIECE}, lambda i: -first[i])
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if normalizer.get(3, [1])[0]:
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if charsmap := b"".join(normalizer.get(2, ())):
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), None)
    kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    added = {piece.text: i for i, piece in enumerate(pieces) if piece.kind in kinds and piece.text}
    found = {
        "version": "1.0",
        "added_tokens": [_added(text, i, special=pieces[i].kind != USER_DEFINED) for text, i in added.items()],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": any(piece.kind == BYTE for piece in pieces),
            "vocab": vocab,
            "merges": merges,
        },
    }
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": unknown}
    named = {name: text for name, text in names.items() if text in vocab}
    return Vocabulary(found, {"add_bos_token": "bos_token" in named, "add_eos_token": False, **named})


def wordpiece(data: bytes, config: Mapping[str, Any]) -> Vocabulary:
    """Convert BERT's vocab.txt, a word in each line. Raises `ValueError` if another tokenizer's words are in it."""
    kind = config.get("tokenizer_class") or "BertTokenizer"
    if not kind.removesuffix("Fast").endswith(("BertTokenizer", "ElectraTokenizer")):
        raise ValueError(f"it holds the words of a {kind}, and only BERT's is known")
    vocab = {word: i for i, word in enumerate(data.decode("utf-8-sig").split("\n")) if word}
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    names |= {name: config[name] for name in names if isinstance(config.get(name), str)}
    if missing := [names[name] for name in ("unk_token", "cls_token", "sep_token") if names[name] not in vocab]:
        raise ValueError(f"it has no {', '.join(missing)}")
    lower, strip = config.get("do_lower_case", True), config.get("strip_accents")
    chinese = config.get("tokenize_chinese_chars", True)
    first, last = (names[name] for name in ("cls_token", "sep_token"))
    found = {
        "version": "1.0",
        "added_tokens": [_added(text, vocab[text], special=True) for text in names.values() if text in vocab],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": chinese,
            "strip_accents": strip,
            "lowercase": lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": [last, vocab[last]], "cls": [first, vocab[first]]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": names["unk_token"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }
    return Vocabulary(found, {name: text for name, text in names.items() if text in vocab})


# The files in which a folder without tokenizer.json may have its vocabulary, the first that exists.
FILES: Mapping[str, Callable[[bytes, Mapping[str, Any]], Vocabulary]] = {
    "tekken.json": tekken,
    "tiktoken.model": tiktoken,
    "cl100k_base.tiktoken": cl100k,
    "tokenizer.model": sentencepiece,
    "vocab.txt": wordpiece,
}


def _ranks(data: bytes) -> dict[bytes, int]:
    """Read tiktoken's file: in each line a token in base64, and its rank."""
    pairs = (line.split() for line in data.splitlines())
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}


def _byte_level(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> dict[str, Any]:
    """Return byte-level BPE: tokens are joined in the order of their ids."""
    chars = _chars_of_bytes()
    texts = {"".join(chars[byte] for byte in token): index for token, index in ranks.items()}
    return {
        "version": "1.0",
        "added_tokens": [_added(text, index, special=True) for text, index in special.items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": texts | dict(special),
            "merges": _joined(texts, lambda index: index),
            "ignore_merges": True,
        },
    }


def _joined(vocab: Mapping[str, int], order: Callable[[int], float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, by `order` of its id, then by the parts' own ids."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                found.append((order(index), vocab[left], vocab[right], left, right))
    found.sort(key=lambda pair: pair[:3])
    return [pair[3:] for pair in found]


def _added(text: str, index: int, *, special: bool) -> dict[str, Any]:
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": text, **options, "special": special}


def _chars_of_bytes() -> Sequence[str]:
    """Return GPT-2's characters of bytes: printable Latin-1 stands for itself, others for characters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    chars = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [chars.get(byte, chr(byte)) for byte in range(256)]


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


def _piece(data: Any) -> _Piece:
    fields = _fields(data)
    text, kind = fields.get(1, [b""])[0], fields.get(3, [NORMAL])[0]
    return _Piece(text.decode(), float(fields.get(2, [0.0])[0]), kind)


def _fields(data: bytes) -> dict[int, list[Any]]:
    """Read a message of Protocol Buffers: the values of each field."""
    fields: dict[int, list[Any]] = {}
    for field, value in _values(data):
        fields.setdefault(field, []).append(value)
    return fields


def _values(data: bytes) -> Iterator[tuple[int, Any]]:
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield field, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("it is no message of Protocol Buffers")
        if at + size > end:
            raise ValueError("it is truncated")
        part = data[at : at + size]
        at += size
        yield field, part if kind == 2 else struct.unpack("<d" if kind == 1 else "<f", part)[0]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("it is truncated")
