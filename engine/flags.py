"""Settings declared once: dataclass fields that become command-line options, YAML keys, environment variables and help.

    @dataclass(frozen=True)
    class Settings:
        port: int = flag(8000, "port to listen on", at_least=1, at_most=65535)

`add_flags(parser, Settings)` gives `--port`, `load(args, Settings)` gives the instance. The command line wins over the
environment (`QUIRE_PORT`), which wins over the YAML file of `--config`, which wins over the default.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import functools
import json
import logging
import math
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.core.params.declare import Declaration, DeclaredField, declared_fields
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_USAGE_OPTIONS = 8  # if a command has more, its usage line shows only [OPTIONS]
_OF_EVERY_COMMAND = ("QUIRE_LOG_FORMAT", "QUIRE_LOG_LEVEL", "QUIRE_CACHE_DIR")  # read elsewhere
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}
_KIND_WORDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list of strings",
    tuple: "a list of strings",
    dict: "a JSON object",
}


@dataclass(frozen=True, slots=True)
class Flag(Declaration):
    """The declaration of a setting."""

    short: str | None = None  # another option name, such as "-tp"
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    env: str | None = None  # environment variable, instead of QUIRE_<FIELD>
    size: bool = False  # an integer that may be written 32k (32,000), 32K (32,768), 4GiB
    common: bool = False  # listed by --help; the other flags of such a class are listed only by --help-all
    secret: bool = False  # shown neither in errors nor by `repr` of the settings


def flag(default: Any, help: str, **more: Any) -> Any:
    """Declare a dataclass field with its help text; `more` holds the other fields of `Flag`."""
    declared = Flag(help, **more)
    metadata = {"declaration": declared}
    if isinstance(default, (list, dict)):
        factory = functools.partial(copy.copy, default)
        return dataclasses.field(default_factory=factory, metadata=metadata, repr=not declared.secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not declared.secret)


class Setting(DeclaredField[Flag]):
    """A declared setting. Its kind is str, int, float, bool, list, tuple or dict."""

    __slots__ = ()

    @property
    def kind(self) -> type:
        """The type without None and without the types of entries."""
        kind = super().kind
        found: type = typing.get_origin(kind) or kind
        return found

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return self.declaration.env or "QUIRE_" + self.name.upper()

    @property
    def wanted(self) -> str:
        flag = self.declaration
        if flag.choices:
            return "one of " + ", ".join(flag.choices)
        limits = [("above", flag.above), ("at least", flag.at_least), ("at most", flag.at_most)]
        words = " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)
        if flag.size:
            return "an integer or a size such as 32k" + (f", {words}" if words else "")
        return f"{_KIND_WORDS[self.kind]} {words}".strip()

    def convert(self, value: Any, label: str) -> Any:
        """Convert `value`, a string or a value of the right type, to this type. `ConfigError` names `label`."""
        converted = self._parse(value) if isinstance(value, str) else value
        if converted is None and self.is_optional:
            return None
        if self.kind is float and type(converted) is int:
            converted = float(converted)
        if self.kind in (list, tuple) and isinstance(converted, (list, tuple)):
            converted = self.kind(converted) if all(isinstance(item, str) for item in converted) else None
        if type(converted) is not self.kind or not self._in_range(converted):
            got = "" if self.declaration.secret else f", got {value!r}"
            raise ConfigError(f"{label} must be {self.wanted}{got}")
        return converted

    def _parse(self, text: str) -> Any:
        try:
            if self.is_optional and self.kind is not str and text.strip().lower() in ("auto", "none"):
                return None
            if self.kind is bool:
                lowered = text.strip().lower()
                return True if lowered in _TRUE else False if lowered in _FALSE else text
            if self.kind is int:
                return parse_size(text) if self.declaration.size else int(text)
            if self.kind is float:
                return float(text)
            if self.kind in (list, tuple):
                return [item.strip() for item in text.split(",") if item.strip()]
            return json.loads(text) if self.kind is dict else text
        except (ValueError, RecursionError):  # RecursionError: JSON that is nested too deeply
            return text

    def _in_range(self, value: Any) -> bool:
        flag = self.declaration
        if flag.choices:
            return all(item in flag.choices for item in ([value] if isinstance(value, str) else value))
        if self.kind not in (int, float):
            return True
        low, high = flag.limits
        return math.isfinite(value) and low <= value <= high


def parse_size(text: str) -> int:
    """Return '4096', '32k' (decimal), '32K' or '4GiB' (binary) as an integer; `ValueError` otherwise."""
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*(?:([kmgtKMGT])(iB)?)?\s*", text)
    if not match:
        raise ValueError(f"not a size: {text!r}")
    number, unit, binary = match.groups()
    value = float(number) * (_UNITS[unit.upper() if binary else unit] if unit else 1)
    if not value.is_integer():
        raise ValueError(f"not a whole number: {text!r}")
    return int(value) if unit or "." in number else int(number)


def settings_of(cls: type) -> dict[str, Setting]:
    """Return the settings of a class by name, in their order."""
    found = declared_fields(cls, Flag)
    return {each.name: Setting(each.name, each.annotation, each.default, each.declaration) for each in found}


def check(instance: Any) -> None:
    """Convert and check every flag of `instance` in place: for `__post_init__` of a frozen settings class."""
    for setting in settings_of(type(instance)).values():
        value = setting.convert(getattr(instance, setting.name), setting.name)
        object.__setattr__(instance, setting.name, value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ' (did you mean x?)', or an empty string when no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        """Replace the options in the usage line of a command with many options by [OPTIONS]."""
        if usage is None and sum(bool(action.option_strings) for action in actions) > _MAX_USAGE_OPTIONS:
            positionals = [action for action in actions if not action.option_strings]
            parts = (self._format_args(action, action.dest) for action in positionals)
            usage = " ".join(["%(prog)s", *parts, "[OPTIONS]"])
        super().add_usage(usage, actions, groups, prefix)


class _HelpAllAction(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        sys.stdout.write(parser.format_help())
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser with vLLM's conventions: --a_b means --a-b; an error about a wrong name suggests a similar
    one.

    `advice`: what to do instead of using an unsupported option, by the option's name.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)
        self.advice: Mapping[str, str] = {}
        self._rare: list[argparse.Action] = []

    def hide(self, action: argparse.Action) -> None:
        """Show an option only in --help-all."""
        if not self._rare:
            self.add_argument("--help-all", action=_HelpAllAction, nargs=0, help="show every option and exit")
        self._rare.append(action)

    def print_help(self, file: Any = None) -> None:
        """Print the help without the hidden options."""
        texts = [action.help for action in self._rare]
        for action in self._rare:
            action.help = argparse.SUPPRESS
        more = f"\n{len(texts)} more options: {self.prog} --help-all\n" if texts else ""
        self._print_message(self.format_help() + more, file or sys.stdout)
        for action, text in zip(self._rare, texts, strict=True):
            action.help = text

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not action.option_strings and action.choices is not None and value not in action.choices:
            known = list(action.choices)
            kind = str(action.metavar or action.dest).lower()
            self.error(f"unknown {kind} {value!r}{nearest(value, known)}; choose from {', '.join(known)}")
        super()._check_value(action, value)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(args) if args is not None else None
        if words is not None:
            end = words.index("--") if "--" in words else len(words)
            words[:end] = [_dashed(word) for word in words[:end]]
        parsed, rest = super().parse_known_args(words, namespace)
        unknown = [word for word in rest if word.startswith("-") and word != "--"]
        if unknown:
            name = unknown[0].partition("=")[0]
            if name in self.advice:
                self.error(f"there is no {name}: {self.advice[name]}")
            self.error(f"unknown option {name}{nearest(name, self._option_string_actions)}")
        return parsed, rest

    def with_options(self, message: str) -> str:
        """Return an error message with the names of settings as this command spells them: --max-model-len.

        A name without an underscore is replaced only where the message begins with it: elsewhere it may be a word.
        """
        options = {each.dest: each.option_strings[0] for each in self._actions if each.option_strings}
        names = r"""^[a-z]+(?=[ :])|(?<![\w./'"=-])[a-z0-9]+(?:_[a-z0-9]+)+(?![\w/'"=]|\.\w)"""
        return re.sub(names, lambda found: options.get(found[0], found[0]), message)

    def error(self, message: str) -> NoReturn:
        more = f" (see {self.prog} --help)" if "arguments are required" in message else ""
        self.exit(2, f"{self.prog}: error: {message}{more}\n")


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def add_flags(parser: Parser, *classes: type) -> None:
    """Add an option for each flag of the settings classes, grouped by class, and `--config FILE`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, with the names of these options")
    for cls in classes:
        title = (cls.__doc__ or cls.__name__).strip().splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        settings = settings_of(cls).values()
        has_common = any(setting.declaration.common for setting in settings)
        for setting in settings:
            names = [setting.option, *filter(None, [setting.declaration.short])]
            common: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": _help(setting)}
            if setting.kind is bool:
                common["action"] = argparse.BooleanOptionalAction
            else:
                common["metavar"] = _metavar(setting)
            if setting.kind in (list, tuple):
                common["nargs"] = "+"
            action = group.add_argument(*names, **common)
            if has_common and not setting.declaration.common:
                parser.hide(action)


def _metavar(setting: Setting) -> str:
    if setting.declaration.metavar or setting.declaration.choices:
        return setting.declaration.metavar or "{" + ",".join(setting.declaration.choices) + "}"
    return {int: "N", float: "X", dict: "JSON"}.get(setting.kind, "TEXT")


def _help(setting: Setting) -> str:
    default = setting.default
    if default is None or default in ("", (), [], {}):
        return setting.declaration.help.replace("%", "%%")
    shown = str(default).lower() if setting.kind is bool else str(default)
    if setting.kind in (list, tuple):
        shown = " ".join(default)
    return f"{setting.declaration.help} (default: {shown})".replace("%", "%%")


def read_yaml(path: str | Path, known: Iterable[str]) -> dict[str, Any]:
    """Return the settings of a YAML file, names with underscores. `ConfigError`: unreadable file or unknown name."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold 'name: value' lines, got {type(content).__name__}")
    names = list(known)
    found = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise ConfigError(f"--config {path}: unknown setting {key!r}{nearest(name, names)}")
        found[name] = value
    return found


def _read_environment(environ: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return the settings in the environment by name. Warn about variables whose names are similar to a setting's."""
    names = {setting.env: name for name, setting in settings.items()}
    for variable in environ:
        if variable.startswith("QUIRE_") and variable not in names and variable not in _OF_EVERY_COMMAND:
            near = difflib.get_close_matches(variable, list(names), n=1, cutoff=0.85)
            if near:
                logger.warning("%s is not a setting and has no effect (did you mean %s?)", variable, near[0])
    # Kubernetes sets variables such as QUIRE_PORT=tcp://10.0.0.7:8000 for a service named quire: they are not settings.
    return {names[key]: value for key, value in environ.items() if key in names and not value.startswith("tcp://")}


def load(
    given: argparse.Namespace | Mapping[str, Any],
    *classes: type,
    environ: Mapping[str, str] = os.environ,
    defaults: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Return an instance of each class, from the command line (`given`), the environment and the file of `--config`.

    `defaults` replace the fields' own defaults. `ConfigError` names the source of a bad value.
    """
    arguments = vars(given) if isinstance(given, argparse.Namespace) else given
    settings = {name: setting for cls in classes for name, setting in settings_of(cls).items()}
    file = arguments.get("config")
    in_file = f"--config {file}: "
    layers: Sequence[tuple[Mapping[str, Any], Any]] = [
        (arguments, lambda setting: setting.option),
        (_read_environment(environ, settings), lambda setting: setting.env),
        (read_yaml(file, settings) if file else {}, lambda setting: in_file + setting.option.removeprefix("--")),
        (defaults or {}, lambda setting: setting.name),
    ]
    values = {}
    for name, setting in settings.items():
        for layer, label in layers:
            if name in layer and not (layer[name] is None and not setting.is_optional):
                values[name] = setting.convert(layer[name], label(setting))
                break
    return [cls(**{name: values[name] for name in settings_of(cls) if name in values}) for cls in classes]


def command_line() -> str:
    """Return the command line of this process, for repeating it, with arguments that may contain API keys hidden."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name == "quire.__main__":
        program = "quire" if spec is not None else os.path.basename(sys.argv[0])
    else:
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    words, hidden = [], False
    for word in sys.argv[1:]:
        name, is_assigned, _ = word.partition("=")
        if word.startswith("-"):
            hidden = name in ("--api-key", "--header")
            words.append(f"{name}=HIDDEN" if hidden and is_assigned else word)
        else:
            words.append("HIDDEN" if hidden else word)
    return f"{program} {shlex.join(words)}".strip()


def run_command(main: Callable[[list[str]], int]) -> NoReturn:
    """End this process with the exit code of `main` for its command line, or with the line of a `ConfigError`."""
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
