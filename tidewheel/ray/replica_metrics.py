"""The metrics of all replicas as one scrape: replicas have no address of their own, so any of them answers for all.

Nothing here knows of Ray but the handle that it is given.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from tidewheel.server.errors import ApiError
from tidewheel.server.telemetry.adapter_metrics import ADAPTERS

logger = logging.getLogger(__name__)

PATH = "/metrics"
_WAIT_S = 4.0  # for the list of replicas, then for each; Prometheus itself waits for 10 s
_FRESH_S = 0.5
_NAMING = re.compile(rf"^.*{ADAPTERS}.*\n", re.MULTILINE)
_COUNTS = (
    ("replicas", "Replicas that run."),
    ("replicas_silent", "Replicas that did not report their metrics in time."),
)

ReplicaText = tuple[str, str]
"""A replica's name, and its metrics in Prometheus' text format."""


class ReplicaMetrics:
    """Asks all replicas of a Serve deployment for their metrics. Its `method` returns one replica's ReplicaText.

    `find_handle` gives the deployment's handle, and `prefix` begins the names of the counts of replicas. Each replica
    asks all, so requests that come meanwhile, or just after, get the same result.
    """

    def __init__(self, find_handle: Callable[[], Any], method: str, prefix: str) -> None:
        self._find_handle = find_handle
        self._method = method
        self._prefix = prefix
        self._handle: Any = None
        self._asking: asyncio.Task[str] | None = None
        self._asked = 0.0

    async def text(self, *, names_adapters: bool) -> str:
        """In Prometheus' text format. Replicas that give no answer within some seconds are counted and logged.

        The names of adapters are in it only if `names_adapters`. Raises ApiError (503) if none can be asked.
        """
        now = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now - self._asked > _FRESH_S):
            self._asking, self._asked = asyncio.create_task(self._ask()), now
        text = await asyncio.shield(self._asking)  # others wait for it too
        return text if names_adapters else _NAMING.sub("", text)

    async def _ask(self) -> str:
        try:
            if self._handle is None:
                self._handle = await asyncio.wait_for(asyncio.to_thread(self._find_handle), _WAIT_S)
            # Serve's own `results_async` is all or nothing: one replica that hangs would hide the others.
            asked = self._handle.broadcast(self._method)._fetch_replica_results_async()
            results = await asyncio.wait_for(asked, _WAIT_S)
        except Exception as error:  # any error of Serve: the client gets an answer
            logger.warning("The replicas cannot be asked for their metrics: %r", error)
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the replicas cannot be asked for their metrics: try again",
                code="metrics_unavailable",
            ) from error
        answers = await asyncio.gather(
            *(asyncio.wait_for(result.get_async(), _WAIT_S) for result in results), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                logger.warning("A replica is missing in the metrics: %r", answer)
        texts = [answer for answer in answers if not isinstance(answer, BaseException)]
        # In a thread, because a thousand replicas have some hundred thousand lines, and others wait for the event loop.
        text = await asyncio.to_thread(merged, texts)
        return text + _counts(self._prefix, len(answers), len(answers) - len(texts))


def merged(texts: Iterable[ReplicaText]) -> str:
    """One text. Each sample in it has its replica as a label."""
    families: dict[str, _Family] = {}
    for replica, text in texts:
        family = _Family()
        for line in text.split("\n"):
            if line.startswith("# "):
                _, what, name, _ = line.split(" ", 3)
                family = families.setdefault(name, _Family())
                family.head.setdefault(what, line)
            elif line:
                family.samples.append(_labelled(line, replica))
    return "".join(f"{line}\n" for family in families.values() for line in (*family.head.values(), *family.samples))


@dataclass
class _Family:
    """The lines of a metric, which the format wants together."""

    head: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def _labelled(sample: str, replica: str) -> str:
    name, space, value = sample.partition(" ")
    begin = sample.find("{", 0, len(name))
    if begin < 0:
        return f'{name}{{replica="{replica}"}}{space}{value}'
    return f'{sample[: begin + 1]}replica="{replica}",{sample[begin + 1 :]}'


def _counts(prefix: str, *counts: int) -> str:
    return "".join(
        f"# HELP {prefix}{name} {text}\n# TYPE {prefix}{name} gauge\n{prefix}{name} {count}\n"
        for (name, text), count in zip(_COUNTS, counts, strict=True)
    )
