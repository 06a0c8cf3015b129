"""Claims: which server works on a batch, by files in the folder that several servers share.

A claim has a number, and who creates the file of the highest has the batch. A server that has died leaves its claim
behind, and another one creates the next. On one machine the kernel knows of the death, because the claim was locked. On
others it shows by a claim that is not touched any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from pathlib import Path

import msgspec

from ..ids import new_id

_NAME = re.compile(r"(batch-[0-9a-f]{32})\.claim-(\d{6})")
_MAX_BYTES = 4096
LEASE_S = 20.0
ABANDONED_S = 60.0


class _Owner(msgspec.Struct):
    """The content of a claim's file. `boot` names the running kernel whose lock is on it; empty if there is none."""

    id: str
    boot: str
    host: str
    pid: int


class Claim:
    """A batch that is this server's, until `release` or until `beat` has failed for `lease_s`."""

    def __init__(self, path: Path, number: int, descriptor: int, lease_s: float) -> None:
        self._path = path
        self._number = number
        self._descriptor = descriptor
        self._lease_s = lease_s
        self._is_lost = False
        self._beaten = _now()

    @property
    def beat_every_s(self) -> float:
        """How often to `beat`, so that one which comes late loses nothing."""
        return self._lease_s / 4

    @property
    def is_held(self) -> bool:
        """Whether no other server can have the batch yet. A server that stood still must ask before it writes."""
        return not self._is_lost and _now() - self._beaten < self._lease_s

    def beat(self) -> bool:
        """Shows the others that this server is alive; whether it still has the batch. Raises OSError."""
        now = _now()
        if self.is_held:
            os.utime(self._descriptor)
            is_there = os.fstat(self._descriptor).st_nlink > 0
            highest = max(_claims_of(self._path.parent, self._path.name.partition(".")[0]), default=0)
            self._is_lost = not is_there or highest > self._number
            self._beaten = now
        return self.is_held

    def release(self) -> None:
        """Lets others have the batch."""
        if self.is_held:
            _remove(self._path)
        os.close(self._descriptor)


class Claims:
    """The claims of one server on the batches in `folder`. For a thread that may wait for a disk.

    A server that has stood still for `lease_s` gives its batch up. Another one takes it after `abandoned_s` without a
    sign of life, which must be longer, as clocks and network file systems lag.
    """

    def __init__(
        self, folder: Path, *, boot: str | None = None, lease_s: float = LEASE_S, abandoned_s: float = ABANDONED_S
    ) -> None:
        """`boot` is for tests, which have one machine alone."""
        self._folder = folder
        self._boot = _boot_id() if boot is None else boot
        self._lease_s = lease_s
        self._abandoned_s = abandoned_s
        self._seen: dict[str, tuple[object, float]] = {}  # claims of other machines, and since when they are so

    def take(self, batch_id: str) -> Claim | None:
        """A claim on the batch, if no server has it. The caller must check then that it is still unfinished.

        Raises OSError.
        """
        before = _claims_of(self._folder, batch_id)
        left: str | None = None
        if before:
            left = self._abandoned(before[max(before)])
            if left is None:
                return None
        number = max(before, default=0) + 1
        path = self._folder / f"{batch_id}.claim-{number:06}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return None
        boot = self._boot if _lock(descriptor) else ""
        os.write(descriptor, msgspec.json.encode(_Owner(new_id(), boot, socket.gethostname(), os.getpid())))
        claim = Claim(path, number, descriptor, self._lease_s)
        for other, other_path in _claims_of(self._folder, batch_id).items():
            if other == number:
                continue
            owner = _owner_of(other_path)
            # Another one has begun to count anew, or has come behind: both give way, and try again later.
            if owner is not None and (other > number or owner.id != left):
                claim.release()
                return None
            _remove(other_path)
        return claim

    def _abandoned(self, path: Path) -> str | None:
        """The owner of a claim, if that server has died."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            changed = os.fstat(descriptor).st_mtime_ns
            owner = _decoded(os.read(descriptor, _MAX_BYTES))
            owner_id = "" if owner is None else owner.id  # it died before it had written its name
            if owner is not None and owner.boot and owner.boot == self._boot:
                return owner_id if _lock(descriptor) else None
            state, since = self._seen.get(path.name, (None, 0.0))
            if state != (owner_id, changed):
                self._seen[path.name] = (owner_id, changed), _now()
                return None
            return owner_id if _now() - since > self._abandoned_s else None
        finally:
            os.close(descriptor)


def _claims_of(folder: Path, batch_id: str) -> dict[int, Path]:
    """The claims on a batch by their numbers."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _NAME.fullmatch(entry.name)
            if name is not None and name[1] == batch_id:
                found[int(name[2])] = Path(entry.path)
    return found


def _owner_of(path: Path) -> _Owner | None:
    try:
        return _decoded(path.read_bytes()) or _Owner("", "", "", 0)
    except FileNotFoundError:
        return None


def _decoded(content: bytes) -> _Owner | None:
    try:
        return msgspec.json.decode(content, type=_Owner)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _lock(descriptor: int) -> bool:
    """Whether the file is locked now, for as long as it is open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another has it, or the file system has no locks
        return False
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _now() -> float:
    """Seconds, including time in which the machine was asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
