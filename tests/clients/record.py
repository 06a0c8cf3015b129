"""Writes what the clients of scenarios/ send to a server into recorded/: `python tests/clients/record.py`.

It needs their packages (`make clients`). test_recorded_requests.py sends the requests again, without the clients.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded"
PYTHON = Path(sys.prefix) / "clients" / "bin" / "python"


class Relay(ThreadingHTTPServer):
    """Sends requests on to a server, and keeps those that have bodies."""

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server = server
        self.requests: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Relay

    def do_GET(self) -> None:
        self._answer(httpx.get(self.server.server + self.path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name: self.headers[name] for name in ("content-type",) if name in self.headers}
        self.server.requests.append({"path": self.path, "headers": headers, "body": json.loads(body)})
        self._answer(httpx.post(self.server.server + self.path, content=body, headers=headers, timeout=60))

    def _answer(self, response: httpx.Response) -> None:
        self.send_response(response.status_code)
        self.send_header("content-type", response.headers["content-type"])
        self.send_header("content-length", str(len(response.content)))
        self.end_headers()
        self.wfile.write(response.content)

    def log_message(self, *arguments: Any) -> None:
        pass


def main() -> None:
    """Runs each scenario against `tidewheel serve`."""
    sys.path.insert(0, str(FOLDER.parent))
    from server.conftest import ServerProcess

    server = ServerProcess()
    try:
        for scenario in sorted((FOLDER / "scenarios").glob("with_*.py")):
            with Relay(server.url) as relay:
                threading.Thread(target=relay.serve_forever, daemon=True).start()
                subprocess.run([PYTHON, scenario, f"http://127.0.0.1:{relay.server_port}"], check=True)
                relay.shutdown()
            path = RECORDED / f"{scenario.stem.removeprefix('with_')}.json"
            path.write_text(json.dumps(relay.requests, indent=1, ensure_ascii=False) + "\n")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
