"""`kvferry kv rm --session`: which snapshots a session alone uses, by what the coordinator knows of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvferry.client.commands.options import connect
from kvferry.client.errors import UnknownSession
from kvferry.client.sdk import Client, FinishReason, SessionDetails
from kvferry.client.sdk.aio import DEFAULT_ADDRESS
from kvferry.store.commands import removal
from kvferry.store.commands.shared import open_place, progress
from kvferry.store.geometry import TokenIds
from kvferry.store.lcp_index import common_prefix
from kvferry.store.vlkv3 import ContentSpan, identity_ids


def remove_session(
    session: str, coordinator: str | None, *, where: str, key_file: Path | None, encrypted: bool, as_json: bool
) -> None:
    """Deletes from a store what nothing but this session needs, and prints it.

    Raises UnknownSession and others of the client, StoreUnavailable.
    """
    store = open_place(where, key_file, encrypted)
    with connect(coordinator or DEFAULT_ADDRESS) as client:
        ids, spans = _tokens(client.session(session).details())
        n_shared = _n_shared(client, session, identity_ids(ids, 0, spans), quiet=as_json)
    gone = removal.remove_conversation(store, ids, spans, n_shared, quiet=as_json)
    removal.print_removed(store, gone, as_json=as_json)


def _tokens(details: SessionDetails) -> tuple[TokenIds, Sequence[ContentSpan]]:
    """A session's tokens, int32 [n], and what its pictures show."""
    pictures = [
        image
        for turn in details.turns
        if turn.finish_reason is not FinishReason.ERROR  # its tokens are not part of the conversation
        for message in turn.messages
        for image in message.images
    ]
    spans = [
        ContentSpan(image.start, image.n_tokens, bytes.fromhex(image.content_hash))
        for image in sorted(pictures, key=lambda image: image.start)
        if image.start < len(details.token_ids)
    ]
    return np.array(details.token_ids, np.int32), spans


def _n_shared(client: Client, session: str, identity: TokenIds, *, quiet: bool) -> int:
    """The longest prefix that any other session has in common with these tokens."""
    others = [s.session_id for s in client.list_sessions() if s.n_tokens and s.session_id != session]
    longest = 0
    with progress("other sessions", len(others), quiet=quiet, in_bytes=False) as advance:
        for ids, spans in _of_all(client, others):
            longest = max(longest, common_prefix(identity_ids(ids, 0, spans), identity))
            advance(1)
    return longest


def _of_all(client: Client, sessions: Sequence[str]) -> Iterator[tuple[TokenIds, Sequence[ContentSpan]]]:
    for session in sessions:
        try:
            yield _tokens(client.session(session).details())
        except UnknownSession:  # deleted since it was listed
            continue
