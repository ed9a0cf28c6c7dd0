"""The diagram in the docs is made of the table that the code obeys."""

from __future__ import annotations

from pathlib import Path

from kvferry.coordinator.turn import TRANSITIONS, Phase

DOCS = Path(__file__).parents[2] / "docs" / "coordinator.md"


def diagram() -> str:
    """As mermaid draws it, in the order of the phases."""
    arrows = [f"    {a.value} --> {b.value}" for a in Phase for b in Phase if b in TRANSITIONS[a]]
    lines = ["stateDiagram-v2", "    [*] --> waiting", *arrows, "    finished --> [*]"]
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


def test_the_docs_show_the_states_as_they_are() -> None:
    assert diagram() in DOCS.read_text(), f"put this into {DOCS.name}:\n{diagram()}"
