"""Settings from the command line, the environment and YAML."""

import argparse
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, check, command_line, flag, load, parse_size, settings_of


@dataclass(frozen=True)
class Kinds:
    """One of each."""

    text: str = flag("a", "a text")
    choice: str = flag("x", "a choice", choices=("x", "y"))
    count: int = flag(1, "a count", short="-c", at_least=1, at_most=9)
    size: int | None = flag(None, "a size", size=True)
    share: float = flag(0.5, "a share", above=0, at_most=1)
    on: bool = flag(True, "a switch")
    off: bool = flag(False, "another")
    names: tuple[str, ...] = flag((), "names")
    extra: dict[str, Any] = flag({}, "an object", env="EXTRA")  # noqa: RUF009

    def __post_init__(self) -> None:
        check(self)


def parse(*words: str) -> argparse.Namespace:
    parser = Parser(prog="quire test")
    add_flags(parser, Kinds)
    return parser.parse_args(words)


def settings(*words: str, environ: dict[str, str] | None = None) -> Kinds:
    return load(parse(*words), Kinds, environ=environ or {})[0]


def test_command_line_gives_every_kind() -> None:
    words = ["--text", "b", "--choice=y", "-c", "2", "--size", "32k", "--share", "1", "--no-on", "--off"]
    assert settings(*words, "--names", "a", "b", "--extra", '{"a": 1}') == Kinds(
        "b", "y", 2, 32000, 1.0, False, True, ("a", "b"), {"a": 1}
    )


def test_underscores_are_dashes() -> None:
    parser = Parser(prog="quire test")
    add_flags(parser, EngineConfig)
    args = parser.parse_args(["--max_model_len=1k", "--no_enable_prefix_caching", "--model", "a_b"])
    config = load(args, EngineConfig, environ={})[0]
    assert (config.max_model_len, config.enable_prefix_caching, config.model) == (1000, False, "a_b")


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("count: 2\ntext: yaml\nshare: 0.25\nnames: [a, b]\n")
    environ = {"QUIRE_COUNT": "3", "QUIRE_TEXT": "env", "EXTRA": "{}"}
    assert load(parse(), Kinds, environ={})[0].count == 1
    assert load(parse(), Kinds, environ={}, defaults={"count": 5})[0].count == 5
    assert load(parse("--config", str(file)), Kinds, environ={}, defaults={"count": 5})[0].count == 2
    assert load(parse("--config", str(file)), Kinds, environ=environ)[0].count == 3
    found = load(parse("--config", str(file), "--count", "4"), Kinds, environ=environ)[0]
    assert (found.count, found.text, found.share, found.names) == (4, "env", 0.25, ("a", "b"))


def test_environment_spellings() -> None:
    environ = {"QUIRE_ON": "off", "QUIRE_OFF": "Yes", "QUIRE_NAMES": "a, b", "QUIRE_SIZE": "none"}
    found = settings(environ=environ)
    assert (found.on, found.off, found.names, found.size) == (False, True, ("a", "b"), None)


def test_misspelt_variable_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    found = settings(environ={"QUIRE_COUNTS": "3", "QUIRE_NOTHING_LIKE_IT": "3"})
    assert found == Kinds()
    assert [record.getMessage() for record in caplog.records] == [
        "QUIRE_COUNTS is not a setting and has no effect (did you mean QUIRE_COUNT?)"
    ]


def test_variables_of_every_command_are_known(caplog: pytest.LogCaptureFixture) -> None:
    """QUIRE_LOG_FORMAT is no misspelt QUIRE_LOAD_FORMAT."""
    load({"model": "m"}, EngineConfig, environ={"QUIRE_LOG_FORMAT": "json", "QUIRE_LOG_LEVEL": "debug"})
    assert not caplog.records


def test_variables_of_a_kubernetes_service_are_no_settings() -> None:
    assert settings(environ={"QUIRE_COUNT": "tcp://10.0.0.7:8000"}) == Kinds()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--count", "x"], "--count must be an integer at least 1 and at most 9, got 'x'"),
        (["--count", "10"], "--count must be an integer at least 1 and at most 9, got '10'"),
        (["--choice", "z"], "--choice must be one of x, y, got 'z'"),
        (["--share", "0"], "--share must be a number above 0 and at most 1, got '0'"),
        (["--share", "nan"], "--share must be a number above 0 and at most 1, got 'nan'"),
        (["--size", "3x"], "--size must be an integer or a size such as 32k, got '3x'"),
        (["--extra", "[]"], "--extra must be a JSON object, got '[]'"),
    ],
)
def test_errors_name_flag_value_and_range(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*words)
    assert str(caught.value) == message


