"""Figures for Prometheus, in a registry of the server's own (session-http.md, /metrics)."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """Counters of one server. The gauges read their value when they are asked for."""

    def __init__(
        self, open_sessions: Callable[[], float], stored_bytes: Callable[[], float], in_flight: Callable[[], float]
    ) -> None:
        self._registry = CollectorRegistry()
        self.sessions = Counter("miles_ref_sessions", "Sessions by what happened.", ["event"], registry=self._registry)
        self.turns = Counter("miles_ref_turns", "Turns by outcome.", ["outcome"], registry=self._registry)
        self.refusals = Counter("miles_ref_errors", "Error answers by status.", ["status"], registry=self._registry)
        self.collects = Counter("miles_ref_collects", "Samples payloads sent.", registry=self._registry)
        self.collect_seconds = Histogram("miles_ref_collect_seconds", "Time of a collect.", registry=self._registry)
        for name, text, read in (
            ("miles_ref_open_sessions", "Sessions that are open.", open_sessions),
            ("miles_ref_stored_bytes", "Bytes that open sessions store, about.", stored_bytes),
            ("miles_ref_turns_in_flight", "Turns that the backend works on.", in_flight),
        ):
            Gauge(name, text, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)
