"""Converts text to token ids and back with a model folder's tokenizer.json, or another vocabulary.

Each token stands for some bytes: `token_bytes` returns them, and `decode` joins them and decodes UTF-8. This matches
the `tokenizers` library except in one case: where a run of byte tokens (`<0xE2>`) is not valid UTF-8, the library
replaces the whole run with replacement characters. Quire keeps the run's valid characters, because text already
streamed to a client cannot be changed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from engine.text import vocabulary_files
from engine.utils.folder_files import read_file
from engine.utils.one_line import one_line

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Several times the sizes of the largest published files.
MAX_TOKENIZER_BYTES, MAX_CONFIG_BYTES, MAX_TEMPLATE_BYTES, MAX_TEMPLATES = 256 << 20, 64 << 20, 4 << 20, 100
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(Exception):
    """The tokenizer cannot be loaded, or cannot encode a text. The message is a single line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class TooManyTokensError(TokenizerError):
    """A text has more tokens than the caller takes: `num_tokens`."""

    def __init__(self, num_tokens: int, most: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens, and at most {most} are taken: shorten it")
        self.num_tokens = num_tokens


class _Token(msgspec.Struct):
    """A token in tokenizer_config.json, with the fields of `tokenizers.AddedToken`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Config(msgspec.Struct):
    """The fields used from tokenizer_config.json and special_tokens_map.json."""

    added_tokens_decoder: dict[int, _Token] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    additional_special_tokens: list[str | _Token] | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        """`config`: content of tokenizer_config.json, including special tokens. `chat_template`: the model's, or
        several by their names. Raises `TokenizerError` if the configuration is invalid.
        """
        self._backend = backend
        named = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        self.chat_templates: dict[str, str] = named
        read = _read_config(config)
        self._add_config_tokens(read)
        self.special_tokens_map: dict[str, str] = {
            name: text for name in _SPECIAL_NAMES if (text := _token_text(getattr(read, name))) is not None
        }
        self.bos_token = self.special_tokens_map.get("bos_token")
        self.eos_token = self.special_tokens_map.get("eos_token")
        self.bos_token_id = self.token_to_id(self.bos_token)
        self.eos_token_id = self.token_to_id(self.eos_token)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # If the config sets either flag, both replace the tokens that tokenizer.json adds around a text.
        flags = (read.add_bos_token, read.add_eos_token)
        self._frame: tuple[list[int], list[int]] | None = None
        if flags != (None, None):
            bos = [self.bos_token_id] if flags[0] and self.bos_token_id is not None else []
            eos = [self.eos_token_id] if flags[1] and self.eos_token_id is not None else []
            self._frame = (bos, eos)
        self._pieces = _Pieces(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; of several, the one named `default`, else the first."""
        return self.chat_templates.get("default", next(iter(self.chat_templates.values()), None))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        config = _read_json(folder, "special_tokens_map.json") | _read_json(folder, "tokenizer_config.json")
        path = folder / "tokenizer.json"
        if not path.is_file():
            other = next((name for name in vocabulary_files.FILES if (folder / name).is_file()), None)
            if other is not None:
                return cls._from_vocabulary(folder, other, config)
            if (reason := folder / "tokenizer.missing").is_file():  # of a GGUF file
                said = _read(reason, folder, MAX_CONFIG_BYTES).decode("utf-8", "replace")
                raise TokenizerError(f"the GGUF file's tokenizer cannot be used: {said}")
            raise TokenizerError(
                f"{folder} has no tokenizer.json, nor {' or '.join(vocabulary_files.FILES)}: convert the tokenizer "
                "with transformers' AutoTokenizer and save_pretrained, or give another folder with --tokenizer"
            )
        backend = _load(_read(path, folder, MAX_TOKENIZER_BYTES), path)
        return cls(backend, config, _read_chat_templates(folder, config))

    @classmethod
    def _from_vocabulary(cls, folder: Path, name: str, config: dict[str, Any]) -> Tokenizer:
        """Convert the vocabulary of another tokenizer. Raises `TokenizerError` if it is malformed or unknown."""
        path = folder / name
        try:
            found = vocabulary_files.FILES[name](_read(path, folder, MAX_TOKENIZER_BYTES), config)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TokenizerError(
                f"{path} cannot be converted: {error}; convert the tokenizer with transformers' AutoTokenizer and "
                "save_pretrained, or give another folder with --tokenizer"
            ) from None
        backend = _load(json.dumps(found.tokenizer).encode(), path)
        said = {key: value for key, value in config.items() if value is not None}
        return cls(backend, found.config | said, _read_chat_templates(folder, config))

    def _add_config_tokens(self, config: _Config) -> None:
        """Add the config's tokens to those of tokenizer.json, and mark special tokens.

        A token that would get a different id than in the config is left out. Special tokens are matched before
        normalisation, which could put a `▁` in front of them.
        """
        tokens, ids = list[tokenizers.AddedToken](), dict[str, int]()
        size = self._backend.get_vocab_size(with_added_tokens=True)
        for token_id, entry in sorted((config.added_tokens_decoder or {}).items()):
            known = ids.get(entry.content, self._backend.token_to_id(entry.content))
            if entry.content and token_id == (size if known is None else known):
                size += known is None
                ids[entry.content] = token_id
                given = {name: value for name, value in msgspec.structs.asdict(entry).items() if value is not None}
                tokens.append(tokenizers.AddedToken(**given))
        self._add(tokens)
        named = [*(getattr(config, name) for name in _SPECIAL_NAMES), *(config.additional_special_tokens or ())]
        texts = {
            text for entry in named if (text := _token_text(entry)) and self._backend.token_to_id(text) is not None
        }
        special = []
        for token in self._backend.get_added_tokens_decoder().values():
            if token.special or token.content in texts:
                options = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip")}
                special.append(tokenizers.AddedToken(token.content, special=True, normalized=False, **options))
                texts.discard(token.content)
        special += [tokenizers.AddedToken(text, special=True, normalized=False) for text in sorted(texts)]
        self._add(special)

    def _add(self, added: list[tokenizers.AddedToken]) -> None:
        """Add tokens in their order, many at once: each call goes through all tokens that were added before."""
        for special, tokens in itertools.groupby(added, lambda token: token.special):
            (self._backend.add_special_tokens if special else self._backend.add_tokens)(list(tokens))

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of `text`. Special tokens in the text are recognised.

        Raises `TokenizerError` for invalid Unicode, `TooManyTokensError` for more than `max_tokens`. Releases the GIL
        while encoding, but not while it makes the list: millions of ids would hold up all other threads.
        """
        try:
            if not add_special_tokens or self._frame is None:
                return self._encode(text, add_special_tokens, max_tokens)
            bos, eos = self._frame
            return bos + self._encode(text, False, max_tokens) + eos
        except (TypeError, UnicodeEncodeError):
            raise TokenizerError("the text is not valid Unicode: it contains a lone surrogate") from None

    def encode_pair(self, first: str, second: str, type_offset: int = 0) -> list[int]:
        """Return two texts as one prompt, with the tokenizer's special tokens around and between them.

        `type_offset`: added to the ids of tokens of the second type, see `ModelSpec.max_token_id`. Raises
        `TokenizerError` like `encode`.
        """
        try:
            if self._frame is None:
                found = self._backend.encode_batch_fast([(first, second)])[0]
                if not type_offset:
                    return found.ids
                return [i + kind * type_offset for i, kind in zip(found.ids, found.type_ids, strict=True)]
            bos, eos = self._frame
            return bos + self._encode(first, False) + self._encode(second, False) + eos
        except (TypeError, UnicodeEncodeError):
            raise TokenizerError("the text is not valid Unicode: it contains a lone surrogate") from None

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        # unlike `encode`, this releases the GIL and computes no offsets, which take as long as the ids
        found = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if max_tokens is not None and len(found) > max_tokens:
            raise TooManyTokensError(len(found), max_tokens)
        return found.ids

    @cached_property
    def max_chars_per_token(self) -> int | None:
        """Maximum characters of text per token; None if there is no bound, because characters may be dropped."""
        if not _keeps_all(self._backend):
            return None
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)))
        return longest * (1 if self._backend.normalizer is None else _MAX_COMPOSED)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        pieces = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        if not pieces:
            return ""
        data = self.first_token_bytes(pieces[0]) + b"".join(map(self.token_bytes, pieces[1:]))
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, except at its start; empty for ids outside the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._pieces.piece(self.id_to_token(token_id))
        return data

    def first_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a text's first token, without the space that some vocabularies put before every word."""
        return self._pieces.first_piece(self.id_to_token(token_id))

    def token_text(self, token_id: int) -> str:
        """Return one token as text. Incomplete characters become U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it (`Ġthe`, `▁the`)."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


_MAX_COMPOSED = 4  # most characters that Unicode normalisation combines into one
_KEEPING_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace", "ByteLevel"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Split"}


def _keeps_all(backend: tokenizers.Tokenizer) -> bool:
    """Return whether tokens cover every character of a text: none is dropped or stands for arbitrarily many others."""
    normalizers, pre_tokenizers = (
        _parts(backend.normalizer, "normalizers"),
        _parts(backend.pre_tokenizer, "pretokenizers"),
    )
    knows_all_bytes = getattr(backend.model, "byte_fallback", False) or any(
        part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers)
    )
    replaced = [part for part in normalizers if part["type"] == "Replace"]
    return (
        knows_all_bytes
        and {part["type"] for part in normalizers} <= _KEEPING_NORMALIZERS
        and {part["type"] for part in pre_tokenizers} <= _KEEPING_PRE_TOKENIZERS
        and all(part.get("behavior") != "Removed" for part in pre_tokenizers)
        and all(len(part["pattern"].get("String", "")) == 1 and part["content"] for part in replaced)
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    )


def _parts(step: Any, name: str) -> list[dict[str, Any]]:
    """Return the parts of a tokenizer step as in tokenizer.json. `name`: the key of the list in a `Sequence` step."""
    if step is None:
        return []
    state = json.loads(step.__getstate__())
    parts: list[dict[str, Any]] = state[name] if state["type"] == "Sequence" else [state]
    return parts


class _Pieces:
    """The decoder of tokenizer.json as a function from one token to its bytes."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = self._byte_tokens = self._no_metaspace_first = False
        self._metaspace = ""
        self._strip, self._num_strip = "", 0
        self._continues = ""  # WordPiece's mark of tokens that continue a word; others begin one
        self._separator = "" if decoder else " "
        parts = decoder.get("decoders", [decoder]) if decoder else []
        fused = False
        for part in parts:
            match part["type"]:
                case "ByteLevel":
                    self._byte_level = True
                case "ByteFallback":
                    self._byte_tokens = True
                case "Fuse":
                    fused = True
                case "Replace" if "String" in part["pattern"]:
                    self._replacements.append((part["pattern"]["String"], part["content"]))
                case "Metaspace":
                    self._metaspace = part["replacement"]
                    scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
                    self._no_metaspace_first = scheme != "never"
                case "WordPiece" if part["prefix"]:
                    self._continues, self._separator = part["prefix"], " "
                case "Strip" if part["stop"] == 0 and (fused or len(parts) == 1):
                    self._strip, self._num_strip = part["content"], part["start"]
                case other:
                    raise TokenizerError(
                        f"tokenizer.json: the decoder {other!r} is not supported, only those of byte-level and "
                        "SentencePiece-style (Metaspace, ByteFallback) and WordPiece vocabularies"
                    )

    def piece(self, token: str | None) -> bytes:
        if token is None:
            return b""
        if self._continues and token.startswith(self._continues):
            return token.removeprefix(self._continues).encode()
        return self._separator.encode() + self._raw(token, self._metaspace, " ")

    def first_piece(self, token: str | None) -> bytes:
        if token is None:
            return b""
        data = self._raw(token, self._metaspace, "" if self._no_metaspace_first else " ")
        strip = self._strip.encode()
        for _ in range(self._num_strip):
            data = data.removeprefix(strip)
        return data

    def _raw(self, token: str, metaspace: str, space: str) -> bytes:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if metaspace:
            token = token.replace(metaspace, space)
        if self._byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token, in plain text
                pass
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 bytes map to themselves, other bytes to characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def _load(content: bytes, path: Path) -> tokenizers.Tokenizer:
    """Create the backend of a tokenizer.json's content. `path`: its source, for errors."""
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:  # an Exception, or a Rust panic, which does not derive from it
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_config(content: dict[str, Any]) -> _Config:
    try:
        return msgspec.convert(content, _Config, str_keys=True)
    except msgspec.ValidationError as error:
        raise TokenizerError(f"tokenizer_config.json: {error}") from None


def _token_text(entry: str | _Token | None) -> str | None:
    """Return the text of a special token, which a config gives as a string or an object."""
    return entry.content if isinstance(entry, _Token) else entry


def _read(path: Path, folder: Path, max_bytes: int) -> bytes:
    try:
        return read_file(path, folder, max_bytes)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not os.path.lexists(path):
        return {}
    try:
        content = json.loads(_read(path, folder, MAX_CONFIG_BYTES).decode("utf-8-sig"))
    except RecursionError:
        raise TokenizerError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must contain a JSON object")
    return content


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Read the chat templates by their names, from the layouts in which transformers has saved them.

    The default is in chat_template.jinja, or else in chat_template.json or tokenizer_config.json, which may have a list
    of named ones. The folder additional_chat_templates holds others.
    """
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        named = {"default": _read_template(path, folder)}
    else:
        template = _read_config(config | _read_json(folder, "chat_template.json")).chat_template
        if isinstance(template, list):
            named = {entry.name: entry.template for entry in template}
        else:
            named = {"default": template} if template is not None else {}
    others = sorted(islice((folder / "additional_chat_templates").glob("*.jinja"), MAX_TEMPLATES + 1))
    if len(others) > MAX_TEMPLATES:
        raise TokenizerError(f"{folder / 'additional_chat_templates'} holds more than {MAX_TEMPLATES} templates")
    for path in others:
        named.setdefault(path.stem, _read_template(path, folder))
    return named


def _read_template(path: Path, folder: Path) -> str:
    try:
        return _read(path, folder, MAX_TEMPLATE_BYTES).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except ValueError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
