"""Promise 31: no unauthenticated peer does anything.

The real servers of a coordinator and of a node, each method of theirs that clients have no business with, and every
kind of stranger. What the right caller gets is asked as well: else a server that refuses everybody would pass.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvferry.coordinator.config import CoordinatorSettings
from kvferry.coordinator.loaded_model import LoadedModel, load_all
from kvferry.coordinator.opening import open_registry
from kvferry.coordinator.server import serve
from kvferry.engine.cores import choose_cores
from kvferry.node.config import NodeConfig
from kvferry.node.process import Node
from kvferry.proto.channel import channel_options
from kvferry.proto.status import CODE_KEY
from kvferry.proto.v1 import fleet_pb2, fleet_pb2_grpc
from kvferry.trust import handing_out
from kvferry.trust.authority import Authority
from kvferry.trust.certificates import Role
from kvferry.trust.doors import Channels, bind, has_reflection, open_folder
from kvferry.trust.errors import PlaintextRefused, TlsFolderInvalid
from kvferry.trust.roles import ROLES_OF

NOT_FOR_CLIENTS = sorted(
    method for method, roles in ROLES_OF.items() if "kvferry" in method and Role.CLIENT not in roles
)
SECONDS = 10.0

Addresses = dict[str, str]
MakeTls = Callable[..., Path]


def address_of(method: str, servers: Addresses) -> str:
    return servers["node" if "WorkerService" in method else "coordinator"]


@pytest.fixture(autouse=True)
def files_are_looked_at_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.trust.rereading.LOOK_SECONDS", 0.0)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_all((str(smollm2_path),), 1024)[0]


@pytest.fixture
async def servers(tls: MakeTls, tmp_path: Path, model: LoadedModel) -> AsyncIterator[Addresses]:
    """As their processes make them; the node answers before it has loaded anything."""
    settings = CoordinatorSettings(
        model="unused", listen="127.0.0.1:0", state=tmp_path / "state", tls_dir=tls("coordinator", Role.COORDINATOR)
    )
    node_config = NodeConfig(model="unused", node_id="node-1", listen="127.0.0.1:0", tls_dir=tls("node-1", Role.NODE))
    node = Node(node_config, choose_cores())
    async with open_registry(settings) as registry, serve(settings, [model], registry) as coordinator:
        try:
            yield {"coordinator": coordinator, "node": await node._listen()}
        finally:
            await node._close()


async def refusal(channel: grpc.aio.Channel, method: str, request: bytes = b"") -> tuple[grpc.StatusCode, str]:
    """The status and the code that a call ends with; OK when it does not end with one."""
    try:
        async for _ in channel.unary_stream(method)(request, timeout=SECONDS):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), str(dict(error.trailing_metadata() or ()).get(CODE_KEY, ""))
    return grpc.StatusCode.OK, ""


async def all_refusals(
    open_channel: Callable[[str], grpc.aio.Channel], servers: Addresses
) -> dict[str, tuple[grpc.StatusCode, str]]:
    found = {}
    for method in NOT_FOR_CLIENTS:
        async with open_channel(address_of(method, servers)) as channel:
            found[method] = await refusal(channel, method)
    return found


def showing(folder: Path) -> Callable[[str], grpc.aio.Channel]:
    return lambda address: Channels(open_folder(folder)).to(address)


def without_certificate(folder: Path) -> Callable[[str], grpc.aio.Channel]:
    """One that trusts the right authority and shows nothing of its own."""
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    return lambda address: grpc.aio.secure_channel(address, credentials, options=channel_options())


def test_the_matrix_is_as_large_as_promised() -> None:
    assert len(NOT_FOR_CLIENTS) >= 12


async def test_every_stranger_is_refused_everything(
    authority: Authority, tls: MakeTls, servers: Addresses, tmp_path: Path
) -> None:
    operator, client = tls("op", Role.OPERATOR), tls("someone", Role.CLIENT)
    other = Authority.create(tmp_path / "other-ca", "another fleet")
    foreign = tls("coordinator", Role.COORDINATOR, of=other)
    (foreign / "ca.pem").write_bytes((operator / "ca.pem").read_bytes())  # it believes us; we do not believe it
    (foreign / "revoked.pem").unlink()
    long_ago = Authority(authority.folder, clock=lambda: dt.datetime.now(dt.UTC) - dt.timedelta(days=90))
    expired = tls("c3", Role.COORDINATOR, of=long_ago, days=60)

    cut_off = (grpc.StatusCode.UNAVAILABLE, "")
    strangers = {
        "plaintext": (lambda a: grpc.aio.insecure_channel(a, options=channel_options()), cut_off),
        "no certificate": (without_certificate(operator), cut_off),
        "other authority": (
            lambda a: grpc.aio.secure_channel(a, _pair_of(foreign), options=channel_options()),
            cut_off,
        ),
        "expired": (showing(expired), cut_off),
        "client's role": (showing(client), (grpc.StatusCode.PERMISSION_DENIED, "permission_denied")),
    }
    refused = 0
    for kind, (open_channel, expected) in strangers.items():
        for method, seen in (await all_refusals(open_channel, servers)).items():
            assert seen == expected, (kind, method)
            refused += 1
    for name, role in (("node-2", Role.NODE), ("c2", Role.COORDINATOR), ("op", Role.OPERATOR)):
        stranger = tls(name, role)
        authority.revoke(name=name)
        for server in ("coordinator", "node-1"):
            handing_out.hand_out_trust(authority, tmp_path / "tls" / "ca" / server)
        for method, seen in (await all_refusals(showing(stranger), servers)).items():
            assert seen == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"), (f"revoked {role}", method)
            refused += 1
    assert refused == 8 * len(NOT_FOR_CLIENTS) >= 60


def _pair_of(folder: Path) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(*((folder / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem")))


async def test_the_right_callers_are_let_in(tls: MakeTls, servers: Addresses) -> None:
    folders = {role: tls("node-9" if role is Role.NODE else f"the-{role}", role) for role in Role}
    own_name = fleet_pb2.HeartbeatRequest(node_id="node-9").SerializeToString()
    for method in NOT_FOR_CLIENTS:
        for role in Role:
            async with showing(folders[role])(address_of(method, servers)) as channel:
                status, _ = await refusal(channel, method, own_name if "FleetService" in method else b"")
            is_let_in = status not in {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
            assert is_let_in is (role in ROLES_OF[method]), (method, role, status)


async def test_a_node_speaks_for_itself_only(tls: MakeTls, servers: Addresses) -> None:
    async with showing(tls("node-1", Role.NODE))(servers["coordinator"]) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        assert (await stub.Heartbeat(fleet_pb2.HeartbeatRequest(node_id="node-1"), timeout=SECONDS)).register_again
        for request, call in (
            (fleet_pb2.HeartbeatRequest(node_id="node-2"), stub.Heartbeat),
            (fleet_pb2.RegisterRequest(node_id="node-2"), stub.Register),
            (fleet_pb2.DeregisterRequest(node_id="node-2"), stub.Deregister),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="speak for itself") as told:
                await call(request, timeout=SECONDS)
            assert told.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_nobody_is_told_what_can_be_called(tls: MakeTls, servers: Addresses) -> None:
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    for address in servers.values():
        async with showing(tls("op", Role.OPERATOR))(address) as channel:
            assert (await refusal(channel, reflection))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_is_for_the_loopback_or_when_it_is_wanted(tls: MakeTls) -> None:
    folder = open_folder(tls("node-1", Role.NODE))
    assert has_reflection(None, "127.0.0.1:0", None)
    assert not has_reflection(None, "10.0.0.1:7070", None)
    assert not has_reflection(None, "127.0.0.1:0", folder)
    assert has_reflection(True, "10.0.0.1:7070", folder)
    assert not has_reflection(False, "127.0.0.1:0", None)


async def test_a_server_that_is_not_at_its_address_is_not_believed(authority: Authority, tmp_path: Path, tls) -> None:
    elsewhere = tmp_path / "elsewhere"
    handing_out.issue(authority, elsewhere, "node-1", Role.NODE, ["10.9.9.9"], 60)
    with pytest.raises(TlsFolderInvalid, match=r"--address 127\.0\.0\.1"):
        Node(NodeConfig(model="m", node_id="node-1", listen="127.0.0.1:0", tls_dir=elsewhere), choose_cores())
    server = grpc.aio.server()
    port = bind(server, "127.0.0.1:0", open_folder(elsewhere))
    await server.start()
    try:
        async with showing(tls("c", Role.COORDINATOR))(f"127.0.0.1:{port}") as channel:
            status, _ = await refusal(channel, NOT_FOR_CLIENTS[0])
        assert status is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("name", "role", "words"), [("node-2", Role.NODE, "not of node-1"), ("node-1", Role.CLIENT, "needs its own")]
)
def test_a_node_with_somebody_elses_certificate_does_not_start(tls: MakeTls, name: str, role: Role, words: str) -> None:
    with pytest.raises(TlsFolderInvalid, match=words):
        Node(NodeConfig(model="m", node_id="node-1", listen="127.0.0.1:0", tls_dir=tls(name, role)), choose_cores())


async def test_plaintext_that_others_reach_has_to_be_asked_for() -> None:
    with pytest.raises(PlaintextRefused, match="--insecure-plaintext"):
        Node(NodeConfig(model="m", node_id="n", listen="0.0.0.0:0"), choose_cores())
    Node(NodeConfig(model="m", node_id="n", listen="0.0.0.0:0", insecure_plaintext=True), choose_cores())


async def test_certificates_rotate_under_an_open_channel(
    authority: Authority, tls: MakeTls, servers: Addresses
) -> None:
    """New keys on both sides, then a new authority, while one and the same caller goes on calling."""
    mine = tls("the-operator", Role.OPERATOR)
    channels = Channels(open_folder(mine))
    everything = [mine, *(mine.parent / name for name in ("coordinator", "node-1"))]

    async def works() -> bool:
        return (await refusal(channels.to(servers["node"]), "/kvferry.v1.WorkerService/GetNodeStatus"))[1] == "starting"

    async def step(change: Callable[[Path], Any], folders: Sequence[Path]) -> None:
        for folder in folders:
            change(folder)
            assert await works()

    try:
        assert await works()
        await step(lambda folder: handing_out.renew(authority, folder, 60), everything)
        authority.renew_authority()
        await step(lambda folder: handing_out.hand_out_trust(authority, folder), everything)
        await step(lambda folder: handing_out.renew(authority, folder, 60), everything)
        authority.forget_old()
        await step(lambda folder: handing_out.hand_out_trust(authority, folder), everything)
    finally:
        await channels.aclose()
