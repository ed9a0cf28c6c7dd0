"""The only place where gRPC options are named.

gRPC ignores an unknown option without a word, so each name here has a test that sees it act
(tests/proto/test_channel.py).
"""

from __future__ import annotations

from typing import Final

Options = list[tuple[str, int]]

MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024
"""KV rows never travel over gRPC. The largest messages are those with images: a file of 20 MiB from a client, and
24 MiB of pixels to a node; a 128k-token prompt has 640 KiB."""

KEEPALIVE_MS: Final = 2_000
KEEPALIVE_TIMEOUT_MS: Final = 2_000
"""With the ping time-out below, a frozen or cut-off peer is noticed within about 2.5 s (reliability.md section 0)."""

ETCD_KEEPALIVE_MS: Final = 10_000


def server_options() -> Options:
    """Options of every server of ours."""
    return [
        ("grpc.so_reuseport", 0),  # else two workers share a port without an error
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # a long prefill is silent: the pings of its client must be welcome
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS * 5),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS * 5),
    ]


def channel_options() -> Options:
    """Options of every client channel of ours."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # the default grows to 120 s: a rebooted board would look dead for two minutes
        ("grpc.initial_reconnect_backoff_ms", 100),
        # this is how long an attempt may take: with certificates a busy board needs more than a tenth of a second
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),  # a started stream cannot be retried; failover is ours
        ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, never one that is backing off
    ]


def etcd_channel_options() -> Options:
    """Of a channel to a member of etcd, which hangs up on those that ping more often than every 5 s."""
    ours = {**dict(channel_options()), "grpc.keepalive_time_ms": ETCD_KEEPALIVE_MS}
    return list(ours.items())
