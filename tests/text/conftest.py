"""Two small tokenizers, trained on the spot: byte-level as in Llama 3 and Qwen, SentencePiece-style as in Llama 2."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's a dog's life, isn't it?\n\nYes.",
    "def decode(ids):\n    return ''.join(pieces[i] for i in ids)  # 1234567890",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? Это просто текст.",
    "吾輩は猫である。名前はまだ無い。 你好，世界！ 한국어 👋🏽 👩‍👩‍👧 🇫🇷 ﷽ ",
] * 3


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """`▁` for spaces, `<0x..>` for bytes outside the vocabulary, one space before every text."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁"]
    learner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    tokens += [token for token in learned["vocab"] if token not in tokens]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = learner.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


CONFIGS: dict[str, dict[str, Any]] = {
    "byte_level": {"eos_token": "<|im_end|>"},
    "sentencepiece": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"},
}


@pytest.fixture(scope="session")
def backends() -> dict[str, tokenizers.Tokenizer]:
    return {"byte_level": byte_level(), "sentencepiece": sentencepiece()}


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def style(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def backend(style: str, backends: dict[str, tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    """The library's own tokenizer: the oracle."""
    return backends[style]


@pytest.fixture(scope="session")
def tokenizer(style: str, backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(backend.to_str()), CONFIGS[style])


@pytest.fixture
def model_folder(tmp_path: Path, style: str, backend: tokenizers.Tokenizer) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIGS[style]))
    return tmp_path
