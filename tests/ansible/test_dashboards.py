"""The dashboards: what they ask for is documented, and a real cluster's Prometheus has it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest
import yaml
from free_ports import free_port

from kvferry.client import Client
from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.model import DEFAULT_MODEL, ensure_model

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "ansible/roles/monitoring"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="prometheus is not installed (package prometheus)"
)

OF_BOARDS = {
    "kvferry_temperature_celsius", "kvferry_cpu_frequency_limit_ratio", "kvferry_certificate_expiry_timestamp_seconds",
}  # fmt: skip
"""What this machine need not have."""


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((ROLE / "files/dashboards").glob("*.json"))]


def queries() -> list[str]:
    """All of them, each once, with a window in place of Grafana's."""
    found = [t["expr"] for page in dashboards() for panel in page["panels"] for t in panel["targets"]]
    return sorted({query.replace("$__rate_interval", "30s") for query in found})


def metrics_of(query: str) -> set[str]:
    """Histograms by the name that they are documented under."""
    names = re.findall(r"\bkvferry_\w+", re.sub(r"\"[^\"]*\"", "", query))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def test_the_files_are_what_the_lists_say() -> None:
    assert subprocess.run([sys.executable, ROOT / "ansible/dashboards.py", "--check"], check=False).returncode == 0


def test_panels_ask_for_documented_metrics_only() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    asked = set[str]().union(*(metrics_of(query) for query in queries()))
    assert asked <= {*re.findall(r"^\| `(kvferry_\w+)", page, re.MULTILINE)}
    assert len(asked) > 40


def test_each_panel_says_what_it_shows_and_lets_its_reader_choose_the_prometheus() -> None:
    assert len(dashboards()) == 3
    for page in dashboards():
        titles = [panel["title"] for panel in page["panels"]]
        assert len(set(titles)) == len(titles)
        assert all(panel["datasource"]["uid"] == "${datasource}" for panel in page["panels"])
        assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in page["panels"])


@needs_prometheus
def test_every_query_is_one(tmp_path: Path) -> None:
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def settings(groups: dict[str, list[str]], hostvars: dict[str, dict[str, Any]], **more: Any) -> str:
    """The role's prometheus.yml."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROLE / "templates"), undefined=jinja2.StrictUndefined, trim_blocks=True,
        autoescape=False,  # noqa: S701 - not HTML
    )  # fmt: skip
    environment.filters["to_json"] = json.dumps
    variables = yaml.safe_load((ROLE / "defaults/main.yml").read_text()) | {"kvferry_tls": "/etc/kvferry/tls"} | more
    template = environment.get_template("prometheus.yml.j2")
    return template.render(ansible_managed="Ansible managed", groups=groups, hostvars=hostvars, **variables)


FLEET = {"coordinators": ["desk"], "nodes": ["board1", "board2"]}
HOSTS = {"desk": {"ansible_host": "192.168.7.10"}, "board1": {"kvferry_address": "192.168.7.11"}, "board2": {}}


def test_all_processes_of_the_inventory_are_asked_by_the_names_of_their_hosts() -> None:
    def targets(**groups: list[str]) -> dict[str, dict[str, str]]:
        jobs = yaml.safe_load(settings(FLEET | groups, HOSTS))["scrape_configs"]
        return {
            job["job_name"]: {one["labels"]["instance"]: one["targets"][0] for one in job["static_configs"]}
            for job in jobs
        }

    assert targets() == {
        "kvferry-coordinator": {"desk": "192.168.7.10:7080"},
        "kvferry-node": {"board1": "192.168.7.11:7081", "board2": "board2:7081"},
        "kvferry-gateway": {"desk": "192.168.7.10:8080"},
    }
    assert targets(gateways=["board1"], etcd=["desk"]) | targets() == targets() | {
        "kvferry-etcd": {"desk": "192.168.7.10:2381"},
    }


def test_gateways_are_asked_over_tls_and_believed_by_the_fleets_authority() -> None:
    jobs = yaml.safe_load(settings(FLEET, HOSTS))["scrape_configs"]
    tls = {job["job_name"]: (job["scheme"], job["tls_config"]["ca_file"]) for job in jobs if "scheme" in job}
    assert tls == {"kvferry-gateway": ("https", "/etc/kvferry/tls/prometheus/ca.pem")}


@needs_prometheus
def test_promtool_takes_the_settings(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(settings(FLEET, HOSTS, monitoring_alertmanagers=["192.168.7.5:9093"]))
    shutil.copy(ROLE / "files/kvferry.rules.yml", tmp_path)
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "config", "--syntax-only", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Asked:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        return httpx.get(f"http://{self._address}/api/v1/{path}", params=parameters).json()["data"]

    def until(self, query: str, value: float, seconds: float = 60) -> None:
        """Until it gives this number."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                found = self.get("query", query=query)["result"]
            except httpx.TransportError:
                found = []
            if found and float(found[0]["value"][1]) == value:
                return
            time.sleep(0.5)
        raise AssertionError(f"{query} is not {value}")


