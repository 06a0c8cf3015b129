"""Asks OpenAI's Agents SDK for a shell, a program and a change of a file, whole and as streams.

Usage: python run_openai_agents.py URL QUESTIONS, which are an object in JSON: what to ask, by the tools' names. Prints
what it was answered, and the file.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import agents
import openai
from agents.editor import ApplyPatchResult

FILES: dict[str, str] = {}


def run_commands(request: Any) -> agents.ShellResult:
    outputs = []
    for command in request.data.action.commands:
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        outcome = agents.ShellCallOutcome(type="exit", exit_code=done.returncode)
        outputs.append(agents.ShellCommandOutput(stdout=done.stdout, stderr=done.stderr, outcome=outcome))
    return agents.ShellResult(output=outputs, max_output_length=request.data.action.max_output_length)


def run_program(request: Any) -> str:
    return subprocess.run(request.data.action.command, capture_output=True, text=True).stdout


def changed(path: str) -> ApplyPatchResult:
    return ApplyPatchResult(status="completed", output=f"SAY({path} is changed)YAS")


class Editor:
    def create_file(self, operation: Any) -> ApplyPatchResult:
        FILES[operation.path] = agents.apply_diff("", operation.diff, mode="create")
        return changed(operation.path)

    def update_file(self, operation: Any) -> ApplyPatchResult:
        FILES[operation.path] = agents.apply_diff(FILES[operation.path], operation.diff)
        return changed(operation.path)

    def delete_file(self, operation: Any) -> ApplyPatchResult:
        del FILES[operation.path]
        return changed(operation.path)


TOOLS = {
    "shell": agents.ShellTool(executor=run_commands),
    "local_shell": agents.LocalShellTool(executor=run_program),
    "apply_patch": agents.ApplyPatchTool(editor=Editor()),
}


async def main(url: str, questions: dict[str, list[str]]) -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    model = agents.OpenAIResponsesModel("scripted", client)
    answers = []
    for name, asked in questions.items():
        agent = agents.Agent(name="miller", model=model, tools=[TOOLS[name]])
        answers += [(await agents.Runner.run(agent, question)).final_output for question in asked]
        for question in asked:
            run = agents.Runner.run_streamed(agent, question)
            async for _ in run.stream_events():
                pass
            answers.append(run.final_output)
    print(json.dumps({"answers": answers, "files": FILES}))


asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
