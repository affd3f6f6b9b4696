"""The server's settings, each declared once."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import ConfigError
from engine.flags import check, flag
from engine.utils.log import FORMATS
from server.http.api_keys import KeyRing
from server.parsing.formats import PARSER_NAMES
from server.parsing.reasoning import REASONING_FORMATS


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter of `lora_modules`: NAME=PATH, or a JSON object as vLLM takes it."""

    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def read(cls, text: str) -> LoraModule:
        """Raise `ConfigError` if the text is neither."""
        name, equals, path = text.partition("=")
        fields: Any = {"name": name, "path": path} if equals else None
        if text.lstrip().startswith("{"):
            try:
                fields = json.loads(text)
            except ValueError:
                fields = None
        names = {"name", "path", "base_model_name"}
        if not isinstance(fields, dict) or not fields.keys() <= names:
            fields = {}
        base = fields.get("base_model_name")
        required = (fields.get("name"), fields.get("path"))
        if not all(isinstance(each, str) and each for each in required) or not isinstance(base, str | None):
            raise ConfigError(f'lora_modules must be NAME=PATH or {{"name": …, "path": …}}, got {text!r}')
        return cls(fields["name"], fields["path"], base)


_SERVER_ADDRESS = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?/([\w.~%-]+/)*", re.ASCII)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "trace")


