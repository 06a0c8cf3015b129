"""Users for locust: chat, completions, and a mix of long and short prompts, on any OpenAI-compatible server.

In addition to locust's row, a request reports three more: `TTFT` (ms to the first text), `ITL` (ms between texts) and
`tok/s` (tokens a second, in the column that locust calls response time). When the run stops, their percentiles
are printed, unrounded, once more.
"""

# mypy: disable-error-code="untyped-decorator"
# (locust's event hooks carry no types)

from __future__ import annotations

import json
import random
import sys
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from locust import HttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner
from measure import StreamError, StreamTimer, summarize, table
from target import Target, discover


class Samples:
    """Every figure of a run by request and metric; on a worker, those not yet sent to the master."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, values: list[float]) -> None:
        """Note figures of the row `name`."""
        self._values[name].extend(values)

    def take(self) -> dict[str, list[float]]:
        """Return all figures and start again."""
        taken, self._values = dict(self._values), defaultdict(list)
        return taken


# A locust process has one environment and one run at a time.
_samples = Samples()
_discover_once = cache(discover)


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--model", env_var="MODEL", default="", help="model to ask for (default: the first served)")
    parser.add_argument("--api-key", env_var="API_KEY", default="", help="sent as a bearer token", is_secret=True)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens in a prompt, about")
    parser.add_argument("--long-prompt-tokens", type=int, default=1200, help="tokens in a long prompt, about")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens in an answer, at most")
    parser.add_argument("--ignore-eos", action="store_true", help="make every answer --max-tokens long")
    parser.add_argument("--think-seconds", type=float, default=0.0, help="pause between a user's requests, on average")
    parser.add_argument("--summary-json", default="", help="file to write the summary to when the run stops")


@events.test_start.add_listener
def _forget_last_run(environment: Environment, **_: Any) -> None:
    _samples.take()


@events.report_to_master.add_listener
def _send_samples(client_id: str, data: dict[str, Any]) -> None:
    data["stream_samples"] = _samples.take()


@events.worker_report.add_listener
def _collect_samples(client_id: str, data: dict[str, Any]) -> None:
    for name, values in data.get("stream_samples", {}).items():
        _samples.add(name, values)


@events.test_stop.add_listener
def _print_summary(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return
    summary = {name: summarize(values) for name, values in sorted(_samples.take().items())}
    sys.stdout.write(f"\nStreams\n{table(summary) if summary else 'no answer was read to its end'}\n\n")
    options = environment.parsed_options
    if options is not None and options.summary_json:
        Path(options.summary_json).write_text(json.dumps(summary, indent=2) + "\n")


class StreamingUser(HttpUser):
    """A user that reads its answers as they are written."""

    abstract = True

    def on_start(self) -> None:
        """Find out which model the server serves, once per process."""
        self.options = self.environment.parsed_options
        self.random = random.Random()
        self.target: Target = _discover_once(self.host, self.options.api_key, self.options.model)

    def wait_time(self) -> float:
        """Seconds until the next request, drawn at random so that users do not synchronize."""
        mean = self.options.think_seconds
        return self.random.expovariate(1 / mean) if mean > 0 else 0.0

    def complete(self, name: str, prompt_tokens: int) -> None:
        """Stream one completion and report it as `name`."""
        prompt = self.target.prompt(prompt_tokens, self.random)
        body = self.target.completion(prompt, self.options.max_tokens, ignore_eos=self.options.ignore_eos)
        self._stream("/v1/completions", body, name)

    def chat(self, name: str, prompt_tokens: int) -> None:
        """Stream the answer to one user message and report it as `name`."""
        prompt = self.target.prompt(prompt_tokens, self.random)
        body = self.target.chat(prompt, self.options.max_tokens, ignore_eos=self.options.ignore_eos)
        self._stream("/v1/chat/completions", body, name)

    def _stream(self, path: str, body: dict[str, Any], name: str) -> None:
        timer = StreamTimer(time.perf_counter())
        url = self.target.base_url + path
        with self.client.post(
            url, json=body, headers=self.target.headers, stream=True, name=name, catch_response=True
        ) as response:
            if not response.ok:
                response.failure(f"status {response.status_code}: {response.text[:200]}")
                return
            try:
                for chunk in response.iter_content(chunk_size=None):
                    timer.feed(chunk, time.perf_counter())
                timer.finish()
            except (StreamError, ValueError, OSError) as error:
                response.failure(f"broken stream: {error}")
                return
        self._report("TTFT", name, [timer.ttft_ms])
        self._report("ITL", name, timer.itl_ms)
        self._report("tok/s", name, [timer.tokens_per_second])

    def _report(self, metric: str, name: str, values: list[float]) -> None:
        _samples.add(f"{name} {metric}", values)
        for value in values:
            self.environment.events.request.fire(
                request_type=metric, name=name, response_time=value, response_length=0, exception=None, context={}
            )


class ChatUser(StreamingUser):
    """Sends short chat messages."""

    @task
    def say(self) -> None:
        """One message, one answer."""
        self.chat("chat", self.options.prompt_tokens)


class CompletionUser(StreamingUser):
    """Sends short prompts."""

    @task
    def finish_text(self) -> None:
        """One prompt, one completion."""
        self.complete("completion", self.options.prompt_tokens)


class MixedUser(StreamingUser):
    """Sends mostly short prompts, and sometimes a long one, which may stall a server's streams."""

    @task(4)
    def short(self) -> None:
        """A short prompt."""
        self.complete("mixed short", self.options.prompt_tokens)

    @task(1)
    def long(self) -> None:
        """A long prompt."""
        self.complete("mixed long", self.options.long_prompt_tokens)
