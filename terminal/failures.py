"""What a person sees when a command fails: one sentence, and never a traceback."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

import platformdirs

EXIT_BUG: Final = 70
"""EX_SOFTWARE of sysexits.h."""

SHOW_VARIABLE: Final = "KVFERRY_TRACEBACK"
_JOURNAL_VARIABLE: Final = "JOURNAL_STREAM"
"""Set by systemd: there the log is where an operator looks, and files are not."""


def sentence_of(error: BaseException) -> tuple[str, int] | None:
    """Of an error that is ours, or the machine's: the sentence and the exit code. None for a bug."""
    if isinstance(getattr(error, "code", None), str) and type(error).__module__.startswith("kvferry."):
        return str(error), int(getattr(error, "exit_code", 1))
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror.lower()}", 1
    if isinstance(error, MemoryError):
        return "the system gives no more memory", 1
    return None


def tell_bug(error: BaseException) -> str:
    """What to say of a bug; its traceback is kept in a file, or told where somebody asked for it."""
    text = "".join(traceback.format_exception(error))
    said = f"this is a bug in kvferry: {type(error).__name__}: {error}"
    if os.environ.get(SHOW_VARIABLE) or os.environ.get(_JOURNAL_VARIABLE):
        return f"{said}\n{text}"
    kept = _keep(text)
    return f"{said}. {f'{kept} says where: please report it' if kept else f'{SHOW_VARIABLE}=1 shows where'}."


def _keep(text: str) -> Path | None:
    """For its owner alone: a traceback may quote what was worked on."""
    name = f"bug-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.txt"
    for folder in (platformdirs.user_log_path("kvferry"), Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError:
            continue
        return folder / name
    return None
