"""An S3-compatible object store, through obstore (extra ``s3``)."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
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

# A server that is away for longer is reported as such, and asked again by whoever looks whether it is back.
RETRIES: Final = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}

_NO_ANSWER: Final = re.compile(r"error sending request|timed out|connection (refused|reset|closed)", re.IGNORECASE)
_STATUS: Final = re.compile(r"status code: (\d{3}[A-Za-z ]*)")
_CLOUD_KEYS: Final = "169.254.169.254"
_KEYS: Final = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY say whose store it is"


class S3Objects:
    """One bucket, below a prefix. Thread-safe. Raises OSError as Objects says."""

    def __init__(self, store: Any, prefix: str = "", where: str = "the object store") -> None:
        """``store``: an obstore store. ``where``: its name in messages."""
        self._store = store
        self._where = where
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""

    def put_new(self, key: str, data: BinaryIO, n_bytes: int) -> None:
        import obstore
        from obstore import exceptions

        with self._os_errors(key):
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

        with self._os_errors(key):
            facts = obstore.head(self._store, self._prefix + key)
        return ObjectFacts(facts["size"], int(facts["last_modified"].timestamp() * 1e9), facts["e_tag"] or "")

    def get(self, key: str, start: int, stop: int, tag: str) -> bytes | memoryview:
        import obstore

        with self._os_errors(key):
            options: Any = {"range": (start, stop)}
            if tag:
                options["if_match"] = tag
            return memoryview(obstore.get(self._store, self._prefix + key, options=options).bytes())

    def names(self, prefix: str) -> list[str]:
        import obstore

        with self._os_errors(prefix):
            found = obstore.list_with_delimiter(self._store, prefix=self._prefix + prefix)
        keys = [entry["path"] for entry in found["objects"]] + list(found["common_prefixes"])
        return sorted(key.rstrip("/").rpartition("/")[2] for key in keys)

    def copy(self, source: str, target: str) -> None:
        import obstore

        with self._os_errors(source):
            obstore.copy(self._store, self._prefix + source, self._prefix + target)

    def delete(self, key: str) -> None:
        import obstore

        self.head(key)  # S3 removes what is not there without a word
        with self._os_errors(key):
            obstore.delete(self._store, self._prefix + key)

    @contextmanager
    def _os_errors(self, key: str) -> Iterator[None]:
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
            raise PermissionError(errno.EACCES, f"{self._where} does not let these keys in; {_KEYS}", key) from error
        except exceptions.BaseError as error:
            raise OSError(errno.EIO, f"{self._where} {_said(error)}", key) from error


def _said(error: Exception) -> str:
    """What went wrong, and what to do, after the store's name. obstore's own words are a page.

    Without keys it asks the cloud's own machine for some.
    """
    said = str(error)
    if _CLOUD_KEYS in said:
        return f"has no keys to be asked with; {_KEYS}"
    if _NO_ANSWER.search(said):
        server = os.environ.get("AWS_ENDPOINT_URL") or "that of AWS"
        return f"does not answer; AWS_ENDPOINT_URL says which server is asked, at the moment {server}"
    status = _STATUS.search(said)
    reason = f"says {status[1]}" if status else f"fails: {said.splitlines()[0][:120]}"
    return f"{reason}; look at the server's log"


def open_s3(url: str, **options: Any) -> ObjectFileSystem:
    """The file system of s3://BUCKET/PREFIX. ``options`` are obstore's; keys and endpoint come from AWS_... variables.

    Raises StoreMisuse when obstore is not installed, or a URL is none.
    """
    try:
        from obstore import exceptions
        from obstore.store import S3Store
    except ImportError as error:
        raise StoreMisuse(
            "an S3 store needs the package obstore: pip install 'kvferry[s3]'", op="open store"
        ) from error
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise StoreMisuse(f"{url!r} is not s3://BUCKET/PREFIX", op="open store")
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    if endpoint and not _is_web_address(endpoint):  # obstore would panic at the first request
        raise StoreMisuse(f"AWS_ENDPOINT_URL {endpoint!r} is not http(s)://HOST[:PORT]", op="open store")
    try:
        store = S3Store(parts.netloc, **{"retry_config": RETRIES, **options})
    except exceptions.BaseError as error:
        said = str(error).splitlines()[0][:200]
        raise StoreMisuse(f"{url!r} cannot be opened: {said}; look at the AWS_ variables", op="open store") from error
    return ObjectFileSystem(S3Objects(store, parts.path, url))


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in {"http", "https"}
            and bool(parts.hostname)
            and parts.port != 0
            and not any(map(str.isspace, text))
        )
    except ValueError:
        return False
