"""The ``coordinator`` command."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import click

from kvferry.telemetry.options import Format, telemetry_options
from kvferry.terminal.completing import completes
from kvferry.terminal.words import say
from kvferry.trust.options import server_options


@click.group()
def coordinator() -> None:
    """The process that keeps the conversations and chooses the nodes."""


@coordinator.command(
    epilog="Example: kvferry coordinator run --model smollm2-135m --state /var/lib/kvferry --store /mnt/kvferry"
)
@click.option(
    "--model",
    multiple=True,
    shell_complete=completes("models"),
    help="A fetched name, a GGUF file or a folder, as the nodes'. [repeatable]",
)
@click.option("--listen", metavar="HOST:PORT", help="Where clients and nodes reach it. [default: 127.0.0.1:7070]")
@click.option(
    "--registry", metavar="etcd[s]://H:P,H:P", help="Share a registry with other coordinators, in place of --state."
)
@click.option("--advertise", metavar="HOST[:PORT]", help="Where those reach this one, if not at --listen.")
@click.option("--state", type=click.Path(path_type=Path), help="Its own folder, on a local disk.")
@click.option("--store", metavar="PLACE", help="The shared snapshot folder, or s3://BUCKET/PREFIX.")
@click.option("--store-key-file", type=click.Path(path_type=Path), help="The fleet's key, where the nodes have one.")
@click.option("--store-encrypted", is_flag=True, default=None, help="The nodes encrypt snapshots with it.")
@click.option("--lease", type=float, help="Seconds of silence after which a node has lost its turns. [default: 3]")
@click.option(
    "--generation",
    type=click.IntRange(min=0),
    help="Be at least this generation, if nodes remember a newer coordinator that is gone for good.",
)
@click.option("--image-tokens", type=int, help="Most tokens of one image; larger ones are scaled. [default: 1024]")
@click.option(
    "--share-prefixes",
    metavar="A,B,...",
    multiple=True,
    help="Tenants that reuse each other's prefixes, or '*': all do. They can tell what the others sent before.",
)
@click.option("--expire-days", type=float, help="Delete sessions unused for so long. [default: never]")
@server_options
@click.option("--tokens", type=click.Path(path_type=Path), help="File of hashed API tokens: clients need one then.")
@click.option("--metrics", metavar="HOST:PORT", help="Where Prometheus may ask. [default: nowhere]")
@click.option("--ready-file", type=click.Path(path_type=Path), help="Written with address and pid when it serves.")
@click.option("--config", "config", type=click.Path(path_type=Path), help="Settings in TOML.")
@click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), show_default=True
)
@telemetry_options
def run(config: Path | None, log_level: str, log_format: Format | None, otlp: str | None, **options: Any) -> None:
    """Serve until SIGTERM, Ctrl-C or, without nohup, a closed terminal."""
    # What gRPC prints by itself, past our logging and in words of its own, we say.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # gRPC and the tokenizer are not needed to say that a path is wrong, or to print the help.
    from kvferry.coordinator.config import CoordinatorSettings
    from kvferry.coordinator.server import run as run_coordinator
    from kvferry.telemetry.logs import configure_logs
    from kvferry.telemetry.tracing import start_tracing

    configure_logs(log_level, log_format)
    start_tracing("coordinator", otlp)
    logging.getLogger("stamina").setLevel(logging.ERROR)  # it tells each attempt and not why; we tell why, once
    for repeatable in ("model", "share_prefixes"):
        options[repeatable] = options[repeatable] or None  # none given: as the settings file has it
    settings = CoordinatorSettings.load(options, config, here=True)
    if settings.ready_file is not None:
        settings.ready_file.unlink(missing_ok=True)
    asyncio.run(run_coordinator(settings))


def main() -> int:
    """The command alone, as ``kvferry coordinator`` behaves: an error of ours is one sentence and its exit code."""
    try:
        coordinator.main(prog_name="kvferry coordinator", standalone_mode=False)
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except click.Abort:
        return 1
    except Exception as e:
        if not isinstance(getattr(e, "code", None), str):
            raise
        say(f"error: {e}", err=True)
        return int(getattr(e, "exit_code", 1))
    return 0
