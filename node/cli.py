"""`kvferry node run` and `kvferry node status`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvferry.telemetry.options import Format, telemetry_options
from kvferry.terminal.completing import completes
from kvferry.terminal.words import say
from kvferry.trust.options import server_options, tls_dir_option


@click.group()
def node() -> None:
    """Run a node, or look at one."""


@node.command(epilog="Example: kvferry node run --model smollm2-135m --coordinator 192.0.2.1:7070 --store /mnt/kvferry")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with any of these settings.")
@click.option("--model", shell_complete=completes("models"), help="Fetched name, GGUF file or folder of the model.")
@click.option("--coordinator", help="HOST:PORT of the coordinator (of several: with commas); none: serve alone.")
@click.option("--store", metavar="PLACE", help="Folder of the snapshot store, or s3://BUCKET/PREFIX.")
@click.option(
    "--store-key-file", type=click.Path(path_type=Path), help="The fleet's key: snapshots are signed with it."
)
@click.option("--store-encrypted", is_flag=True, default=None, help="Encrypt snapshots with that key as well.")
@click.option("--node-id", help="Name of this node, unique in the fleet.  [default: the host's name]")
@click.option("--listen", help="HOST:PORT to listen at; port 0 takes a free one.  [default: 127.0.0.1:0]")
@click.option("--advertise", help="HOST[:PORT] at which the coordinator reaches this node, if not --listen.")
@click.option("--threads", type=int, help="Threads of the engine; 0: one for each big processor.  [default: 0]")
@click.option("--kv-memory", help="Memory for K/V rows, such as 1GiB.  [default: 1GiB]")
@click.option("--kv", help="What that memory stores: f32, f16 (half of it) or q8 (a quarter).  [default: f32]")
@click.option("--vision-cache", help="Memory for what images look like, if the model sees.  [default: 256MiB]")
@click.option("--context", type=int, help="Most tokens of a conversation.  [default: what the model says]")
@click.option("--max-running", type=int, help="Turns in one batch.  [default: 8]")
@click.option("--max-queued", type=int, help="Turns that may wait beside those.  [default: 32]")
@click.option("--decode-slowdown", type=float, help="Longest step beside prompts, in steps without.  [default: 3]")
@click.option("--quant", help="q8 or q4: what float weights become; all nodes of a fleet the same.  [default: q8]")
@click.option("--weights", help="auto, memory, mmap or stream: where they lie; see docs/models.md.  [default: auto]")
@click.option("--step-seconds", type=float, help="Longest step of prompts alone.  [default: 0.5]")
@click.option("--speculate", help="off, ngram (tokens from the text so far) or draft: propose tokens.  [default: off]")
@click.option("--draft-model", help="Small model of the same family, for --speculate draft.")
@click.option("--max-sessions", type=int, help="Sessions kept in memory.  [default: 512]")
@click.option("--store-max-bytes", help="Size the store may grow to.  [default: 16GiB]")
@click.option("--store-max-files", type=int, help="Snapshots the store may hold.  [default: 4096]")
@click.option("--store-version", type=click.IntRange(1, 3), help="Of snapshots written: 1 or 3.  [default: 3]")
@click.option("--store-write-per-hour", help="Bytes written to the store in an hour at most.  [default: no limit]")
@click.option("--publish-every-tokens", type=int, help="Rows after which a running turn is saved.  [default: 256]")
@click.option("--publish-min-tokens", type=int, help="Growth worth saving at the end of a turn.  [default: 16]")
@click.option("--restore-min-tokens", type=int, help="Rows a restore must gain over memory.  [default: 32]")
@click.option("--restore-deadline-seconds", type=float, help="After which rows are recomputed.  [default: 30]")
@click.option("--store-stall-seconds", type=float, help="Without progress: the store hangs.  [default: 4]")
@click.option("--drain-timeout-seconds", type=float, help="For saving everything at the end.  [default: 30]")
@server_options
@click.option("--metrics", metavar="HOST:PORT", help="Where Prometheus may ask.  [default: nowhere]")
@click.option(
    "--ready-file", type=click.Path(path_type=Path), help="File that says where the node serves, once it does."
)
@click.option("--log-level", help="debug, info, warning or error.  [default: info]")
@telemetry_options
def run(config_file: Path | None, log_format: Format | None, otlp: str | None, **flags: Any) -> None:
    """Serve turns until SIGTERM, Ctrl-C or a closed terminal, which drain: turns move on, sessions are saved.

    A second SIGTERM or Ctrl-C ends at once. nohup keeps it running without a terminal.

    Each setting may also come from the environment (KVFERRY_NODE_MODEL ...) or from the TOML file; flags win over the
    environment, the environment over the file.
    """
    _silence_grpc()
    import asyncio
    import sys

    from kvferry.engine.cores import choose_cores, pin_this_thread

    cores = choose_cores()
    pin_this_thread(cores.others)  # before gRPC starts threads, which inherit it
    from kvferry.node.config import NodeConfig

    config = NodeConfig.load(flags, config_file, here=True)
    from kvferry.node.process import Node
    from kvferry.telemetry.logs import configure_logs
    from kvferry.telemetry.tracing import start_tracing

    configure_logs(config.log_level, log_format, node_id=config.node_id)
    start_tracing("node", otlp, config.node_id)

    async def serve() -> int:
        return await Node(config, cores).serve()

    sys.exit(asyncio.run(serve()))


@node.command(epilog="Example: kvferry node status 192.0.2.11:7071")
@click.argument("address")
@tls_dir_option
@click.option("--json", "is_json", is_flag=True, help="For programs.")
def status(address: str, *, tls_dir: Path | None, is_json: bool) -> None:
    """Ask the node at ADDRESS (HOST:PORT) how it is."""
    _silence_grpc()
    from rich.table import Table

    from kvferry.node.asking import as_json, as_lines, ask_status
    from kvferry.terminal.output import console

    _check_address(address)
    told = ask_status(address, tls_dir)
    if is_json:
        click.echo(as_json(told))
        return
    table = Table("", address, title_justify="left")
    for name, value in as_lines(told):
        table.add_row(name, value)
    console().print(table)


@node.command(epilog="Example: kvferry node drain 192.0.2.11:7071 --finish 60")
@click.argument("address")
@tls_dir_option
@click.option("--finish", default=0.0, show_default=True, help="Seconds that running answers have to finish there.")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds for saving its conversations.")
@click.option("--json", "is_json", is_flag=True, help="For programs.")
def drain(address: str, *, tls_dir: Path | None, finish: float, timeout: float, is_json: bool) -> None:
    """Have the node at ADDRESS (HOST:PORT) refuse new turns, move its own and save its conversations.

    It leaves the fleet, and its process waits to be ended or started anew: there is no way back into the fleet before.
    """
    _silence_grpc()
    from kvferry.node.asking import as_json, ask_to_drain

    _check_address(address)
    told = ask_to_drain(address, timeout, finish, tls_dir)
    if is_json:
        click.echo(as_json(told))
        return
    say(f"drained: {told.n_sessions_saved} sessions saved, {told.n_turns_moved} turns moved")


def _check_address(address: str) -> None:
    from kvferry.proto.address import parse_address

    try:
        parse_address(address)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="ADDRESS") from error


def _silence_grpc() -> None:
    """What gRPC prints by itself, past our logging and in words of its own, we say. Before it is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
