"""The coordinator of a job's servers: the sockets and the file of one planner.

A new map is stored before anyone gets it, so a later coordinator goes on where this one ended.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import zmq

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps import messages as m
from dlrover_py.ps.cluster_map import ClusterMap
from dlrover_py.ps.planner import Planner, PlanRules
from dlrover_py.ps.wire import JobAccess, WireError, decode, send

FORGET_S = 60.0
"""Seconds of silence after which a connection gets no more maps. Workers ask more often."""


class Coordinator:
    """Owns the map of a job. One thread at a time may call it."""

    def __init__(self, job: str, token: str, state: Path, rules: PlanRules, now: float) -> None:
        """Open the socket, and go on with a stored map if there is one.

        Args:
            job: Name of the job.
            token: The job's secret.
            state: File of the map.
            rules: How buckets are kept.
            now: The time in seconds.

        Raises:
            ConfigError: The rules are wrong, or the file is not the map of this job.
        """
        rules.check()
        self._state = state
        start = ClusterMap(job, ack=rules.ack)
        if state.exists():
            try:
                start = msgspec.json.decode(state.read_bytes(), type=ClusterMap)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{state}: expected the map of job {job}: {error}") from error
            if start.job != job:
                raise ConfigError(f"{state}: expected the map of job {job}, found {start.job}'s")
        self.planner = Planner(start, rules, now)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.access = JobAccess(job, f"tcp://127.0.0.1:{port}", token)
        self._key = self.access.key
        self._routes: dict[bytes, float] = {}
        """When each connection was heard last."""
        self._published = start.epoch

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)

    def receive(self, now: float) -> None:
        """Handle the messages that have come."""
        for _ in range(64):
            try:
                route, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message, _ = decode(frames, self._key)
                self._handle(route, message, now)
            except WireError as error:
                self._send(route, m.Unreadable(str(error)))
            except ConfigError as error:
                self._send(route, m.CoordinatorRefusal(str(error)))
            self.publish()

    def tick(self, now: float) -> None:
        """Take note of the time: silent servers count as lost."""
        self.planner.tick(now)
        self._routes = {route: at for route, at in self._routes.items() if now - at < FORGET_S}
        self.publish()

    def lost(self, server: str) -> None:
        """Note that the process of a server has ended."""
        self.planner.lost(server)
        self.publish()

    def publish(self) -> None:
        """Store the map and send it to all, if it is new."""
        if self.planner.map.epoch == self._published:
            return
        self._published = self.planner.map.epoch
        fresh = self._state.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(self.planner.map))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._state)
        for route in self._routes:
            self._send(route, m.MapNews(self.planner.map))

    def _handle(self, route: bytes, message: Any, now: float) -> None:
        planner = self.planner
        self._routes[route] = now
        epoch = planner.map.epoch
        match message:
            case m.Alive():
                planner.heard(message.server, message.address, now)
                for bucket, term, learner in message.synced:
                    planner.synced(message.server, bucket, term, learner)
                epoch = message.epoch
            case m.WatchMap():
                epoch = message.epoch
            case m.JoinClient():
                planner.join(message.client)
            case m.CreateTable():
                planner.create_table(message.spec)
                epoch = -1  # the answer is a map in any case
            case m.Drain():
                planner.drain(message.server)
            case _:
                raise WireError(f"the coordinator takes no {type(message).__name__}")
        if epoch < planner.map.epoch == self._published:
            self._send(route, m.MapNews(planner.map))

    def _send(self, route: bytes, message: Any) -> None:
        with contextlib.suppress(zmq.Again):  # it asks again
            send(self.socket, message, [], self._key, route)
