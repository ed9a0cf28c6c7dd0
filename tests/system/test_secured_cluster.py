"""A cluster whose every connection is encrypted, and whose clients need tokens: it fails over, rotates its certificates
and loses a revoked node with no token lost, doubled or differing; and nothing secret is written anywhere (promise 33).
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from browser_kit import ANSWER_MS, WHY_NOT, browser_is_there, browsing
from free_ports import free_port
from otlp_collector import Collector

from kvferry.client import Client, NodeLost, NodeState, Token
from kvferry.client.errors import Unauthenticated
from kvferry.drills.cluster import LocalCluster
from kvferry.drills.conversation import TurnRequest, hold_turn
from kvferry.trust import handing_out
from kvferry.trust.authority import Authority
from kvferry.trust.certificates import Role
from kvferry.trust.tokens import new_token, write_tokens

from .rig import Strike, options, placed_on, question
from .tripped import Tripped

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(280)]

HOLDERS = {
    "coordinator": Role.COORDINATOR,
    "gateway": Role.GATEWAY,
    "operator": Role.OPERATOR,
    "someone": Role.CLIENT,
    **{f"node-{number}": Role.NODE for number in (1, 2, 3)},
}
CANARY = "Zyzzyva-canary-7f3a"
"""In prompts; no process may write it."""


@dataclass
class Secured:
    nodes: Tripped
    authority: Authority
    tls: Path
    token: str
    metrics: list[str]
    traces: Collector

    @property
    def cluster(self) -> LocalCluster:
        return self.nodes.cluster

    def client(self) -> Client:
        return Client(self.cluster.address, tls_dir=self.tls / "someone", token=self.token)

    def operator(self) -> Client:
        return Client(self.cluster.address, tls_dir=self.tls / "operator")

    def until_node(self, node_id: str, state: Callable[[NodeState], bool]) -> None:
        deadline = time.monotonic() + 20
        with self.operator() as client:
            while not any(node.node_id == node_id and state(node.state) for node in client.nodes()):
                assert time.monotonic() < deadline, client.nodes()
                time.sleep(0.1)


@pytest.fixture(scope="module")
def secured(model, tmp_path_factory) -> Iterator[Secured]:
    """Everything at the level DEBUG: what is not logged there is logged nowhere."""
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority.create(folder / "ca", "test fleet")
    for name, role in HOLDERS.items():
        handing_out.issue(authority, folder / "tls" / name, name, role, ["127.0.0.1"], 60)
    token, kept = new_token("acme")
    write_tokens(folder / "tokens.json", [kept])
    collector, port = Collector(), free_port()
    debug = ("--log-level", "debug", "--otlp", collector.endpoint)
    chosen = options(
        model,
        folder / "cluster",
        http_port=0,
        certificates=folder / "tls",
        node_arguments=(*debug, "--metrics", "127.0.0.1:0"),
        coordinator_arguments=(*debug, "--tokens", str(folder / "tokens.json"), "--metrics", f"127.0.0.1:{port}"),
        gateway_arguments=(*debug, "--https"),
    )
    nodes = Tripped(chosen)
    with collector, nodes.cluster:
        yield Secured(nodes, authority, folder / "tls", token, [f"http://127.0.0.1:{port}/metrics"], collector)


def test_a_killed_nodes_answer_goes_on_with_the_same_bits(secured: Secured, control) -> None:
    turn = question(1)
    strike = secured.nodes.strike(20, secured.cluster.kill_node)
    with secured.client() as client:
        session = client.create_session()
        log = hold_turn(session, turn, strike)
        assert strike.done
        control.assert_same([turn], [log.record], session)
    assert len(set(placed_on(log))) == 2
    secured.cluster.ensure_all_live()


@pytest.mark.skipif(not browser_is_there(), reason=WHY_NOT)
def test_the_dashboards_chat_is_for_who_enters_a_token(secured: Secured) -> None:
    from playwright.sync_api import expect

    page_address = f"https://{secured.cluster.http_address}/#chat"
    with browsing(expected="401", ignore_https_errors=True) as page:
        page.goto(page_address)
        for entered in ("", "kvf_wrong", secured.token):
            if entered:
                if not page.locator("#token").is_visible():
                    page.locator("#access summary").click()
                page.fill("#token", entered)
                with page.expect_navigation():
                    page.press("#token", "Enter")
            page.fill("#words", "Say where the ferry goes.")
            page.press("#words", "Enter")
            if entered == secured.token:
                expect(page.locator("#talk .by").first).to_be_visible(timeout=ANSWER_MS)
            else:
                expect(page.locator("#talk")).to_contain_text("API token", timeout=ANSWER_MS)
                expect(page.locator("#talk .by")).to_have_count(0)
        assert secured.token not in page.content()


def test_certificates_rotate_under_a_running_stream(secured: Secured, control) -> None:
    """All keys and certificates, and the authority's, are replaced while an answer comes."""
    turn = question(3)
    folders = [secured.tls / name for name in HOLDERS]
    steps: list[Callable[[], object]] = [
        lambda: [handing_out.renew(secured.authority, folder, 60) for folder in folders],
        secured.authority.renew_authority,
        lambda: [handing_out.hand_out_trust(secured.authority, folder) for folder in folders],
        lambda: [handing_out.renew(secured.authority, folder, 60) for folder in folders],
    ]

    def rotate(_log: object, event: object) -> None:
        if isinstance(event, Token) and event.sequence % 12 == 4 and steps:
            steps.pop(0)()
            time.sleep(0.6)

    with secured.client() as client:
        session = client.create_session()
        log = hold_turn(session, turn, rotate)
        assert not steps
        assert not [event for _, event in log.events if isinstance(event, NodeLost)], "a rotation breaks no stream"
        secured.authority.forget_old()
        for folder in folders:
            handing_out.hand_out_trust(secured.authority, folder)
        time.sleep(0.6)
        control.assert_same([turn], [log.record], session)
        session.generate("And then?", max_tokens=4).collect()
    with secured.operator() as client:
        assert sum(node.state is NodeState.LIVE for node in client.nodes()) == 3, "nodes joined with what is new"


