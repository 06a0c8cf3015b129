"""Requests such as coding agents and chat pages send: each is answered, with what its last turn asks for.

They have the fields and shapes of real ones, and texts of our own. `make clients` runs some of the agents themselves:
see test_agents.py.
"""

from __future__ import annotations

import json
import re

import pytest
from clients.record import RECORDED
from server.conftest import RunningServer, StartServer

AGENTS = sorted(path.stem for path in (RECORDED / "agents").glob("*.json"))


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(tool_call_parser="hermes", engine={"max_model_len": 2**16})


@pytest.mark.parametrize("agent", AGENTS)
def test_the_requests_of_agents_are_answered(agent: str, server: RunningServer) -> None:
    for request in json.loads((RECORDED / "agents" / f"{agent}.json").read_text("utf-8")):
        content = json.dumps(request["body"])
        response = server.http.post(request["path"], content=content, headers=request["headers"])
        assert response.status_code == 200, response.text
        if "count_tokens" in request["path"]:
            assert response.json()["input_tokens"] > 100
            continue
        said = re.findall(r"SAY\((.*?)\)YAS", json.dumps(request["body"], ensure_ascii=False))[-1]
        name = re.search(r'"name\\": \\"(\w+)', said)
        wanted = said if name is None else name[1].rpartition("__")[2]
        pieces = re.findall(r'"(?:content|delta|text)":\s?"([^"]*)"', response.text)
        assert (wanted in "".join(pieces)) if name is None else f'"name":"{wanted}"' in response.text


def test_a_namespace_comes_back_apart(server: RunningServer) -> None:
    body = json.loads((RECORDED / "agents" / "codex.json").read_text("utf-8"))[-1]["body"]
    (call,) = server.post("/v1/responses", {**body, "stream": False}).json()["output"]
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
