"""`kvferry kv`: the store's commands, of which `rm` takes a session's name as well, since a coordinator knows whose
tokens are whose."""

from __future__ import annotations

from typing import Any, Final

import click

from kvferry.store import cli
from kvferry.store.commands import removal
from kvferry.terminal.completing import completes
from kvferry.trust.options import credential_parameters

_HELP: Final = (
    "A session of the coordinator: what no other session uses goes. If it goes on, its next turn is computed from the"
    " start, and saved."
)


@click.pass_context
def _rm(ctx: click.Context, /, session: str | None, coordinator: str | None, **others: Any) -> None:
    if sum(given is not None for given in (session, others["name"], others["tokens"])) != 1:
        raise click.UsageError("give one of --name, --tokens and --session")
    if session is None:
        ctx.invoke(removal.rm, **others)
        return
    others = {name: given for name, given in others.items() if name not in {"name", "tokens"}}
    # gRPC and the SDK take a second to import on a board, and no other command here needs them
    from kvferry.client.commands.session_snapshots import remove_session

    remove_session(session, coordinator, **others)


_RM: Final = click.Command(
    "rm",
    callback=_rm,
    help=removal.rm.help,
    epilog="Example: kvferry kv rm /mnt/kvferry --session SESSION",
    params=[
        *removal.rm.params,
        click.Option(["--session"], shell_complete=completes("sessions"), metavar="ID", help=_HELP),
        click.Option(
            ["--coordinator"],
            envvar="KVFERRY_COORDINATOR",
            show_envvar=True,
            metavar="HOST:PORT",
            help="Where it listens, with --session; the local one if not given.",
        ),
        *credential_parameters(),
    ],
)

kv = click.Group("kv", commands={**cli.kv.commands, "rm": _RM}, help=cli.kv.help)
