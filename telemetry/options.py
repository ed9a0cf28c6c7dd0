"""The command-line options that all long-running processes have for whoever watches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import click

Format = Literal["json", "text"]

Command = TypeVar("Command", bound=Callable[..., object])


def telemetry_options(command: Command) -> Command:
    """``log_format`` and ``otlp``; also from the environment, so that one line of a unit or a shell sets all."""
    with_otlp = click.option(
        "--otlp", metavar="URL", envvar="KVFERRY_OTLP",
        help="Send traces to an OpenTelemetry collector's gRPC port, as http://HOST:4317.  [default: none]",
    )  # fmt: skip
    with_format = click.option(
        "--log-format", type=click.Choice(["json", "text"]), envvar="KVFERRY_LOG_FORMAT",
        help="One JSON object a line, or text.  [default: json in systemd's journal, else text]",
    )  # fmt: skip
    return with_format(with_otlp(command))
