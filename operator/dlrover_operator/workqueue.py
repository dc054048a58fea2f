"""A work queue of keys, each of which is processed by at most one worker at a time.

A key waits only once, and may be added with a delay. The metrics have the names that controllers in
Go use, so that existing dashboards work.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily

K = TypeVar("K", bound=Hashable)
BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)
"""Buckets of the histograms, in seconds."""


class WorkQueue(Generic[K]):
    """A work queue of keys, for the tasks of one event loop."""

    def __init__(
        self, name: str, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make an empty queue and register its metrics.

        Args:
            name: label of the metrics.
            registry: registry of the metrics.
            clock: a monotonic clock in seconds.
        """
        self._name, self._clock = name, clock
        self._waiting: dict[K, float] = {}
        """Time since which each key waits, in the order of processing."""
        self._running: dict[K, float] = {}
        """Time since which each key is processed."""
        self._again: set[K] = set()
        """Running keys that must be processed again afterwards."""
        self._timers: dict[K, asyncio.TimerHandle] = {}
        """Timers of delayed keys."""
        self._ready = asyncio.Semaphore(0)
        self._metrics = _QueueMetrics(name, registry)
        registry.register(self)

    def add(self, key: K) -> None:
        """Add a key; a key that is being processed is processed again afterwards.

        A key that waits already stays at its place. A delayed addition of the key is canceled.
        """
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._metrics.adds.inc()
            self._waiting[key] = self._clock()
            self._ready.release()

    def add_after(self, key: K, delay_s: float) -> None:
        """Add a key after a delay in seconds, by a timer of the event loop.

        A timer that is set for an earlier time stays; one for a later time is replaced. Any
        :meth:`add` of the key cancels it.
        """
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + delay_s:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(max(0.0, delay_s), self.add, key)

    def retry_after(self, key: K, delay_s: float) -> None:
        """Add a key after a delay in seconds, and count it as a retry after a failure."""
        self._metrics.retries.inc()
        self.add_after(key, delay_s)

    async def take(self) -> K:
        """Wait for the key that has waited longest, and return it.

        The key counts as being processed until the caller calls :meth:`done`.
        """
        await self._ready.acquire()
        key = next(iter(self._waiting))
        now = self._clock()
        self._metrics.waited.observe(now - self._waiting.pop(key))
        self._running[key] = now
        return key

    def done(self, key: K) -> None:
        """Record that the work on a key has ended.

        If the key was added during the work, it waits again now.
        """
        self._metrics.worked.observe(self._clock() - self._running.pop(key))
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def forget(self, key: K) -> None:
        """Cancel the delayed addition of a key. A key that waits or is being processed stays."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether no key waits to be taken, and no work runs."""
        return not self._running and not self._waiting

    @property
    def longest_s(self) -> float:
        """Seconds since the start of the oldest running work; 0.0 if none runs."""
        return self._clock() - min(self._running.values()) if self._running else 0.0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges of the queue; prometheus_client calls this."""
        unfinished = sum(self._clock() - since for since in self._running.values())
        for metric, help_text, value in (
            ("depth", "Keys that wait in the queue.", len(self._waiting)),
            (
                "unfinished_work_seconds",
                "Sum of the running times of the work in progress, in seconds.",
                unfinished,
            ),
            (
                "longest_running_processor_seconds",
                "Running time of the oldest work in progress, in seconds.",
                self.longest_s,
            ),
        ):
            family = GaugeMetricFamily(f"workqueue_{metric}", help_text, labels=["name"])
            family.add_metric([self._name], value)
            yield family


class _QueueMetrics:
    """The counters and histograms of a queue."""

    def __init__(self, name: str, registry: CollectorRegistry) -> None:
        def counter(metric: str, help_text: str) -> Counter:
            return Counter(f"workqueue_{metric}", help_text, ["name"], registry=registry).labels(
                name
            )

        def histogram(metric: str, help_text: str) -> Histogram:
            family = Histogram(
                f"workqueue_{metric}", help_text, ["name"], buckets=BUCKETS, registry=registry
            )
            return family.labels(name)

        self.adds = counter("adds", "Keys that were added.")
        self.retries = counter("retries", "Keys that were added after a failure.")
        self.waited = histogram(
            "queue_duration_seconds", "Time that keys waited in the queue, in seconds."
        )
        self.worked = histogram(
            "work_duration_seconds", "Duration of the work on a key, in seconds."
        )
