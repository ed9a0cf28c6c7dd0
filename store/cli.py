"""`kvferry kv`: look at snapshots and at directories of them, without a running node. Exit code 0, or a refusal's own
(errors.py)."""

from __future__ import annotations

import click

from kvferry.store.commands.checking import fsck, scrub
from kvferry.store.commands.directories import lcp, ls
from kvferry.store.commands.exchange import convert, diff
from kvferry.store.commands.files import dump, inspect, verify
from kvferry.store.commands.removal import rm
from kvferry.store.commands.upkeep import du, gc


@click.group()
def kv() -> None:
    """List, inspect, verify, convert, repair and remove KV snapshots.

    Every refusal has an exit code of its own: 10 and up, see docs/format.md.
    """


for _command in (ls, inspect, verify, dump, lcp, diff, convert, fsck, scrub, gc, du, rm):
    kv.add_command(_command)
