"""The button that a local cluster is there for."""

from __future__ import annotations

import os
import signal

import psutil
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.client import NodeInfo
from kvferry.gateway.context import context_of
from kvferry.gateway.errors import ApiError


async def kill(request: Request) -> Response:
    """POST /dashboard/nodes/ID/kill: SIGKILL, for a cluster that was started here to be broken."""
    context = context_of(request)
    node_id = request.path_params["node_id"]
    if not context.dashboard.may_kill:
        raise ApiError(403, "nodes are killed from here on local clusters only: kvferry up", code="not_allowed")
    node = next((node for node in await context.client.nodes() if node.node_id == node_id), None)
    if node is None:
        raise ApiError(404, f"there is no node {node_id}", code="unknown_node")
    _kill(node)
    return JSONResponse({"killed": node_id, "pid": node.pid})


def _kill(node: NodeInfo) -> None:
    """Only a process that the one which started us has started, and that says it is this node."""
    try:
        process = psutil.Process(node.pid)
        is_ours = process.ppid() == os.getppid() and node.node_id in process.cmdline()
    except psutil.Error:
        is_ours = False
    if not is_ours:
        raise ApiError(409, f"{node.node_id} (pid {node.pid}) is no process of this cluster", code="not_ours")
    os.kill(node.pid, signal.SIGKILL)
