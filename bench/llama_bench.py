"""llama.cpp's own llama-bench as a runner of the engine bench, where llama-cpp-python is not installed.

It loads the model for each run, which it does not count, and tells the wall clock only. It has no batches of sequences
that decode; other files are made by llama-quantize, if that is there too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from kvferry.bench.peer import INSTALL_HINT, PeerMissing
from kvferry.bench.workload import PASS_ROWS, Speed, Task
from kvferry.engine.files.catalogue import cache_root

PROGRAM: Final = "llama-bench"
_QUANTISER: Final = "llama-quantize"


class LlamaBench:
    """One model file with one setting of flash attention and so many threads."""

    def __init__(self, path: Path, label: str, n_threads: int, *, flash: bool) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            raise PeerMissing(INSTALL_HINT)
        self.name = f"{PROGRAM} {label}, flash attention {'on' if flash else 'off'}"
        fixed = {
            "-m": path,
            "-t": n_threads,
            "-fa": int(flash),
            "-b": PASS_ROWS,
            "-ub": PASS_ROWS,
            "-r": 1,
            "-o": "json",
        }
        self._command = [program, *(str(word) for pair in fixed.items() for word in pair)]

    def can(self, task: Task) -> bool:
        return task.kind != "batch"

    def run(self, task: Task) -> Speed:
        size = {"-p": task.n_tokens, "-n": 0} if task.kind == "prefill" else {"-p": 0, "-n": task.n_tokens}
        words = [str(word) for pair in (size | {"-d": task.depth}).items() for word in pair]
        done = subprocess.run([*self._command, *words], capture_output=True, text=True, check=False)
        try:
            speed = float(json.loads(done.stdout)[0]["avg_ts"])
        except (ValueError, LookupError, TypeError) as error:
            told = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise PeerMissing(f"{self.name} ended with {done.returncode} and said: {told}") from error
        return Speed(speed, speed)

    def close(self) -> None:
        """Nothing is held between runs."""


def quantised_by_tool(path: Path, kind: str) -> Path:
    """As ``peer.requantised``, by the command line tool. Raises PeerMissing."""
    tool = shutil.which(_QUANTISER)
    if tool is None:
        raise PeerMissing(f"there is no {_QUANTISER} on the PATH to make a {kind} file with")
    target = cache_root() / "bench" / f"{path.stem}.{kind}.gguf"
    if target.is_file() and target.stat().st_mtime >= path.stat().st_mtime:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_suffix(f".{os.getpid()}.tmp")
    kept = ["--allow-requantize", "--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0"]
    done = subprocess.run([tool, *kept, str(path), str(staged), kind], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        staged.unlink(missing_ok=True)
        raise PeerMissing(f"{_QUANTISER} cannot make a {kind} file of {path.name}")
    staged.replace(target)
    return target
