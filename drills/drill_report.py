"""A drill's outcome on disk: `report.json` for programs, `report.txt` and `report.html` for people."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Final

import platformdirs

from kvferry.drills.runner import Outcome
from kvferry.drills.timeline import picture_of, timeline_of
from kvferry.drills.verdict import LimitResult

SCHEMA: Final = 1
"""Of report.json; docs/drills.md has it."""


def default_reports() -> Path:
    """Where reports lie unless a run was told otherwise."""
    return platformdirs.user_data_path("kvferry") / "drills"


def report_name(outcome: Outcome) -> str:
    """Of a report's folder: they sort by time."""
    return f"{_time(outcome):%Y%m%dT%H%M%SZ}-{outcome.scenario.name}-{outcome.target}"


def check_reports_folder(folder: Path) -> None:
    """Makes it, and writes a block there and removes it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))


def write_report(outcome: Outcome, folder: Path, left_behind: list[str]) -> Path:
    """All three files, in a new folder below this one; returns it."""
    place = folder / report_name(outcome)
    place.mkdir(parents=True, exist_ok=True)
    told = as_json(outcome, left_behind)
    (place / "report.txt").write_text(as_text(outcome) + "\n", encoding="utf-8")
    (place / "report.html").write_text(as_html(outcome), encoding="utf-8")
    temp = place / "report.json.new"  # last and at once: who lists reports sees whole ones
    temp.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    temp.rename(place / "report.json")
    return place


def as_json(outcome: Outcome, left_behind: list[str]) -> dict[str, Any]:
    """See docs/drills.md."""
    return {
        "schema": SCHEMA,
        "name": outcome.scenario.name,
        "target": outcome.target,
        "started": _time(outcome).isoformat(timespec="seconds"),
        "seconds": outcome.seconds,
        "verdict": outcome.ruling.value,
        "reason": outcome.reason,
        "hypothesis": outcome.scenario.hypothesis,
        "nodes": outcome.n_nodes,
        "conversations": len(outcome.conversations),
        "ways": outcome.ways,
        "limits": [dataclasses.asdict(limit) | {"measured": _rounded(limit.measured)} for limit in outcome.limits],
        "figures": {}
        if outcome.figures is None
        else {name: _rounded(value) for name, value in dataclasses.asdict(outcome.figures).items()},
        "findings": outcome.findings,
        "timeline": [dataclasses.asdict(moment) | {"at_s": round(moment.at_s, 3)} for moment in timeline_of(outcome)],
        "left_behind": left_behind,
    }


def as_text(outcome: Outcome) -> str:
    """A page for a terminal."""
    lines = [f"drill {outcome.scenario.name} on {outcome.target}: {headline(outcome)}", "", outcome.scenario.hypothesis]
    lines += [f"  {what}: {how}" for what, how in outcome.ways.items()]
    if outcome.limits:
        lines += ["", *(f"  {'ok    ' if limit.held else 'BROKEN'}  {limit_text(limit)}" for limit in outcome.limits)]
    lines += ["", *(f"  {line}" for line in figure_lines(outcome))] if outcome.figures else []
    if outcome.findings:
        lines += ["", *(f"  {finding}" for finding in outcome.findings[:20])]
    if outcome.strikes:
        lines += ["", "  when      what      whom              "]
        lines += [f"  {m.at_s:7.2f} s {m.kind:9} {m.part:17} {m.text}" for m in timeline_of(outcome)]
    return "\n".join(lines)


def headline(outcome: Outcome) -> str:
    """The verdict in a few words, with the limits that broke it."""
    if outcome.reason:
        return f"{outcome.ruling.value} ({outcome.reason})"
    broken = [limit_text(limit) for limit in outcome.limits if not limit.held]
    return f"{outcome.ruling.value}{': ' if broken else ''}{'; '.join(broken)}"


def limit_text(limit: LimitResult) -> str:
    """Such as "detection at most 3.5 s: 2.61"."""
    unit = f" {limit.unit}" if limit.unit else ""
    measured = "never seen" if limit.measured is None else f"{limit.measured:.2f}".removesuffix(".00")
    if limit.unit == "tokens":
        return f"{limit.name}: {measured}"
    return f"{limit.name} {limit.limit:g}{unit}: {measured}"


def figure_lines(outcome: Outcome) -> list[str]:
    """All figures, one a line."""
    figures = outcome.figures
    if figures is None:
        return []
    return [
        (
            f"tokens      {figures.tokens_compared} compared with the undisturbed answers: {figures.tokens_lost} lost, "
            f"{figures.tokens_duplicated} duplicated, {figures.tokens_differing} differing"
        ),
        f"pause       {figures.longest_pause_s:.2f} s at most, undisturbed {figures.undisturbed_pause_s:.2f} s",
        f"detection   {_seconds(figures.detection_s)}",
        f"recovery    {_seconds(figures.recovery_s)} after the last healing",
        f"failovers   {figures.failovers}, and {figures.connections_lost} connections to the coordinator lost",
        (
            f"restored    {figures.tokens_restored} tokens' rows, {figures.bytes_restored} bytes; "
            f"{figures.files_refused} files refused, {figures.saves_without_room} saves without room"
        ),
    ]


def as_html(outcome: Outcome) -> str:
    """One page that needs nothing from anywhere."""
    limits = "".join(
        f'<tr class="{"ok" if limit.held else "broken"}"><td>{escape(limit_text(limit))}</td>'
        f"<td>{'held' if limit.held else 'broken'}</td></tr>"
        for limit in outcome.limits
    )
    figures = "\n".join(figure_lines(outcome))
    findings = "".join(f"<li>{escape(finding)}</li>" for finding in outcome.findings[:50])
    moments = "".join(
        f"<tr><td>{m.at_s:.2f} s</td><td>{m.kind}</td><td>{escape(m.part)}</td><td>{escape(m.text)}</td></tr>"
        for m in timeline_of(outcome)
    )
    ways = "".join(f"<li>{what}: {escape(how)}</li>" for what, how in outcome.ways.items())
    title = f"{outcome.scenario.name} on {outcome.target}"
    when = f"{_time(outcome):%Y-%m-%d %H:%M:%S}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
:root {{ color-scheme: light dark }} body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: auto }}
td {{ padding: .1rem .8rem .1rem 0; vertical-align: top }} .broken {{ color: #c0392b; font-weight: bold }}
.held {{ color: #27864b }} pre {{ overflow-x: auto }} svg {{ max-width: 100%; height: auto }}
</style></head><body>
<h1>{title}: <span class="{outcome.ruling.value}">{outcome.ruling.value}</span></h1>
<p>{when} UTC, {outcome.n_nodes} nodes, {outcome.seconds:.0f} s. {escape(outcome.reason)}</p>
<p><b>Hypothesis:</b> {escape(outcome.scenario.hypothesis)}</p><ul>{ways}</ul>
{picture_of(outcome) if outcome.strikes else ""}
<h2>Limits</h2><table>{limits}</table><h2>Figures</h2><pre>{escape(figures)}</pre>
{f"<h2>Findings</h2><ul>{findings}</ul>" if findings else ""}
<h2>Timeline</h2><table>{moments}</table>
</body></html>
"""


def _time(outcome: Outcome) -> datetime:
    return datetime.fromtimestamp(outcome.started, UTC)


def _seconds(value: float | None) -> str:
    return "never seen" if value is None else f"{value:.2f} s"


def _rounded(value: float | None) -> float | int | None:
    return round(value, 3) if isinstance(value, float) else value
