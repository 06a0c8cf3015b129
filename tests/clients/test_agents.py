"""Coding agents as they are installed: each runs a command that the scripted model asks for, and shows its answer.

`make clients` installs them, for they are large. test_recorded_agents.py has requests such as theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server.conftest import RunningServer, StartServer
from system_tools import require, say_skipped

pytestmark = pytest.mark.clients

MODULES = Path(sys.prefix) / "agents" / "node_modules"
SCRIPTS = Path(__file__).with_name("agents")
# Some packages have a placeholder, which a script of their installation would replace by the program of another one.
PROGRAMS = {
    "aider": Path(sys.prefix) / "aider" / "bin" / "aider",
    "claude": MODULES / "@anthropic-ai" / "claude-code-*" / "claude",
    "cline": MODULES / "@cline" / "cli-*" / "bin" / "cline",
    "ai-sdk": MODULES / "@ai-sdk" / "openai" / "package.json",  # node runs it
    "cn": MODULES / ".bin" / "cn",
    "codex": MODULES / ".bin" / "codex",
    "copilot": MODULES / ".bin" / "copilot",
    "openai-agents": Path(sys.prefix) / "openai-agents" / "bin" / "python",
    "opencode": MODULES / "opencode-*" / "bin" / "opencode",
    "pi": MODULES / ".bin" / "pi",
    "qwen": MODULES / ".bin" / "qwen",
}
COMMAND = "echo 'SA''Y(the wheel turns)YA''S'"  # its output asks for the answer, and it does not itself
SAID = "the wheel turns"
CONTEXT = 2**18


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    # A token of this model is a byte, and what agents say first has 100,000 of them.
    return start_server(engine={"max_model_len": CONTEXT, "num_blocks": CONTEXT // 8}, tool_call_parser="hermes")


def asked(tool: str, **arguments: Any) -> str:
    return f"SAY(<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>)YAS"


def run(name: str, arguments: list[str], home: Path, **environment: str) -> str:
    """The output of an agent that runs in a folder of its own."""
    return shown([found(name), *arguments], home, **environment)


def found(name: str) -> Path:
    """An agent's program. Without it the test is skipped."""
    pattern = PROGRAMS[name]
    if MODULES in pattern.parents:
        require("node")
    # Where a program comes for newer processors and for all, the name of the second is longer.
    programs = sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    if not programs:
        lack = "Skipped: the tests with coding agents need their packages (make clients)"
        say_skipped(lack)
        pytest.skip(lack.removeprefix("Skipped: "))
    return programs[-1]


