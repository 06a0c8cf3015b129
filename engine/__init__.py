"""The engine: sequences, KV blocks and steps. It never sees HTTP."""

from tidewheel import SearchPath

__path__ = SearchPath(__path__)
