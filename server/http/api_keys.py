"""API keys, and the tenants that they belong to: who a request is from, and what they may see and do."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from contextvars import ContextVar

import msgspec

from tidewheel.engine.errors import TidewheelError

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_OWNER_DOMAIN = b"tidewheel owner of a key\0"  # what is stored tells nothing of digests that are kept elsewhere
WORDS = "name=NAME (1 to 64 letters, digits, '.', '_', '-' and '@'), admin and priority"
"""What may stand behind a key."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request. The default is for a server of one tenant, and for requests from within.

    `owner` is the name under which its data is kept; "" where tenants are not told apart. Only a tenant that
    `prioritizes` may put requests before those of others.
    """

    owner: str = ""
    administers: bool = True
    prioritizes: bool = True
    sees_all: bool = True

    def sees(self, owner: str) -> bool:
        """Whether what is kept under `owner` is there for this tenant. Only administrators see what has no owner."""
        return self.sees_all or (owner == self.owner if owner else self.administers)

    def salt(self, cache_salt: str | None) -> str | None:
        """A request's `cache_salt` as the engine has it: no two tenants have one in common."""
        if not self.owner:
            return cache_salt
        return self.owner if cache_salt is None else f"{self.owner}\n{cache_salt}"  # an owner is one line


ANYBODY = Tenant()
STRANGER = Tenant(administers=False, prioritizes=False, sees_all=False)
"""The sender of a request without a valid key, on a server that has keys."""

_current: ContextVar[Tenant] = ContextVar("tenant", default=ANYBODY)


def current_tenant() -> Tenant:
    """The tenant of the current request."""
    return _current.get()


def act_as(tenant: Tenant) -> None:
    """Makes a tenant the current one, for the task that this is called in and all that it starts."""
    _current.set(tenant)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key by its digest, and whose it is. `administers` and `prioritizes` are marks of the key alone."""

    digest: bytes
    owner: str
    administers: bool = False
    prioritizes: bool = False


def plain_key(secret: str) -> ApiKey:
    """A key that nothing is said of. Its owner is the same on every server, and does not tell the key."""
    raw = secret.encode()
    # No name has a colon, so no tenant has this one.
    return ApiKey(digest=digest(raw), owner="key:" + hashlib.sha256(_OWNER_DOMAIN + raw).hexdigest()[:32])


def admin_key(secret: str) -> ApiKey:
    """A key that may do everything."""
    return msgspec.structs.replace(plain_key(secret), administers=True, prioritizes=True)


def key_of_line(line: str) -> ApiKey:
    """A key with what is said of it: `KEY [name=NAME] [admin] [priority]`.

    Raises ValueError, which quotes nothing of the line: any word may be a part of a key.
    """
    secret, *words = line.split()
    key = plain_key(secret)
    names = [word.removeprefix("name=") for word in words if word.startswith("name=")]
    if len({word.partition("=")[0] for word in words}) < len(words):
        raise ValueError("repeats a word")
    if {*words} - {"admin", "priority", *(f"name={name}" for name in names)} or not all(map(_NAME.fullmatch, names)):
        raise ValueError(f"may have only {WORDS} after its key")
    return ApiKey(
        digest=key.digest,
        owner=names[0] if names else key.owner,
        administers="admin" in words,
        prioritizes="priority" in words,
    )


class ApiKeys:
    """All keys of a server. A server whose keys have one owner has one tenant, who sees everything.

    That tenant may do everything too, unless marks tell its keys apart. Raises TidewheelError for a key that is there
    twice and differs.
    """

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        known: dict[bytes, ApiKey] = {}
        for key in keys:
            if known.setdefault(key.digest, key) != key:
                raise TidewheelError(
                    "one API key is given twice, with different names or rights: give it once, with --api-key, "
                    "--admin-api-key or --api-key-file"
                )
        self.are_several_tenants = len({key.owner for key in known.values()}) > 1
        self.has_administrator = any(key.administers for key in known.values())
        """Whether a key is marked as an administrator's."""
        marks = {(key.administers, key.prioritizes) for key in known.values()}
        may_all = not self.are_several_tenants and len(marks) < 2
        self._tenants = [
            (
                key.digest,
                Tenant(
                    owner=key.owner if self.are_several_tenants else "",
                    administers=may_all or key.administers,
                    prioritizes=may_all or key.prioritizes,
                    sees_all=not self.are_several_tenants,
                ),
            )
            for key in known.values()
        ]

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, offered: Sequence[bytes]) -> Tenant | None:
        """The tenant of the first of the offered keys that is valid."""
        digests = [digest(key) for key in offered]
        # Every key is compared, so that the time taken does not tell which one was close.
        matches = [tenant for mine in digests for known, tenant in self._tenants if hmac.compare_digest(mine, known)]
        return matches[0] if matches else None

    def tenant_of(self, owner: str) -> Tenant:
        """The tenant of work that is done later, such as a batch; `owner` was kept with it."""
        if not self.are_several_tenants:
            return ANYBODY
        return Tenant(owner=owner, administers=False, prioritizes=False, sees_all=False)


def digest(key: bytes) -> bytes:
    """Digests have one length, so that the time of a comparison does not show the length of a key."""
    return hashlib.sha256(key).digest()
