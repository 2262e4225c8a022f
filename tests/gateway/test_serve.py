"""`warmroute serve` as a command: how it starts and ends, and what it says."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

from loadgen.local import Program


def serve(tmp_path: Path, port: int = 0) -> Program:
    # nobody listens on port 9 (discard)
    return Program(
        "gateway", [sys.executable, "-m", "gateway.cli", "serve", "--port", str(port), "--workers", "http://127.0.0.1:9"], tmp_path / "log"
    )


def test_an_interrupt_is_no_failure_and_a_worker_that_is_not_there_is_named(tmp_path: Path) -> None:
    program = serve(tmp_path)
    try:
        program.wait_for("listening on")
        assert program.log.read_text().count("worker 127.0.0.1:9 is not up: connection refused") == 1
        program.send_signal(signal.SIGINT)
        assert program.wait() == 0
    finally:
        program.stop()


def test_a_taken_port_is_told_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = serve(tmp_path, port)
        try:
            assert program.wait() == 1
        finally:
            program.stop()
    assert f"Error: cannot listen on 127.0.0.1:{port}" in program.log.read_text() and "--port" in program.tail(2)
