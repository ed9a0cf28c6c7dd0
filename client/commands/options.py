"""Options and output that the commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvferry.client.errors import ClientError
from kvferry.client.sdk import Client
from kvferry.client.sdk.aio import DEFAULT_ADDRESS
from kvferry.client.sdk.retry import OnOutage
from kvferry.terminal.output import colour
from kvferry.terminal.words import say
from kvferry.trust.bearer import read_token
from kvferry.trust.options import credential_options, given_credential

Command = TypeVar("Command", bound=Callable[..., Any])

UNARY_PATIENCE_S = 2.0
"""A person who asks for a list would rather see the error than wait a minute; a restart of the coordinator fits in."""


def coordinator_option(command: Command) -> Command:
    """--coordinator HOST:PORT or several, else $KVFERRY_COORDINATOR; and how to show it who we are: for `connect`."""
    command = credential_options(command)
    return click.option(
        "--coordinator",
        default=DEFAULT_ADDRESS,
        show_default=True,
        envvar="KVFERRY_COORDINATOR",
        show_envvar=True,
        metavar="HOST:PORT[,...]",
        help="Where the coordinator listens, or several of them.",
    )(command)


def connect(coordinator: str, patience_s: float = UNARY_PATIENCE_S, on_outage: OnOutage | None = None) -> Client:
    """With the certificate and the API token that the running command was given. Raises ClientError, TrustError."""
    return Client(
        coordinator,
        patience_s=patience_s,
        on_outage=on_outage,
        tls_dir=given_credential("tls_dir"),
        token=read_token(given_credential("token_file")),
        insecure_plaintext=bool(given_credential("insecure_plaintext")),
    )


def tell_outage(error: ClientError, patience_s: float) -> None:
    """The SDK's hook: a person who waits is told at once for what, and how long."""
    say(f"[{str(error).rstrip('.')}; trying on for {patience_s:g} s]", dim=True, err=True, color=colour())
