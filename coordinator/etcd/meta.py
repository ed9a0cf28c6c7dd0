"""What is the same for all coordinators of one registry, made by the first of them."""

from __future__ import annotations

import dataclasses

from kvferry.coordinator.errors import StateIncompatible
from kvferry.coordinator.etcd.client import EtcdClient, absent, put, unchanged_since
from kvferry.coordinator.etcd.records import LAYOUT, MetaRecord, pack, unpack


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """What an opened registry is from now on."""

    meta: MetaRecord
    # Made by this opening.
    is_new: bool


async def open_meta(
    etcd: EtcdClient, key: bytes, new_coordinator_id: str, first_generation: int, generation_at_least: int
) -> Opening:
    """Find or make it, and raise the generation if the operator says so. Raises StateIncompatible."""
    while True:
        (found,), _ = await etcd.snapshot((key, b""))
        if not found:
            generation = max(first_generation, generation_at_least)
            meta = MetaRecord(coordinator_id=new_coordinator_id, generation=generation)
            condition = absent(key)
        else:
            meta = unpack(MetaRecord, found[0].value)
            if meta.layout > LAYOUT:
                raise StateIncompatible(
                    f"etcd holds version {meta.layout} of the registry and this program knows version {LAYOUT}: "
                    "start the program that wrote it, or name another prefix (etcd://HOST:PORT/PREFIX)"
                )
            if meta.generation >= generation_at_least:
                return Opening(meta, is_new=False)
            meta = dataclasses.replace(meta, generation=generation_at_least)
            condition = unchanged_since(key, found[0].mod_revision)
        if await etcd.commit([condition], [put(key, pack(meta))]):
            return Opening(meta, is_new=not found)
