"""A look at the store's path before a model is loaded: what only a person can change is told at once."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from kvferry.node.errors import StoreMisconfigured
from kvferry.store.errors import StoreMisuse
from kvferry.store.place import StorePlace


def check_store(place: StorePlace, patience_seconds: float) -> None:
    """Raises StoreMisconfigured. A disk that does not answer in time may yet do so, and is served without."""
    try:
        place.open()
    except StoreMisuse as error:
        raise StoreMisconfigured(str(error)) from error
    path = place.folder
    if path is None:
        return
    found: list[str | None] = []
    looking = threading.Thread(target=lambda: found.append(why_not_store(path)), name="kvferry-look", daemon=True)
    looking.start()
    looking.join(patience_seconds)
    if found and found[0] is not None:
        raise StoreMisconfigured(found[0])


def why_not_store(path: Path) -> str | None:
    """Why no store can be there until somebody changes something; None when there may be one. May hang."""
    whole = path.absolute()
    for part in (whole, *whole.parents):
        try:
            mode = part.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue  # the store makes it, or what is above is a file
        except PermissionError:
            return (
                f"the store {path} cannot be used: {part} may not be looked at; look at who owns the folders above it"
            )
        except OSError:
            return None  # what a disk says in its bad hours
        if not stat.S_ISDIR(mode):
            return f"the store {path} cannot be used: {part} is a file where a folder is needed; give another --store"
        if not os.access(part, os.R_OK | os.W_OK | os.X_OK):
            return (
                f"the store {path} cannot be used: the folder {part} may not be written to; look at who owns it and "
                "how it is mounted, or give another --store"
            )
        return None
    return None
