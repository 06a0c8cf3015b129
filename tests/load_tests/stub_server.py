"""A program that serves a model which says `word` to everything. Its options are those of any peer."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say({"data": [{"id": "stub"}], "build_info": "b7"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if isinstance(body["prompt"], list):  # it finds half of the alphabet equally likely
            places = [None, *({str(token): {"logprob": -2.5649}} for token in body["prompt"][1:])]
            self._say({"choices": [{"prompt_logprobs": places}]})
            return
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            self._say({"usage": usage})
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        frames = [*[{"choices": [{"text": "word"}]}] * body["max_tokens"], {"choices": [], "usage": usage}]
        for said in [*map(json.dumps, frames), "[DONE]"]:
            frame = f"data: {said}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(frame), frame))
        self.wfile.write(b"0\r\n\r\n")

    def _say(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    options = dict(pairwise(sys.argv))
    if "--refuse" in options:
        sys.exit("no such model")
    ThreadingHTTPServer((options["--host"], int(options["--port"])), _Handler).serve_forever()
