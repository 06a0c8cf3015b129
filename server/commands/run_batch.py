"""`tidewheel run-batch`: answer a file of requests in OpenAI's batch format, by the server's own endpoints."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidewheel.engine.declaring.mistakes import Mistakes, made
from tidewheel.engine.declaring.option import options_of
from tidewheel.engine.encoders.load import load_encoders_beside, load_model_alone
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.encoders.settings import pools
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.files.reading import require_file
from tidewheel.engine.files.wording import reason
from tidewheel.engine.loading.downloads import downloads_of
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.progress import AnswerProgress

from ..app_options import AppOptions
from ..batches.rows import add_line, check_file, finished_rows, read_rows
from ..http import event_loop
from ..http.limits import AdmissionLimits
from ..options.model import DEMO_MODEL_NAME, engine_options, model_parser, read_model_options
from ..options.parser import add_option, build, read_given
from ..options.serve import refuse_unknown_variables
from ..options.vllm_flags import flags_of, read_vllm_line
from ..telemetry.logs import LogOptions, configure_logging

logger = logging.getLogger(__name__)

_OWNERS = (AppOptions, EncoderOptions, LogOptions)
_NAMES = (
    "served_model_name chat_template trust_request_chat_template default_chat_template_kwargs generation_config "
    "override_generation_config response_role return_tokens_as_token_ids enable_auto_tool_choice tool_call_parser "
    "reasoning_parser unknown_parameters runner convert task pooler_config embedding_model "
    "served_embedding_model_name embedding_threads embedding_dtype log_level "
    "log_format"
).split()
_OPTIONS = [option for owner in _OWNERS for option in options_of(owner) if option.name in _NAMES]
_IDLE = {
    "no server is started, and the command reports at its end how many requests "
    "have failed": "--enable-metrics --host= --port= --url=",
    "requests are not logged one by one": "--disable-log-requests --disable-log-stats --max-log-len=",
    "answers are written to the output as they come": "--output-tmp-dir=",
    "the command sends as many requests as the engine can use": "--max-inflight=",
}
_REFUSED = {"give the file's options on the command line": "--config="}
"""Flags of vLLM's run-batch that this command does not have, by why they have no effect or by what to do instead."""
_WAITING = 2  # as many times more requests are in work than run in a step: those that come next are ready


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What the command was told."""

    source: Path
    target: Path
    engine: EngineOptions
    encoders: EncoderOptions
    app: AppOptions


def run(arguments: Sequence[str]) -> int:
    """The `run-batch` command: 0 if every request is answered, 1 if there are errors among the answers.

    Raises TidewheelError if the files or the model cannot be used.
    """
    batch = _parse(arguments)
    for flag, path in (("--input-file", batch.source), ("--output-file", batch.target)):
        if path.parts[:1] in (("http:",), ("https:",)):
            raise TidewheelError(f"{flag} must be a file of this machine, not a URL: download or upload it separately")
    require_file(batch.source)
    _require_output(batch)
    try:
        total = check_file(batch.source)
    except (OSError, TidewheelError) as error:
        raise TidewheelError(f"{batch.source}: {reason(error)}") from error
    try:
        finished = finished_rows(batch.target)
    except OSError as error:
        raise TidewheelError(f"--output-file {batch.target} cannot be used: {reason(error)}") from error
    done = {row.custom_id: finished[row.custom_id] for row in read_rows(batch.source) if row.custom_id in finished}
    failed_before = sum(done.values())
    if len(done) == total:
        said = f"{failed_before} of them with an error: to run these again, delete their lines from it"
        print(
            f"All {total} requests are answered in {batch.target}{f', {said}' * bool(failed_before)}", file=sys.stderr
        )
        return 1 if failed_before else 0
    num_errors = event_loop.run(_answer(batch, total, done))
    answered = f"{total - len(done)} requests answered, {num_errors} of them with an error"
    before = f"{len(done)} were there before, {failed_before} of them with an error"
    print(f"{answered}; {before}. The output is {batch.target}", file=sys.stderr)
    return 1 if num_errors or failed_before else 0


def _require_output(batch: _Batch) -> None:
    """Raises TidewheelError if answers cannot be written, which else a person would learn when the model is loaded."""
    target, folder = batch.target, batch.target.parent
    if target.is_dir():
        wrong = "is a folder: name a file in it"
    elif not folder.is_dir():
        wrong = f"cannot be written: the folder {folder} does not exist"
    elif target.exists() and target.samefile(batch.source):
        wrong = "is the input file: name another one for the answers"
    elif target.exists() and not target.is_file():
        wrong = "is not a regular file: name one, because a stopped run reads it to continue"
    else:
        try:
            was_there = target.exists()
            target.open("ab").close()
            if not was_there:
                target.unlink()  # an empty one would be left if the model cannot be loaded
        except OSError as error:
            wrong = f"cannot be written: {reason(error)}"
        else:
            return
    raise TidewheelError(f"--output-file {target} {wrong}")


async def _answer(batch: _Batch, total: int, done: Collection[str]) -> int:
    """Run what is not `done`; returns the number of errors."""
    from ..app import build_app
    from ..batches.app_client import AppClient
    from ..batches.run import run_rows
    from ..encoder_app import CONCURRENT_ROWS, build_encoder_app

    if pools(batch.engine, batch.encoders):
        app = build_encoder_app(load_model_alone(batch.engine, batch.encoders, batch.app.served_model_names), batch.app)
        concurrency = CONCURRENT_ROWS
    else:
        encoders = load_encoders_beside(batch.engine, batch.encoders, downloads_of(batch.engine))
        engine = load_engine(batch.engine)
        app = build_app(engine, batch.app, encoders, media=batch.engine.media)
        concurrency = _WAITING * engine.limits.max_num_seqs
    rows = (row for row in read_rows(batch.source) if row.custom_id not in done)
    num_errors, num_done = 0, len(done)
    with batch.target.open("ab", buffering=0) as target, AnswerProgress("request", total, num_done) as progress:

        def write(line: bytes, is_answer: bool) -> None:
            nonlocal num_errors, num_done
            try:
                add_line(target, line)  # at once: what is answered is not computed again, however this ends
            except OSError as error:
                raise TidewheelError(
                    f"--output-file {batch.target} can no longer be written: {reason(error)}. {num_done} of {total} "
                    "requests are answered in it; make room, and run the same command again for the others"
                ) from error
            num_errors, num_done = num_errors + (not is_answer), num_done + 1
            progress.report(1)

        async with app.router.lifespan_context(app):
            await run_rows(rows, AppClient(app).post, write, concurrency=concurrency)
    return num_errors


def _parse(arguments: Sequence[str]) -> _Batch:
    parser = model_parser(
        "tidewheel run-batch", "Answer a file of requests in OpenAI's batch format.", "-i IN -o OUT [MODEL] [options]"
    )
    group = parser.add_argument_group("batch")
    group.add_argument("-i", "--input-file", required=True, metavar="FILE", help="the requests, one JSON object a line")
    group.add_argument("-o", "--output-file", required=True, metavar="FILE",
        help="the answers; requests that already have an answer in it are not run again")  # fmt: skip
    for option in _OPTIONS:
        add_option(group, option)
    line = read_vllm_line(arguments, parser.flags, flags_of((_IDLE, True), (_REFUSED, False)))
    mistakes = Mistakes()
    parsed = parser.read(line.ours, mistakes)
    for refusal in line.refusals:
        mistakes.add(refusal)
    refuse_unknown_variables(mistakes)
    given = read_model_options(parsed, mistakes)
    given |= read_given(_OPTIONS, parsed, os.environ, mistakes)
    log = mistakes.attempt(build, LogOptions, {"log_level": "warning", **given})
    batch = mistakes.attempt(_batch, given, parsed)
    parser.refuse(mistakes)
    configure_logging(made(log).log_level, made(log).log_format)
    for note in line.notes:
        logger.warning("%s", note)
    return made(batch)


def _batch(given: Mapping[str, Any], parsed: Mapping[str, Any]) -> _Batch:
    """What was given, by name. Raises OptionError, for all contradictions at once."""
    mistakes = Mistakes()
    names = given.get("served_model_name") or (() if "model" in given else (DEMO_MODEL_NAME,))
    app = mistakes.attempt(
        build,
        AppOptions,
        {**given, "served_model_name": names, "disable_log_requests": True, "disable_access_log": True},
        admission=AdmissionLimits(max_queue=None),
    )
    engine, encoders = mistakes.attempt(engine_options, given), mistakes.attempt(build, EncoderOptions, given)
    mistakes.raise_any()
    source, target = Path(parsed.get("input_file", "")), Path(parsed.get("output_file", ""))
    return _Batch(source=source, target=target, engine=made(engine), encoders=made(encoders), app=made(app))