@contextmanager
def prometheus(folder: Path, text: str) -> Iterator[Asked]:
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(ROLE / "files/kvferry.rules.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    command = [
        PROMETHEUS,
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    ]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        yield Asked(address)
    finally:
        process.terminate()
        process.wait(20)


def ask(cluster: LocalCluster, *, kill: bool = False) -> None:
    """A turn through the gateway; its node may die meanwhile."""
    body = {"messages": [{"role": "user", "content": "Tell of a ferry. " * 20}], "max_tokens": 32, "stream": True}
    url = f"http://{cluster.http_address}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        for number, line in enumerate(response.iter_lines()):
            if kill and number >= 8 and line.startswith("data: {"):
                kill = False
                session_id = json.loads(line.removeprefix("data: "))["id"] + ".0"
                with Client(cluster.address) as client:
                    cluster.kill_node(client.session(session_id).details().turns[-1].placements[-1].node_id)


@pytest.mark.slow
@pytest.mark.alone
@needs_prometheus
def test_a_real_cluster_has_an_answer_to_every_query(tmp_path: Path) -> None:
    ensure_model(DEFAULT_MODEL)
    port = free_port()
    options = ClusterOptions(
        model=DEFAULT_MODEL, directory=tmp_path / "cluster", n_nodes=2, kv_memory="256MiB", http_port=0,
        coordinator_arguments=("--metrics", f"127.0.0.1:{port}"),
        node_arguments=("--metrics", "127.0.0.1:0", "--store-write-per-hour", "1GiB"),
    )  # fmt: skip
    with LocalCluster(options) as cluster:
        ports = {name: node.wait_ready()["metrics"].rpartition(":")[2] for name, node in cluster.nodes.items()}
        desk = {"coordinator_metrics_port": port, "gateway_port": cluster.http_address.rpartition(":")[2]}
        hosts = {"desk": desk} | {name: {"node_metrics_port": at} for name, at in ports.items()}
        hostvars = {name: {"ansible_host": "127.0.0.1", **host} for name, host in hosts.items()}
        text = settings({"coordinators": ["desk"], "nodes": [*ports]}, hostvars, monitoring_scrape_seconds=1)
        text = re.sub(r"    (scheme|tls_config): .*\n", "", text)  # on the loopback gateways speak HTTP
        with prometheus(tmp_path, text) as asked:
            asked.until("sum(up)", 4)
            ask(cluster)
            asked.until("sum(kvferry_gateway_streams_open)", 0)
            ask(cluster, kill=True)
            asked.until("sum(kvferry_failovers_total)", 1)
            asked.until("sum(count_over_time(kvferry_placements_lost_total[1m])) >= bool 2", 1)
            answers = {query: asked.get("query", query=query)["result"] for query in queries()}
            rules = [rule for group in asked.get("rules")["groups"] for rule in group["rules"]]
            lost = asked.get("query", query="kvferry_tokens_lost_total + kvferry_tokens_duplicated_total")["result"]
            asked.until('count(ALERTS{alertname="KvferryNodeDown",alertstate="firing"})', 1)
    assert {query for query, found in answers.items() if not found and not metrics_of(query) & OF_BOARDS} == set()
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [float(one["value"][1]) for one in lost] == [0]