def test_errors_name_the_source(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("count: many")
    with pytest.raises(ConfigError, match=r"settings\.yaml: count must be an integer .*, got 'many'"):
        settings("--config", str(file))
    with pytest.raises(ConfigError, match="QUIRE_COUNT must be an integer"):
        settings(environ={"QUIRE_COUNT": "many"})
    with pytest.raises(ConfigError, match=r"^count must be an integer"):
        Kinds(count=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("counts: 1", r"unknown setting 'counts' \(did you mean count\?\)"),
        ("- 1", "must hold 'name: value' lines, got list"),
        ("a: [", "not YAML"),
        (None, "No such file"),
    ],
)
def test_bad_yaml(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "settings.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        settings("--config", str(file))


def test_empty_yaml_and_null_are_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("")
    assert settings("--config", str(file)) == Kinds()
    file.write_text("size: null\ncount: null\n")
    assert settings("--config", str(file)) == Kinds()


def test_unknown_option_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--cuont", "3")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "quire test: error: unknown option --cuont (did you mean --count?)\n"


def test_usage_of_many_options_is_one_line() -> None:
    parser = Parser(prog="quire test")
    parser.add_argument("place", nargs="?")
    add_flags(parser, Kinds)
    assert parser.format_usage() == "usage: quire test [place] [OPTIONS]\n"
    assert all(name in parser.format_help() for name in ("--count", "--no-off", "--extra"))
    few = Parser(prog="quire test")
    few.add_argument("--one")
    assert few.format_usage() == "usage: quire test [-h] [--one ONE]\n"


def test_abbreviations_are_refused() -> None:
    with pytest.raises(SystemExit):
        parse("--cou", "3")


def test_sizes() -> None:
    spelled = {"7": 7, "32k": 32000, "32K": 32768, "1.5k": 1500, "4GiB": 4 << 30, "2M": 2 << 20, "1g": 10**9}
    assert {text: parse_size(text) for text in spelled} == spelled
    for text in ("", "k", "1.5", "1 x", "0.0001k"):
        with pytest.raises(ValueError, match="not a"):
            parse_size(text)


def test_engine_config_checks_itself() -> None:
    assert EngineConfig(model="m", max_model_len="32k").max_model_len == 32000  # type: ignore[arg-type]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model": ""}, "model is missing"),
        ({"block_size": 24}, "block_size must be a power of two, got 24"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a number above 0 and at most 1, got 1.5"),
        ({"kv_cache_memory_bytes": 1, "num_gpu_blocks_override": 1}, "give only one"),
        ({"hf_overrides": "[1]"}, r"hf_overrides must be a JSON object, got '\[1\]'"),
        ({"hf_overrides": "[" * 100_000}, "hf_overrides must be a JSON object"),
        ({"hf_overrides": {"a": {1, 2}}}, r"hf_overrides must be a JSON object \(Object of type set"),
        ({"hf_overrides": {"a": 2**64}}, r"hf_overrides must be a JSON object \(can't serialize ints"),
        ({"hf_overrides": {"a": "b" * 70_000}}, "hf_overrides must be at most 65536 characters, got 70009"),
    ]
    for changes, message in refused:
        with pytest.raises(ConfigError, match=message):
            EngineConfig(**{"model": "m", **changes})


def test_every_flag_has_help_and_a_valid_default() -> None:
    for setting in settings_of(EngineConfig).values():
        assert setting.declaration.help
        if setting.name != "model":
            assert setting.convert(setting.default, setting.name) == setting.default


def test_the_command_line_hides_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", "serve", "--api-key", "k1", "k2", "--header", "A=b", "--header=A=c", "--extra-body", '{"a": 1}']
    monkeypatch.setattr("sys.argv", ["/usr/bin/quire", *words])
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    hidden = "--api-key HIDDEN HIDDEN --header HIDDEN --header=HIDDEN"
    assert command_line() == f"quire bench serve {hidden} --extra-body '{{\"a\": 1}}'"
