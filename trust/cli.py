"""`kvferry certs` and `kvferry tokens`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvferry.terminal.words import say

ROLES: Final = ("coordinator", "node", "gateway", "client", "operator")

DAYS: Final = 60

FOLDER: Final = click.Path(path_type=Path, file_okay=False)
FILE: Final = click.Path(path_type=Path, dir_okay=False)

Command = TypeVar("Command", bound=Callable[..., Any])


def _holder_options(command: Command) -> Command:
    """Whose certificate it is."""
    for option in (
        click.option(
            "--address", "addresses", multiple=True, metavar="HOST",
            help="Where others reach it: a name or an IP address, without a port (repeatable).",
        ),
        click.option("--identity", "name", required=True, help="Its name; a node's is its --node-id."),
        click.option("--role", required=True, type=click.Choice(ROLES), help="What it may do goes by it."),
    ):  # fmt: skip
        command = option(command)
    return command


days_option = click.option("--days", type=int, default=DAYS, show_default=True, help="How long it is valid.")


@click.group()
def certs() -> None:
    """Be a private certificate authority: who is who in the fleet."""


@certs.command(epilog="Example: kvferry certs init ca")
@click.argument("authority", type=FOLDER)
@click.option("--name", default="kvferry fleet", show_default=True, help="What certificates say who signed them.")
@click.option("--days", type=int, default=3650, show_default=True, help="How long the authority itself is valid.")
def init(authority: Path, name: str, days: int) -> None:
    """Make an authority in the folder AUTHORITY. Its key must not leave it: keep the folder where nobody else reads."""
    from kvferry.trust.authority import Authority

    Authority.create(authority, name, days)
    say(f"{authority} signs certificates now; its key is {authority / 'ca.key.pem'}")


@certs.command(
    epilog="Example: kvferry certs issue ca --identity board-1 --role node --address 192.0.2.11 --out /etc/kvferry/tls"
)
@click.argument("authority", type=FOLDER)
@_holder_options
@days_option
@click.option(
    "--out", type=FOLDER, required=True, help="Becomes the --tls-dir: ca.pem, cert.pem, key.pem, revoked.pem."
)
def issue(authority: Path, name: str, role: str, addresses: tuple[str, ...], days: int, out: Path) -> None:
    """Make a key and a certificate in one go, for processes on this machine. For others: request, sign, install."""
    from kvferry.trust import handing_out
    from kvferry.trust.authority import Authority
    from kvferry.trust.certificates import Role

    identity = handing_out.issue(Authority(authority), out, name, Role(role), addresses, days)
    say(f"{out} is {identity}, until {identity.not_after:%Y-%m-%d}")


@certs.command(epilog="Example: kvferry certs renew ca /etc/kvferry/tls")
@click.argument("authority", type=FOLDER)
@click.argument("tls_dirs", type=FOLDER, nargs=-1, required=True)
@days_option
def renew(authority: Path, tls_dirs: tuple[Path, ...], days: int) -> None:
    """Give TLS_DIRS new keys and certificates that say the same. Processes that use them take them up by themselves."""
    from kvferry.trust import handing_out
    from kvferry.trust.authority import Authority

    for folder in tls_dirs:
        identity = handing_out.renew(Authority(authority), folder, days)
        say(f"{folder} is {identity}, until {identity.not_after:%Y-%m-%d}")


@certs.command(
    epilog="Example: kvferry certs request /etc/kvferry/tls --identity board-1 --role node --address 192.0.2.11"
)
@click.argument("tls_dir", type=FOLDER)
@_holder_options
def request(tls_dir: Path, name: str, role: str, addresses: tuple[str, ...]) -> None:
    """Make a key in TLS_DIR, where it stays, and request.pem, which goes to the authority to be signed."""
    from kvferry.trust import handing_out
    from kvferry.trust.certificates import Role

    say(str(handing_out.make_request(tls_dir, name, Role(role), addresses)))


@certs.command(epilog="Example: kvferry certs sign ca request.pem --identity board-1 --role node --out cert.pem")
@click.argument("authority", type=FOLDER)
@click.argument("request_file", type=FILE)
@_holder_options
@days_option
@click.option("--out", type=FILE, required=True, help="The certificate; it goes back to where the request came from.")
def sign(
    authority: Path, request_file: Path, name: str, role: str, addresses: tuple[str, ...], days: int, out: Path
) -> None:
    """Sign a request. What the certificate says is what you say here; the request only has to agree."""
    from kvferry.terminal.output_file import is_stdout
    from kvferry.trust import handing_out
    from kvferry.trust.authority import Authority
    from kvferry.trust.certificates import Role
    from kvferry.trust.errors import RequestInvalid
    from kvferry.trust.files import PUBLIC_MODE, reason_of, write_atomically

    pem = handing_out.sign_request(Authority(authority), request_file, name, Role(role), addresses, days)
    try:
        write_atomically(out, pem, PUBLIC_MODE)
    except OSError as error:
        raise RequestInvalid(f"{out} cannot be written: {reason_of(error)}") from error
    say(f"{out} is {role} {name}", err=is_stdout(out))


@certs.command(epilog="Example: kvferry certs install /etc/kvferry/tls --cert cert.pem --ca ca.pem")
@click.argument("tls_dir", type=FOLDER)
@click.option("--cert", "certificate", type=FILE, required=True, help="What the authority signed.")
@click.option("--ca", type=FILE, required=True, help="The authority's ca.pem.")
@click.option("--revoked", type=FILE, help="The authority's revoked.pem.")
def install(tls_dir: Path, certificate: Path, ca: Path, revoked: Path | None) -> None:
    """Put a signed certificate into force in TLS_DIR, if it fits the key there."""
    from kvferry.trust import handing_out

    identity = handing_out.install(tls_dir, certificate, ca, revoked)
    say(f"{tls_dir} is {identity}, until {identity.not_after:%Y-%m-%d}")


@certs.command(epilog="Example: kvferry certs revoke ca board-1")
@click.argument("authority", type=FOLDER)
@click.argument("identity", required=False)
@click.option("--serial", help="One certificate only, as kvferry certs show prints it.")
@click.option("--to", "tls_dirs", type=FOLDER, multiple=True, help="Put the new list into this folder (repeatable).")
def revoke(authority: Path, identity: str | None, serial: str | None, tls_dirs: tuple[Path, ...]) -> None:
    """Revoke all certificates of IDENTITY. It holds wherever the authority's revoked.pem has arrived, at once."""
    from kvferry.trust import handing_out
    from kvferry.trust.authority import Authority

    if (identity is None) == (serial is None):
        raise click.UsageError("Name an identity, or a --serial.")
    ours = Authority(authority)
    revoked = ours.revoke(name=identity, serial=serial)
    for folder in tls_dirs:
        handing_out.hand_out_trust(ours, folder)
    for one in revoked:
        say(f"revoked {one.role} {one.name}, serial {one.serial}")
    if not revoked:
        say("nothing new: all of these were revoked before")
    say(f"copy {authority / 'revoked.pem'} into every --tls-dir of the fleet")


