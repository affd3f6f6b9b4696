"""Two models in processes of their own, behind one port, as `quire serve A B` starts them."""

import shutil
from pathlib import Path

import httpx
import pytest

from tests.support.served import serve


@pytest.mark.slow
@pytest.mark.parametrize("level", ["1", "2"])
def test_two_models_take_turns(tiny_model: Path, tmp_path: Path, level: str) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    settings = ("--device", "cpu", "--num-gpu-blocks-override", "128", "--sleep-level", level)
    with serve(tiny_model, str(other), *settings) as url, httpx.Client(base_url=url, timeout=120) as http:
        names = [card["id"] for card in http.get("/v1/models").json()["data"]]
        assert names == [tiny_model.name, "other"]
        texts = []
        for name in (*names, *names):
            body = {"model": name, "prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["model"] == name
            texts.append(answer["choices"][0]["text"])
            assert [each["name"] for each in http.get("/api/ps").json()["models"]] == [f"{name}:latest"]
        assert len(set(texts)) == 1, "the same weights"
