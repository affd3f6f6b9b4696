"""Model folders that mean harm or are badly broken: each is refused in one clear line, with little time and memory.

What hostile chat templates do is in tests/text/test_chat_template.py.
"""

import contextlib
import json
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.errors import ModelError
from engine.processing.input_processor import InputProcessor
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.tokenizer import TokenizerError
from tests.support.loaded import load as load_model
from tests.support.tiny_model import CONFIG, write_model

ERRORS = (ModelError, TokenizerError, ChatTemplateError, ConfigError)
MEMORY = 1 << 30  # bytes of address space that reading a folder may take


Harm = Callable[[Path], object]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "healthy")


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """A larger allocation fails, which is not among `ERRORS`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read(folder: Path) -> None:
    """All that a server reads of a model."""
    inputs = InputProcessor.load(EngineConfig(model=str(folder)))
    assert inputs.tokenizer is not None
    if inputs.tokenizer.chat_template is not None:
        template = ChatTemplate(inputs.tokenizer.chat_template, inputs.tokenizer.special_tokens_map)
        template.render([{"role": "user", "content": "Hi"}])
    load_model(folder, inputs.spec, dtype=torch.float32, device="cpu", max_model_len=inputs.max_model_len)


# ---- ways to do harm ----


def written(name: str, content: str | bytes) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return harm


def changed(name: str, **fields: Any) -> Harm:
    def harm(folder: Path) -> None:
        path = folder / name
        content = (json.loads(path.read_text()) if path.exists() else {}) | fields
        path.write_text(json.dumps(content))

    return harm


def config(**fields: Any) -> Harm:
    return changed("config.json", **fields)


def tokens(**fields: Any) -> Harm:
    return changed("tokenizer_config.json", **fields)


def added(**fields: Any) -> Harm:
    return tokens(added_tokens_decoder={"258": {"content": "<x>", **fields}})


def fifo(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return harm


def linked(name: str, target: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return harm


def sparse(name: str, num_bytes: int) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, num_bytes)

    return harm


def moved_out(name: str) -> Harm:
    """A good file, but elsewhere: the model's folder has a link to it."""

    def harm(folder: Path) -> None:
        outside = folder.parent / "outside"
        if (folder / name).exists():
            shutil.move(folder / name, outside)
        else:
            outside.write_text("{}")
        (folder / name).symlink_to(outside)

    return harm


def templates_elsewhere(folder: Path) -> None:
    (folder.parent / "templates").mkdir()
    (folder.parent / "templates" / "tool_use.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").symlink_to(folder.parent / "templates")


def many_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    for number in range(101):
        (folder / "additional_chat_templates" / f"{number}.jinja").touch()


