"""Where numba keeps the code of one function: by what its source says, not by where and since when it lies.

Numba's own locators put the path of the source into the cache's path, so that every release that is installed, and
every clone, would compile the same kernels again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from numba.core import caching


class ContentLocator(caching.UserProvidedCacheLocator):
    """Below ``numba.config.CACHE_DIR``, in a folder named like the one that holds the source."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """The name of the source's folder."""
        return Path(py_file).resolve().parent.name

    def get_source_stamp(self) -> str:
        """What a cached function is compared by: the SHA-256 of its source file."""
        return hashlib.sha256(Path(self._py_file).read_bytes()).hexdigest()


CONTENT_LOCATOR: Final = f"{ContentLocator.__module__}.{ContentLocator.__qualname__}"
"""As numba's configuration names it."""
