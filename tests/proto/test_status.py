"""Every error code has one status, and travels in the trailing metadata."""

import grpc
import pytest

from kvferry.proto.status import CODE_KEY, RETRY_AFTER_KEY, STATUS_OF, status_of, trailing_metadata


@pytest.mark.parametrize(("code", "status"), STATUS_OF.items())
def test_each_code_has_a_failing_status(code: str, status: grpc.StatusCode) -> None:
    assert status_of(code) is status
    assert status is not grpc.StatusCode.OK


def test_a_code_nobody_listed_is_internal() -> None:
    assert status_of("no_such_code") is grpc.StatusCode.INTERNAL


def test_metadata_carries_the_code_and_the_retry_hint() -> None:
    assert trailing_metadata("no_node", retry_after_ms=500) == ((CODE_KEY, "no_node"), (RETRY_AFTER_KEY, "500"))
    assert trailing_metadata("empty_prompt") == ((CODE_KEY, "empty_prompt"),)
