"""A picture for a terminal of any width: columns go, the least telling first, before anything is cut."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvferry.client.sdk import NodeInfo, NodeState
from kvferry.client.top.picture import Phase, Picture, Stream
from kvferry.terminal.units import bytes_text, duration_text

T = TypeVar("T")

NODE_COLOUR: Final = {NodeState.LIVE: "green", NodeState.SUSPECT: "yellow", NodeState.DEAD: "red"}
PHASE_COLOUR: Final = {Phase.DECODE: "green", Phase.PREFILL: "cyan", Phase.MOVING: "yellow", Phase.OVER: "dim"}
HOT_CELSIUS: Final = 80.0
"""RK3588 boards throttle at 85."""
SILENT_S: Final = 2.0
_OTHER_LINES: Final = 7
"""Head, two headers, two blank lines, and two that count what does not fit."""


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """``from_width``: of terminals that show it."""

    title: str
    cell: Callable[[T, float], str | Text]
    from_width: int = 0
    is_number: bool = False


def _heat(node: NodeInfo, _: float) -> Text:
    if node.temperature_celsius is None:
        return Text("-")
    return Text(f"{node.temperature_celsius:.0f} °C", "red" if node.temperature_celsius >= HOT_CELSIUS else "")


def _kv(node: NodeInfo, _: float) -> str:
    share = node.kv_bytes_used / node.kv_bytes_budget if node.kv_bytes_budget else 0.0
    return f"{bytes_text(node.kv_bytes_used)} {share:4.0%}"


def _pauses(stream: Stream, _: float) -> str:
    return f"{stream.n_pauses} ({stream.longest_pause_s:.1f} s)" if stream.n_pauses else "-"


def _rate(stream: Stream, now_s: float) -> str | Text:
    rate = stream.rate(now_s)
    if rate:
        return f"{rate:.1f}"
    silent_s = stream.waits_s(now_s)
    return Text(f"{silent_s:.0f} s …", "yellow") if silent_s > SILENT_S else "-"


NODES: Final[tuple[Column[NodeInfo], ...]] = (
    Column("node", lambda n, _: n.node_id),
    Column("state", lambda n, _: Text(n.state.value, NODE_COLOUR.get(n.state, ""))),
    Column("run", lambda n, _: str(n.n_running), is_number=True),
    Column("wait", lambda n, _: str(n.n_queued), is_number=True),
    Column("tok/s", lambda n, _: f"{n.decode_tokens_per_second:.1f}", is_number=True),
    Column("prefill/s", lambda n, _: f"{n.prefill_tokens_per_second:.0f}", 60, is_number=True),
    Column("rows", _kv, 70, is_number=True),
    Column("heat", _heat, 80, is_number=True),
    Column("sessions", lambda n, _: str(n.n_resident_sessions), 95, is_number=True),
    Column("heard", lambda n, _: f"{n.seconds_since_heartbeat:.1f} s", 100, is_number=True),
    Column("kernels", lambda n, _: f"{n.kernel_path} x {n.n_threads}", 120),
)
STREAMS: Final[tuple[Column[Stream], ...]] = (
    Column("session", lambda s, _: s.session_id[:8]),
    Column("node", lambda s, _: s.node_id or "-"),
    Column("phase", lambda s, _: Text(s.phase.value, PHASE_COLOUR.get(s.phase, ""))),
    Column("tok/s", _rate, is_number=True),
    Column("tokens", lambda s, _: str(s.n_tokens), 50, is_number=True),
    Column("pauses", _pauses, 70, is_number=True),
    Column("moves", lambda s, _: str(s.n_moves), 80, is_number=True),
    Column("prompt", lambda s, _: f"{s.n_prompt}, {s.n_reused} reused", 95, is_number=True),
    Column("for", lambda s, now: duration_text((s.ended_s or now) - s.began_s), 105, is_number=True),
)


def view(picture: Picture, width: int, height: int) -> RenderableType:
    """``height``: lines that there are; what does not fit is counted."""
    lines: list[RenderableType] = [_head(picture, width)]
    n_told = 0
    if picture.trouble:
        told = textwrap.wrap(_trouble(picture), max(10, width - 1))
        n_told = len(told)
        lines += [Text(line, "red") for line in told]
    if picture.status is None:
        return Group(*lines)
    nodes = picture.status.nodes
    room = max(4, height - _OTHER_LINES - n_told)
    n_nodes = min(len(nodes), max(2, room - min(len(picture.streams), room // 2)))
    style = "dim" if picture.trouble else ""
    lines += ["", _table(NODES, nodes[:n_nodes], picture.now_s, width, style), *_more(len(nodes) - n_nodes, "nodes")]
    if picture.streams:
        n_streams = max(1, room - n_nodes)
        shown = picture.streams[:n_streams]
        table = _table(STREAMS, shown, picture.now_s, width, style)
        lines += ["", table, *_more(len(picture.streams) - n_streams, "streams")]
    else:
        lines += ["", Text("no turn runs", "dim")]
    return Group(*lines)


def _head(picture: Picture, width: int) -> Text:
    status = picture.status
    if status is None:
        return Text(f"kvferry top: {picture.coordinator}", no_wrap=True, overflow="ellipsis")
    rate = sum(stream.rate(picture.now_s) for stream in picture.streams)
    parts = [f"{status.model}", f"{status.n_open_turns} turns open", f"{rate:.1f} tok/s"]
    if width >= 60:
        parts.append(f"{status.n_sessions} sessions")
    if width >= 80:
        parts += [f"{status.n_failovers} failovers", f"up {duration_text(status.uptime_seconds)}"]
    return Text("  ".join(parts), "bold", no_wrap=True, overflow="ellipsis")


def _trouble(picture: Picture) -> str:
    ago = f"; what is below is {duration_text(picture.silent_s)} old" if picture.status is not None else ""
    return f"{picture.trouble.rstrip('.')}; trying on{ago}"


def _table(columns: tuple[Column[T], ...], rows: tuple[T, ...], now_s: float, width: int, style: str) -> Table:
    shown = [column for column in columns if width >= column.from_width]
    table = Table(box=None, pad_edge=False, header_style="bold", style=style, padding=(0, 1))
    for column in shown:
        table.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(column.cell(row, now_s) for column in shown))
    return table


def _more(n: int, what: str) -> list[RenderableType]:
    return [Text(f"and {n} more {what}", "dim")] if n > 0 else []
