"""`kvferry gateway run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvferry.telemetry.options import Format, telemetry_options
from kvferry.trust.options import insecure_plaintext_option, tls_dir_option


@click.group()
def gateway() -> None:
    """The OpenAI HTTP API in front of a coordinator."""


@gateway.command(epilog="Example: kvferry gateway run --coordinator 192.0.2.1:7070 --listen 127.0.0.1:8080")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with any of these settings.")
@click.option(
    "--coordinator", metavar="HOST:PORT[,...]", help="The coordinator, or several.  [default: 127.0.0.1:7070]"
)
@click.option("--listen", metavar="HOST:PORT", help="Where HTTP is served.  [default: 127.0.0.1:8080]")
@click.option("--patience-seconds", type=float, help="For a coordinator that is away.  [default: 60]")
@click.option(
    "--keep-seconds", type=int, help="How long a completion's stream can be picked up again.  [default: 3600]"
)
@click.option("--keep-responses-days", type=float, help="How long responses are kept that nobody uses.  [default: 30]")
@tls_dir_option
@click.option("--https", is_flag=True, default=None, help="Serve HTTPS with the certificate in --tls-dir.")
@click.option("--https-cert", type=click.Path(path_type=Path), help="Serve HTTPS with this certificate (PEM).")
@click.option("--https-key", type=click.Path(path_type=Path), help="Its key (PEM).")
@insecure_plaintext_option
@click.option("--allow-kill", is_flag=True, default=None, help="The dashboard may kill nodes started beside it.")
@click.option(
    "--dashboard", type=click.Choice(["loopback", "all", "off"]),
    help="Who may look at the dashboard, which shows the whole cluster.  [default: loopback]",
)  # fmt: skip
@click.option("--drill-reports", type=click.Path(path_type=Path), help="Folder of drill reports, for the dashboard.")
@click.option(
    "--ready-file", type=click.Path(path_type=Path), help="File that says where the gateway serves, once it does."
)
@click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), show_default=True
)
@telemetry_options
def run(config_file: Path | None, log_level: str, log_format: Format | None, otlp: str | None, **flags: Any) -> None:
    """Serve until SIGTERM, Ctrl-C or, without nohup, a closed terminal: chat completions, responses, models, health.

    Point a program's base_url at http://HOST:PORT/v1. Its API key is handed on to the coordinator: any will do, unless
    that one has --tokens.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kvferry.gateway.config import GatewayConfig
    from kvferry.gateway.process import serve
    from kvferry.telemetry.logs import configure_logs
    from kvferry.telemetry.tracing import start_tracing

    configure_logs(log_level, log_format)
    start_tracing("gateway", otlp)
    serve(GatewayConfig.load(flags, config_file, here=True))
