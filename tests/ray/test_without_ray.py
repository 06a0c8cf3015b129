"""Nothing needs Ray but the replicas on it, and who lacks it reads how to get it."""

from __future__ import annotations

import subprocess
import sys

_SERVE = "from tidewheel.server.commands.cli import main; import sys; sys.exit(main(['serve', *sys.argv[1:]]))"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_server_does_not_import_it() -> None:
    names = "tidewheel.server.service, tidewheel.ray.policy, tidewheel.ray.proxy, tidewheel.ray.settings"
    done = run(f"import sys, {names}; print('ray' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_a_lack_of_it_is_told() -> None:
    program = f"import sys; sys.modules['ray'] = None; {_SERVE}"
    done = run(program, "--distributed-executor-backend", "ray", "--data-parallel-size", "2")
    assert done.returncode == 1
    assert "pip install 'tidewheel[ray]'" in done.stderr
