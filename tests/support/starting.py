"""A server whose engine is still loading."""

from __future__ import annotations

from server.app import create_app, create_starting_app
from server.observability.readiness import Readiness
from server.observability.server_metrics import ServerMetrics
from server.settings import ServerConfig
from server.starting import Switch
from tests.support.fake_engine import FakeEngine


class Starting:
    """`switch` is its app; `open` makes the engine ready."""

    def __init__(self, **settings: object) -> None:
        self.engine = FakeEngine()
        self.engine.states.enter("loading")
        self.settings = ServerConfig(**settings)  # type: ignore[arg-type]
        self.readiness, self.metrics = Readiness(self.engine), ServerMetrics(self.engine)
        self.switch = Switch(create_starting_app(self.settings, self.readiness, self.metrics), self.readiness)

    def open(self) -> None:
        self.engine.states.enter("ready")
        self.switch.switch_to(
            create_app(
                self.engine, self.settings, readiness=self.readiness, server_metrics=self.metrics, log_stats=False
            )
        )
