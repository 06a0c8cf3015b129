"""The kernel's huge pages. Without them, nearly every read of a weight would need a walk through the page tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class HugePages:
    """`transparent` is the kernel's mode (always, madvise, never), or None if it lacks them. `size` is in bytes."""

    transparent: str | None
    size: int | None
    reserved: int
    reserved_free: int

    @property
    def on_request(self) -> bool:
        """Whether memory gets huge pages if a program asks for them and some are free."""
        return self.transparent in ("always", "madvise")


def huge_pages(root: Path = _ROOT) -> HugePages:
    """The kernel's huge pages. `root` is where `/proc` and `/sys` are."""
    meminfo = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    words = "".join(_lines(root / "sys/kernel/mm/transparent_hugepage/enabled")).split()
    size = meminfo.get("Hugepagesize")
    return HugePages(
        transparent=next((word.strip("[]") for word in words if word.startswith("[")), None),
        size=None if size is None else int(size.split()[0]) * 1024,
        reserved=int(meminfo.get("HugePages_Total", "0")),
        reserved_free=int(meminfo.get("HugePages_Free", "0")),
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
