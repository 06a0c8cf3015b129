"""`tidewheel chat` against a server."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from fake_hub import Late, fake_hub
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import swept
from server.conftest import RunningServer, StartServer
from server.images import file, seeing

from tidewheel.server.commands.chat.client import ChatClient
from tidewheel.server.commands.chat.wrapping import WordWrap
from tidewheel.server.commands.cli import main
from tidewheel.server.commands.server_client import ClientError

DEMO = Path(__file__).parents[3] / "server" / "demo"


@pytest.fixture
def client(server: RunningServer) -> ChatClient:
    return ChatClient(server.url, model=None, system="be brief", api_key=None)


def test_a_conversation_remembers_and_resets(server: RunningServer, client: ChatClient) -> None:
    assert "".join(client.ask("SAY(one)YAS")) == "one"
    assert "".join(client.ask("and SAY(two)YAS")) == "two"
    prompt = server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))
    assert prompt == "<system>be brief<user>SAY(one)YAS<assistant>one<user>and SAY(two)YAS<assistant>"
    client.reset()
    assert client.messages == [{"role": "system", "content": "be brief"}]


def test_a_stopped_answer_is_forgotten_and_ends_at_the_server(start_server: StartServer) -> None:
    slow = start_server(engine={"step_s": 0.01})
    client = ChatClient(slow.url + "/v1", model="scripted", system=None, api_key=None)
    pieces = client.ask("LOOP(")
    assert next(pieces) == "x"
    pieces.close()
    assert client.messages == []
    deadline = time.monotonic() + 20
    while slow.engine.stats().num_running:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_images_go_with_the_next_message(
    start_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    sighted = start_server(engine=seeing(template))
    path = tmp_path / "photo.jpg"
    path.write_bytes(file(3))

    def prompt() -> str:
        return sighted.engine.tokenizer.decode(list(sighted.engine.requests[-1].prompt_token_ids), False)

    assert main(["chat", "--url", sighted.url, "--image", str(path), "--image", str(path), "SAY(two)YAS"]) == 0
    assert capsys.readouterr().out == "two\n"
    assert prompt() == "<user><img><pad><pad><pad></img><img><pad><pad><pad></img>SAY(two)YAS"
    client = ChatClient(sighted.url, model=None, system=None, api_key=None)
    client.attach(path)
    assert "".join(client.ask("SAY(a)YAS")) == "a"
    assert "".join(client.ask("SAY(b)YAS")) == "b"
    assert prompt() == "<user><img><pad><pad><pad></img>SAY(a)YAS<assistant>a<user>SAY(b)YAS"
    client.attach(path)
    client.reset()
    assert "".join(client.ask("SAY(c)YAS")) == "c"
    assert prompt() == "<user>SAY(c)YAS"
    with pytest.raises(ClientError, match=r"none.png cannot be read"):
        client.attach(tmp_path / "none.png")


def test_one_shot(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", server.url, "SAY(hi", "there)YAS"]) == 0
    assert capsys.readouterr().out == "hi there\n"


def test_vllms_options(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--url", f"{server.url}/v1", "--model-name", "scripted", "-q", "SAY(on we go)YAS"]
    assert main(["chat", *line, "--system-prompt", "be brief"]) == 0
    assert main(["complete", *line, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "on we go\non we\n"
    assert main(["complete", *line, "--max-tokens", "5", "--stats"]) == 0
    assert capsys.readouterr().out == "on we\n"  # too few tokens to tell a rate
    longer = [*line[:-1], "SAY(on we go home)YAS", "--max-tokens", "13"]
    assert main(["complete", *longer, "--stats"]) == 0
    assert re.fullmatch(r"on we go home\n[\d.]+ tokens/s\n", capsys.readouterr().out)
    del server.engine.requests[-2:]
    chatted, completed = (
        server.engine.tokenizer.decode(list(request.prompt_token_ids)) for request in server.engine.requests[-2:]
    )
    assert chatted == "<system>be brief<user>SAY(on we go)YAS<assistant>"
    assert completed == "SAY(on we go)YAS"
    with pytest.raises(SystemExit):
        main(["chat", *line, "and", "more"])
    assert "two texts: 'and more' and --quick 'SAY(on we go)YAS'" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/nowhere/model", "nope.gguf"])
def test_a_path_is_a_model_even_if_nothing_is_there(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", path]) != 0
    said = capsys.readouterr().err
    assert "the server did not start" in said
    assert path in said


def test_what_is_piped_in_is_one_question(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompt() -> str:
        return server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))

    monkeypatch.setattr(sys, "stdin", io.StringIO("SAY(c)YAS\nSAY(d)YAS\n"))
    assert main(["complete", "--url", server.url]) == 0
    assert capsys.readouterr().out == "d\n"
    assert prompt() == "SAY(c)YAS\nSAY(d)YAS"
    monkeypatch.setattr(sys, "stdin", io.StringIO("    /reset\n\nSAY(b)YAS\n"))  # all of it is one question
    assert main(["chat", "--url", server.url, "--model", "scripted"]) == 0
    assert capsys.readouterr().out == "b\n"
    assert prompt() == "<user>    /reset\n\nSAY(b)YAS<assistant>"
    file = tmp_path / "notes.txt"
    file.write_text("Some notes.\nSAY(short)YAS\n")
    with file.open() as opened:
        monkeypatch.setattr(sys, "stdin", opened)
        assert main(["chat", "--url", server.url, "Summarize", "this:"]) == 0
    assert capsys.readouterr().out == "short\n"
    assert prompt() == "<user>Summarize this:\n\nSome notes.\nSAY(short)YAS<assistant>"
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(["chat", "--url", server.url]) == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "--url", server.url, "SAY(alone)YAS"]) == 0
    assert capsys.readouterr().out == "alone\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:9", "hi"], "is a server running there?"),
        (["--url", "localhost:80", "hi"], "is not a URL"),
        (["--model", "other", "hi"], "is not served here"),
    ],
)
def test_trouble_is_one_line(
    server: RunningServer, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    if "--url" not in arguments:
        arguments = ["--url", server.url, *arguments]
    assert main(["chat", *arguments]) == 1
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1


def test_an_error_in_the_middle_of_an_answer(client: ChatClient) -> None:
    with pytest.raises(ClientError, match="a token without text"):
        list(client.ask("BREAK("))


def test_keys(start_server: StartServer) -> None:
    guarded = start_server(api_keys=("k",))
    with pytest.raises(ClientError, match="401"):
        next(ChatClient(guarded.url, model=None, system=None, api_key="wrong").ask("hi"))
    assert "".join(ChatClient(guarded.url, model=None, system=None, api_key="k").ask("hi")) == "ok"


class Terminal:
    """`tidewheel chat` in a terminal, with prompt_toolkit or without. `state` is where its history is kept."""

    def __init__(self, *arguments: str, state: Path, toolkit: bool, **variables: str) -> None:
        hide = "" if toolkit else "sys.modules['prompt_toolkit'] = None; "
        code = f"import sys; {hide}from tidewheel.server.commands.cli import main; sys.exit(main(sys.argv[1:]))"
        self._terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # lines and columns
        self._raw, self._num_read = b"", 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "chat", *arguments],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            env={
                **os.environ,
                "XDG_STATE_HOME": str(state),
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                **variables,
            },
        )
        os.close(inside)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def shown_until(self, text: str) -> str:
        """Waits for `text`; what is shown up to it. Steps to the right are spaces, other steps are left out."""
        deadline = time.monotonic() + 20
        while (end := (shown := self._shown()).find(text, self._num_read)) < 0:
            ready, _, _ = select.select([self._terminal], [], [], max(deadline - time.monotonic(), 0))
            assert ready, shown[self._num_read :]
            self._raw += os.read(self._terminal, 4096)
        begin, self._num_read = self._num_read, end + len(text)
        return shown[begin:end]

    def _shown(self) -> str:
        moved = re.sub(r"\x08*\x1b\[\d*C", " ", self._raw.decode(errors="replace"))
        return re.sub(r"\x1b\[(\?[\d;]*[hl]|[\d;]*[ADJK])", "", moved)


# Two processes start.
@pytest.mark.parametrize("toolkit", [True, swept(False)], ids=["prompt_toolkit", "readline"])
def test_a_conversation_in_a_terminal(start_server: StartServer, tmp_path: Path, toolkit: bool) -> None:
    if toolkit:
        pytest.importorskip("prompt_toolkit")
    slow = start_server(engine={"step_s": 0.01}, reasoning_parser="qwen3")

    def last_prompt() -> str:
        prompt: str = slow.engine.tokenizer.decode(list(slow.engine.requests[-1].prompt_token_ids))
        return prompt

    with Terminal("--url", slow.url, state=tmp_path, toolkit=toolkit) as terminal:
        terminal.shown_until(f"scripted at {slow.url}")
        terminal.shown_until("> ")
        terminal.type("LOOP(\r")
        terminal.shown_until("xxxx")
        terminal.process.send_signal(signal.SIGINT)
        terminal.shown_until("(stopped)")
        terminal.shown_until("> ")
        terminal.type("/help\r")
        terminal.shown_until("forget the conversation")
        terminal.shown_until("> ")
        terminal.type("/hepl\r")
        terminal.shown_until("there is no /hepl; /help lists the commands")
        terminal.shown_until("> ")
        terminal.type("/hepl me with this\r")
        terminal.shown_until("there is no /hepl; /help lists the commands")
        terminal.shown_until("> ")
        terminal.type("/set parameter temperature 0.25\r")
        terminal.shown_until("temperature 0.25")
        terminal.shown_until("> ")
        terminal.type("/image no-such.png\r")
        terminal.shown_until("no-such.png cannot be read")
        terminal.shown_until("> ")
        terminal.type("/set stream false\r")
        terminal.shown_until("stream cannot be set")
        terminal.shown_until("> ")
        terminal.type("half a question")
        terminal.shown_until("half a question")
        terminal.process.send_signal(signal.SIGINT)
        terminal.shown_until("(Ctrl-D or /exit leaves)")
        terminal.shown_until("> ")
        terminal.type("two lines:\\\r")
        terminal.shown_until("... ")
        terminal.type("SAY(<think>hmm</think>on we go)YAS\r")
        terminal.shown_until("\x1b[2mhmm\x1b[0m")  # dim
        terminal.shown_until("on we go")
        terminal.shown_until(" tokens/s")
        terminal.shown_until("> ")
        assert last_prompt() == "<user>two lines:\nSAY(<think>hmm</think>on we go)YAS<assistant>"
        assert slow.engine.requests[-1].sampling.temperature == 0.25
        terminal.type("/set system Be SAY(kind)YAS\r")
        terminal.shown_until("with this system message")
        terminal.shown_until("> ")
        terminal.type("\x1b[200~pasted\nlines\x1b[201~\r")
        terminal.shown_until("kind")
        terminal.shown_until("> ")
        assert last_prompt() == "<system>Be SAY(kind)YAS<user>pasted\nlines<assistant>"
        terminal.type("/bye\r")
        assert terminal.process.wait(20) == 0
    with Terminal("--url", slow.url, state=tmp_path, toolkit=toolkit) as terminal:
        terminal.shown_until("> ")
        terminal.type("\x1b[A\x1b[A\x1b[A\r")  # up, beyond the two pasted lines: commands are not in the history
        terminal.shown_until("\x1b[2mhmm\x1b[0m")
        terminal.shown_until(" tokens/s")
        assert last_prompt() == "<user>SAY(<think>hmm</think>on we go)YAS<assistant>"
        terminal.shown_until("> ")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.process.wait(20) == 0
    history = tmp_path / "tidewheel/chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert not {"/help", "/hepl", "/exit"} & {line.lstrip("+") for line in history.read_text().splitlines()}


# Two servers start, and one loads the built-in model.
def test_a_server_is_started_where_none_runs_and_ends_with_the_conversation(
    unused_port: int, dummy_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tidewheel.server.commands.chat.command.DEFAULT_URL", f"http://127.0.0.1:{unused_port}")
    assert main(["chat", "What", "is", "2", "+", "3?"]) == 0
    assert "5" in capsys.readouterr().out
    broken = dummy_model.parent / "nothing"
    broken.mkdir()
    assert main(["chat", str(broken), "hi"]) == 1
    error = capsys.readouterr().err
    assert "the server did not start" in error
    assert "config.json" in error
    assert error.count("\n") == 1


# A bar is drawn of what takes over two seconds, and a server starts.
def test_the_download_of_a_model_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
    files["model.safetensors"] = Late(files["model.safetensors"])
    with (
        fake_hub({"own/mill": files}) as hub,
        Terminal("own/mill", state=tmp_path, toolkit=True, **hub.environment(tmp_path / "hub")) as terminal,
    ):
        bar = terminal.shown_until("Starting a server of own/mill")
        assert re.search(r"Downloading: 100%\|█+\| ([\d.]+M)/\1 ", bar), bar
        terminal.shown_until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0


def test_reasoning_is_no_part_of_what_a_pipe_gets(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = start_server(reasoning_parser="qwen3").url
    assert main(["chat", "--url", url, "SAY(<think>well</think>so)YAS"]) == 0
    assert capsys.readouterr().out == "so\n"
    client = ChatClient(url, model=None, system=None, api_key=None)
    thoughts: list[str] = []
    assert "".join(client.ask("SAY(<think>well</think>so)YAS", thoughts.append)) == "so"
    assert "".join(thoughts) == "well"
    assert client.tokens_per_second is not None
    assert client.tokens_per_second > 0


def test_what_the_server_says_of_a_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = b': loading m 40%\n\ndata: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n'
    client = ChatClient("http://127.0.0.1:9", model="m", system=None, api_key=None)
    monkeypatch.setattr(client, "models", dict)
    monkeypatch.setattr(client, "request", lambda *a: contextlib.nullcontext(io.BytesIO(stream)))
    told: list[str] = []
    client.on_wait = told.append
    assert ("".join(client.ask("?")), told) == ("a", ["loading m 40%"])


def test_the_speed_counts_the_last_token_though_it_has_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    delta = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n'
    end = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n'
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 11}}\ndata: [DONE]\n'
    client = ChatClient("http://127.0.0.1:9", model="m", system=None, api_key=None)
    monkeypatch.setattr(client, "models", dict)
    monkeypatch.setattr(client, "request", lambda *a: contextlib.nullcontext(io.BytesIO(delta * 2 + end + usage)))
    monkeypatch.setattr("time.perf_counter", iter([1.0, 2.0, 3.0]).__next__)
    assert "".join(client.ask("hi")) == "aa"
    assert client.tokens_per_second == 5.0  # ten tokens after the first, in two seconds


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abcde fghij k", "abcde\nfghij\nk"),  # no line of the space behind a full one
        ("abcde  \nfg", "abcde\nfg"),
        ("ab cd  ef", "ab cd\nef"),
        ("a\n  b c", "a\n  b c"),
        ("潮車 潮", "潮車\n潮"),  # two columns each
    ],
)
def test_a_line_may_fill_the_terminal(text: str, shown: str) -> None:
    wrap = WordWrap(5)
    assert wrap.feed(text) + wrap.end() == shown


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="ab \n潮", max_size=60), st.integers(1, 12), st.lists(st.integers(0, 60), max_size=4))
def test_lines_are_broken_at_words_however_they_come(text: str, width: int, cuts: list[int]) -> None:
    def wrapped(pieces: list[str]) -> str:
        wrap = WordWrap(width)
        return "".join(map(wrap.feed, pieces)) + wrap.end()

    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = wrapped([text])
    assert wrapped([text[a:b] for a, b in itertools.pairwise(ends)]) == whole
    assert "".join(whole.split()) == "".join(text.split())
    assert all(len(line.strip()) <= width for line in whole.split("\n"))
