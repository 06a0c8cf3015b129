"""Coding agents as they are installed: each runs a command that the scripted model asks for, and shows its answer.

`make clients` installs them, for they are large. test_recorded_agents.py has requests such as theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server.conftest import RunningServer, StartServer
from system_tools import require, say_skipped

pytestmark = pytest.mark.clients

MODULES = Path(sys.prefix) / "agents" / "node_modules"
# Claude Code's own package has a placeholder, which a script of its installation would replace.
PROGRAMS = {"codex": ".bin/codex", "claude": "@anthropic-ai/claude-code-*/claude"}
COMMAND = "echo 'SA''Y(the wheel turns)YA''S'"  # its output asks for the answer, and it does not itself


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    # A token of this model is a byte, and what agents say first has 100,000 of them.
    return start_server(engine={"max_model_len": 2**18, "num_blocks": 2**15}, tool_call_parser="hermes")


def asked(tool: str, argument: str) -> str:
    call = {"name": tool, "arguments": {argument: COMMAND, "description": "Says it."}}
    return f"SAY(<tool_call>{json.dumps(call)}</tool_call>)YAS"


def run(name: str, arguments: list[str], home: Path, **environment: str) -> str:
    """What an agent shows, in a folder of its own."""
    require("node")
    programs = [*MODULES.glob(PROGRAMS[name])]
    if not programs:
        lack = "Skipped: the tests with coding agents need their packages (make clients)"
        say_skipped(lack)
        pytest.skip(lack.removeprefix("Skipped: "))
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "LANG") if name in os.environ}
    done = subprocess.run(
        [programs[0], *arguments],
        cwd=home,
        env={**kept, "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# These two take a second or two: the programs are large, and start slowly.
def test_codex(server: RunningServer, tmp_path: Path) -> None:
    provider = f'name = "here"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
    chosen = 'model = "scripted"\nmodel_provider = "here"\n'
    (tmp_path / "config.toml").write_text(f"{chosen}[model_providers.here]\n{provider}")
    # The command is this test's own, and sandboxes are not there in containers.
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    said = run("codex", ["exec", *options, asked("exec_command", "cmd")], tmp_path, CODEX_HOME=str(tmp_path))
    assert said.strip() == "the wheel turns"


def test_claude_code(server: RunningServer, tmp_path: Path) -> None:
    said = run(
        "claude",
        ["--print", asked("Bash", "command"), "--allowedTools", "Bash"],
        tmp_path,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="scripted",
        ANTHROPIC_SMALL_FAST_MODEL="scripted",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert said.strip() == "the wheel turns"
