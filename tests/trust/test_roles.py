"""The table of who may call what covers every method that a server of ours has."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvferry.proto.v1 import chat_pb2, fleet_pb2, worker_pb2
from kvferry.trust.certificates import Role
from kvferry.trust.roles import NEED_TOKEN, OWN_NAME, ROLES_OF, may_call

FILES = (chat_pb2, fleet_pb2, worker_pb2, health_pb2, reflection_pb2)

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def test_every_method_of_every_service_is_in_the_table_and_nothing_else() -> None:
    assert set(METHODS) == set(ROLES_OF), "a new method needs a line in trust/roles.py: who may call it?"


def test_a_method_that_is_not_in_the_table_is_nobodys() -> None:
    assert not any(may_call(role, "/kvferry.v1.ChatService/NoSuchMethod") for role in Role)


def test_only_a_coordinator_gives_a_node_work_and_only_a_node_is_a_member() -> None:
    assert ROLES_OF["/kvferry.v1.WorkerService/RunTurn"] == {Role.COORDINATOR}
    assert all(ROLES_OF[method] == {Role.NODE} for method in METHODS if "FleetService" in method)
    assert not any(may_call(Role.NODE, method) for method in METHODS if "ChatService" in method)


def test_a_client_sees_nothing_of_the_fleet() -> None:
    allowed = {method.rpartition("/")[2] for method in METHODS if may_call(Role.CLIENT, method)}
    assert not allowed & {"ListNodes", "GetStatus", "ListSnapshots", "RunTurn", "Register", "Drain"}


@pytest.mark.parametrize(("method", "field"), OWN_NAME.items())
def test_fields_that_name_the_caller_exist(method: str, field: str) -> None:
    assert field in METHODS[method].input_type.fields_by_name


def test_what_a_session_holds_is_behind_a_token() -> None:
    without = {method for method in METHODS if "ChatService" in method} - NEED_TOKEN
    assert {method.rpartition("/")[2] for method in without} == {"ListNodes", "GetStatus"}
