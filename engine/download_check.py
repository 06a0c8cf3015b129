"""What is known of a hub's model before its weights are downloaded: whether it is served, and whether it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .errors import DeviceError, ModelError
from .opened_model import OpenedModel, open_model
from .options import EngineOptions
from .weights import source_at
from .weights.hub import is_cached
from .weights.hub_headers import hub_headers

logger = logging.getLogger(__name__)


def check_before_download(options: EngineOptions, check_fits: Callable[[OpenedModel], None]) -> None:
    """Raise what serving the model would fail with, from its headers; `check_fits` looks at its memory.

    Nothing is looked at if weights are in the cache. A hub that cannot be asked, or that does not send parts of files,
    leaves it to the download to say so.
    """
    if is_cached(options.model, options.revision, options.download_dir):
        return
    with ExitStack() as stack:
        try:
            path = stack.enter_context(hub_headers(options.model, options.revision))
        except ModelError as error:
            logger.debug("%s is not looked at before it is downloaded: %s", options.model, error)
            return
        try:
            with _unlogged():
                check_fits(open_model(options, source_at(path, options.load_format)))
        except (ModelError, DeviceError) as error:
            raise type(error)(_named(error, path, options.model)) from error


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


def _named(error: Exception, path: Path, model: str) -> str:
    """The error's words, with the model's name in place of where its headers lie for the moment."""
    return str(error).replace(str(path), model)
