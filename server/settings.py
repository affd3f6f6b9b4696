"""The server's settings, each declared once."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.flags import check, flag
from engine.log import FORMATS
from server.keys import KeyRing
from server.parsing.reasoning import REASONING_FORMATS
from server.parsing.tools import TOOL_FORMATS

LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "trace")


@dataclass(frozen=True)
class ServerConfig:
    """HTTP server.

    `ConfigError` when a value is out of range or a file is missing.
    """

    host: str = flag("0.0.0.0", "address to listen on; 127.0.0.1 for this machine only", metavar="ADDRESS", common=True)
    port: int = flag(8000, "port to listen on; 0 takes a free one", at_least=0, at_most=65535, common=True)
    uds: str | None = flag(None, "Unix socket to listen on instead of host and port", metavar="PATH")
    root_path: str = flag("", "path under which a proxy publishes the server", metavar="PATH")
    ssl_keyfile: str | None = flag(None, "private key, to serve HTTPS", metavar="FILE")
    ssl_certfile: str | None = flag(None, "certificate, to serve HTTPS", metavar="FILE")
    ssl_ca_certs: str | None = flag(
        None, "certificates of the authorities that clients must be signed by", metavar="FILE"
    )
    api_key: tuple[str, ...] = flag(
        (),
        "keys, one of which requests must bring; other users of the machine see them here: better is QUIRE_API_KEY (also "
        "VLLM_API_KEY), or a file",
        metavar="KEY",
        secret=True,
        common=True,
    )
    api_key_file: str | None = flag(
        None,
        "file of named keys, made by `quire keys new NAME --file FILE`; read again when it changes",
        metavar="FILE",
        common=True,
    )
    open_metrics: bool = flag(False, "/metrics needs no key")
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "further names that a server without keys is called by, *.example.org for all that end so, * for any; addresses "
        "and local names always are",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "other sites whose pages may use the API from a browser; * for all", metavar="ORIGIN"
    )
    enable_request_id_headers: bool = flag(True, "answer with an X-Request-Id header, the client's own if it sent one")

    chat_template: str | None = flag(
        None,
        "file with a Jinja chat template, or the template itself, instead of the model's; of a reranker: writes the pairs",
        metavar="FILE",
    )
    default_chat_template_kwargs: dict[str, Any] = flag(  # noqa: RUF009
        {}, "variables for the chat template, which requests may override"
    )
    response_role: str = flag("assistant", "role of the messages that are generated", metavar="ROLE")

    enable_auto_tool_choice: bool = flag(True, "let models decide whether to call tools, where a request brings some")
    tool_call_parser: str = flag(
        "auto",
        "how the model writes tool calls; auto: as its chat template does",
        choices=("auto", "none", *TOOL_FORMATS),
        common=True,
    )
    reasoning_parser: str = flag(
        "auto",
        "how the model marks its reasoning, which is told apart from the answer; auto: as its chat template does",
        choices=("auto", "none", *REASONING_FORMATS),
        common=True,
    )
    strict: bool = flag(False, "refuse requests with fields that are unknown or have no effect, instead of saying so")

    max_stored_responses: int = flag(
        1000, "responses of /v1/responses that are kept in memory, to be asked for or continued", at_least=0
    )
    max_num_queued_reqs: int = flag(
        4096, "most requests that may wait beside max_num_seqs that run; further ones are answered with 503", at_least=0
    )
    max_body_bytes: int | None = flag(
        None, "most bytes of a request's body (else 4 MiB, and 32 for each token of the context)", at_least=1, size=True
    )
    body_timeout: float = flag(60.0, "seconds in which a request's body must arrive", above=0)
    max_header_bytes: int = flag(65_536, "most bytes of a request's headers", at_least=1, size=True)
    header_timeout: float = flag(10.0, "seconds in which a request's headers must arrive", above=0)
    keep_alive_timeout: float = flag(75.0, "seconds after which an idle connection is closed", above=0)
    send_timeout: float = flag(30.0, "seconds after which a client that reads nothing of its answer loses it", above=0)
    max_connections: int | None = flag(
        None,
        "most connections; idle ones are closed for new ones (else what the limit of open files allows, at most 16,384)",
        at_least=1,
    )
    sse_keep_alive_interval: float = flag(
        15.0, "seconds after which a silent stream gets a comment, so that proxies keep it open; 0: never", at_least=0
    )
    shutdown_timeout: float = flag(
        20.0,
        "seconds that running requests may take to finish when the server stops; a second signal ends them",
        at_least=0,
    )
    log_stats_interval: float = flag(
        10.0, "seconds between statistics lines in the log", above=0, env="VLLM_LOG_STATS_INTERVAL"
    )
    otlp_traces_endpoint: str | None = flag(
        None, "OpenTelemetry collector to send traces to, OTLP over HTTP (needs the extra otel)", metavar="URL"
    )
    record_trace: str | None = flag(
        None,
        "record the traffic for `quire bench serve --replay FILE`: times, lengths and equal prefixes, nothing else",
        metavar="FILE",
    )
    log_format: str = flag("text", "form of the log's lines", choices=FORMATS)
    enable_log_requests: bool = flag(False, "log each request, without its text")
    uvicorn_log_level: str = flag("info", "how much the HTTP server logs", choices=LOG_LEVELS)
    disable_uvicorn_access_log: bool = flag(False, "no log line for each HTTP request")
    disable_access_log_for_endpoints: tuple[str, ...] = flag(
        ("/health", "/livez", "/metrics", "/ping", "/readyz", "/static/"),
        "paths without access log lines; one that ends with / covers everything below it",
        metavar="PATH",
    )

    def __post_init__(self) -> None:
        check(self)
        if len(self.allowed_origins) == 1 and self.allowed_origins[0].startswith("["):  # vLLM takes a JSON list
            object.__setattr__(self, "allowed_origins", _json_list("allowed_origins", self.allowed_origins[0]))
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name} must be a file, got {path!r}")
        if "" in self.api_key:  # it would be no key at all
            raise ConfigError("api_key must not be empty; is the variable set that it was taken from?")
        self.read_keys()  # reports a missing file before the model is loaded, and so does the next
        self.read_chat_template()
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile needs ssl_certfile beside it")
        if self.otlp_traces_endpoint is not None:
            _check_traces_endpoint(self.otlp_traces_endpoint)

    def read_keys(self) -> KeyRing | None:
        """The keys that open the server; None: it is open to all. `ConfigError` when their file cannot be read."""
        given = self.api_key or tuple(filter(None, [os.environ.get("VLLM_API_KEY")]))
        return KeyRing(given, self.api_key_file) if given or self.api_key_file is not None else None

    def read_chat_template(self) -> str | None:
        """The content of `chat_template`; `ConfigError` when it is neither a file nor a template."""
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
        raise ConfigError(f"{name} must be a list of texts, got {text!r}")
    return tuple(items)