def test_a_revoked_nodes_answer_goes_on_elsewhere_and_it_stays_out(secured: Secured, control) -> None:
    turn, revoked = question(5, 200), []

    def revoke(node_id: str) -> None:
        revoked.append(node_id)
        secured.authority.revoke(name=node_id)
        for name in HOLDERS:
            handing_out.hand_out_trust(secured.authority, secured.tls / name)

    with secured.client() as client:
        session = client.create_session()
        log = hold_turn(session, turn, Strike(4, revoke))
        (node_id,) = revoked
        secured.until_node(node_id, lambda state: state is not NodeState.LIVE)
        control.assert_same([turn], [log.record], session)
        assert node_id not in placed_on(hold_turn(client.create_session(), question(7)))
    assert "is revoked" in secured.cluster.log_of(node_id), "the operator finds the reason in its log"
    handing_out.renew(secured.authority, secured.tls / node_id, 60)  # a new certificate brings it back
    secured.until_node(node_id, lambda state: state is NodeState.LIVE)


def test_nothing_secret_is_written_anywhere(secured: Secured) -> None:
    """Prompts, answers' text, tokens and keys, over answers of the SDK and of the OpenAI API, and over refusals."""
    ca = str(secured.tls / "someone" / "ca.pem")
    wrong, _ = new_token("acme")
    url = f"https://{secured.cluster.http_address}/v1/chat/completions"
    said = f"Repeat after me: {CANARY}"
    body = {"model": "any", "max_tokens": 24, "messages": [{"role": "user", "content": said}]}
    told: list[str] = []
    with secured.client() as client:
        answer = client.create_session().generate(TurnRequest(said, 24).text, max_tokens=24).collect()
    with httpx.Client(verify=ssl.create_default_context(cafile=ca)) as http:
        for token, status in ((secured.token, 200), (wrong, 401), (CANARY, 401)):
            response = http.post(url, json=body, headers={"authorization": f"Bearer {token}"}, timeout=60)
            assert response.status_code == status
            told += [response.text] if status != 200 else []
        told.append(http.get(f"https://{secured.cluster.http_address}/metrics").text)
    with Client(secured.cluster.address, tls_dir=secured.tls / "someone", token=wrong) as client:
        with pytest.raises(Unauthenticated) as refused:
            client.create_session()
        told.append(str(refused.value))
    for address in secured.metrics + [f"http://{ready(p)['metrics']}/metrics" for p in secured.cluster.nodes.values()]:
        told.append(httpx.get(address).text)
    secured.traces.wait_for(lambda spans: len({span.service for span in spans}) == 3)
    told.append(secured.traces.raw.decode("latin-1"))
    secrets = [CANARY, secured.token, secured.token.split("_", 2)[2], wrong.split("_", 2)[2]]
    for folder in secured.tls.iterdir():
        secrets += (folder / "key.pem").read_text().splitlines()[1:-1]
    written = {path.name: path.read_text() for path in (secured.cluster.directory / "logs").iterdir()}
    written |= {path.name: path.read_text() for path in (secured.cluster.directory / "run").iterdir()}
    assert all("DEBUG" in written[f"{name}.log"] for name in ("coordinator", "gateway"))
    for name, text in written.items():
        assert not [secret for secret in secrets if secret in text], name
        assert answer.text.strip() not in text, name
    assert not [secret for secret in [*secrets, answer.text.strip()] for text in told if secret in text]


def ready(process) -> dict[str, str]:
    return json.loads(process.ready_file.read_text())
