"""A small real server with vLLM's way of behaving, for what a supervisor must bear: it starts
quickly, has children of its own, and can be deaf, talkative, or slow.

    python -S tests/fleet/engine.py --port 8000 --model m --root /weights [--children 2] [--deaf]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OPTIONS = argparse.ArgumentParser()
OPTIONS.add_argument("--port", type=int)
OPTIONS.add_argument("--host", default="127.0.0.1")
OPTIONS.add_argument("--model")
OPTIONS.add_argument("--root")
OPTIONS.add_argument("--children", type=int, default=0)
OPTIONS.add_argument("--away", action="store_true", help="children leave the session")
OPTIONS.add_argument("--bare", action="store_true", help="children have lost their environment")
OPTIONS.add_argument("--deaf", action="store_true", help="SIGTERM is not heard")
OPTIONS.add_argument("--shout", type=int, default=0, help="bytes written at the start")
OPTIONS.add_argument("--slow-s", type=float, default=0.0, help="before it listens")
OPTIONS.add_argument("--die", type=int, default=-1, help="ends with this code at once")
OPTIONS.add_argument("--dumb", action="store_true", help="its answers are none")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            card = {"id": ASKED.model, "root": ASKED.root, "parent": None}
            self._say({"data": [card]})
        else:
            self._say({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"finish_reason": "abort" if ASKED.dumb else "length", "text": "a"}
        self._say({"model": ASKED.model, "choices": [choice]})

    def _say(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    if ASKED.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(ASKED.children):
        if os.fork() == 0:
            if ASKED.away:
                os.setsid()
            if ASKED.bare:  # as those have that overwrite it with a name of their own
                os.execve("/bin/sleep", ["sleep", "600"], {})
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(60)
    if ASKED.die >= 0:
        sys.exit(f"cannot go on: {ASKED.root}" if ASKED.die == 1 else ASKED.die)
    for _ in range(ASKED.shout // 1000):
        print("x" * 999, flush=True)
    time.sleep(ASKED.slow_s)
    server = ThreadingHTTPServer((ASKED.host, ASKED.port), Handler)
    server.daemon_threads = True
    print("listening", flush=True)
    server.serve_forever(0.05)


if __name__ == "__main__":
    ASKED = OPTIONS.parse_args()
    main()
