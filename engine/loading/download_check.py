"""Checks a hub's models before they are downloaded: whether they are served, and whether they fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ..errors import DeviceError, ModelError
from ..options import EngineOptions
from ..speculation.options import DraftModel, Eagle3
from ..weights import source_at
from ..weights.hub_headers import hub_headers
from ..weights.hub_room import Download, check_room, not_cached
from .downloads import download_of
from .opened_model import OpenedModel, open_model

logger = logging.getLogger(__name__)


def check_before_download(
    options: EngineOptions, downloads: Sequence[Download], check_fits: Callable[[EngineOptions, OpenedModel], None]
) -> None:
    """Raise what serving would fail with, from the size of the `downloads` and from their headers.

    `check_fits` looks at the memory of the model, and of the draft model that the options name, which may be headers
    too. Nothing is looked at if all weights are in the cache. A hub that cannot be asked, or that does not send parts
    of files, leaves it to the download to say so.
    """
    folder = options.download_dir
    missing = not_cached(downloads, folder)
    if not missing:
        return
    check_room(missing, folder)
    with ExitStack() as stack:
        try:
            headers = {
                download: stack.enter_context(
                    hub_headers(download.model, download.revision, with_mmproj=download.with_mmproj)
                )
                for download in missing
            }
        except ModelError as error:
            logger.debug("%s cannot be checked before it is downloaded: %s", options.model, error)
            return
        of_model = headers.get(download_of(options))
        seen = _with_draft_at(options, headers)
        try:
            with _unlogged():
                # Where a repository has both, the headers are from safetensors.
                load_format = "auto" if options.load_format == "pt" else options.load_format
                source = None if of_model is None else source_at(of_model, load_format)
                check_fits(seen, open_model(seen, source))
        except (ModelError, DeviceError) as error:
            raise type(error)(_named(error, headers)) from error


def _with_draft_at(options: EngineOptions, headers: Mapping[Download, Path]) -> EngineOptions:
    """The options with what drafts where its headers are, if they were fetched."""
    asked = options.speculative.speculation
    if not isinstance(asked, DraftModel | Eagle3):
        return options
    path = headers.get(Download(asked.model, asked.revision))
    if path is None:
        return options
    given = options.speculative
    method = "eagle3" if isinstance(asked, Eagle3) else "draft_model"  # a name may have told it
    config = {**(given.speculative_config or {}), "method": method, "model": str(path)}
    return replace(options, speculative=replace(given, speculative_model=None, speculative_config=config))


@contextmanager
def _unlogged() -> Iterator[None]:
    """Leaves out what will be logged when the model is opened again, with its weights."""
    loggers = logging.getLogger(__package__)
    before = loggers.level
    loggers.setLevel(logging.ERROR)
    try:
        yield
    finally:
        loggers.setLevel(before)


def _named(error: Exception, headers: Mapping[Download, Path]) -> str:
    """The error's words, with each model's name in place of where its headers lie for the moment."""
    said = str(error)
    for download, path in headers.items():
        said = said.replace(str(path), download.model)
    return said
