"""Simulated workers as a gateway's configuration describes its workers: the same ports, models and profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import ValidationError

from workers.profile import WorkerProfile

_LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


class LikeError(ValueError):
    """The file cannot be followed; the message names it and what to do."""


@dataclass(frozen=True, slots=True)
class Described:
    """One worker of the file."""

    host: str
    port: int
    model: str | None
    profile: WorkerProfile


def described_workers(file: Path) -> list[Described]:
    """The file's workers. Of each are used its url, which must be on this machine, and its profile. Raises LikeError."""
    try:
        data = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LikeError(f"{file}: cannot be read: {error}") from None
    workers = data.get("workers") if isinstance(data, dict) else None
    if not isinstance(workers, list) or not workers:
        raise LikeError(f"{file}: has no 'workers'")
    return [_described(f"{file}: workers.{number}", worker) for number, worker in enumerate(workers)]


def _described(where: str, worker: Any) -> Described:
    url = worker.get("url") if isinstance(worker, dict) else None
    if not isinstance(url, str):
        raise LikeError(f"{where}: has no url")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise LikeError(f"{where}.url: {error}") from None
    if parts.scheme != "http" or host not in _LOCAL or port is None:
        raise LikeError(f"{where}.url: {url} is not served from here; a simulated worker needs http://127.0.0.1:PORT")
    fields = {name: value for name, value in worker.items() if name in WorkerProfile.model_fields}
    try:
        profile = WorkerProfile.model_validate(fields | {"engine": "sim"})
        profile.latency_model()
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise LikeError(f"{where}: {faults}") from None
    except KeyError as error:
        raise LikeError(f"{where}.latency: {error.args[0]}") from None
    return Described(host, port, profile.model, profile)
