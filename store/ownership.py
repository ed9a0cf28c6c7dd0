"""What goes when a conversation goes: pure, no files.

A snapshot is a conversation's own when all its tokens are that conversation's, no other conversation that still lives
has rows in it, and nothing that stays continues it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.store.chains import Chains
from kvferry.store.geometry import TokenIds
from kvferry.store.lcp_index import common_prefix
from kvferry.store.vlkv3 import ContentSpan, identity_ids


def only_of(
    chains: Chains,
    whole_files: Mapping[str, TokenIds],
    token_ids: TokenIds,
    spans: Sequence[ContentSpan] = (),
    n_shared: int = 0,
) -> tuple[str, ...]:
    """Names of the files that nothing else needs when the conversation of these tokens goes; a chain's last ones first.

    ``whole_files``: version 1 and 2 files by name, with their ids. ``spans``: what stands behind placeholder tokens.
    ``n_shared``: the longest prefix that another living conversation has in common with this one. A segment with a row
    of that stays; so does a whole file inside it, but not a longer one, for every conversation saves its own.
    """
    inside = [segment for segment in chains.along(token_ids, spans) if segment.start >= n_shared]
    going: list[str] = []
    for segment in sorted(inside, key=lambda segment: (-segment.start, segment.name)):  # what continues it comes first
        if chains.children(segment.name) <= set(going):
            going.append(segment.name)
    ids = identity_ids(token_ids, 0, spans)
    own = [name for name, its in whole_files.items() if len(its) > n_shared and common_prefix(its, ids) == len(its)]
    return (*going, *sorted(own))
