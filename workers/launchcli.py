"""`warmroute worker launch`: a real engine from a profile."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from workers.engines import engine_command
from workers.engines.command import UnsupportedError
from workers.launch import RestartPolicy, supervise
from workers.launchprofile import ProfileError, load_launch_profile

_DEFAULTS = RestartPolicy()
_EPILOG = """\b
Examples:
  What would be run, one flag a line, ready to paste:
    warmroute worker launch deploy/profiles/qwen3-32b-fp8-tp2.yaml --print
\b
  Run it, with some settings changed:
    warmroute worker launch deploy/profiles/qwen3-32b-fp8-tp2.yaml --set tp=4 --set max_num_seqs=256
\b
  The same profile for another engine, from an environment of its own:
    warmroute worker launch profile.yaml --set engine=sglang --python ~/sglang/bin/python
\b
  The second node of a worker that spans two:
    warmroute worker launch deploy/profiles/glm-5.2-fp8-wide-ep-vllm.yaml --set nodes.rank=1
\b
Exit codes: 0 stopped as asked; 1 the engine kept failing; 2 wrong usage or profile; 3 its program cannot be run; 4 a port is in use.
"""


@click.command("launch", epilog=_EPILOG)
@click.argument("profile_path", metavar="PROFILE.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a field, e.g. tp=2 or nodes.rank=1; repeatable.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on, instead of the profile's.")
@click.option("--python", "python", metavar="PATH", help="Interpreter that has the engine.  [default: what is on the PATH]")
@click.option("--print", "print_only", is_flag=True, help="Show the command and do not run it.")
@click.option(
    "--startup-timeout",
    default=_DEFAULTS.startup_timeout_s,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds until an engine that is not ready counts as failed.",
)
@click.option(
    "--grace", default=_DEFAULTS.grace_s, show_default=True, type=click.FloatRange(0), help="Seconds between SIGTERM and SIGKILL on a stop."
)
@click.option(
    "--max-failures", default=_DEFAULTS.max_failures, show_default=True, type=click.IntRange(1), help="Failures in a row until it gives up."
)
@click.option(
    "--backoff",
    default=_DEFAULTS.backoff_s,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds before the first restart; doubled with each failure in a row, up to a minute.",
)
@click.option(
    "--stable", default=_DEFAULTS.stable_s, show_default=True, type=click.FloatRange(0), help="Seconds of service that forgive failures."
)
def launch_command(
    profile_path: Path,
    settings: tuple[str, ...],
    port: int | None,
    python: str | None,
    print_only: bool,
    startup_timeout: float,
    grace: float,
    max_failures: int,
    backoff: float,
    stable: float,
) -> None:
    """Start a vLLM, SGLang or TensorRT-LLM worker from a profile and keep it running.

    The profile says in the same words for every engine what to serve and how (deploy/profiles has some to start from). What the engine
    cannot do is an error. An engine that dies is restarted with growing delays; SIGTERM or Ctrl-C stops it with all its processes.
    """
    if port is not None:
        settings = (*settings, f"port={port}")
    try:
        profile = load_launch_profile(profile_path, settings)
        command = engine_command(profile, python)
    except (ProfileError, UnsupportedError) as error:
        faults = error.faults if isinstance(error, ProfileError) else [f"{profile_path}: {problem}" for problem in error.problems]
        for fault in faults:
            click.echo(fault, err=True)
        sys.exit(2)
    if print_only:
        click.echo(command.shell(f"{profile_path.stem}-options.yaml"), nl=False)
        return
    for note in command.notes:
        click.echo(f"warmroute: {note}")
    policy = RestartPolicy(startup_timeout_s=startup_timeout, grace_s=grace, backoff_s=backoff, stable_s=stable, max_failures=max_failures)
    sys.exit(asyncio.run(supervise(command, policy, name=profile.engine)))
