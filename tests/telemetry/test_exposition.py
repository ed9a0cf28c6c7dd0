"""One port that answers a scrape."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvferry.proto.v1 import worker_pb2
from kvferry.telemetry.exposition import CannotExpose, Exposition
from kvferry.telemetry.families import counter, gauge, info, labelled, of_message, of_messages


class Made(Collector):
    def collect(self) -> Iterator[Metric]:
        load = worker_pb2.NodeLoad(n_running=3, tokens_generated=70, store_ok=True)
        yield from of_message(load, [gauge("n_running", "running", "r"), counter("tokens_generated", "tokens", "t")])
        yield from of_messages([load], [gauge("store_ok", "store_up", "s")], {"error": "store_error"})
        yield info("node", "who", {"id": "a"})
        yield labelled("nodes", "n", "state", {"live": 2})


def scrape(address: str) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {
            (sample.name, ",".join(f"{k}={v}" for k, v in sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


def test_fields_of_messages_become_metrics():
    with Exposition("127.0.0.1:0", Made()) as exposition:
        assert scrape(exposition.address) == {
            ("kvferry_running", ""): 3,
            ("kvferry_tokens_total", ""): 70,
            ("kvferry_store_up", "error="): 1,
            ("kvferry_node_info", "id=a"): 1,
            ("kvferry_nodes", "state=live"): 2,
        }
        address = exposition.address
    with pytest.raises(OSError, match="refused"):
        scrape(address)


def test_without_an_address_nothing_listens():
    with Exposition(None, Made()) as exposition:
        assert exposition.address == ""


def test_a_port_that_is_taken_is_told_in_one_sentence():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(CannotExpose, match=f"metrics cannot be served at {address}"):
            Exposition(address, Made()).start()
