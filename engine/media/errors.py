"""What is wrong with an image of a request. MediaReader and MediaFetcher add the request's field."""

from __future__ import annotations


class ImageError(Exception):
    """Why a file cannot be read as an image, in words that follow "it cannot be read: "."""


class FetchError(Exception):
    """Why an image cannot be fetched, in words that follow "it cannot be fetched: ". They name no address or path."""
