"""What differs between engines: the command line that a neutral profile becomes, and the names of their metrics."""

from __future__ import annotations

from collections.abc import Callable

from workers.engines import sglang, trtllm, vllm
from workers.engines.command import Command
from workers.engines.metrics import EngineMetrics
from workers.launchprofile import LaunchEngine, LaunchProfile

ENGINE_METRICS: dict[str, EngineMetrics] = {"vllm": vllm.METRICS, "sglang": sglang.METRICS, "trtllm": trtllm.METRICS}

_COMMANDS: dict[LaunchEngine, Callable[[LaunchProfile, str | None], Command]] = {
    "vllm": vllm.command,
    "sglang": sglang.command,
    "trtllm": trtllm.command,
}


def engine_command(profile: LaunchProfile, python: str | None = None) -> Command:
    """The command that starts a profile's engine. `python`: the interpreter that has the engine, else the PATH's.

    Raises UnsupportedError for what the engine cannot do.
    """
    return _COMMANDS[profile.engine](profile, python)
