"""Replicas of the server on Ray Serve: `serve run tidewheel.ray:app model=... num_replicas=3`.

Needs the extra `ray`. Ray is imported when `app` is called, so the parts that know nothing of Ray can be used without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: dict[str, Any]) -> Application:
    """The Serve application of `serve run` and of Serve's config files.

    `arguments` are the fields of `settings.ReplicaSettings`; all others are options of `tidewheel serve`, such as
    `model` or `max_model_len`. Raises TidewheelError, saying which cannot be used.
    """
    from .application import application_of

    return application_of(arguments)
