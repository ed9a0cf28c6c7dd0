"""Between the messages about models, nodes and the coordinator and the SDK's values."""

from __future__ import annotations

from typing import Final

from kvferry.client.sdk.values import ClusterStatus, ModelInfo, NodeInfo, NodeState, StoreFigures
from kvferry.proto.v1 import chat_pb2, common_pb2

_NODE_STATES: Final = {
    chat_pb2.NODE_STATE_LIVE: NodeState.LIVE,
    chat_pb2.NODE_STATE_SUSPECT: NodeState.SUSPECT,
    chat_pb2.NODE_STATE_DEAD: NodeState.DEAD,
    chat_pb2.NODE_STATE_DRAINING: NodeState.DRAINING,
}


def model_of(message: chat_pb2.ModelInfo) -> ModelInfo:
    """A model that the coordinator serves."""
    return ModelInfo(
        name=message.name,
        tokenizer_digest=message.tokenizer_digest,
        vocabulary_size=message.vocabulary_size,
        context_length=message.context_length,
        sees_images=message.sees_images,
        n_nodes=message.n_nodes,
        fingerprints=tuple(message.fingerprints),
    )


def node_of(message: chat_pb2.NodeInfo) -> NodeInfo:
    """A node as the coordinator sees it."""
    return NodeInfo(
        node_id=message.node_id,
        address=message.address,
        state=_NODE_STATES.get(message.state, NodeState.UNKNOWN),
        model=message.model,
        fingerprint=message.fingerprint,
        n_running=message.n_running,
        n_queued=message.n_queued,
        n_resident_sessions=message.n_resident_sessions,
        kv_bytes_used=message.kv_bytes_used,
        kv_bytes_budget=message.kv_bytes_budget,
        seconds_since_heartbeat=message.seconds_since_heartbeat,
        prefill_tokens_per_second=message.prefill_tokens_per_second,
        decode_tokens_per_second=message.decode_tokens_per_second,
        kernel_path=message.kernel_path,
        store_ok=message.store_ok,
        n_threads=message.n_threads,
        tokens_generated=message.tokens_generated,
        other_store=message.other_store,
        other_key=message.other_key,
        pid=message.pid,
        sees_images=message.sees_images,
        store=_store_of(message.store) if message.HasField("store") else None,
        restore_bytes_per_second=message.restore_bytes_per_second,
        temperature_celsius=message.temperature_celsius if message.HasField("temperature_celsius") else None,
    )


def _store_of(message: common_pb2.StoreFigures) -> StoreFigures:
    return StoreFigures(
        bytes_saved=message.bytes_saved,
        bytes_restored=message.bytes_restored,
        saves_without_room=message.saves_without_room,
        saves_over_write_budget=message.saves_over_write_budget,
        saves_not_worth_it=message.saves_not_worth_it,
        write_budget_left=message.write_budget_left if message.HasField("write_budget_left") else None,
        files_evicted=message.files_evicted,
        files_refused=message.files_refused,
        files_quarantined=message.files_quarantined,
        blocks_audited=message.blocks_audited,
        blocks_wrong=message.blocks_wrong,
    )


def status_of(message: chat_pb2.GetStatusResponse) -> ClusterStatus:
    """The coordinator and its fleet."""
    return ClusterStatus(
        version=message.version,
        model=message.model,
        coordinator_id=message.coordinator_id,
        generation=message.generation,
        uptime_seconds=message.uptime_seconds,
        n_sessions=message.n_sessions,
        n_open_turns=message.n_open_turns,
        nodes=tuple(node_of(n) for n in message.nodes),
        n_snapshots=message.n_snapshots,
        snapshot_bytes=message.snapshot_bytes,
        n_failovers=message.n_failovers,
        n_turns_finished=message.n_turns_finished,
        n_predictions=message.n_predictions,
        prediction_error=message.prediction_error_median,
        predicted_seconds=message.predicted_seconds_median,
        first_token_seconds=message.first_token_seconds_median,
        sees_images=message.sees_images,
        models=tuple(message.models),
    )
