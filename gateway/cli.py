"""The `warmroute` command."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path
from typing import Any

import click
import uvloop
import yaml
from pydantic import ValidationError

from gateway.agentcli import agent_command
from gateway.config import Config, load_or_exit, missing_secrets, reason
from gateway.doctor import doctor_command
from kvindex.tokenizer import TokenizerError
from routing.policies import POLICIES
from workers.launchcli import launch_command
from workers.simcli import sim_command

EPILOG_SERVE = """
\b
Examples:
  warmroute serve --workers http://gpu1:8000,http://gpu2:8000
      two workers, everything else discovered from them
  warmroute serve --config warmroute.yaml
      models, aliases, engine profiles and limits from a file (see `warmroute check-config`)
  WARMROUTE_INDEX__BACKEND=redis warmroute serve --config warmroute.yaml --processes 4
      four processes behind one port; they share what they know through Redis (index.redis.url)
  WARMROUTE_LISTEN__PORT=9000 warmroute serve --config warmroute.yaml
      the environment overrides the file

\b
Then point any OpenAI client at it:
  OPENAI_BASE_URL=http://127.0.0.1:8000/v1
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="warmroute")
def main() -> None:
    """An OpenAI-compatible gateway that routes each request to the worker whose KV cache is already warm."""


@main.command(epilog=EPILOG_SERVE)
@click.option("--config", "config_path", type=click.Path(dir_okay=False, path_type=Path), help="YAML file with the whole configuration.")
@click.option("--workers", help="Comma-separated worker URLs; added to those of the file.")
@click.option("--host", help="Address to bind.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to bind; 0 takes a free one.  [default: 8000]")
@click.option("--policy", type=click.Choice(list(POLICIES)), help="Routing policy.")
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Gateway processes behind the port.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)
def serve(
    config_path: Path | None, workers: str | None, host: str | None, port: int | None, policy: str | None, processes: int, log_level: str
) -> None:
    """Start the gateway."""
    config = load_or_exit(config_path)
    config = _with_flags(config, workers, host, port, policy)
    if not config.workers and not config.registry.enabled:
        raise click.UsageError("no workers: give --workers URL[,URL...], or a --config file with a 'workers' list")
    if processes > 1:
        _require_shared_index(config, processes)
    process = "" if processes == 1 else " [%(process)d]"
    logging.basicConfig(level=log_level.upper(), format=f"%(asctime)s{process} %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if stale := stale_modules():
        logging.getLogger("warmroute").warning("compiled before a change of %s: run make compile again (or make pure)", ", ".join(stale))
    from gateway.app import Gateway
    from gateway.server import Server

    def started(url: str) -> None:
        listening = f"listening on {url} with {len(config.workers)} workers, policy {config.policy}"
        logging.getLogger("warmroute").info(listening + (f", {processes} processes" if processes > 1 else ""))
        if processes > 1:  # this one only looks after the others
            return
        # what exists now lives as long as the process: keep the collector from walking it over and over
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)

    if processes > 1:
        from gateway.processes import Processes

        try:
            parent = Processes(config, processes, on_started=started)
        except OSError as error:
            raise click.ClickException(f"cannot listen on {config.listen.host}:{config.listen.port}: {error.strerror or error}") from None
        sys.exit(parent.run())
    try:
        gateway = Gateway(config)
    except (TokenizerError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    server = Server(gateway, config.listen, on_started=started)
    try:
        uvloop.run(server.serve())
    except KeyboardInterrupt:  # it has shut down in order
        return
    except SystemExit:
        if server.started:
            raise
        where = f"{config.listen.host}:{config.listen.port}"
        raise click.ClickException(f"cannot listen on {where}: see above; --host and --port choose another address") from None
    if not server.started:
        sys.exit(3)


def stale_modules(root: Path = Path(__file__).parent.parent) -> list[str]:
    """Sources in a checkout that were compiled before they were last changed: Python would go on with the old."""
    if not (root / "setup.py").exists():  # installed from a wheel, where both are of one time
        return []
    compiled = [path for package in ("gateway", "routing") for path in (root / package).rglob("*.so")]
    sources = [(path, path.with_name(path.name.partition(".")[0] + ".py")) for path in compiled]
    return sorted(str(source.relative_to(root)) for path, source in sources if source.stat().st_mtime > path.stat().st_mtime)


def _require_shared_index(config: Config, processes: int) -> None:
    if config.index.backend != "redis":
        raise click.UsageError(
            f"--processes {processes} needs an index that the processes share, or each would know only its own part of the traffic: "
            "set index.backend to redis and index.redis.url to a Redis server (WARMROUTE_INDEX__BACKEND=redis in the environment)"
        )
    if sys.platform != "linux":
        raise click.UsageError(f"--processes {processes} needs Linux, which spreads connections over several sockets of one port")


@main.command("check-config")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
def check_config(path: Path) -> None:
    """Check a configuration file: every fault with its line and what to do. Exits 1 when there is one.

    A secret that is not in the environment is only a warning: it need not be where the file is checked.
    """
    if _is_engine_profile(path):
        raise click.ClickException(
            f"{path} is the profile of an engine, not a gateway's file: warmroute worker launch {path} --print checks it"
        )
    config = load_or_exit(path)
    for warning in missing_secrets(config):
        click.echo(f"{path}: warning: {warning}", err=True)
    models = {worker.model for worker in config.workers if worker.model} | {model.name for model in config.models}
    click.echo(f"{path}: ok ({len(config.workers)} workers, models: {', '.join(sorted(models)) or 'discovered from the workers'})")


def _is_engine_profile(path: Path) -> bool:
    """Whether a file is meant for `warmroute worker launch`."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return False  # for the reader of configurations to say what is wrong
    return isinstance(content, dict) and "engine" in content and not content.keys() & Config.model_fields.keys()


main.add_command(doctor_command)


@main.group()
def worker() -> None:
    """Workers: start a real engine, or a simulated one, and register it with the gateways."""


worker.add_command(agent_command, "agent")
worker.add_command(launch_command, "launch")
worker.add_command(sim_command, "sim")


def _with_flags(config: Config, workers: str | None, host: str | None, port: int | None, policy: str | None) -> Config:
    """Flags win over the file and the environment."""
    from gateway.fleet import worker_from_url

    listen: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    update: dict[str, Any] = {"listen": config.listen.model_copy(update=listen)}
    if policy is not None:
        update["policy"] = policy
    if workers:
        try:
            added = [worker_from_url(url.strip()) for url in workers.split(",") if url.strip()]
        except ValidationError as error:
            raise click.UsageError(f"--workers: {reason(error)}") from None
        except ValueError as error:
            raise click.UsageError(f"--workers: {error}") from None
        known = {w.url for w in config.workers}
        update["workers"] = config.workers + [w for w in added if w.url not in known]
    return config.model_copy(update=update)


if __name__ == "__main__":
    main()
