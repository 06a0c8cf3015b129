"""Servers under a closed loop of clients, Tidewheel beside its peers: throughput, latencies, and what was in time.

Each server is started for the same model, gets the same requests, and is ended before the next one starts. Prompts and
answers have lognormal lengths, as conversations do; a seed decides them. Prefix caches are off.

    python load_tests/closed_loop.py --file model.gguf --tidewheel .venv/bin/tidewheel --llama-server llama-server
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import perplexities
from measure import StreamError, StreamTimer, percentile
from peer_runners.job import Job, Scenario
from peers import cache_gib, listed, one_per_core, processors, say
from perplexities import PerplexityError
from servers import SERVERS, Server, ServerError, running
from streams import closed_loop
from target import Target, TargetError, discover

from tidewheel.engine.declaring.values import positive_count
from tidewheel.engine.errors import TidewheelError
from tidewheel.server.commands.bench import text
from tidewheel.server.commands.bench.workload import parse_counts
from tidewheel.server.commands.eval.model import Subject, find, tokenizer_of
from tidewheel.server.commands.eval.windows import split
from tidewheel.server.options.model import engine_options
from tidewheel.server.options.parser import argument_type

OWN = "tidewheel"
TTFT_LIMIT_MS, TPOT_LIMIT_MS = 1000.0, 100.0
NOTES = (
    "tokens/s are those of all answers, from the first request until the last token",
    f"in time: the share of requests with a first text within {TTFT_LIMIT_MS:g} ms and at most {TPOT_LIMIT_MS:g} ms a "
    "token after it; goodput: how many of these end in a second",
    "TTFT: request to first text, ITL: one text to the next, both in ms; client and server share the processors",
    "the perplexity is that of the second half of each window of the text; a dash where a server gives no scores",
)
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 4, 8
_START_TIMEOUT_S = 600.0
_SHORTEST = 4


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of numbers of tokens, cut at `most`."""

    median: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """One number of tokens."""
        return max(_SHORTEST, min(self.most, round(rng.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True)
class Figures:
    """What a server did for a number of clients. Times are in milliseconds."""

    clients: int
    requests: int
    prompt_tokens: int
    tokens: int
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    in_time: float
    goodput: float


@dataclass
class Row:
    """A server and its figures, one of each number of clients, or why there are none."""

    server: str
    model: str
    perplexity: float | None = None
    figures: list[Figures] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """All results. The JSON is its `asdict`, so these fields are its schema."""

    cpus: list[int]
    seed: int
    prompts: Lengths
    answers: Lengths
    rows: list[Row]
    notes: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 where nothing could be measured."""
    args = parse_args(arguments)
    try:
        result = compare(args)
    except TidewheelError as error:
        sys.stderr.write(f"closed_loop: {error}\n")
        return 1
    sys.stdout.write(report(result))
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 0 if any(row.figures for row in result.rows) else 1


def compare(args: argparse.Namespace) -> Result:
    """Measure all named servers in turn. Raises TidewheelError for a model or a text that cannot be read."""
    subject = find(engine_options({"model": str(args.file or args.folder)}), "the model")
    windows = [] if args.text is None else windows_of(subject, args.text, args.windows)
    rows = []
    for server in SERVERS.values():
        program: Path | None = getattr(args, _attribute(server))
        if program is None:
            continue
        given = job_for(args, server, subject)
        rows.append(row := Row(server.name, given.file or f"{given.model} {given.weights}"))
        if given.file is None and not (server.reads_folders and given.model):
            row.failures.append(f"it needs a --{'folder' if server.reads_folders else 'file'}")
            continue
        with telling(row):
            measure(args, row, server, program, given, windows)
    for name, url in args.url:
        rows.append(row := Row(name, url))
        with telling(row):
            let_in(args, row, discover(url))
    return Result(args.cpus, args.seed, args.prompts, args.answers, rows, [*NOTES])


@contextmanager
def telling(row: Row) -> Iterator[None]:
    """Note what is wrong with a server in its row."""
    try:
        yield
    except (ServerError, TargetError, StreamError, PerplexityError, OSError) as error:
        row.failures.append(str(error) or type(error).__name__)


def measure(
    args: argparse.Namespace, row: Row, server: Server, program: Path, given: Job, windows: Sequence[Sequence[int]]
) -> None:
    """Start a server, and let the clients in. Raises what is wrong with it."""
    say(f"starting {server.name}")
    with running(server, program, given, _START_TIMEOUT_S) as url:
        target = discover(url)
        let_in(args, row, target)
        if windows and server.gives_prompt_logprobs:
            row.perplexity = perplexities.of_server(target, windows)
    # Not while the server runs: it is another program, and the server has the memory of two.
    if windows and given.file is not None and (own := program.with_name("llama-perplexity")).exists():
        row.perplexity = perplexities.of_llama_perplexity(own, str(given.file), args.text, len(windows), len(args.cpus))


def let_in(args: argparse.Namespace, row: Row, target: Target) -> None:
    """Measure a running server with each number of clients. Raises StreamError and OSError."""
    for clients in args.clients:
        count = max(clients * args.requests_per_client, args.least_requests)
        say(f"{row.server}: {clients} clients, {count} requests")
        rng = random.Random(f"{args.seed} {clients}")
        bodies = [body(target, args.prompts.draw(rng), args.answers.draw(rng), rng) for _ in range(count)]
        warm_up = [{**b, "max_tokens": _WARM_UP_TOKENS} for b in bodies[-_WARM_UP_REQUESTS:]]
        closed_loop(target.base_url, warm_up, clients)
        row.figures.append(figures(clients, closed_loop(target.base_url, bodies, clients)))
        say(f"{row.server}: {row.figures[-1].tokens_per_s:.1f} tokens/s")


def body(target: Target, prompt_tokens: int, tokens: int, rng: random.Random) -> dict[str, Any]:
    """A request with a prompt of random words."""
    return target.completion(target.prompt(prompt_tokens, rng), tokens, ignore_eos=True)


def figures(clients: int, timers: Sequence[StreamTimer]) -> Figures:
    """Sum up the answers."""
    took = max(timer.arrivals[-1] for timer in timers) - min(timer.started for timer in timers)
    ttfts = [timer.ttft_ms for timer in timers]
    itls = [gap for timer in timers for gap in timer.itl_ms] or [0.0]
    in_time = [timer for timer in timers if timer.ttft_ms <= TTFT_LIMIT_MS and _tpot_ms(timer) <= TPOT_LIMIT_MS]
    tokens = sum(timer.tokens for timer in timers)
    return Figures(
        clients=clients,
        requests=len(timers),
        prompt_tokens=sum(timer.prompt_tokens or 0 for timer in timers),
        tokens=tokens,
        tokens_per_s=tokens / took,
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        itl_p50=percentile(itls, 50),
        itl_p99=percentile(itls, 99),
        in_time=len(in_time) / len(timers),
        goodput=len(in_time) / took,
    )


def windows_of(subject: Subject, path: Path, most: int) -> list[list[int]]:
    """The first whole windows of a text. Raises TidewheelError for a text that cannot be used."""
    cut = split(path, tokenizer_of(subject), perplexities.CONTEXT, subject.opened.spec.vocab_size)
    whole = [window.tolist() for window in cut.windows if len(window) == perplexities.CONTEXT]
    if len(whole) < 2:
        raise TidewheelError(f"--text {path} is too short: two windows of {perplexities.CONTEXT} tokens are needed")
    return whole[:most]


def job_for(args: argparse.Namespace, server: Server, subject: Subject) -> Job:
    """A server's job: the file if it reads it, otherwise the folder, and room for all clients."""
    file = args.file if server.reads_gguf else None
    scenarios = [Scenario("closed loop", max(args.clients), args.prompts.most, args.answers.most)]
    return Job(
        model=str(args.folder or ""),
        vocab_size=subject.opened.spec.vocab_size,
        weights=args.weights,
        options=args.options,
        file=None if file is None else str(file),
        cache_gib=cache_gib(subject.opened.spec, scenarios),
        cpus=args.cpus,
        seed=args.seed,
        scenarios=scenarios,
    )


def report(result: Result) -> str:
    """The result as text for a terminal."""
    own = {f.clients: f for row in result.rows if row.server == OWN for f in row.figures}
    heading = ["", "perplexity", "clients", "tokens/s", f"{OWN} is", "TTFT p50", "p99", "ITL p50", "p99", "in time",
               "goodput"]  # fmt: skip
    cells = [
        [
            row.server, "-" if row.perplexity is None else f"{row.perplexity:.2f}", str(f.clients),
            f"{f.tokens_per_s:.1f}",
            f"x {own[f.clients].tokens_per_s / f.tokens_per_s:.2f}" if f.clients in own else "-",
            *(f"{ms:.1f}" for ms in (f.ttft_p50, f.ttft_p99, f.itl_p50, f.itl_p99)),
            f"{f.in_time:.0%}", f"{f.goodput:.2f}/s",
        ]
        for row in result.rows for f in row.figures
    ]  # fmt: skip
    failures = "".join(f"{row.server}: {why}\n" for row in result.rows for why in row.failures)
    notes = "".join(f"note: {note}\n" for note in result.notes)
    return "\n".join(part for part in (text.table([heading, *cells]), failures, notes) if part)


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Measure servers under a closed loop of clients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--file", type=Path, metavar="FILE.gguf", help="the model, for servers that read GGUF files")
    add("--folder", type=Path, metavar="FOLDER", help="the same model, for the others, or for all without a --file")
    add("--weights", default="bfloat16", metavar="NAME", help="format of a folder's weights")
    for server in SERVERS.values():
        add(f"--{server.name}", type=Path, metavar="PROGRAM", help=server.program)
    add("--url", type=argument_type(_named), action="append", default=[], metavar="NAME=URL",
        help="a server that runs already; it may be given several times")  # fmt: skip
    add("--options", default="", metavar="TEXT", help="Tidewheel's own, such as '--kv-cache-dtype int8'")
    add("--clients", type=argument_type(parse_counts), default=(1, 8, 32, 128), metavar="N,...",
        help="how many there are at a time")  # fmt: skip
    add("--requests-per-client", type=argument_type(positive_count), default=4, metavar="N", help="how many each sends")
    add("--least-requests", type=argument_type(positive_count), default=16, metavar="N",
        help="of few clients together")  # fmt: skip
    add("--prompts", type=argument_type(_lengths), default=Lengths(120, 1.0, 1024), metavar="MEDIAN,SIGMA,MOST",
        help="lengths of prompts: a lognormal distribution of tokens")  # fmt: skip
    add("--answers", type=argument_type(_lengths), default=Lengths(100, 0.8, 512), metavar="MEDIAN,SIGMA,MOST",
        help="lengths of answers")  # fmt: skip
    add("--text", type=Path, metavar="FILE", help="a text for the perplexity; none is measured without it")
    add("--windows", type=argument_type(positive_count), default=16, metavar="N",
        help=f"how many windows of {perplexities.CONTEXT} tokens of it")  # fmt: skip
    add("--cpus", type=argument_type(processors), default=one_per_core(), metavar="N,...",
        help="processors of the servers, a thread each")  # fmt: skip
    add("--seed", type=int, default=0, help="decides lengths and prompts")
    add("--json", type=Path, metavar="FILE", help="file for the result")
    args = parser.parse_args(arguments)
    if args.file is None and args.folder is None:
        parser.error("name a --file or a --folder")
    if not args.url and all(getattr(args, _attribute(server)) is None for server in SERVERS.values()):
        parser.error(f"name a program or a --url: {', '.join(f'--{name}' for name in SERVERS)}")
    return args


def _named(given: str) -> tuple[str, str]:
    name, separator, url = given.partition("=")
    if not separator:
        raise ValueError(f"{given} is no NAME=URL")
    return name, url


def _lengths(given: str) -> Lengths:
    parts = listed(given)
    if len(parts) != 3:
        raise ValueError("three numbers are needed: the median, sigma and the most")
    return Lengths(float(parts[0]), float(parts[1]), int(parts[2]))


def _tpot_ms(timer: StreamTimer) -> float:
    """Milliseconds a token after the first text."""
    return (timer.arrivals[-1] - timer.arrivals[0]) * 1e3 / max(timer.tokens - 1, 1)


def _attribute(server: Server) -> str:
    return server.name.replace("-", "_")


if __name__ == "__main__":
    raise SystemExit(main())
