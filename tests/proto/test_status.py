"""Every error code has one status, and travels in the trailing metadata."""

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvferry.coordinator import errors
from kvferry.proto.status import CODE_KEY, RETRY_AFTER_KEY, STATUS_OF, status_of, trailing_metadata


@pytest.mark.parametrize(("code", "status"), STATUS_OF.items())
def test_each_code_has_a_failing_status(code: str, status: grpc.StatusCode) -> None:
    assert status_of(code) is status
    assert status is not grpc.StatusCode.OK


def documented() -> Iterator[tuple[str, str]]:
    """(code, status) as the table of docs/api.md has them."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for status, codes in re.findall(r"^\| `([A-Z_]+)` \| (`[a-z_`, ]+) \|", page, re.MULTILINE):
        yield from ((code, status) for code in re.findall(r"`([a-z_]+)`", codes))


def test_the_documented_codes_have_the_documented_status() -> None:
    assert len(list(documented())) > 25
    assert {code: status_of(code).name for code, _ in documented()} == dict(documented())


def test_every_code_that_a_client_may_be_told_is_documented() -> None:
    of_nodes_only = {"node_id_taken"}
    told = {getattr(kind, "code", "") for kind in vars(errors).values()} & STATUS_OF.keys()
    assert told - of_nodes_only <= dict(documented()).keys()


def test_a_code_nobody_listed_is_internal() -> None:
    assert status_of("no_such_code") is grpc.StatusCode.INTERNAL


def test_metadata_carries_the_code_and_the_retry_hint() -> None:
    assert trailing_metadata("no_node", retry_after_ms=500) == ((CODE_KEY, "no_node"), (RETRY_AFTER_KEY, "500"))
    assert trailing_metadata("empty_prompt") == ((CODE_KEY, "empty_prompt"),)
