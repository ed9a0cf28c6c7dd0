"""The generated page of the gRPC contract tells everything that the .proto files tell."""

from __future__ import annotations

import re

from kvferry.proto import reference
from kvferry.proto.v1 import chat_pb2, common_pb2, fleet_pb2, worker_pb2


def test_every_method_message_field_and_value_is_told():
    page = reference.page()
    for file in (chat_pb2, common_pb2, fleet_pb2, worker_pb2):
        descriptor = file.DESCRIPTOR
        for service in descriptor.services_by_name.values():
            for method in service.methods:
                assert f"| `{method.name}` |" in page
        for message in descriptor.message_types_by_name.values():
            section = page.split(f"\n### {message.name}\n")[1].split("\n### ")[0]
            for field in message.fields:
                assert f"| `{field.name}` |" in section, f"{message.name}.{field.name}"
        for enum in descriptor.enum_types_by_name.values():
            assert all(f"| `{value.name}` |" in page for value in enum.values)


def test_links_lead_to_sections_of_the_page():
    page = reference.page()
    sections = {title.replace(".", "").lower() for title in re.findall(r"^### (\S+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= sections


def test_comments_become_explanations():
    assert "The new messages only; earlier turns are the session's." in reference.page()
