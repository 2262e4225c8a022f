"""`warmroute worker launch`: what is shown, and that an engine is kept running and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from workers.launch import EXIT_CANNOT_START, EXIT_CRASH_LOOP, EXIT_PORT_IN_USE, RestartPolicy
from workers.launchcli import launch_command

pytestmark = pytest.mark.slow  # real processes that start, die and are waited for

FAKE = Path(__file__).parent / "fake_engine.py"
PROFILES = Path(__file__).parent.parent.parent / "deploy" / "profiles"
linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans come back to the launcher on Linux only")


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that nobody has."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                for offset in range(1, count):
                    socket.create_server(("127.0.0.1", port + offset)).close()
            except (OSError, OverflowError):
                continue
        return port


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    except FileNotFoundError:
        return False
    except OSError:
        return False


class Launched:
    """The launcher with a fake engine, in a process of its own."""

    def __init__(self, directory: Path, fault: str, *options: str):
        self.port = free_ports(2)
        self.pids = directory / "pids"
        self.pids.mkdir()
        python = directory / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
        python.chmod(0o755)
        profile = directory / "profile.yaml"
        profile.write_text(
            f"engine: vllm\nmodel: m\nport: {self.port}\nkv_events: {{endpoint: 'tcp://*:{self.port + 1}'}}\n"
            f"env: {{FAKE: {fault}, FAKE_PIDS: {self.pids}}}\n"
        )
        command = [sys.executable, "-c", "from workers.launchcli import launch_command; launch_command()", str(profile)]
        command += ["--python", str(python), "--backoff", "0.05", "--grace", "5", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []

    def until(self, pattern: str) -> str:
        """Read its output up to a line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern!r} never came:\n" + "\n".join(self.lines))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def end(self) -> int:
        """Its exit code, once it has ended; what it printed until then is in `lines`."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(30)

    def started(self, name: str) -> list[int]:
        """Process ids, oldest first."""
        return [int(path.name.rpartition("-")[2]) for path in sorted(self.pids.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime_ns)]

    def left(self) -> list[int]:
        return [pid for pid in self.started("api") + self.started("core") if alive(pid)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def launched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launched]:
    launcher = Launched(tmp_path, *request.param)
    yield launcher
    launcher.close()


def launch(fault: str, *options: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("launched", [(fault, *options)], indirect=True, ids=[fault])


@launch("none")
def test_it_reports_readiness_passes_output_on_and_stops(launched: Launched) -> None:
    launched.until(r"ready after [\d.]+ s at http://127.0.0.1")
    assert any(
        line.startswith(f"[vllm] arguments: -m vllm.entrypoints.cli.main serve m --host 127.0.0.1 --port {launched.port}")
        for line in launched.lines
    )
    assert launched.stop() == 0
    assert launched.lines[-1] == "warmroute: vllm stopped"
    assert launched.left() == []


@launch("leaves-core", "--grace", "0.5")
def test_the_death_of_the_api_server_alone_takes_its_core_along_and_both_come_back(launched: Launched) -> None:
    """The core ignores SIGTERM and holds the port of the KV events: without its end the new engine could not start."""
    launched.until("ready after")
    [api], [core] = launched.started("api"), launched.started("core")
    os.kill(api, signal.SIGKILL)
    launched.until(r"killed by SIGKILL.*restart 1 of 4")
    assert not alive(core)
    launched.until("ready after")
    assert len(launched.started("api")) == len(launched.started("core")) == 2
    assert launched.stop() == 0
    assert launched.left() == []


@launch("deaf", "--grace", "0.5")
def test_what_ignores_sigterm_is_killed_after_the_grace(launched: Launched) -> None:
    launched.until("ready after")
    assert launched.stop() == 0
    assert any("after 0.5 s: killed" in line for line in launched.lines)
    assert launched.left() == []


@launch("deaf", "--grace", "600")
def test_a_second_signal_does_not_wait_for_the_grace(launched: Launched) -> None:
    launched.until("ready after")
    launched.process.send_signal(signal.SIGTERM)
    launched.until("stopping")  # two signals at once may arrive as one
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == 0
    assert launched.left() == []


@linux
@launch("leaves-daemon", "--grace", "0.5")
def test_a_process_that_left_the_group_is_ended_too(launched: Launched) -> None:
    launched.until("ready after")
    [core] = launched.started("core")
    assert os.getpgid(core) == core
    assert launched.stop() == 0
    assert launched.left() == []


@launch("dies", "--max-failures", "2")
def test_a_crash_loop_ends_with_the_last_lines_and_what_to_check(launched: Launched) -> None:
    assert launched.end() == EXIT_CRASH_LOOP
    assert len(launched.started("api")) == 2
    text = "\n".join(launched.lines)
    assert "2 failures in a row, giving up" in text
    assert "    RuntimeError: out of memory" in text
    assert "ended before it was ready (exit code 7)" in text
    assert "--print shows the command" in text


@launch("never-ready", "--startup-timeout", "0.6", "--max-failures", "1")
def test_what_never_becomes_ready_counts_as_failed(launched: Launched) -> None:
    assert launched.end() == EXIT_CRASH_LOOP
    assert any("was not ready after 0.6 s" in line for line in launched.lines)
    assert launched.left() == []


@launch("dies-once-ready", "--stable", "0", "--max-failures", "2")
def test_service_for_long_enough_forgives_failures(launched: Launched) -> None:
    for _ in range(3):
        launched.until(r"restart 1 of 1 in")
    assert launched.stop() == 0
    assert launched.left() == []


@launch("dies", "--backoff", "60")
def test_a_stop_does_not_wait_for_the_backoff(launched: Launched) -> None:
    launched.until("restart 1 of 4 in")
    assert launched.stop() == 0


@linux
@launch("none")
def test_the_engine_ends_when_the_launcher_is_killed(launched: Launched) -> None:
    launched.until("ready after")
    [api] = launched.started("api")
    launched.process.kill()
    launched.process.wait()
    with contextlib.suppress(ProcessLookupError):  # gone already
        end = os.pidfd_open(api)  # readable when the process ends
        try:
            select.select([end], [], [], 20)
        finally:
            os.close(end)
    assert not alive(api)


def run(tmp_path: Path, profile: str, *options: str) -> tuple[int, str]:
    path = tmp_path / "p.yaml"
    path.write_text(profile)
    result = CliRunner().invoke(launch_command, [str(path), *options])
    return result.exit_code, result.output


def test_a_port_that_another_program_holds_is_told_before_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        code, output = run(tmp_path, "engine: vllm\nmodel: m\n", "--port", str(port))
    assert code == EXIT_PORT_IN_USE
    assert f"port {port} is in use" in output


def test_a_missing_program_is_told(tmp_path: Path) -> None:
    code, output = run(tmp_path, "engine: vllm\nmodel: m\n", "--python", str(tmp_path / "none"), "--port", str(free_ports(1)))
    assert code == EXIT_CANNOT_START
    assert "--python" in output


def test_print_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    """Run what is printed, with a program that shows its arguments and the options file in the engine's place."""
    engine = tmp_path / "bin" / "trtllm-serve"
    engine.parent.mkdir()
    engine.write_text('#!/bin/sh\nprintf "%s\\n" "$A" "$@"\nfor last; do :; done\ncat "$last"\n')
    engine.chmod(0o755)
    profile = "engine: trtllm\nmodel: a b\nserved_model_name: it's\nblock_size: 64\nenv: {A: 'x y'}\n"
    code, output = run(tmp_path, profile, "--print")
    assert code == 0
    environment = os.environ | {"PATH": f"{engine.parent}:{os.environ['PATH']}"}
    shown = subprocess.run(["sh", "-c", output], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[:4] == ["x y", "a b", "--served_model_name", "it's"]
    assert "  tokens_per_block: 64" in shown.splitlines()


def test_set_and_port_change_what_is_printed(tmp_path: Path) -> None:
    code, output = run(tmp_path, "engine: vllm\nmodel: m\ntp: 2\n", "--set", "tp=4", "--set", "engine=sglang", "--port", "9", "--print")
    assert code == 0
    assert "--tp-size 4" in output
    assert "--port 9" in output


@pytest.mark.parametrize(
    ("profile", "options", "says"),
    [
        ("engine: trtllm\nmodel: m\ndp: 2\n", (), "start a worker for each"),
        ("engine: vllm\nmodel: m\nmodle: m\n", (), "did you mean 'model'?"),
        ("engine: vllm\n", (), "model: Field required"),
    ],
)
def test_a_profile_that_cannot_be_is_told(tmp_path: Path, profile: str, options: tuple[str, ...], says: str) -> None:
    code, output = run(tmp_path, profile, "--print", *options)
    assert code == 2
    assert says in output


def test_every_shipped_profile_is_printed() -> None:
    for path in sorted(PROFILES.glob("*.yaml")):
        result = CliRunner().invoke(launch_command, [str(path), "--print"])
        assert result.exit_code == 0, result.output


def test_backoff_doubles_up_to_its_limit_with_jitter() -> None:
    policy = RestartPolicy(backoff_s=2.0, max_backoff_s=10.0)
    for failures, longest in ((1, 2.0), (2, 4.0), (3, 8.0), (4, 10.0), (50, 10.0)):
        delays = {policy.delay_s(failures) for _ in range(20)}
        assert len(delays) > 1
        assert all(longest / 2 <= delay <= longest for delay in delays)
