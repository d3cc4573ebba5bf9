"""What Prometheus reads: requests by route, lookups by kind, and what the database says when asked."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from db.store import Store
from db.values import JobState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class Metrics:
    """The figures of one app, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("method", "route")
        self._requests = Counter(
            "flashtune_http_requests", "Requests answered.", (*labels, "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "flashtune_http_request_seconds",
            "Time to the end of an answer; streams are left out.",
            labels,
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._lookups = Counter("flashtune_lookups", "Lookups by how they matched.", ("kind",), registry=self._registry)
        self._jobs = Gauge("flashtune_jobs", "Jobs by state.", ("state",), registry=self._registry)
        self._work = Gauge(
            "flashtune_work_ready", "Pieces of work ready, by stage.", ("stage",), registry=self._registry
        )
        self._workers = Gauge("flashtune_workers_alive", "Workers heard of lately.", registry=self._registry)

    def request(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """Count one answer; ``seconds`` is None for a stream."""
        self._requests.labels(method, route, str(status)).inc()
        if seconds is not None:
            self._seconds.labels(method, route).observe(seconds)

    def lookup(self, kind: str) -> None:
        self._lookups.labels(kind).inc()

    def text(self, store: Store) -> bytes:
        """Ask the store for its figures and return all of them in Prometheus's text format."""
        counts = store.jobs.counts()
        for state in JobState:
            self._jobs.labels(str(state)).set(counts.get(str(state), 0))
        ready = dict.fromkeys(("compile", "measure"), 0)
        for (stage, _), count in store.work.ready().items():
            ready[stage] = ready.get(stage, 0) + count
        for stage, count in ready.items():
            self._work.labels(stage).set(count)
        self._workers.set(len(store.fleet.workers(alive_only=True)))
        return generate_latest(self._registry)
