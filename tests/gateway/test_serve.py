"""`warmroute serve` as a command: how it starts and ends, and what it says."""

from __future__ import annotations

import re
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


def test_a_second_interrupt_ends_it_at_once_and_in_order(tmp_path: Path) -> None:
    """The first waits for requests under way; here for one whose body never comes."""
    program = serve(tmp_path)
    try:
        program.wait_for("listening on")
        port = re.search(r"listening on http://127\.0\.0\.1:(\d+)", program.log.read_text())
        assert port is not None
        with socket.create_connection(("127.0.0.1", int(port[1]))) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n")
            assert b" 100 " in client.recv(1000)
            program.send_signal(signal.SIGINT)
            program.wait_for("Waiting for connections to close")
            program.send_signal(signal.SIGINT)
            assert program.wait() == 0
        log = program.log.read_text()
        assert "Application shutdown complete" in log and "Traceback" not in log
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
