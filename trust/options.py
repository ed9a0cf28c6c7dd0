"""Options of the command line that several rooms share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

TLS_DIR_VARIABLE: Final = "KVFERRY_TLS_DIR"

PATH: Final = click.Path(path_type=Path)

TLS_DIR_HELP: Final = "Folder with ca.pem, cert.pem, key.pem and, where one is, revoked.pem. [default: plaintext]"
TOKEN_FILE_HELP: Final = "File with an API token. [default: that in the environment's KVFERRY_TOKEN]"  # noqa: S105 - no token

Command = TypeVar("Command", bound=Callable[..., Any])

tls_dir_option = click.option(
    "--tls-dir",
    type=PATH,
    envvar=TLS_DIR_VARIABLE,
    show_envvar=True,
    help=TLS_DIR_HELP,
)

insecure_plaintext_option = click.option(
    "--insecure-plaintext",
    is_flag=True,
    default=None,
    help="Allow plaintext where others can read and change it.",
)

reflection_option = click.option(
    "--reflection/--no-reflection",
    default=None,
    help="Tell anybody what can be called. [default: in plaintext on the loopback only]",
)


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta[f"kvferry.{parameter.name}"] = value


_KEPT: Final[dict[str, Any]] = {"expose_value": False, "callback": _keep}

_CREDENTIALS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("--tls-dir", {"type": PATH, "envvar": TLS_DIR_VARIABLE, "show_envvar": True, "help": TLS_DIR_HELP, **_KEPT}),
    ("--token-file", {"type": PATH, "help": TOKEN_FILE_HELP, **_KEPT}),
    ("--insecure-plaintext", {"is_flag": True, "help": "Send an API token in clear.", **_KEPT}),
)


def credential_options(command: Command) -> Command:
    """Of whatever asks a coordinator; the command finds them with `given_credential`."""
    for name, how in reversed(_CREDENTIALS):
        command = click.option(name, **how)(command)
    return command


def credential_parameters() -> list[click.Parameter]:
    """The same, for a command that is put together from its parameters."""
    return [click.Option([name], **how) for name, how in _CREDENTIALS]


def given_credential(name: str) -> Any:
    """What the running command was given for tls_dir, token_file or insecure_plaintext; None: nothing."""
    return click.get_current_context().meta.get(f"kvferry.{name}")


def server_options(command: Command) -> Command:
    """Of whatever listens."""
    return tls_dir_option(insecure_plaintext_option(reflection_option(command)))
