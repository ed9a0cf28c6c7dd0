"""How a version 3 file is bound to its bytes: plain digests, digests with a key, or encryption. Pure but for randomness
that is passed in. The document is docs/vlkv-v3.md.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import IntEnum
from typing import Final, Protocol

import xxhash

from kvferry.store.errors import StoreMisuse

ENTRY_BYTES: Final = 16
ROOT_BYTES: Final = 32
SALT_BYTES: Final = 16
KEY_ID_BYTES: Final = 8
KEY_BYTES_MIN: Final = 16  # below that a key can be guessed
NO_KEY: Final = bytes(KEY_ID_BYTES)
NO_SALT: Final = bytes(SALT_BYTES)


class SealKind(IntEnum):
    """The extension header's seal."""

    PLAIN = 0
    KEYED = 1
    ENCRYPTED = 2


class FileSeal(Protocol):
    """One file's digests. ``changes_bytes``: closing encrypts in place, so it must not be done to live rows.

    ``is_xxh3``: an entry is the block's xxh3-128, which others can compute as well.
    """

    changes_bytes: bool
    is_xxh3: bool

    def close(self, index: int, data: memoryview) -> bytes:
        """The table's entry for these bytes; encrypts them in place when that is the seal."""

    def open(self, index: int, data: memoryview, entry: bytes | memoryview) -> bool:
        """Whether the bytes are the ones that were closed; decrypts them in place when that is the seal."""

    def root(self, *parts: bytes | memoryview) -> bytes:
        """The root over head and table."""


class Seal(Protocol):
    """A store's way of sealing its files."""

    kind: SealKind
    key_id: bytes

    def prefix(self, data: bytes) -> bytes:
        """The prefix digest of these bytes."""

    def for_file(self, salt: bytes) -> FileSeal:
        """The digests of one file."""

    def new_salt(self, unique: str) -> bytes:
        """The salt of a new file, from 32 hex digits that nobody else uses."""

    def for_tenant(self, digest: str) -> Seal:
        """The same with a tenant's own key; ``digest`` as in its folder's name, empty: as it is."""


class PlainSeal:
    """Finds damage, not intent: xxh3-128 per block, SHA-256 at the root."""

    kind = SealKind.PLAIN
    key_id = NO_KEY
    changes_bytes = False
    is_xxh3 = True

    def prefix(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    def for_file(self, salt: bytes) -> FileSeal:  # noqa: ARG002 -- a seal's signature
        return self

    def new_salt(self, unique: str) -> bytes:  # noqa: ARG002 -- the same
        return NO_SALT

    def for_tenant(self, digest: str) -> Seal:  # noqa: ARG002 -- the same
        return self

    def close(self, index: int, data: memoryview) -> bytes:  # noqa: ARG002 -- the same
        return xxhash.xxh3_128_digest(data)

    def open(self, index: int, data: memoryview, entry: bytes | memoryview) -> bool:  # noqa: ARG002 -- the same
        return xxhash.xxh3_128_digest(data) == entry

    def root(self, *parts: bytes | memoryview) -> bytes:
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return digest.digest()


class KeyedSeal:
    """Refuses what was not written with the fleet's key. Raises StoreMisuse for a short key."""

    kind = SealKind.KEYED

    def __init__(self, key: bytes) -> None:
        if len(key) < KEY_BYTES_MIN:
            raise StoreMisuse(f"a store key needs {KEY_BYTES_MIN} bytes, not {len(key)}", op="open store")
        self._key = key
        self.key_id = hashlib.sha256(b"kvferry key id" + key).digest()[:KEY_ID_BYTES]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(key id {self.key_id.hex()})"

    def prefix(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")

    def for_file(self, salt: bytes) -> FileSeal:
        return _KeyedFile(hkdf(self._key, salt, b"kvferry 3 block"), hkdf(self._key, salt, b"kvferry 3 root"))

    def new_salt(self, unique: str) -> bytes:  # noqa: ARG002 -- two writers write the same bytes
        return NO_SALT

    def for_tenant(self, digest: str) -> Seal:
        return type(self)(hkdf(self._key, b"", b"kvferry 3 tenant " + digest.encode())) if digest else self


class EncryptedSeal(KeyedSeal):
    """AES-256-GCM per block under a key of the file's own."""

    kind = SealKind.ENCRYPTED

    def for_file(self, salt: bytes) -> FileSeal:
        return _EncryptedFile(hkdf(self._key, salt, b"kvferry 3 block"), hkdf(self._key, salt, b"kvferry 3 root"))

    def new_salt(self, unique: str) -> bytes:
        return bytes.fromhex(unique)


class _KeyedFile:
    changes_bytes = False
    is_xxh3 = False

    def __init__(self, block_key: bytes, root_key: bytes) -> None:
        self._block_key = block_key
        self._root_key = root_key

    def close(self, index: int, data: memoryview) -> bytes:
        mac = hmac.new(self._block_key, index.to_bytes(4, "little"), "sha256")
        mac.update(data)
        return mac.digest()[:ENTRY_BYTES]

    def open(self, index: int, data: memoryview, entry: bytes | memoryview) -> bool:
        return hmac.compare_digest(self.close(index, data), bytes(entry))

    def root(self, *parts: bytes | memoryview) -> bytes:
        mac = hmac.new(self._root_key, digestmod="sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()


class _EncryptedFile(_KeyedFile):
    changes_bytes = True

    def __init__(self, block_key: bytes, root_key: bytes) -> None:
        super().__init__(block_key, root_key)
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(block_key)
        self._invalid = InvalidTag

    def close(self, index: int, data: memoryview) -> bytes:
        sealed = self._cipher.encrypt(_nonce(index), data, None)
        data[:] = sealed[:-ENTRY_BYTES]
        return sealed[-ENTRY_BYTES:]

    def open(self, index: int, data: memoryview, entry: bytes | memoryview) -> bool:
        try:
            data[:] = self._cipher.decrypt(_nonce(index), b"".join((data, entry)), None)
        except self._invalid:
            return False
        return True


def describe(seal: Seal) -> str:
    """What tells seals apart without giving a key away."""
    kind = seal.kind.name.lower()
    return kind if seal.key_id == NO_KEY else f"{kind} {seal.key_id.hex()}"


def _nonce(index: int) -> bytes:
    return index.to_bytes(4, "little") + bytes(8)


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """HKDF-SHA-256 of RFC 5869, one block of output: 32 bytes."""
    extracted = hmac.digest(salt, key, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")
