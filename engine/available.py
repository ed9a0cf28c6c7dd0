"""How much memory this process may still take: what the system has, or what its control groups leave it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes. File caches count as free: the system gives them up when it must."""
    rooms = [_system_room(proc)]
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            rooms += _rooms(cgroups, path, "memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
            rooms += _rooms(cgroups / "memory", path, *names)
    return max(0, min(rooms))


def _system_room(proc: Path) -> int:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62  # a system that does not say


def _rooms(root: Path, path: str, limit: str, usage: str, caches: tuple[str, ...]) -> list[int]:
    """What a group and those above it leave; a container may not see its own under the path that it is told."""
    found = []
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        if group != root and root not in group.parents:
            break
        stated = _text(group / limit).strip()
        if stated.isdigit():
            stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
            cached = sum(int(stat.get(name, 0)) for name in caches)
            found.append(int(stated) - int(_text(group / usage) or 0) + cached)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
