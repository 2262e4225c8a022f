"""An engine for tests of the launcher: it misbehaves as the variable FAKE says. Run as `fake_engine.py ... --port N`.

Every process writes its number into the directory FAKE_PIDS, as NAME-PID, and /health answers until it is killed.
"""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

FAULT = os.environ.get("FAKE", "none")
PIDS = Path(os.environ["FAKE_PIDS"])


def note(name: str) -> None:
    (PIDS / f"{name}-{os.getpid()}").touch()


def core(*, own_session: bool, port: int) -> None:
    """A process that survives its parent and SIGTERM and holds a port, as an engine core does."""
    code = (
        "import os, pathlib, signal, socket, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "held = socket.create_server(('127.0.0.1', int(sys.argv[2])))\n"
        "(pathlib.Path(sys.argv[1]) / f'core-{os.getpid()}').touch()\n"
        "os.write(int(sys.argv[3]), b'.')\n"
        "time.sleep(600)\n"
    )
    started, tell = os.pipe()
    subprocess.Popen([sys.executable, "-c", code, str(PIDS), str(port), str(tell)], start_new_session=own_session, pass_fds=[tell])
    os.close(tell)
    os.read(started, 1)


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if FAULT == "never-ready" else 200)
        self.end_headers()
        self.wfile.write(b"ok")
        if FAULT == "dies-once-ready":
            print("dying after the first health check", flush=True)
            self.wfile.flush()
            os._exit(9)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    note("api")
    print("arguments:", " ".join(sys.argv[1:]), flush=True)
    if FAULT == "dies":
        print("loading\rweights 50 %\rRuntimeError: out of memory", flush=True)
        sys.exit(7)
    if FAULT == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if FAULT == "leaves-core":
        core(own_session=False, port=port + 1)
    if FAULT == "leaves-daemon":
        core(own_session=True, port=port + 1)
    http.server.ThreadingHTTPServer.address_family = socket.AF_INET
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()


if __name__ == "__main__":
    main()
