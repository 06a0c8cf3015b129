"""Nothing needs Ray but the replicas on it, and who lacks it reads how to get it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_MAIN = "from tidewheel.server.commands.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
_SERVE = "from tidewheel.server.commands.cli import main; import sys; sys.exit(main(['serve', *sys.argv[1:]]))"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_server_does_not_import_it() -> None:
    names = "tidewheel.server.service, tidewheel.ray.policy, tidewheel.ray.proxy, tidewheel.ray.settings"
    done = run(f"import sys, {names}; print('ray' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("what", ["--data-parallel-size", "--pipeline-parallel-size"])
def test_a_lack_of_it_is_told(what: str) -> None:
    program = f"import sys; sys.modules['ray'] = None; {_SERVE}"
    done = run(program, "--distributed-executor-backend", "ray", what, "2")
    assert done.returncode == 1
    assert "pip install 'tidewheel[ray]'" in done.stderr


@pytest.mark.parametrize("flag", ["--threads-bind=0", "--reserved-cpus=1"])
def test_stages_on_nodes_have_cores_that_nobody_names(flag: str) -> None:
    stages = ("--distributed-executor-backend=ray", "--pipeline-parallel-size=2")
    done = run(f"import sys; sys.modules['ray'] = None; {_SERVE}", *stages, flag)
    assert done.returncode == 1
    assert f"{flag.partition('=')[0]} and stages on Ray do not work together" in done.stderr


def test_who_asks_for_nodes_reads_how_to_get_some() -> None:
    done = run(f"import sys; sys.modules['ray'] = None; {_MAIN}", "devices", "--ray-address")
    assert done.returncode == 1
    assert "--ray-address needs Ray Serve: pip install 'tidewheel[ray]'" in done.stderr
