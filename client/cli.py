"""The command `kvferry`: a group that loads each room's commands when they run, so that no room imports another."""

from __future__ import annotations

import os
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points, version
from typing import Final, TextIO

import click

ENTRY_POINT_GROUP: Final = "kvferry.commands"

SHORT_HELP: Final = {
    "up": "Start a local cluster in one command.",
    "chat": "Talk to the model; the conversation outlives nodes and coordinators.",
    "sessions": "List, show, fork and delete conversations.",
    "nodes": "Show the fleet.",
    "status": "Show the coordinator and its fleet at a glance.",
    "route": "Explain where each turn went and why, and how right the router was.",
    "models": "Fetch, list, inspect and verify models.",
    "node": "Run a node.",
    "coordinator": "Run a coordinator.",
    "gateway": "Serve the OpenAI HTTP API.",