@dataclass(frozen=True)
class ServerConfig:
    """HTTP server.

    Raises `ConfigError` for a value out of range or a missing file.
    """

    host: str = flag(
        "0.0.0.0", "address to listen on; 127.0.0.1 accepts only local connections", metavar="ADDRESS", common=True
    )
    port: int = flag(8000, "port to listen on; 0: any free port", at_least=0, at_most=65535, common=True)
    uds: str | None = flag(None, "Unix socket to listen on instead of host and port", metavar="PATH")
    root_path: str = flag("", "path prefix under which a reverse proxy exposes the server", metavar="PATH")
    ssl_keyfile: str | None = flag(None, "private key for HTTPS", metavar="FILE")
    ssl_certfile: str | None = flag(None, "certificate for HTTPS", metavar="FILE")
    ssl_ca_certs: str | None = flag(
        None, "CA certificates; clients must present a certificate signed by one of these CAs", metavar="FILE"
    )
    api_key: tuple[str, ...] = flag(
        (),
        "API keys that requests must present one of; other users of the machine can see the command line, so prefer "
        "QUIRE_API_KEY, VLLM_API_KEY or --api-key-file",
        metavar="KEY",
        secret=True,
        common=True,
    )
    api_key_file: str | None = flag(
        None,
        "file of named API keys, created by `quire keys new NAME --file FILE`; reloaded when it changes",
        metavar="FILE",
        common=True,
    )
    open_metrics: bool = flag(False, "serve /metrics without an API key")
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "host names that a server without API keys accepts, besides IP addresses and this machine's own names; "
        "*.example.org: all subdomains; *: any",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "web origins whose pages may call the API from a browser; *: all", metavar="ORIGIN"
    )
    page_servers: tuple[str, ...] = flag(
        (),
        "addresses of other servers whose models the chat page offers beside this one's; each must have this page's "
        "origin in its --allowed-origins",
        metavar="URL",
    )
    enable_request_id_headers: bool = flag(
        True, "send an X-Request-Id header with each response: the client's own value if the request has one"
    )

    api_server_count: int = flag(
        1,
        "processes that take connections, parse requests and write answers; they share one engine, all limits and "
        "metrics; more than 1 where a single one uses a whole core",
        at_least=1,
        at_most=64,
    )

    lora_modules: tuple[str, ...] = flag(
        (),
        "LoRA adapters to serve, each NAME=FOLDER or JSON with name, path and base_model_name; needs enable_lora",
        metavar="NAME=FOLDER",
    )
    lora_folder: str | None = flag(
        None,
        "folder of LoRA adapters: one whose folder has the name that a request gives as model is loaded then; "
        "/v1/load_lora_adapter loads from this folder alone",
        metavar="FOLDER",
    )

    chat_template: str | None = flag(
        None,
        "Jinja chat template that replaces the model's: a file or the template itself; for rerankers: formats the "
        "pairs",
        metavar="FILE",
    )
    default_chat_template_kwargs: dict[str, Any] = flag(  # noqa: RUF009
        {}, "default variables for the chat template; requests may override them"
    )
    response_role: str = flag("assistant", "role of the generated messages", metavar="ROLE")

    enable_auto_tool_choice: bool = flag(True, "let the model decide whether to call tools when a request has tools")
    tool_call_parser: str = flag(
        "auto",
        "format of the model's tool calls; auto: detected from its chat template",
        choices=("auto", "none", *PARSER_NAMES),
        common=True,
    )
    reasoning_parser: str = flag(
        "auto",
        "format of the model's reasoning, which is returned apart from the answer; auto: detected from its chat "
        "template",
        choices=("auto", "none", *REASONING_FORMATS),
        common=True,
    )
    strict: bool = flag(False, "reject requests with unknown or ineffective fields instead of returning warnings")

    max_loaded_models: int | None = flag(
        None,
        "of several models: how many are awake at a time; the others sleep, or are not loaded yet (default: 1)",
        at_least=1,
    )
    sleep_level: int | None = flag(
        None,
        "of several models: where those that sleep keep their weights; 1: in host memory; 2: nowhere, they are loaded "
        "again (default: 1, with several ranks 2)",
        at_least=1,
        at_most=2,
    )
    model_keep_alive: float | None = flag(
        None,
        "of several models: seconds without a request after which one sleeps; Ollama's keep_alive in a request "
        "overrides it (default: when another one needs its place)",
        at_least=0,
    )
    max_stored_responses: int = flag(
        1000, "maximum number of /v1/responses responses kept in memory for retrieval and continuation", at_least=0
    )
    max_num_queued_reqs: int = flag(
        4096,
        "maximum number of waiting requests, besides the max_num_seqs that run; further requests get status 503",
        at_least=0,
    )
    max_body_bytes: int | None = flag(
        None,
        "maximum size of a request body in bytes (default: 4 MiB, plus 32 bytes for each token of the context, plus "
        "32 MiB for a model that reads images)",
        at_least=1,
        size=True,
    )
    body_timeout: float = flag(60.0, "seconds within which a request's body must arrive", above=0)
    max_header_bytes: int = flag(65_536, "maximum size of a request's headers in bytes", at_least=1, size=True)
    header_timeout: float = flag(10.0, "seconds within which a request's headers must arrive", above=0)
    keep_alive_timeout: float = flag(75.0, "seconds after which an idle connection is closed", above=0)
    send_timeout: float = flag(
        30.0, "seconds after which the connection of a client that reads nothing of its response is closed", above=0
    )
    max_connections: int | None = flag(
        None,
        "maximum number of connections; idle ones are closed to accept new ones (default: what the open-file limit "
        "allows, at "
        "most 16,384)",
        at_least=1,
    )
    sse_keep_alive_interval: float = flag(
        15.0,
        "seconds after which an idle stream gets an SSE comment, so that proxies keep it open; 0: never",
        at_least=0,
    )
    shutdown_timeout: float = flag(
        20.0,
        "seconds for running requests to finish when the server stops; a second signal aborts them",
        at_least=0,
    )
    log_stats_interval: float = flag(
        10.0, "seconds between statistics lines in the log", above=0, env="VLLM_LOG_STATS_INTERVAL"
    )
    otlp_traces_endpoint: str | None = flag(
        None, "OpenTelemetry collector that receives traces, by OTLP over HTTP (needs the extra otel)", metavar="URL"
    )
    record_trace: str | None = flag(
        None,
        "record the traffic for `quire bench serve --replay FILE`: only times, lengths and common prefixes",
        metavar="FILE",
    )
    log_format: str = flag("text", "format of log lines", choices=FORMATS)
    enable_log_requests: bool = flag(False, "log each request, without its text")
    uvicorn_log_level: str = flag("info", "log level of the HTTP server", choices=LOG_LEVELS)
    disable_uvicorn_access_log: bool = flag(False, "do not log each HTTP request")
    disable_access_log_for_endpoints: tuple[str, ...] = flag(
        ("/health", "/livez", "/metrics", "/ping", "/readyz", "/static/"),
        "paths whose HTTP requests are not logged; a path that ends with / covers everything below it",
        metavar="PATH",
    )

    def __post_init__(self) -> None:
        check(self)
        if len(self.allowed_origins) == 1 and self.allowed_origins[0].startswith("["):  # vLLM takes a JSON list
            object.__setattr__(self, "allowed_origins", _json_list("allowed_origins", self.allowed_origins[0]))
        object.__setattr__(self, "page_servers", tuple(dict.fromkeys(map(_server_address, self.page_servers))))
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name} must be a file, got {path!r}")
        if "" in self.api_key:  # an empty key would protect nothing
            raise ConfigError("api_key must not be empty; is the environment variable set that it comes from?")
        for module in self.lora_modules:
            LoraModule.read(module)
        if self.lora_folder is not None and not Path(self.lora_folder).expanduser().is_dir():
            raise ConfigError(f"lora_folder must be a folder, got {self.lora_folder!r}")
        self.read_keys()  # like the next line, reports a missing file before the model is loaded
        self.read_chat_template()
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile also needs ssl_certfile")
        if self.otlp_traces_endpoint is not None:
            _check_traces_endpoint(self.otlp_traces_endpoint)

    def read_keys(self) -> KeyRing | None:
        """Return the API keys; None: the server needs none. `ConfigError` when the key file cannot be read."""
        given = self.api_key or tuple(filter(None, [os.environ.get("VLLM_API_KEY")]))
        return KeyRing(given, self.api_key_file) if given or self.api_key_file is not None else None

    def read_chat_template(self) -> str | None:
        """Return the text of `chat_template`. `ConfigError` when it is neither a file nor a template."""
        if self.chat_template is None:
            return None
        if "{" in self.chat_template:
            return self.chat_template
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template must be a file or a template, got {self.chat_template!r}: {error}"
            ) from None


def _server_address(url: str) -> str:
    """Return the address of a server with a slash at its end. It becomes part of the chat page and of its policy."""
    address = url.rstrip("/").removesuffix("/v1") + "/"
    if not _SERVER_ADDRESS.fullmatch(address):
        raise ConfigError(f"page_servers must be URLs such as http://host:8000, got {url!r}")
    return address


def _check_traces_endpoint(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_traces_endpoint must be a URL such as http://localhost:4318, got {url!r}")
    if any(importlib.util.find_spec(name) is None for name in ("opentelemetry", "opentelemetry.exporter")):
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry: pip install 'quire[otel]'")


def _json_list(name: str, text: str) -> tuple[str, ...]:
    try:
        items = json.loads(text)
    except ValueError:
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{name} must be a list of strings, got {text!r}")
    return tuple(items)
