"""Keys that wait for work: each once, none twice at the same time, some not before their time.

The metrics have the names that controllers in Go give theirs, so that dashboards fit.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily

K = TypeVar("K", bound=Hashable)
BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)


class WorkQueue(Generic[K]):
    """A queue of one event loop."""

    def __init__(
        self, name: str, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._clock = name, clock
        self._waiting: dict[K, float] = {}
        self._running: dict[K, float] = {}
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._ready = asyncio.Semaphore(0)
        self._metrics = _Metrics(name, registry)
        registry.register(self)

    def add(self, key: K) -> None:
        """Have a key worked on, once: now, or once the work that runs on it is over."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._metrics.adds.inc()
            self._waiting[key] = self._clock()
            self._ready.release()

    def add_after(self, key: K, delay_s: float) -> None:
        """Have a key worked on by then at the latest."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + delay_s:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(max(0.0, delay_s), self.add, key)

    def retry_after(self, key: K, delay_s: float) -> None:
        """The same after a failure."""
        self._metrics.retries.inc()
        self.add_after(key, delay_s)

    async def take(self) -> K:
        """Wait for the next key; :meth:`done` must follow."""
        await self._ready.acquire()
        key = next(iter(self._waiting))
        now = self._clock()
        self._metrics.waited.observe(now - self._waiting.pop(key))
        self._running[key] = now
        return key

    def done(self, key: K) -> None:
        """The work on a key is over."""
        self._metrics.worked.observe(self._clock() - self._running.pop(key))
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def forget(self, key: K) -> None:
        """Nothing is to be done for it later."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    @property
    def longest_s(self) -> float:
        """How long the oldest work runs."""
        return self._clock() - min(self._running.values()) if self._running else 0.0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What prometheus_client asks for."""
        unfinished = sum(self._clock() - since for since in self._running.values())
        for metric, words, value in (
            ("depth", "Keys that wait.", len(self._waiting)),
            ("unfinished_work_seconds", "Sum of the ages of the work that runs.", unfinished),
            ("longest_running_processor_seconds", "Age of the oldest.", self.longest_s),
        ):
            family = GaugeMetricFamily(f"workqueue_{metric}", words, labels=["name"])
            family.add_metric([self._name], value)
            yield family


class _Metrics:
    def __init__(self, name: str, registry: CollectorRegistry) -> None:
        def counter(metric: str, words: str) -> Counter:
            return Counter(f"workqueue_{metric}", words, ["name"], registry=registry).labels(name)

        def histogram(metric: str, words: str) -> Histogram:
            family = Histogram(
                f"workqueue_{metric}", words, ["name"], buckets=BUCKETS, registry=registry
            )
            return family.labels(name)

        self.adds = counter("adds", "Keys that were added.")
        self.retries = counter("retries", "Keys that were added after a failure.")
        self.waited = histogram("queue_duration_seconds", "How long keys have waited.")
        self.worked = histogram("work_duration_seconds", "How long work on a key took.")
