"""Proof that a message between ranks comes from a rank of this start: a keyed digest (HMAC, RFC 2104) of the start's secret.

Ranks meet at a port that anybody on the network can reach. Neither torch's store nor a plain socket authenticates its clients.
"""

import hmac
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

DIGEST = 64  # characters


class Intrusion(RuntimeError):
    """Data was written in this start's name without knowledge of its secret."""


def digest(secret: str, *parts: str) -> str:
    """Return the digest of ``parts`` in their order, in hexadecimal."""
    return hmac.new(secret.encode(), "\0".join(parts).encode(), "sha256").hexdigest()


def proven(secret: str, claim: str, *parts: str) -> bool:
    """Return True if ``claim`` is the digest of ``parts``. The comparison takes constant time."""
    return hmac.compare_digest(digest(secret, *parts).encode(), claim.encode(errors="replace"))


class SignedKeys:
    """This start's own keys of a store. Each value carries its proof; a value without one is rejected. The keys of torch's
    process groups are beside them, under names that the secret hides; torch reads those itself."""

    def __init__(self, store: dist.Store, secret: str) -> None:
        self._store, self._secret = store, secret

    def set(self, key: str, value: str) -> None:
        self._store.set(key, digest(self._secret, key, value) + value)

    def get(self, key: str) -> str:
        """Wait for a key and return its value. Raises Intrusion, and dist.DistError on timeout."""
        text = self._store.get(key).decode(errors="replace")
        proof, value = text[:DIGEST], text[DIGEST:]
        if not proven(self._secret, proof, key, value):
            raise Intrusion(f"the key {key!r} of the ranks' store was written by somebody who does not belong to this start")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist. Raises dist.DistError on timeout."""
        self._store.wait(list(keys), timeout)

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that do not exist."""
        return [key for key in keys if not self._store.check([key])]
