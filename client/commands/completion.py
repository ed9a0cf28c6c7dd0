"""`kvferry completion`, and the names of conversations for it."""

from __future__ import annotations

import os
from collections.abc import Iterable

import click
from click.shell_completion import get_completion_class

from kvferry.terminal.words import say

_MOST = 50
"""More are no help in choosing; the latest are wanted most."""

PROGRAM = "kvferry"


@click.command(
    epilog="Example: kvferry completion bash > ~/.local/share/bash-completion/completions/kvferry",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what a shell needs to complete commands, options, models, conversations and drills.

    \b
    bash:  eval "$(kvferry completion bash)"         in ~/.bashrc
    zsh:   eval "$(kvferry completion zsh)"          in ~/.zshrc, after compinit
    fish:  kvferry completion fish > ~/.config/fish/completions/kvferry.fish
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    say(found(context.find_root().command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())


def session_ids(context: click.Context) -> Iterable[str]:
    """Of the coordinator that the command line, or the environment, names."""
    from kvferry.client.commands.options import connect
    from kvferry.client.sdk.aio import DEFAULT_ADDRESS

    address = context.params.get("coordinator") or os.environ.get("KVFERRY_COORDINATOR") or DEFAULT_ADDRESS
    with context.scope(cleanup=False), connect(address, patience_s=0) as client:
        return [session.session_id for session in client.list_sessions(limit=_MOST)]