@certs.command("renew-authority", epilog="Example: kvferry certs renew-authority ca")
@click.argument("authority", type=FOLDER)
@click.option("--days", type=int, default=3650, show_default=True, help="How long it is valid.")
def renew_authority(authority: Path, days: int) -> None:
    """Sign with a new key from now on, and still trust the old one, so that the fleet changes over without a gap."""
    from kvferry.trust.authority import Authority

    Authority(authority).renew_authority(days)
    say(
        f"1. copy {authority / 'ca.pem'} and revoked.pem into every --tls-dir  2. renew every certificate  "
        "3. kvferry certs forget-old, and copy again"
    )


@certs.command("forget-old", epilog="Example: kvferry certs forget-old ca")
@click.argument("authority", type=FOLDER)
def forget_old(authority: Path) -> None:
    """Trust only what the present key has signed."""
    from kvferry.trust.authority import Authority

    Authority(authority).forget_old()
    say(f"copy {authority / 'ca.pem'} into every --tls-dir")


@certs.command(epilog="Example: kvferry certs show /etc/kvferry/tls")
@click.argument("places", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(places: tuple[Path, ...], as_json: bool) -> None:
    """Show what PLACES (authorities, TLS folders, certificates) hold: who, which role, until when."""
    from kvferry.trust.showing import lines_of, print_lines

    lines = lines_of(places)
    if as_json:
        click.echo(json.dumps([line.as_json() for line in lines], indent=1))
    else:
        print_lines(lines)


@click.group()
def tokens() -> None:
    """API tokens of clients: whose sessions they see, and how much they may ask."""


file_option = click.option(
    "--file", "path", type=FILE, required=True, envvar="KVFERRY_TOKENS", show_envvar=True,
    help="As the coordinator's --tokens; it reads it again when it changes.",
)  # fmt: skip


@tokens.command(epilog="Example: kvferry tokens add --file /etc/kvferry/tokens --tenant acme --days 90")
@file_option
@click.option("--tenant", required=True, help="Whose sessions it makes and sees.")
@click.option("--requests-per-minute", type=int, help="Turns begun in a minute. [default: no limit]")
@click.option("--concurrent-turns", type=int, help="Turns open at once. [default: no limit]")
@click.option("--days", type=float, help="How long it is valid. [default: until it is revoked]")
def add(path: Path, **terms: Any) -> None:
    """Make a token and print it, once: the file keeps its hash only."""
    from kvferry.trust.tokens import change_tokens, new_token

    text, token = new_token(terms.pop("tenant"), **terms)
    change_tokens(path, lambda present: [*present, token], may_be_new=True)
    say(text)


@tokens.command("list", epilog="Example: kvferry tokens list --file /etc/kvferry/tokens")
@file_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_tokens(path: Path, as_json: bool) -> None:
    """Show all tokens, without what would let anybody use them."""
    from kvferry.trust.showing import print_tokens
    from kvferry.trust.tokens import read_tokens

    found = read_tokens(path)
    if as_json:
        click.echo(json.dumps([token.model_dump(mode="json", exclude={"sha256"}) for token in found], indent=1))
    else:
        print_tokens(found)


@tokens.command("revoke", epilog="Example: kvferry tokens revoke --file /etc/kvferry/tokens TOKEN_ID")
@file_option
@click.argument("token_id")
def revoke_token(path: Path, token_id: str) -> None:
    """Refuse a token from now on: streams that it has open end as well."""
    from kvferry.trust.tokens import change_tokens, revoked

    change_tokens(path, lambda present: revoked(present, token_id))
    say(f"revoked {token_id}")