OPTIONAL = ("generation_config.json", "modules.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def index(*files: Any) -> Harm:
    """An index instead of the one file."""

    def harm(folder: Path) -> None:
        outside = folder.parent / "outside.safetensors"
        shutil.move(folder / "model.safetensors", outside)
        weight_map = {f"tensor {number}": file for number, file in enumerate(files)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return harm


def header(change: Callable[[dict[str, Any]], object] | None = None, *, text: bytes = b"", length: int = -1) -> Harm:
    """A safetensors file whose header is changed, or `text`; `length`: what it claims that it has."""

    def harm(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        fields = json.loads(data[8 : 8 + size])
        if change is not None:
            change(fields)
        new = text or json.dumps(fields).encode()
        claimed = length if length >= 0 else len(new)
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", claimed) + new + data[8 + size :])

    return harm


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def named_twice(folder: Path) -> None:
    """The second time its data are another tensor's."""
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    fields = json.loads(data[8 : 8 + size])
    begin = fields[EMBEDDING]["data_offsets"][0]
    second = fields[NORM] | {"data_offsets": [begin, begin + 256]}
    new = json.dumps(fields).encode()[:-1] + b"," + json.dumps({NORM: second}).encode()[1:]
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])


def tokenizer_json(**fields: Any) -> Harm:
    return changed("tokenizer.json", **fields)


DEEP_JSON = '{"a":' * 100_000 + "1" + "}" * 100_000
LONG_NUMBER = '{"hidden_size": 1' + "0" * 5000 + "}"
HOSTILE: dict[str, tuple[Harm, str]] = {
    # config.json: numbers
    "10⁹ layers": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "more layers than the weights have": (config(num_hidden_layers=1000), "weights lack"),
    "10¹⁸ channels": (config(hidden_size=10**18), "hidden_size"),
    "2³⁰ channels": (config(hidden_size=2**30, head_dim=16), "has shape"),
    "sizes whose product is beyond 64 bits": (
        config(hidden_size=2**30, num_attention_heads=2**30, head_dim=1024, num_key_value_heads=2**30),
        "too large",
    ),
    "10⁹ words": (config(vocab_size=10**9), "has shape"),
    "10¹² positions": (config(max_position_embeddings=10**12), "max_position_embeddings"),
    "a context stretched without end": (
        config(rope_scaling={"rope_type": "linear", "factor": 1e300}),
        "longest context",
    ),
    "a number of 5,000 digits": (written("config.json", LONG_NUMBER), "not valid JSON"),
    "a negative size": (config(intermediate_size=-5), "intermediate_size"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads"),
    "half a layer": (config(num_hidden_layers=1.5), "num_hidden_layers"),
    "NaN": (config(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "infinity": (config(rope_theta=float("inf")), "rope_theta"),
    "a NaN in the RoPE scaling": (config(rope_scaling={"type": "linear", "factor": float("nan")}), "factor"),
    "no original length": (
        config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}),
        "original_max_position_embeddings",
    ),
    "10⁹ as an end of text": (config(eos_token_id=10**30), "eos_token_id"),
    # config.json: types
    "sizes as texts": (config(hidden_size="64"), "hidden_size"),
    "sizes as lists": (config(hidden_size=[64] * 100_000), "hidden_size"),
    "true as a number": (config(num_hidden_layers=True), "num_hidden_layers"),
    "an object as the architecture": (config(architectures=[{"a": 1}]), "architectures"),
    "a long name as the architecture": (config(architectures=["x" * 100_000]), "not supported"),
    "lines in the architecture's name": (config(architectures=["a\nb\x1b[2Jc"]), "not supported"),
    "a list as the activation": (config(hidden_act=["silu"]), "hidden_act"),
    "a list as the dtype": (config(torch_dtype=["float32"]), "dtype"),
    "a list as the RoPE scaling": (config(rope_scaling=[1]), "rope_scaling"),
    "a number as the quantisation": (config(quantization_config=5), "quantization_config"),
    "a list as the quantisation's method": (config(quantization_config={"quant_method": []}), "quant_method"),
    "lists in the sparsity": (
        config(quantization_config={"quant_method": "compressed-tensors", "sparsity_config": [1]}),
        "quantization_config",
    ),
    "numbers as groups": (
        config(quantization_config={"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 1}}}),
        "weights",
    ),
    "a broken expression for modules": (
        config(quantization_config={"quant_method": "gptq", "dynamic": {"-:(": {}}}),
        "quantization_config",
    ),
    # files
    "deep JSON": (written("config.json", DEEP_JSON), "nested too deeply"),
    "no JSON": (written("config.json", "{"), "not valid JSON"),
    "no UTF-8": (written("config.json", b'{"a": "\xff"}'), "not valid JSON"),
    "a list": (written("config.json", "[1]"), "JSON object"),
    **{
        f"20 GB of {name}": (sparse(name, 20 * 10**9), "it is too large: 19073 MiB")
        for name in ("config.json", "tokenizer.json", *OPTIONAL, *TEMPLATES)
    },
    "more than a template ever has": (written("chat_template.jinja", "x" * (5 << 20)), "it is too large"),
    **{f"a pipe as {name}": (fifo(name), "it is no regular file") for name in (*OPTIONAL, *TEMPLATES)},
    **{f"a device as {name}": (linked(name, "/dev/zero"), "outside the model's folder") for name in TEMPLATES},
    **{f"a link from {name} to nothing": (linked(name, "nothing"), "cannot be read") for name in TEMPLATES},
    **{
        f"a link from {name} out of the folder": (moved_out(name), "a link to a file outside the model's folder")
        for name in ("config.json", "tokenizer.json", "model.safetensors", *OPTIONAL, *TEMPLATES)
    },
    "a folder of templates elsewhere": (templates_elsewhere, "outside the model's folder"),
    "a hundred and one templates": (many_templates, "more than 100 templates"),
    "a pipe as config.json": (fifo("config.json"), "no config.json"),
    "a pipe as weights": (fifo("model.safetensors"), "no .safetensors"),
    "a pipe as the tokenizer": (fifo("tokenizer.json"), "no tokenizer.json"),
    "a link to itself": (linked("config.json", "config.json"), "no config.json"),
    "a device as weights": (linked("model.safetensors", "/dev/zero"), "no .safetensors"),
    # the index
    "a file above the folder": (index("../outside.safetensors"), "not a file name"),
    "a file of the system": (index("/etc/passwd"), "not a file name"),
    "a file in a folder": (index("a/../../outside.safetensors"), "not a file name"),
    "the folder itself": (index("."), "not a file name"),
    "numbers as files": (index(5), "not a file name"),
    "lists as files": (index(["a"]), "not a file name"),
    "a deep index": (
        lambda folder: (index("a")(folder), written("model.safetensors.index.json", DEEP_JSON)(folder)),
        "nested too deeply",
    ),
    # safetensors
    "a header of 2⁶³ bytes": (header(length=2**63), "corrupt or truncated"),
    "a header of 2 GB": (header(length=2 << 30), "corrupt or truncated"),
    "no header": (written("model.safetensors", b""), "corrupt or truncated"),
    "a header that is cut off": (written("model.safetensors", struct.pack("<Q", 100) + b"{"), "corrupt or truncated"),
    "a header that is no JSON": (header(text=b"not JSON"), "corrupt or truncated"),
    "a deep header": (header(text=DEEP_JSON.encode()), "corrupt or truncated"),
    "tensors that overlap": (
        header(lambda fields: fields[NORM].update(data_offsets=[0, 256])),
        "corrupt or truncated",
    ),
    "data before the beginning": (
        header(lambda fields: fields[NORM].update(data_offsets=[-256, 0])),
        "corrupt or truncated",
    ),
    "data beyond the end": (
        header(lambda fields: fields[NORM].update(data_offsets=[10**12, 10**12 + 256])),
        "corrupt or truncated",
    ),
    "a shape that its data do not have": (
        header(lambda fields: fields[NORM].update(shape=[10**9])),
        "corrupt or truncated",
    ),
    "a shape beyond 64 bits": (
        header(lambda fields: fields[NORM].update(shape=[2**32, 2**32])),
        "corrupt or truncated",
    ),
    "an unknown dtype": (header(lambda fields: fields[NORM].update(dtype="F99")), "corrupt or truncated"),
    "integers as weights": (header(lambda fields: fields[NORM].update(dtype="I32")), "stored as I32"),
    "a tensor too many": (header(lambda fields: fields.update({"x\n" * 50_000: fields.pop(NORM)})), "weights lack"),
    "a tensor twice": (named_twice, "corrupt or truncated"),
    "data that are cut off": (sparse("model.safetensors", 100_000), "corrupt or truncated"),
    # generation_config.json and 1_Pooling
    "a text as temperature": (changed("generation_config.json", temperature="hot"), "temperature"),
    "a NaN as temperature": (changed("generation_config.json", temperature=float("nan")), "temperature"),
    "a list as top_k": (changed("generation_config.json", top_k=[1]), "top_k"),
    "an object as end of text": (changed("generation_config.json", eos_token_id={"a": 1}), "eos_token_id"),
    "-1 as end of text": (changed("generation_config.json", eos_token_id=-1), "eos_token_id"),
    "deep generation settings": (written("generation_config.json", DEEP_JSON), "nested too deeply"),
    "deep modules": (written("modules.json", DEEP_JSON), "modules.json"),
    # the tokenizer
    "an empty tokenizer": (written("tokenizer.json", "{}"), "cannot be read"),
    "a deep tokenizer": (written("tokenizer.json", DEEP_JSON), "cannot be read"),
    "a tokenizer that is no UTF-8": (written("tokenizer.json", b"\xff\xfe"), "cannot be read"),
    "a tokenizer of an unknown kind": (tokenizer_json(model={"type": "Magic"}), "cannot be read"),
    "a tokenizer without words": (tokenizer_json(model={"type": "BPE", "vocab": 5, "merges": []}), "cannot be read"),
    "merges of words that are none": (
        tokenizer_json(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}),
        "cannot be read",
    ),
    "a decoder of an unknown kind": (
        tokenizer_json(decoder={"type": "BPEDecoder", "suffix": "</w>"}),
        "is not supported",
    ),
    "ids of added tokens that are none": (
        tokens(added_tokens_decoder={"x": {"content": "a"}}),
        "tokenizer_config.json",
    ),
    "added tokens as texts": (tokens(added_tokens_decoder={"258": "a"}), "tokenizer_config.json"),
    "added tokens as a list": (tokens(added_tokens_decoder=[1]), "tokenizer_config.json"),
    "an added token without text": (tokens(added_tokens_decoder={"258": {"special": True}}), "tokenizer_config.json"),
    "an added token whose text is a number": (added(content=5), "tokenizer_config.json"),
    "an added token that is special as a text": (added(special="yes"), "tokenizer_config.json"),
    "a special token as a number": (tokens(eos_token=5), "tokenizer_config.json"),
    "special tokens as a number": (tokens(additional_special_tokens=5), "tokenizer_config.json"),
    "special tokens as numbers": (tokens(additional_special_tokens=[5]), "tokenizer_config.json"),
    "a deep tokenizer_config": (written("tokenizer_config.json", DEEP_JSON), "nested too deeply"),
    # the chat template
    "a number as template": (tokens(chat_template=5), "chat_template"),
    "templates without names": (tokens(chat_template=[{"template": "a"}]), "chat_template"),
    "texts as named templates": (tokens(chat_template=["a"]), "chat_template"),
    "a template that is no UTF-8": (written("chat_template.jinja", b"\xff"), "chat_template.jinja"),
    "a template that does not end": (tokens(chat_template="{% for i in range(10**9) %}x{% endfor %}"), "template"),
    "a template that grows": (tokens(chat_template="{{ 'x' * 10**10 }}"), "writes too much"),
    "a template that reaches out": (tokens(chat_template="{{ ''.__class__.__mro__ }}"), "unsafe"),
}


@pytest.mark.parametrize("name", ["chat_template.jinja", "1_Pooling/config.json", "model.safetensors"])
def test_a_false_cache_shows_nothing(name: str, healthy: Path, tmp_path: Path) -> None:
    """A folder that claims to be a snapshot, whose cache's blobs are a link to what is not the cache's."""
    folder = tmp_path / "models--a--b" / "snapshots" / "1"
    shutil.copytree(healthy, folder)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "key").write_text("{}")
    (tmp_path / "models--a--b" / "blobs").symlink_to(tmp_path / "elsewhere")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "models--a--b" / "blobs" / "key")
    if "/" in name:
        (folder / "modules.json").write_text("[]")
    with pytest.raises(ERRORS, match="outside the model's folder"):
        read(folder)


def test_the_cache_of_the_hub_is_read(healthy: Path, tmp_path: Path) -> None:
    """There every file is a link to a blob."""
    folder, blobs = (tmp_path / "models--a--b" / name for name in ("snapshots/1", "blobs"))
    blobs.mkdir(parents=True)
    shutil.copytree(healthy, folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        shutil.move(file, blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))
    read(folder)
    (tmp_path / "alias").symlink_to(folder)
    read(tmp_path / "alias")


def test_the_healthy_folder_is_read(healthy: Path) -> None:
    assert json.loads((healthy / "config.json").read_text()) == CONFIG
    with bounded_memory():
        read(healthy)


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_in_one_line(name: str, healthy: Path, tmp_path: Path) -> None:
    harm, words = HOSTILE[name]
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    harm(folder)
    with bounded_memory(), pytest.raises(ERRORS) as caught:
        read(folder)
    message = str(caught.value)
    assert words in message
    assert message.isprintable(), "one line, without what moves a terminal's cursor"
    assert len(message) < 1500
