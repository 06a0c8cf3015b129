"""`tidewheel serve` around a scripted engine, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from ports import free_port

SCRIPT = Path(__file__).with_name("scripted_engine.py")


class ScriptedProcess:
    """A server that takes 10 ms a token. `client` talks to it; what it logs is in `log`, after `wait` all of it.

    `max_files` is how many files it may open at first. `client_options` are httpx's.
    """

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        port: int = 0,
        scheme: str = "http",
        max_files: int | None = None,
        **client_options: Any,
    ) -> None:
        self.port = port or free_port()
        limited = [] if max_files is None else ["sh", "-c", f'ulimit -Sn {max_files}; exec "$0" "$@"']
        self.process = subprocess.Popen(
            [*limited, sys.executable, str(SCRIPT), "--port", str(self.port), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
        )
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        options = {"base_url": f"{scheme}://127.0.0.1:{self.port}", "timeout": 60, "trust_env": False, **client_options}
        self.client = httpx.Client(**options)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client.get("/health")
                return
            except httpx.TransportError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError(f"the server did not start:\n{self.log}") from None
                time.sleep(0.02)

    @property
    def log(self) -> str:
        return "".join(self._log)

    def wait(self) -> int:
        """The exit code, once the process has ended by itself."""
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        self.client.close()

    def start_stream(self, prompt: str, **fields: Any) -> tuple[threading.Thread, list[str]]:
        """Reads a stream in a thread; returns after its first line. The lines so far are in the list."""
        lines: list[str] = []
        started = threading.Event()

        def read() -> None:
            body = {"prompt": prompt, "max_tokens": 8000, "stream": True, **fields}
            try:
                with self.client.stream("POST", "/v1/completions", json=body) as response:
                    for line in response.iter_lines():
                        lines.append(line)
                        started.set()
            finally:
                started.set()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        assert started.wait(60)
        return thread, lines

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            self._log.extend(self.process.stderr)


def memory(server: ScriptedProcess) -> int:
    """The resident bytes of a server."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
