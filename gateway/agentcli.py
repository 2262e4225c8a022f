"""`warmroute worker agent`: registers the engine it runs beside."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from pydantic import ValidationError

from gateway.config import Config, WorkerConfig, load_or_exit
from workers.profile import WorkerProfile

if TYPE_CHECKING:  # needs the extra `redis`
    from gateway.agent import Agent

logger = logging.getLogger("warmroute.agent")

_EPILOG = """\b
Examples:
  Beside an engine on this machine, which gateways reach as gpu7:
    export WARMROUTE_REGISTRY_SECRET=... WARMROUTE_POOL_SECRET=...
    warmroute worker agent --worker http://127.0.0.1:8000 --advertise http://gpu7:8000 --redis redis://cache:6379/0
\b
  Redis, pool, the worker's profile and the models' index blocks from the file that the gateways use:
    warmroute worker agent --worker http://gpu7:8000 --config warmroute.yaml
\b
  What an engine does not tell, by key; its KV events are left alone:
    warmroute worker agent --worker http://127.0.0.1:8000 --profile accelerator=h100 --profile tp=2 --no-events
\b
Gateways take registered workers in with registry.enabled, from where registry.allow says.
Exit codes: 0 stopped as asked; 1 a fault in the file; 2 wrong usage, or a secret is missing.
"""


@click.command("agent", epilog=_EPILOG)
@click.option("--worker", "url", required=True, metavar="URL", help="The engine, as reached from here.")
@click.option("--advertise", metavar="URL", help="The engine, as gateways reach it.  [default: the worker's URL]")
@click.option("--name", help="Its name in the pool.  [default: the advertised host:port]")
@click.option("--config", "config_path", type=click.Path(dir_okay=False, path_type=Path), help="A gateway's configuration file.")
@click.option("--redis", "redis_url", metavar="URL", help="The pool's Redis; passwords and TLS go into the file.")
@click.option("--pool", help="The pool to register in.  [default: the file's, or 'default']")
@click.option("--profile", "settings", multiple=True, metavar="KEY=VALUE", help="A field of the worker's profile; repeatable.")
@click.option("--block-tokens", type=click.IntRange(1), help="Index block in tokens, as gateways have it for the model.")
@click.option("--events/--no-events", default=True, show_default=True, help="Whether to follow the engine's KV events.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)
def agent_command(
    url: str,
    advertise: str | None,
    name: str | None,
    config_path: Path | None,
    redis_url: str | None,
    pool: str | None,
    settings: tuple[str, ...],
    block_tokens: int | None,
    events: bool,
    log_level: str,
) -> None:
    """Register an engine with the gateways of a pool, as long as it is healthy.

    The agent runs beside the engine. It takes its entry away as soon as the engine is down or the agent is stopped; when the agent
    dies, its lease ends within 5 seconds. It also follows the engine's KV events, so that only the engine's HTTP port need be
    reached by gateways. Entries are signed with the secret in WARMROUTE_REGISTRY_SECRET.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config = load_or_exit(config_path)
    config = _with_flags(config, redis_url, pool)
    worker = _worker(config, url, settings)
    try:
        agent = _agent(config, worker, advertise, name, block_tokens, events)
    except ImportError as error:
        raise click.UsageError(f"{error.name} is not installed: pip install 'warmroute[exact,redis]'") from None
    except ValidationError as error:
        first = error.errors()[-1]  # the name comes from the URL
        raise click.UsageError(f"the worker's {first['loc'][0]} {first['msg'].removeprefix('Value error, ')}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if _is_loopback(agent.registration.advertise):
        logger.warning("gateways on other machines cannot reach %s; give --advertise", agent.registration.advertise)
    asyncio.run(_run(agent))


async def _run(agent: Agent) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await agent.run(stop)


def _agent(config: Config, worker: WorkerConfig, advertise: str | None, name: str | None, block_tokens: int | None, events: bool) -> Agent:
    """Raises ImportError, ValueError."""
    from gateway.agent import Agent, Registration
    from gateway.registry import seal
    from kvindex.chain import use_pool_secret

    redis = config.index.redis
    follows = events and worker.kv_events != "off"
    if follows:
        import gateway.cache_feed  # noqa: F401

        secret = os.environ.get(redis.secret_env, "")
        if not secret:
            raise ValueError(f"following KV events needs the gateways' pool secret in {redis.secret_env}; or give --no-events")
        use_pool_secret(secret)
    advertised = (advertise or worker.url).rstrip("/")
    block_tokens = block_tokens or next((m.block_tokens for m in config.models if worker.model in (None, m.name)), None)
    registration = Registration(
        id=name or worker.name or urlsplit(advertised).netloc,
        url=worker.url,
        advertise=advertised,
        profile=worker.stated_profile(),
        api_key=os.environ.get(worker.api_key_env or ""),
        kv_events=worker.kv_events if follows else "off",
        block_tokens=block_tokens,
    )
    return Agent(registration, redis, seal(config.registry.secret_env, redis.pool))


def _with_flags(config: Config, redis_url: str | None, pool: str | None) -> Config:
    given = {name: value for name, value in (("url", redis_url), ("pool", pool)) if value is not None}
    try:
        redis = type(config.index.redis)(**{**config.index.redis.model_dump(), **given})
    except ValidationError as error:
        fault = error.errors()[0]
        flag = "--redis" if fault["loc"][0] == "url" else "--pool"
        raise click.UsageError(f"{flag}: {fault['msg'].removeprefix('Value error, ')}") from None
    return config.model_copy(update={"index": config.index.model_copy(update={"redis": redis})})


def _worker(config: Config, url: str, settings: tuple[str, ...]) -> WorkerConfig:
    """The worker of this URL as the file has it, with what the command line says."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    known = next((worker for worker in config.workers if worker.url == url), None)
    fields: dict[str, Any] = {name: getattr(known, name) for name in known.model_fields_set} if known is not None else {}
    fields["url"] = url
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in WorkerProfile.model_fields:
            raise click.UsageError(f"--profile {setting!r} is not KEY=VALUE with one of: {', '.join(WorkerProfile.model_fields)}")
        fields[key] = value
    try:
        return WorkerConfig(**fields)
    except ValidationError as error:
        fault = error.errors()[0]
        field = fault["loc"][0]
        flag = "--worker" if field == "url" else f"--profile {field}"
        raise click.UsageError(f"{flag}: {fault['msg'].removeprefix('Value error, ')}") from None


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
