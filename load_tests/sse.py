"""Server-sent events, parsed as the bytes arrive."""


class EventParser:
    """Turns a byte stream, split at any place, into the `data` of its events.

    Lines may end in LF or CRLF; comments, field names other than `data` and events without data are passed over.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Take the bytes that arrived and return the data of every event that they complete, in order."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line:
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" ").decode())
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events
