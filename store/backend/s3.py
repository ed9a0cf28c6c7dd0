"""An S3-compatible object store, through obstore (extra ``s3``)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit

from kvferry.store.backend.object_fs import ObjectFileSystem
from kvferry.store.backend.objects import ObjectFacts
from kvferry.store.errors import StoreMisuse

# Up to this size an object is created by one conditional request, from memory. Larger ones go up in parts, after a look
# whether the key is free; who loses that race replaces an object by one of the same content, and readers notice by its
# tag.
ONE_REQUEST_BYTES: Final = 32 << 20
PART_BYTES: Final = 8 << 20
PARTS_AT_ONCE: Final = 2  # with what waits to be sent this bounds the memory of an upload to some 32 MiB


class S3Objects:
    """One bucket, below a prefix. Thread-safe. Raises OSError as Objects says."""

    def __init__(self, store: Any, prefix: str = "") -> None:
        """``store``: an obstore store."""
        self._store = store
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""

    def put_new(self, key: str, data: BinaryIO, n_bytes: int) -> None:
        import obstore
        from obstore import exceptions

        with _os_errors(key):
            if n_bytes <= ONE_REQUEST_BYTES:
                obstore.put(self._store, self._prefix + key, data.read(n_bytes), mode="create", use_multipart=False)
                return
            try:
                obstore.head(self._store, self._prefix + key)
            except (FileNotFoundError, exceptions.NotFoundError):
                obstore.put(self._store, self._prefix + key, data, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
                return
        raise FileExistsError(errno.EEXIST, "File exists", key)

    def head(self, key: str) -> ObjectFacts:
        import obstore

        with _os_errors(key):
            facts = obstore.head(self._store, self._prefix + key)
        return ObjectFacts(facts["size"], int(facts["last_modified"].timestamp() * 1e9), facts["e_tag"] or "")

    def get(self, key: str, start: int, stop: int, tag: str) -> bytes | memoryview:
        import obstore

        with _os_errors(key):
            options: Any = {"range": (start, stop)}
            if tag:
                options["if_match"] = tag
            return memoryview(obstore.get(self._store, self._prefix + key, options=options).bytes())

    def names(self, prefix: str) -> list[str]:
        import obstore

        with _os_errors(prefix):
            found = obstore.list_with_delimiter(self._store, prefix=self._prefix + prefix)
        keys = [entry["path"] for entry in found["objects"]] + list(found["common_prefixes"])
        return sorted(key.rstrip("/").rpartition("/")[2] for key in keys)

    def copy(self, source: str, target: str) -> None:
        import obstore

        with _os_errors(source):
            obstore.copy(self._store, self._prefix + source, self._prefix + target)

    def delete(self, key: str) -> None:
        import obstore

        self.head(key)  # S3 removes what is not there without a word
        with _os_errors(key):
            obstore.delete(self._store, self._prefix + key)


@contextmanager
def _os_errors(key: str) -> Iterator[None]:
    from obstore import exceptions

    try:
        yield
    except (FileNotFoundError, exceptions.NotFoundError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key) from None
    except exceptions.AlreadyExistsError:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key) from None
    except exceptions.PreconditionError as error:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), key) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), key) from error
    except exceptions.BaseError as error:
        raise OSError(errno.EIO, str(error).splitlines()[0][:200], key) from error


def open_s3(url: str, **options: Any) -> ObjectFileSystem:
    """The file system of s3://BUCKET/PREFIX. ``options`` are obstore's; keys and endpoint come from AWS_... variables.

    Raises StoreMisuse when obstore is not installed, or the URL is none.
    """
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise StoreMisuse(
            "an S3 store needs the package obstore: pip install 'kvferry[s3]'", op="open store"
        ) from error
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise StoreMisuse(f"{url!r} is not s3://BUCKET/PREFIX", op="open store")
    return ObjectFileSystem(S3Objects(S3Store(parts.netloc, **options), parts.path))
