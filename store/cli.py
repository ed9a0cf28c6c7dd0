"""`kvferry kv`: look at snapshots and at directories of them, without a running node. Exit code 0, or a refusal's own
(errors.py)."""

from __future__ import annotations

import click

from kvferry.store.commands.directories import lcp, ls
from kvferry.store.commands.files import dump, inspect, verify


@click.group()
def kv() -> None:
    """List, inspect, verify and dump KV snapshots.

    Every refusal has an exit code of its own: 10 and up, see docs/format.md.
    """


for _command in (ls, inspect, verify, dump, lcp):
    kv.add_command(_command)
