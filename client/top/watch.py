"""Follows a cluster: asks how it is, and reads along in each turn that runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvferry.client.errors import ClientError
from kvferry.client.sdk import Client, ClusterStatus
from kvferry.client.top.picture import LINGER_S, Picture, Stream

MAX_FOLLOWED: Final = 64
"""Threads and streams that we take; more turns than that are not told apart by a person either."""
MAX_LISTED: Final = 200


class Watch:
    """`look` belongs to one thread; turns are read in threads of their own, which end with them or the client."""

    def __init__(self, client: Client, coordinator: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._coordinator, self._clock = client, coordinator, clock
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, str], Stream] = {}
        self._status: ClusterStatus | None = None
        self._heard_s = clock()

    def look(self) -> Picture:
        """Asks the coordinator once. Never raises ClientError: an outage is part of the picture."""
        trouble = ""
        try:
            self._status = self._client.status()
            self._follow_new()
            self._heard_s = self._clock()
        except ClientError as error:
            trouble = str(error)
        now = self._clock()
        with self._lock:
            for key, stream in list(self._streams.items()):
                if stream.ended_s is not None and now - stream.ended_s > LINGER_S:
                    del self._streams[key]
            streams = tuple(sorted(self._streams.values(), key=lambda stream: stream.began_s))
        silent_s = now - self._heard_s if trouble else 0.0
        return Picture(self._coordinator, now, self._status, streams, trouble, silent_s)

    def _follow_new(self) -> None:
        if self._status is None or not self._status.n_open_turns:
            return
        for session in self._client.list_sessions(limit=MAX_LISTED):
            key = session.session_id, session.open_turn_id
            if session.open_turn_id and key not in self._streams and len(self._streams) < MAX_FOLLOWED:
                stream = Stream(*key, self._clock(), node_id=session.last_node_id)
                with self._lock:
                    self._streams[key] = stream
                threading.Thread(target=self._follow, args=(stream,), name=f"top {key[1]}", daemon=True).start()

    def _follow(self, stream: Stream) -> None:
        try:
            with self._client.session(stream.session_id).resume(stream.turn_id) as turn:
                for event in turn:
                    with self._lock:
                        stream.push(event, self._clock())
        except Exception:  # noqa: BLE001 - the coordinator went away, or we did: the next look follows it anew
            with self._lock:
                self._streams.pop((stream.session_id, stream.turn_id), None)
