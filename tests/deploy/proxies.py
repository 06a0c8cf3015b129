"""The proxies of deploy/, run as Debian installs them, in front of servers of the tests."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ports import free_port
from system_tools import require

ROOT = Path(__file__).parents[2]
_NGINX = """
daemon off;
worker_processes 1;
{user}
pid {folder}/pid;
error_log stderr;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/tidewheel.conf;
}}
"""


class Proxy:
    """nginx or haproxy with its example configuration, or with another `source` like it, and the test's ports."""

    def __init__(self, kind: str, replicas: Sequence[int], folder: Path, source: Path | None = None) -> None:
        program = require(kind)
        self.kind = kind
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        if kind == "nginx":
            _place(ROOT / "deploy/nginx/tidewheel.conf", "listen 8000;", f"listen {self.port};", replicas, folder)
            user = "user root;" if os.geteuid() == 0 else ""
            (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, user=user))
            command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
        else:
            listen = f"bind 127.0.0.1:{self.port}"
            path = _place(source or ROOT / "deploy/haproxy/haproxy.cfg", "bind :8000", listen, replicas, folder)
            command = [program, "-db", "-f", str(path)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 60
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{kind} did not start: {self._process.communicate()[0]}")
            time.sleep(0.02)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def _place(source: Path, listen: str, own: str, replicas: Sequence[int], folder: Path) -> Path:
    text = source.read_text()
    assert text.count(listen) == 1
    text = text.replace(listen, own)
    servers = sorted({*re.findall(r"127\.0\.0\.1:800\d", text)})
    assert len(servers) == len(replicas)
    for server, port in zip(servers, replicas, strict=True):
        text = text.replace(server, f"127.0.0.1:{port}")
    path = folder / source.name
    path.write_text(text)
    return path