def shown(command: list[str | Path], home: Path, **environment: str) -> str:
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "LANG") if name in os.environ}
    process = subprocess.Popen(
        command,
        cwd=home,
        env={**kept, "HOME": str(home), "DO_NOT_TRACK": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complaints = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
    assert process.returncode == 0, said + complaints
    return said


# They take some seconds: the programs are large, and start slowly.
def test_codex(server: RunningServer, tmp_path: Path) -> None:
    provider = f'name = "here"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
    chosen = 'model = "scripted"\nmodel_provider = "here"\n'
    (tmp_path / "config.toml").write_text(f"{chosen}[model_providers.here]\n{provider}")
    # The command is this test's own, and sandboxes are not there in containers.
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    said = run("codex", ["exec", *options, asked("exec_command", cmd=COMMAND)], tmp_path, CODEX_HOME=str(tmp_path))
    assert said.strip() == SAID


def test_claude_code(server: RunningServer, tmp_path: Path) -> None:
    said = run(
        "claude",
        ["--print", asked("Bash", command=COMMAND, description="Says it."), "--allowedTools", "Bash"],
        tmp_path,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="scripted",
        ANTHROPIC_SMALL_FAST_MODEL="scripted",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(CONTEXT),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert said.strip() == SAID


@pytest.mark.parametrize("package", ["openai-compatible", "openai", "anthropic"])
def test_opencode(package: str, server: RunningServer, tmp_path: Path) -> None:
    provider = {
        "npm": f"@ai-sdk/{package}",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": "none"},
        "models": {"scripted": {}},
    }
    (tmp_path / "opencode.json").write_text(json.dumps({"provider": {"here": provider}, "model": "here/scripted"}))
    # It quotes an argument that has blanks, and joins all by blanks.
    words = asked("bash", command=COMMAND, description="Says it.").split(" ")
    offline = {f"OPENCODE_DISABLE_{what}": "1" for what in ("AUTOUPDATE", "DEFAULT_PLUGINS", "MODELS_FETCH")}
    said = run("opencode", ["run", *words], tmp_path, **offline)
    assert said.strip() == SAID


@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
def test_pi(api: str, server: RunningServer, tmp_path: Path) -> None:
    base_url = server.url if api == "anthropic-messages" else f"{server.url}/v1"
    provider = {"baseUrl": base_url, "api": api, "apiKey": "none", "models": [{"id": "scripted"}]}
    (tmp_path / "models.json").write_text(json.dumps({"providers": {"here": provider}}))
    options = ["--provider", "here", "--model", "scripted", "--print"]
    said = run(
        "pi", [*options, asked("bash", command=COMMAND)], tmp_path, PI_CODING_AGENT_DIR=str(tmp_path), PI_OFFLINE="1"
    )
    assert said.strip() == SAID


@pytest.mark.parametrize(("kind", "wire"), [("openai", "completions"), ("openai", "responses"), ("anthropic", "")])
def test_copilot(kind: str, wire: str, server: RunningServer, tmp_path: Path) -> None:
    """GitHub's Copilot with a provider of one's own, which needs no account."""
    said = run(
        "copilot",
        ["--silent", "--allow-all-tools", "--prompt", asked("bash", command=COMMAND, description="Says it.")],
        tmp_path,
        COPILOT_OFFLINE="true",
        COPILOT_PROVIDER_BASE_URL=server.url if kind == "anthropic" else f"{server.url}/v1",
        COPILOT_PROVIDER_TYPE=kind,
        COPILOT_MODEL="scripted",
        **({"COPILOT_PROVIDER_WIRE_API": wire} if wire else {}),
    )
    assert said.strip() == SAID


def test_qwen_code(server: RunningServer, tmp_path: Path) -> None:
    said = run(
        "qwen",
        ["--auth-type", "openai", "--yolo", asked("run_shell_command", command=COMMAND, is_background=False)],
        tmp_path,
        OPENAI_BASE_URL=f"{server.url}/v1",
        OPENAI_API_KEY="none",
        OPENAI_MODEL="scripted",
    )
    assert said.strip() == SAID


def test_cline(server: RunningServer, tmp_path: Path) -> None:
    data = ["--data-dir", str(tmp_path / "data")]  # without it, a process of its stays behind
    run("cline", ["auth", "openai", "-k", "none", "-m", "scripted", "-b", f"{server.url}/v1", *data], tmp_path)
    said = run("cline", ["--json", *data, asked("run_commands", commands=[COMMAND])], tmp_path)
    assert json.loads(said.splitlines()[-1])["text"] == SAID


def test_continue(server: RunningServer, tmp_path: Path) -> None:
    model = {"name": "here", "provider": "openai", "model": "scripted", "apiKey": "none", "apiBase": f"{server.url}/v1"}
    config = {"name": "here", "version": "1.0.0", "schema": "v1", "models": [model]}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    said = run(
        "cn",
        ["--config", "config.yaml", "--auto", "--print", asked("Bash", command=COMMAND)],
        tmp_path,
        CONTINUE_TELEMETRY_ENABLED="0",
    )
    assert said.strip() == SAID


MILL = {"type": "create_file", "path": "mill.py", "diff": "+off\n+again\n"}
CHANGED = {"type": "update_file", "path": "mill.py", "diff": "@@\n-off\n+on\n again\n"}


@pytest.fixture
def questions() -> str:
    """For the tools that OpenAI's models were trained on, and clients run."""
    wanted = {
        "shell": [asked("shell", commands=["cd /", COMMAND], timeout_ms=9000)],
        "local_shell": [asked("local_shell", command=["sh", "-c", COMMAND])],
        "apply_patch": [asked("apply_patch", **MILL), asked("apply_patch", **CHANGED)],
    }
    return json.dumps(wanted)


def test_openai_agents(server: RunningServer, tmp_path: Path, questions: str) -> None:
    """OpenAI's Agents SDK."""
    script = SCRIPTS / "run_openai_agents.py"
    said = json.loads(run("openai-agents", [str(script), server.url, questions], tmp_path))
    assert said == {"answers": [SAID] * 4 + ["mill.py is changed"] * 4, "files": {"mill.py": "on\nagain"}}


def test_ai_sdk(server: RunningServer, tmp_path: Path, questions: str) -> None:
    """Vercel's AI SDK, with its package for OpenAI."""
    found("ai-sdk")
    command = [require("node"), SCRIPTS / "run_ai_sdk.cjs", server.url, questions]
    said = json.loads(shown(command, tmp_path, NODE_PATH=str(MODULES)))
    assert said["answers"] == [SAID] * 4 + ["mill.py is changed"] * 4
    assert said["changes"] == [MILL, MILL, CHANGED, CHANGED]


def test_aider(server: RunningServer, tmp_path: Path) -> None:
    """It has no tools: the answer is an edit of a file."""
    mill = tmp_path / "mill.py"
    mill.write_text("turns = False\n")
    edit = "mill.py\n```python\n<<<<<<< SEARCH\nturns = False\n=======\nturns = True\n>>>>>>> REPLACE\n```\n"
    # Without these figures of the model it asks the network for them.
    figures = {"openai/scripted": {"max_input_tokens": 2**17, "input_cost_per_token": 0, "output_cost_per_token": 0}}
    (tmp_path / ".aider.model.metadata.json").write_text(json.dumps(figures))
    options = ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--edit-format", "diff"]
    run(
        "aider",
        ["--model", "openai/scripted", *options, "--message", f"SAY({edit})YAS", "mill.py"],
        tmp_path,
        OPENAI_API_BASE=f"{server.url}/v1",
        OPENAI_API_KEY="none",
    )
    assert mill.read_text() == "turns = True\n"
