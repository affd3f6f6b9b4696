"""Converts a GGUF file's vocabulary to the files of a Hugging Face tokenizer.

Two kinds of vocabulary: "gpt2", byte-level BPE of words that regular expressions cut, named by `tokenizer.ggml.pre`;
and "llama", SentencePiece's BPE, whose pieces have scores ("gemma4": merges).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.models.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens; others: unused, byte
SPACE = "▁"  # of SentencePiece
MAX_PIECE = 256  # characters of a piece that is joined of others; the longest published has 31

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (rf"{_SUFFIXES}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",)
_QWEN2 = (rf"{_SUFFIXES}|{_LETTERS}|\p{{N}}|{_REST}",)
_DIGITS = (r"\p{N}", _GPT2)
_GPT4O = (rf"{_CASED[0]}{_SUFFIXES}?|{_CASED[1]}{_SUFFIXES}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
# `tokenizer.ggml.pre` → regular expressions that cut a text, one after the other.
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    "qwen35": (
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        + _REST.replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "mellum"), (_GPT2,)),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _DIGITS),
    "tekken": (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_WITH_SLASH}",),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken", "glm4")  # ignore merges
_BEGINS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken")  # with bos, unless a file says
_COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen", "megrez", "hunyuan")  # NFC
# Tokens that end a turn, for files that do not name theirs.
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json and tokenizer_config.json. Raises `ModelError`, without the file's name."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model == "gpt2":
        found = _byte_level(metadata, _known(pre))
    elif model in ("llama", "gemma4"):
        found = _sentencepiece(metadata)
    else:
        raise ModelError(f"vocabularies of the kind {model!r} are not supported; {_ADVICE}")
    return {"tokenizer.json": found, "tokenizer_config.json": _config(metadata, model, pre)}


_ADVICE = "give the original model's tokenizer by --tokenizer NAME"


def _known(pre: object) -> str:
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ModelError(f"its words are cut by {pre!r} (tokenizer.ggml.pre), which is not known; {_ADVICE}")
    return pre


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text: eos, and those that end a turn."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    said = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    found = [token for token in said if isinstance(token, int)]
    if said[1] is None:
        tokens = _list(metadata, "tokens", str)
        types = _types(metadata, len(tokens))
        ends = set(_ENDS_OF_TURN)
        if "<|return|>" in tokens:  # harmony: <|end|> ends a message, after which others follow
            ends.remove("<|end|>")
        found += [i for i, token in enumerate(tokens) if token in ends and types[i] in (CONTROL, USER_DEFINED)]
    return list(dict.fromkeys(found))


def special_token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of "bos", "eos", "unknown" or "padding"; None if the file names none."""
    token, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get("tokenizer.ggml.tokens")
    return token if isinstance(token, int) and isinstance(tokens, list) and 0 <= token < len(tokens) else None


def _byte_level(metadata: Mapping[str, Any], pre: str) -> dict[str, Any]:
    tokens = _list(metadata, "tokens", str)
    vocab = _vocab(tokens)
    cuts = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
        for cut in PRE_TOKENIZERS[pre]
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": _added(tokens, _types(metadata, len(tokens)), (CONTROL, USER_DEFINED)),
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, bytes_]},
        "post_processor": None,
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _stored_merges(metadata, vocab),
            "ignore_merges": pre in _WHOLE_WORDS,
        },
    }


def _stored_merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in _list(metadata, "merges", str):
        start, _, right = merge[1:].partition(" ")  # a piece may begin with a space
        left = merge[:1] + start
        if left in vocab and right in vocab and left + right in vocab:
            pairs.append((left, right))
    return pairs


def _sentencepiece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = _list(metadata, "tokens", str)
    types = _types(metadata, len(tokens))
    # llama.cpp writes spaces in tokens that users defined.
    tokens = [
        token.replace(" ", SPACE) if kind == USER_DEFINED else token for token, kind in zip(tokens, types, strict=True)
    ]
    vocab, unknown = _vocab(tokens), special_token_id(metadata, "unknown")
    if stored := "tokenizer.ggml.merges" in metadata:
        merges = _stored_merges(metadata, vocab)
    else:
        scores = _list(metadata, "scores", float)
        if len(scores) != len(tokens):
            raise ModelError(f"it has {len(scores)} scores of {len(tokens)} tokens; download it again")
        first = [1e9 if kind == USER_DEFINED else score for score, kind in zip(scores, types, strict=True)]
        merges = _merges(vocab, first)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", not stored) is not False
    replace: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        replace = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    added = _added(tokens, types, (UNKNOWN, CONTROL, USER_DEFINED))
    if metadata.get("general.architecture") == "phi3":
        keeping = (unknown, special_token_id(metadata, "bos"), vocab.get("<|endoftext|>"))
        added = [{**token, "rstrip": token["id"] not in keeping} for token in added]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": replace,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is a piece, best score first, as SentencePiece would join them."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        if len(piece) > MAX_PIECE:
            continue
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [(vocab[left], vocab[right], left, right) for left, right in pairs if left in vocab and right in vocab]
        found += [(scores[index], len(left), len(right), left, right) for _, _, left, right in sorted(known)]
    found.sort(key=lambda pair: pair[:3], reverse=True)
    return [pair[3:] for pair in found]


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocab.setdefault(token, i)
    return vocab


def _added(tokens: Sequence[str], types: Sequence[int], kinds: Sequence[int]) -> list[dict[str, Any]]:
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first = _vocab(tokens)
    return [
        {"id": i, "content": token, **options, "special": kind != USER_DEFINED}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in kinds and token and first[token] == i
    ]


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    """Return the type of each token; without them, all that are named as special are control tokens."""
    if "tokenizer.ggml.token_type" in metadata:
        types: list[int] = _list(metadata, "token_type", int)
        if len(types) != count:
            raise ModelError(f"it has {len(types)} types of {count} tokens; download it again")
        return types
    special = {special_token_id(metadata, name) for name in ("bos", "eos", "unknown", "padding")}
    return [CONTROL if i in special else NORMAL for i in range(count)]


def _config(metadata: Mapping[str, Any], model: str, pre: object) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: special_token_id(metadata, theirs) for theirs, name in names.items()}
    config: dict[str, Any] = {name: tokens[token] for name, token in ids.items() if token is not None}
    begins = metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in _BEGINS)
    config |= {"add_bos_token": begins is True, "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token") is True}
    return config


def chat_templates(metadata: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the chat templates with their names, as in tokenizer_config.json."""
    start = "tokenizer.chat_template"
    return [
        {"name": name.removeprefix(start).lstrip(".") or "default", "template": template}
        for name, template in metadata.items()
        if (name == start or name.startswith(start + ".")) and isinstance(template, str)
    ]


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found or not isinstance(found[0], kind):
        raise ModelError(f"it has no tokenizer.ggml.{name}; {_ADVICE}")
    return found
