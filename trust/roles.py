"""Which role may call which method: one table for every service of every process. Pure.

A method that is not here is nobody's (tests/trust/test_roles.py compares the table with the .proto files).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvferry.trust.certificates import Role

_CHAT: Final = "/kvferry.v1.ChatService/"
_FLEET: Final = "/kvferry.v1.FleetService/"
_WORKER: Final = "/kvferry.v1.WorkerService/"

_PEOPLE: Final = frozenset({Role.CLIENT, Role.GATEWAY, Role.OPERATOR})
_READERS: Final = _PEOPLE | {Role.COORDINATOR}
"""A coordinator reads for its client a turn that another coordinator answers."""

_OVERSEERS: Final = frozenset({Role.GATEWAY, Role.OPERATOR})
_NODE: Final = frozenset({Role.NODE})
_COORDINATOR: Final = frozenset({Role.COORDINATOR})
_OPERATOR: Final = frozenset({Role.OPERATOR})
_EVERYBODY: Final = frozenset(Role)

ROLES_OF: Final[Mapping[str, frozenset[Role]]] = {
    _CHAT + "CreateSession": _PEOPLE,
    _CHAT + "GetSession": _PEOPLE,
    _CHAT + "ListSessions": _PEOPLE,
    _CHAT + "ForkSession": _PEOPLE,
    _CHAT + "DeleteSession": _PEOPLE,
    _CHAT + "ExportSession": _PEOPLE,
    _CHAT + "ImportSession": _PEOPLE,
    _CHAT + "Generate": _PEOPLE,
    _CHAT + "Resume": _READERS,
    _CHAT + "CancelTurn": _READERS,
    _CHAT + "ListModels": _PEOPLE,
    # the fleet's names, addresses and load are not for everybody who may ask a question
    _CHAT + "ListNodes": _OVERSEERS,
    _CHAT + "GetStatus": _OVERSEERS,
    _CHAT + "ListSnapshots": _OVERSEERS,
    _CHAT + "LocateSession": _OVERSEERS,
    _FLEET + "Register": _NODE,
    _FLEET + "Heartbeat": _NODE,
    _FLEET + "Deregister": _NODE,
    _WORKER + "RunTurn": _COORDINATOR,
    _WORKER + "StopTurn": _COORDINATOR,
    _WORKER + "RestoreSession": _COORDINATOR,
    _WORKER + "SaveSession": _COORDINATOR,
    _WORKER + "DropSession": _COORDINATOR,
    _WORKER + "Drain": _COORDINATOR | _OPERATOR,
    _WORKER + "GetNodeStatus": _COORDINATOR | _OPERATOR,
    "/grpc.health.v1.Health/Check": _EVERYBODY,
    "/grpc.health.v1.Health/List": _EVERYBODY,
    "/grpc.health.v1.Health/Watch": _EVERYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
}

OWN_NAME: Final[Mapping[str, str]] = {
    _FLEET + "Register": "node_id",
    _FLEET + "Heartbeat": "node_id",
    _FLEET + "Deregister": "node_id",
}
"""Fields of requests that must name their caller: a node speaks for itself only."""

NEED_TOKEN: Final = frozenset(
    method for method in ROLES_OF if method.startswith(_CHAT) and not method.endswith(("/ListNodes", "/GetStatus"))
)
"""What clients, and gateways for theirs, need an API token for where tokens are in use: all but how the fleet is, which
a gateway has to know for itself."""

BEARERS: Final = frozenset({Role.CLIENT, Role.GATEWAY})
"""Who needs one: operators and the other coordinators are known by their certificates."""

STARTS_TURN: Final = _CHAT + "Generate"


def may_call(role: Role, method: str) -> bool:
    """``method``: as gRPC names it, /package.Service/Method."""
    return role in ROLES_OF.get(method, frozenset())
