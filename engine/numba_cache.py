"""Where numba keeps compiled code. Import this module before numba, in every module that has jitted functions.

numba notices a changed source file only for the file that holds the jitted function, not for what that function calls
or is built from. So the folder's name is a digest of all engine sources and of the compiler's versions: an edit
anywhere gets a fresh folder. ``NUMBA_CACHE_DIR``, when set, is left alone. The folder is disposable.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

from kvferry.engine.files.catalogue import cache_root

_VARIABLE: Final = "NUMBA_CACHE_DIR"


def _sources_digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for package in ("numba", "llvmlite", "numpy"):
        digest.update(f"{package} {version(package)}\n".encode())
    digest.update(f"{sys.version}\n".encode())
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _usable(folder: Path) -> Path:
    """The folder, or a private temporary one where it cannot be written, as on a read-only file system."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="kvferry-numba-"))


def _configure() -> Path:
    given = os.environ.get(_VARIABLE)
    if given:
        return Path(given)
    folder = _usable(cache_root() / "numba" / _sources_digest())
    os.environ[_VARIABLE] = str(folder)
    loaded = sys.modules.get("numba")
    if loaded is not None:  # it has read its environment already
        loaded.config.CACHE_DIR = str(folder)
    return folder


CACHE_FOLDER: Final = _configure()
