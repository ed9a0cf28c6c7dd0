"""`kvferry nodes` and `kvferry status`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from kvferry.client.commands.options import connect, coordinator_option
from kvferry.client.sdk import NodeInfo, StoreFigures
from kvferry.terminal.output import json_option, print_json, print_table
from kvferry.terminal.units import bytes_text, duration_text
from kvferry.terminal.words import say


@click.command(epilog="Example: kvferry nodes --coordinator 192.0.2.1:7070")
@coordinator_option
@json_option
def nodes(coordinator: str, as_json: bool) -> None:
    """Show the fleet."""
    with connect(coordinator) as client:
        found = client.nodes()
    if as_json:
        print_json(found)
    else:
        _print_nodes(found)


@click.command(epilog="Example: kvferry status --json")
@coordinator_option
@json_option
def status(coordinator: str, as_json: bool) -> None:
    """Show the coordinator and its fleet at a glance."""
    with connect(coordinator) as client:
        found = client.status()
    if as_json:
        print_json(found)
        return
    say(f"coordinator {found.coordinator_id} at {coordinator}, kvferry {found.version}")
    say(f"models: {', '.join(found.models or (found.model,))}")
    say(
        f"up {duration_text(found.uptime_seconds)} (generation {found.generation}), "
        f"{found.n_turns_finished} turns finished, {found.n_failovers} failovers"
    )
    say(
        f"{found.n_sessions} sessions, {found.n_open_turns} turns open, "
        f"{found.n_snapshots} snapshots ({bytes_text(found.snapshot_bytes)})"
    )
    if found.n_predictions:
        say(
            f"first token after {found.first_token_seconds:.2f} s at the median of the last {found.n_predictions}, "
            f"predicted {found.predicted_seconds:.2f} s, off by {found.prediction_error:.0%}"
        )
    stores = [node.store for node in found.nodes if node.store is not None]
    if stores:
        say(_store_use(stores))
    _print_nodes(found.nodes)


def _store_use(stores: Sequence[StoreFigures]) -> str:
    """What the nodes did with their stores since they were started, all together."""

    def total(what: Callable[[StoreFigures], int]) -> int:
        return sum(map(what, stores))

    return (
        f"stores: {bytes_text(total(lambda s: s.bytes_saved))} saved, "
        f"{bytes_text(total(lambda s: s.bytes_restored))} restored, "
        f"{total(lambda s: s.saves_without_room + s.saves_over_write_budget)} saves refused by a budget, "
        f"{total(lambda s: s.files_evicted)} files evicted, {total(lambda s: s.files_refused)} refused; "
        f"{total(lambda s: s.blocks_audited)} restored blocks computed again, {total(lambda s: s.blocks_wrong)} wrong"
    )


OTHER_STORE = (
    "saves to another store than the coordinator looks at: only nodes with the same --store can resume what it saves."
)
OTHER_KEY = (
    "has another store key than the coordinator: only nodes with the same --store-key-file and --store-encrypted can "
    "resume what it saves."
)


def _print_nodes(found: Sequence[NodeInfo]) -> None:
    columns = [
        "node",
        "state",
        "address",
        "#pid",
        "#running",
        "#queued",
        "#sessions",
        "KV",
        "kernels",
        "store",
        "#heard",
    ]
    rows = [
        [
            node.node_id,
            node.state.value,
            node.address,
            str(node.pid) if node.pid else "?",
            str(node.n_running),
            str(node.n_queued),
            str(node.n_resident_sessions),
            f"{bytes_text(node.kv_bytes_used)} of {bytes_text(node.kv_bytes_budget)}",
            f"{node.kernel_path} x {node.n_threads}",
            store_text(node),
            f"{node.seconds_since_heartbeat:.1f} s ago",
        ]
        for node in found
    ]
    print_table(columns, rows, "No node has registered yet.")
    for node in found:
        if node.other_store or node.other_key:
            say(f"{node.node_id} {OTHER_STORE if node.other_store else OTHER_KEY}")


def store_text(node: NodeInfo) -> str:
    """A node's store in a word or two."""
    if node.other_store:
        return "another"
    if node.other_key:
        return "another key"
    return "ok" if node.store_ok else "failing"
