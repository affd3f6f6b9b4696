"""Streaming text equals the full text, for any tokens cut in any way, and stop strings end it where they should."""

import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

TEXTS = st.text() | st.text("ab \n👋é", max_size=30)


def stream(detokenizer: Detokenizer, ids: list[int], rng: random.Random, finish: bool = True) -> list[str]:
    """Pushes `ids` in random cuts."""
    deltas = []
    while ids:
        cut = rng.choice([1, 1, 1, 2, 3, 7])
        deltas.append(detokenizer.push(ids[:cut]))
        ids = ids[cut:]
    if finish:
        deltas.append(detokenizer.push([], finished=True))
    return deltas


@given(text=TEXTS, prompt=TEXTS, seed=st.integers(0, 99), skip=st.booleans())
def test_text_streams_whole(tokenizer: Tokenizer, text: str, prompt: str, seed: int, skip: bool) -> None:
    prompt_ids = tokenizer.encode(prompt) if seed % 3 else []
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip)
    deltas = stream(detokenizer, ids, random.Random(seed))
    assert not any("\ufffd" in delta for delta in deltas) or "\ufffd" in text + prompt
    assert deltas[-1] == "", "whole characters do not wait for the end"
    full = tokenizer.decode(prompt_ids + ids, skip)
    assert tokenizer.decode(prompt_ids, skip) + "".join(deltas) == full
    assert detokenizer.text == "".join(deltas)


@given(data=st.data())
def test_any_tokens_stream_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    skip = data.draw(st.booleans())
    deltas = stream(Detokenizer(tokenizer, [], skip_special_tokens=skip), ids, random.Random(len(ids)))
    assert "".join(deltas) == tokenizer.decode(ids, skip)


@given(text=TEXTS, cut=st.integers(0, 20), seed=st.integers(0, 99))
def test_prompt_may_end_inside_a_character(tokenizer: Tokenizer, text: str, cut: int, seed: int) -> None:
    ids = tokenizer.encode(text)
    prompt, output = ids[:cut], ids[cut:]
    deltas = "".join(stream(Detokenizer(tokenizer, prompt), output, random.Random(seed)))
    assert "\ufffd" not in deltas or "\ufffd" in text
    assert (tokenizer.decode(prompt).rstrip("\ufffd") + deltas) == tokenizer.decode(ids) or "\ufffd" in text


@given(
    text=st.text("aab\n é👋", max_size=40),
    stop=st.lists(st.text("aab\n é👋", min_size=1, max_size=4), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    include=st.booleans(),
)
def test_stop_strings(tokenizer: Tokenizer, text: str, stop: list[str], seed: int, include: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    full = "".join(stream(Detokenizer(tokenizer, [0]), ids, random.Random(seed)))
    ends = [(full.index(s) + len(s), i) for i, s in enumerate(stop) if s in full]
    detokenizer = Detokenizer(tokenizer, [0], stop=stop, include_stop_str_in_output=include)
    plain = Detokenizer(tokenizer, [0])
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.push([token_id]))
        plain.push([token_id])
        if detokenizer.stopped_by is None:
            held = plain.text.removeprefix("".join(deltas))
            assert held == "" or any(s.startswith(held) for s in stop), "only what may begin a stop string is held back"
    deltas.append(detokenizer.push([], finished=True))
    if not ends:
        assert detokenizer.stopped_by is None
        assert "".join(deltas) == full
        return
    end, index = min(ends)
    assert detokenizer.stopped_by == stop[index]
    assert "".join(deltas) == (full[:end] if include else full[: end - len(stop[index])])
    again = Detokenizer(tokenizer, [0], stop=stop, include_stop_str_in_output=include)
    assert "".join(stream(again, ids, random.Random(seed))) == "".join(deltas), "cuts change nothing"
    assert (again.stopped_by, again.num_tokens) == (detokenizer.stopped_by, detokenizer.num_tokens)


def test_holds_back_the_shortest_suffix(tokenizer: Tokenizer) -> None:
    def ids(text: str) -> list[int]:
        return [i for char in text for i in tokenizer.encode("x" + char, add_special_tokens=False)[-1:]]

    detokenizer = Detokenizer(tokenizer, [0], stop=["abc", "bd"])
    assert [detokenizer.push(ids(c)) for c in "xababe"] == ["x", "", "", "ab", "", "abe"]
    assert [detokenizer.push(ids(c)) for c in "abd"] == ["", "", "a"]
    assert detokenizer.stopped_by == "bd"
    assert detokenizer.push(ids("more"), finished=True) == ""
    assert detokenizer.text == "xababea"


def test_min_tokens_and_the_end(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode("xa", add_special_tokens=False)[-1]] * 5
    detokenizer = Detokenizer(tokenizer, [0], stop=["aa"], min_tokens=3)
    deltas = [detokenizer.push([i]) for i in ids]
    assert detokenizer.stopped_by == "aa"
    assert "".join(deltas) == detokenizer.text == "aa"
    assert detokenizer.num_tokens == 4
    detokenizer = Detokenizer(tokenizer, [0], stop=["aaaaaa"])
    assert "".join(detokenizer.push([i]) for i in ids) == ""
    assert detokenizer.push([], finished=True) == "aaaaa"
    assert detokenizer.stopped_by is None


def test_half_a_character_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦩", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) == "a"
    assert detokenizer.push([], finished=True) == "\ufffd"


def test_first_word_after_a_prompt_keeps_its_space(story_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(story_model)
    word = tokenizer.encode("dog", add_special_tokens=False)
    assert Detokenizer(tokenizer, tokenizer.encode("a")).push(word) == " dog"
    assert Detokenizer(tokenizer, [1]).push(word) == "dog"


@pytest.mark.parametrize("stop", [[], ["\n\nHuman:", "a" * 1000]])
def test_time_per_token_does_not_grow(tokenizer: Tokenizer, stop: list[str]) -> None:
    ids = tokenizer.encode("aaaa the dog " * 50, add_special_tokens=False)

    def seconds(repeats: int) -> float:
        detokenizer = Detokenizer(tokenizer, [0] * 10_000, stop=stop)
        start = time.process_time()
        for _ in range(repeats):
            for token_id in ids:
                detokenizer.push([token_id])
        return (time.process_time() - start) / repeats

    seconds(1)
    assert min(seconds(80) for _ in range(2)) < 10 * min(seconds(2) for _ in range(5)), "40 times as long a text"
