"""Nodes whose engines can be stopped at an exact token."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.drills.cluster import ClusterOptions, LocalCluster

from .rig import Control, Strike

TRIPWIRE = Path(__file__).parent / "tripwire"


class Tripped:
    """A cluster whose nodes obey orders (see tripwire/sitecustomize.py)."""

    def __init__(self, settings: ClusterOptions) -> None:
        self.cluster = LocalCluster(settings)
        path = os.pathsep.join([str(TRIPWIRE), *filter(None, [os.environ.get("PYTHONPATH")])])
        for name, process in self.cluster.nodes.items():
            process.environment |= {"PYTHONPATH": path, "KVFERRY_TEST_TRIPWIRE": str(self._orders(name))}
        self.control = Control(self.cluster)
        self._rounds = itertools.count(1)

    def order(self, node_id: str, **orders: Any) -> None:
        """From its next step on; none of them: an engine like any other."""
        path = self._orders(node_id)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.replace(path)

    def strike(self, after_token: int, act: Callable[[str], None]) -> Strike:
        """In the next turn, whose answer waits there for `act`: it is short, and ends first on a busy machine."""
        self.hold(after_token)

        def act_and_let_go(node_id: str) -> None:
            act(node_id)
            self.let_go()

        return Strike(after_token, act_and_let_go)

    def hold(self, after_token: int) -> None:
        """No engine goes on in the next turn when it has that many tokens of the answer."""
        number = next(self._rounds)
        for node_id in self.cluster.nodes:
            self.order(node_id, round=f"hold {number}", stop_at=max(after_token, 1))

    def let_go(self) -> None:
        """Engines like any others."""
        for node_id in self.cluster.nodes:
            self.order(node_id)

    def stop(self, node_id: str) -> None:
        """In order, so that no turn is placed there; no error when it has ended already."""
        self.cluster.nodes[node_id].stop()

    def _orders(self, node_id: str) -> Path:
        return self.cluster.directory / "run" / f"{node_id}.orders"
