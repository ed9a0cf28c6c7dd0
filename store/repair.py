"""Saving what is good of a damaged segment: the rows before the damage, as a segment of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvferry.store import names, vlkv3
from kvferry.store.chain_reader import open_chain
from kvferry.store.compaction import CheckedChain
from kvferry.store.folder import Folder
from kvferry.store.fs import FileSystem
from kvferry.store.inspection import confirm_good
from kvferry.store.publish import create_temp, publish
from kvferry.store.seals import Seal
from kvferry.store.segment_file import Terms
from kvferry.store.segment_writer import SegmentWriter


def salvage(
    fs: FileSystem, folder: Folder, name: str, position: int, unique: str, node_id: str, seal: Seal
) -> Path | None:
    """Writes rows start..position-1 of a segment that is damaged at ``position``; None when there are none, or when
    what comes before the segment is not there to say whose they are.

    Raises StoreFull, StoreUnavailable, SnapshotRejected when more is damaged than was said.
    """
    if not folder.chains.is_linked(name) or position <= folder.chains.segment(name).start:
        return None
    chain = folder.chains.chain(name, position)
    ids = folder.chains.token_ids(name)[:position]
    spans = [span for span in folder.chains.spans(name) if span.start < position]
    terms = Terms(seal=seal)
    with open_chain(fs, folder.path, chain, terms) as reader:
        old = reader.parts[-1].file.extent
        extent = replace(
            old,
            n_tokens=position - old.start,
            prefix=vlkv3.prefix_digest(terms.seal, old.fingerprint, ids, spans),
        )
        own = [span for span in spans if span.start >= old.start]
        writer = SegmentWriter(extent, ids[old.start :], own, terms.seal, terms.seal.new_salt(unique))
        final = folder.path / extent.name
        temp_name = names.temp_name(final.name, node_id, unique, writer.extent.file_bytes)
        with create_temp(fs, folder.path / temp_name) as temp:
            inode = writer.write(temp, CheckedChain(reader))
            publish(fs, temp.path, final, inode, lambda: confirm_good(fs, final, seal))
    return final
