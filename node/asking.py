"""Asking a node how it is, or to drain, for a person."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

import grpc
from google.protobuf import json_format

from kvferry.node.errors import NodeUnreachable
from kvferry.proto.status import CODE_KEY
from kvferry.proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from kvferry.trust.doors import open_folder, open_sync_channel

TIMEOUT_SECONDS: Final = 5.0


def ask_status(address: str, tls_dir: Path | None = None) -> worker_pb2.GetNodeStatusResponse:
    """Raises NodeUnreachable, TlsFolderInvalid."""
    with _asked(address, tls_dir, TIMEOUT_SECONDS) as stub:
        return stub.GetNodeStatus(worker_pb2.GetNodeStatusRequest(), timeout=TIMEOUT_SECONDS)


def ask_to_drain(
    address: str, timeout_seconds: float, finish_seconds: float, tls_dir: Path | None = None
) -> worker_pb2.DrainResponse:
    """Returns when it is drained. Raises NodeUnreachable, TlsFolderInvalid."""
    request = worker_pb2.DrainRequest(timeout_seconds=timeout_seconds, finish_seconds=finish_seconds)
    patience = timeout_seconds + finish_seconds + TIMEOUT_SECONDS
    with _asked(address, tls_dir, patience) as stub:
        return stub.Drain(request, timeout=patience)


@contextlib.contextmanager
def _asked(address: str, tls_dir: Path | None, patience_seconds: float) -> Iterator[worker_pb2_grpc.WorkerServiceStub]:
    """The node's service; an error of a call becomes NodeUnreachable."""
    with open_sync_channel(address, open_folder(tls_dir)) as channel:
        try:
            yield worker_pb2_grpc.WorkerServiceStub(channel)
        except grpc.RpcError as error:
            call = cast("grpc.Call", error)  # gRPC raises objects that are both
            raise NodeUnreachable(f"no node answers at {address}: {_reason(call, patience_seconds)}") from error


def _reason(call: grpc.Call, patience_seconds: float) -> str:
    """In words of ours where gRPC's are about its own insides."""
    if call.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "what serves there is something else"
    if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"nothing was heard for {patience_seconds:g} s"
    if call.code() is grpc.StatusCode.UNAVAILABLE and not dict(call.trailing_metadata() or ()).get(CODE_KEY):
        return "it cannot be reached; look at the address, whether the node runs, and at the certificates (--tls-dir)"
    return call.details() or "no details"


def as_json(status: worker_pb2.GetNodeStatusResponse | worker_pb2.DrainResponse) -> str:
    """The message, with what is zero or false as well."""
    return json_format.MessageToJson(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=2
    )


def as_lines(status: worker_pb2.GetNodeStatusResponse) -> list[tuple[str, str]]:
    """Names and values for a person."""
    load = status.load
    return [
        ("node", f"{status.node_id}, kvferry {status.version}, up {status.uptime_seconds:.0f} s"),
        ("model", f"{status.model}, fingerprint {status.fingerprint}, context {status.context_length}"),
        ("engine", f"{status.kernel_path}, {status.n_threads} threads on processors {status.cores}"),
        ("weights", status.weights or "not said"),
        ("state", "draining" if status.draining else "serving"),
        ("turns", f"{load.n_running} running, {load.n_queued} waiting, stalled {load.stalled_seconds:.1f} s"),
        ("K/V memory", f"{load.kv_bytes_used / 2**20:.0f} of {load.kv_bytes_budget / 2**20:.0f} MiB"),
        ("sessions", ", ".join(f"{s.session_id} ({s.n_tokens} rows)" for s in status.resident) or "none"),
        ("speed", f"prefill {load.prefill_tokens_per_second:.0f}, decode {load.decode_tokens_per_second:.1f} tokens/s"),
        ("speculation", f"{load.tokens_accepted} of {load.tokens_proposed} proposed tokens were right"),
        ("event loop", _lag(status.process)),
        ("store", "ok" if load.store_ok else load.store_error),
        (
            "snapshots",
            f"{load.snapshots_published} published, {load.snapshots_failed} failed, {load.snapshots_refused} refused",
        ),
        ("store use", _store_use(load.store) if load.HasField("store") else "no store"),
        ("restored rows", f"{load.blocks_audited} blocks computed again, {load.blocks_wrong} wrong"),
    ]


def _store_use(store: common_pb2.StoreFigures) -> str:
    """In one line."""
    left = f" ({store.write_budget_left / 1e6:.0f} MB left this hour)" if store.HasField("write_budget_left") else ""
    n_not_saved = store.saves_without_room + store.saves_over_write_budget
    return (
        f"{store.bytes_saved / 1e6:.1f} MB saved{left}, {store.bytes_restored / 1e6:.1f} MB restored, "
        f"{n_not_saved} saves without room or over budget, {store.saves_not_worth_it} not worth it, "
        f"{store.files_evicted} files evicted, {store.files_refused} refused, {store.files_quarantined} in quarantine"
    )


def _lag(process: worker_pb2.ProcessHealth) -> str:
    seconds = (process.loop_lag_p50_seconds, process.loop_lag_p99_seconds, process.loop_lag_max_seconds)
    return "late by {:.1f} ms (p50), {:.1f} ms (p99), {:.1f} ms (most)".format(*(1000 * value for value in seconds))
