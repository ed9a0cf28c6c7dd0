"""A node on a made-up board, whose kernel states the capacities that KVFERRY_TEST_CAPACITIES lists."""

from __future__ import annotations

import os

from kvferry.client.cli import main
from kvferry.engine import cores

CAPACITIES = dict(enumerate(map(int, os.environ["KVFERRY_TEST_CAPACITIES"].split(","))))
cores.capacities = lambda folder=cores.CPU_FOLDER: CAPACITIES

main()
