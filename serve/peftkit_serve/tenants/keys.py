"""API keys: shown once, kept as salted hashes, compared in constant time.

    pk_<id>_<secret>     id: 12 hex digits, finds the row; secret: 256 random bits

A secret that is random itself needs no slow hash: it can't be guessed from its digest.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

_KEY = re.compile(r"pk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the only moment when it is known."""

    id: str
    text: str
    """What the client sends."""
    salt: bytes
    digest: bytes


def new_key() -> NewKey:
    """A fresh random key."""
    key_id, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_bytes(16)
    return NewKey(key_id, f"pk_{key_id}_{secret}", salt, digest_of(secret, salt))


def parse(text: str) -> tuple[str, str] | None:
    """The id and the secret of what a client sent; None for what is no key."""
    match = _KEY.fullmatch(text)
    return None if match is None else (match[1], match[2])


def digest_of(secret: str, salt: bytes) -> bytes:
    """What is kept of a secret."""
    return hashlib.blake2b(secret.encode(), salt=salt, digest_size=32).digest()


def matches(secret: str, salt: bytes, digest: bytes) -> bool:
    """Whether a secret is the one whose digest is kept, in a time that doesn't depend on where they differ."""
    return hmac.compare_digest(digest_of(secret, salt), digest)
