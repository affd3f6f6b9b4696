"""Log-probabilities as clients get them: those of transformers in float32, for prompts, echoes and answers of real
models.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.served import serve

TEXTS = ["Zoë 👋 sagt: «Grüße!»\n", "Once upon a time there was a cat.", "α"]


class Scored:
    """A served model, and the same in transformers."""

    def __init__(self, url: str, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.stories = model / "expected_greedy.json"
        self.http = httpx.Client(base_url=url, timeout=120)
        # Only then is a prompt, which an echo gives as it came, its tokens' texts and nothing else.
        self.is_byte_level = json.loads((model / "tokenizer.json").read_text())["decoder"]["type"] == "ByteLevel"
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def table(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary]: log-probabilities of what follows each token."""
        with torch.inference_mode():
            return self._model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    def check(self, prompt: list[int], answer: list[int], logprobs: list[float], tops: list[list[float]]) -> None:
        """The answer's log-probabilities, and those of the most likely tokens at its positions."""
        table = self.table(prompt + answer)[len(prompt) - 1 : -1]
        assert logprobs == pytest.approx(table.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist(), abs=1e-3)
        for row, found in zip(table, tops, strict=True):
            assert found == pytest.approx(row.topk(len(found)).values.tolist(), abs=1e-3)


@pytest.fixture(scope="module", params=["tiny_model", "demo_model", "story_model"])
def scored(request: pytest.FixtureRequest, quick_quire: list[str]) -> Iterator[Scored]:
    model = request.getfixturevalue(request.param)
    with serve(model, "--dtype", "float32", quire=quick_quire) as url:
        scored = Scored(url, model)
        yield scored
        scored.http.close()


def test_answers(scored: Scored) -> None:
    """The model's own probabilities, whatever was sampled with."""
    for sampling in ({"temperature": 0}, {"temperature": 1.5, "top_k": 50, "seed": 1, "presence_penalty": 1}):
        options = {"max_tokens": 24, "return_token_ids": True, "ignore_eos": True, "logprobs": 4, **sampling}
        body = scored.post("/v1/completions", prompt=TEXTS, return_tokens_as_token_ids=True, **options)
        for choice in body["choices"]:
            found, answer = choice["logprobs"], choice["token_ids"]
            assert found["tokens"] == [f"token_id:{token}" for token in answer]
            own = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
            assert all(top[token] == logprob for token, logprob, top in own)
            tops = [sorted(top.values(), reverse=True)[:4] for top in found["top_logprobs"]]
            scored.check(choice["prompt_token_ids"], answer, found["token_logprobs"], tops)


def test_answers_of_chats(scored: Scored) -> None:
    messages = [{"role": "user", "content": TEXTS[0]}]
    options = {"max_tokens": 24, "return_token_ids": True, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    body = {"messages": messages, "logprobs": True, "top_logprobs": 5, "prompt_logprobs": 0, **options}
    response = scored.http.post("/v1/chat/completions", json=body)
    if "no chat template" in response.text:
        pytest.skip("it is no chat model")
    body = response.json()
    (choice,), prompt = body["choices"], body["prompt_token_ids"]
    found = choice["logprobs"]["content"]
    tops = [[top["logprob"] for top in at["top_logprobs"]] for at in found]
    scored.check(prompt, choice["token_ids"], [at["logprob"] for at in found], tops)
    check_prompt(scored, prompt, body["prompt_logprobs"])


def check_prompt(scored: Scored, prompt: list[int], found: list[Any]) -> None:
    assert found[0] is None
    table = scored.table(prompt)
    for row, token, at in zip(table[:-1], prompt[1:], found[1:], strict=True):
        assert at[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-3)
        assert at[str(token)]["rank"] == int((row > row[token]).sum()) + 1


def test_prompts(scored: Scored) -> None:
    body = {"max_tokens": 1, "return_token_ids": True, "prompt_logprobs": 3}
    for choice in scored.post("/v1/completions", prompt=TEXTS, **body)["choices"]:
        check_prompt(scored, choice["prompt_token_ids"], choice["prompt_logprobs"])


@pytest.mark.parametrize("more", [0, 8])
def test_echoes(scored: Scored, more: int) -> None:
    """Score texts as evaluation harnesses do: every token of the prompt but the first has its log-probability and its
    place.
    """
    body = {
        "prompt": TEXTS,
        "echo": True,
        "logprobs": 1,
        "max_tokens": more,
        "return_token_ids": True,
        "temperature": 0,
    }
    for text, choice in zip(TEXTS, scored.post("/v1/completions", ignore_eos=True, **body)["choices"], strict=True):
        prompt, found = choice["prompt_token_ids"], choice["logprobs"]
        token_ids = prompt + choice["token_ids"][:more]
        assert choice["text"].startswith(text)
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        scored.check(prompt[:1], token_ids[1:], found["token_logprobs"][1:], [[]] * (len(token_ids) - 1))
        if scored.is_byte_level:
            for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
                assert token.startswith(("bytes:", "<|")) or choice["text"].startswith(token, offset), (token, offset)


def test_parts_of_characters_stand_where_the_character_does(scored: Scored) -> None:
    if not scored.is_byte_level:
        pytest.skip("its tokenizer knows no parts of characters")
    body = {"prompt": TEXTS[0], "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = scored.post("/v1/completions", **body)["choices"]
    found, text, seen = choice["logprobs"], "", b""
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert offset == len(text)
        seen += eval(f"b'{token[6:]}'") if token.startswith("bytes:") else token.encode()
        text = seen.decode(errors="ignore")
    assert text == TEXTS[0]


def test_stories_have_the_likelihood_that_transformers_finds(scored: Scored) -> None:
    if not scored.stories.exists():
        pytest.skip("it tells no stories")
    for story in json.loads(scored.stories.read_text()):
        token_ids = (story["prompt_ids"] + story["output_ids"])[:250]
        body = {"prompt": token_ids, "echo": True, "logprobs": 0, "max_tokens": 0}
        (choice,) = scored.post("/v1/completions", **body)["choices"]
        table = scored.table(token_ids)[:-1]
        wanted = float(table.gather(1, torch.tensor(token_ids[1:])[:, None]).double().sum())
        assert sum(choice["logprobs"]["token_logprobs"][1:]) == pytest.approx(wanted, abs=1e-2)
