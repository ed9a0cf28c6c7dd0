"""Settings that several processes have, declared once: what one of them says, all say."""

from __future__ import annotations

from typing import Any

from kvferry.settings.fields import setting


def tls_dir() -> Any:
    """Path | None, of a server."""
    return setting(
        None,
        what="folder with ca.pem, cert.pem, key.pem and, where one is, revoked.pem",
        why="a fleet needs one (kvferry certs); on one machine's loopback there is nobody to keep out",
        example="/etc/kvferry/tls",
    )


def insecure_plaintext() -> Any:
    """bool, of a server that others may change things at."""
    return setting(
        default=False,
        what="allow plaintext at addresses that others reach",
        why="whoever is on the network could read and change everything, and is let in",
    )


def reflection() -> Any:
    """bool | None."""
    return setting(
        None,
        what="tell anybody what can be called",
        why="not set, it is told in plaintext on the loopback only: of use to developers, and to attackers",
        example=False,
    )


def metrics(example_port: int) -> Any:
    """str | None: an address."""
    return setting(
        None,
        what="HOST:PORT at which Prometheus may ask; not set: nowhere",
        why="the port is open to whoever reaches it: an operator opens it on purpose",
        example=f"127.0.0.1:{example_port}",
    )


def ready_file(role: str) -> Any:
    """Path | None."""
    return setting(
        None,
        what=f"file that says where the {role} serves, once it does",
        why="for whoever starts it and waits, such as scripts and tests",
        example=f"/run/kvferry/{role}.json",
    )
