"""The gateway's configuration: one YAML file plus environment overrides (WARMROUTE_LISTEN__PORT=9000).

Unknown keys are errors; every error names the line and what to do.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gateway.allowed_urls import AllowedURLs
from routing.policies import POLICIES
from workers.latency import LATENCY_MODELS, LatencyModel
from workers.profile import Speculation, WorkerProfile


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"no such policy; known: {', '.join(map(repr, POLICIES))}")
    return name


POLICY_NAMES = Annotated[str, AfterValidator(_known_policy), Field(json_schema_extra={"enum": list(POLICIES)})]
MOST_NAME_BYTES = 200  # of a worker's name
LEAST_SECRET = 16  # characters of a secret that gateways share


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Listen(Strict):
    """Where the gateway listens, and what it accepts."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 takes a free one")
    max_body_mb: float = Field(64.0, gt=0, description="largest request body, MiB (long agent sessions pass 32)")
    max_header_kb: float = Field(64.0, gt=0, description="largest request head, KiB")
    header_timeout_s: float = Field(30.0, gt=0, description="total time a client may take to send a request's head")
    body_timeout_s: float = Field(300.0, gt=0, description="total time a client may take to send a request's body")
    write_timeout_s: float = Field(300.0, gt=0, description="a client that takes no byte of its answer for this long is cut")


class Upstream(Strict):
    """How the gateway speaks to workers."""

    connect_timeout_s: float = Field(2.0, gt=0)
    idle_s: float = Field(4.0, gt=0, description="idle connections are closed after this; below the worker's own keep-alive (5 s)")
    keepalive_s: float = Field(15.0, gt=0, description="a stream that is silent for this long gets a keepalive event")
    attempts: int = Field(3, ge=1, description="workers tried before a request that has sent nothing to its client fails")
    probe_interval_s: float = Field(1.0, gt=0, description="half of it for a worker that is down")
    probe_timeout_s: float = Field(2.0, gt=0)
    probe_failures: int = Field(3, ge=1, description="probes without an answer until a worker counts as down (a refusal counts at once)")


class ModelConfig(Strict):
    """A model name that clients may use."""

    name: str = Field(description="name as the workers serve it")
    aliases: list[str] = Field(default_factory=list, description="other names clients may use for it")
    tokenizer: Path | None = Field(
        None, description="directory with its tokenizer.json and chat template: prompts are known by their exact tokens, as KV events are"
    )
    block_tokens: int | None = Field(None, ge=1, description="index block in token mode; absent: the engine's own block, 16 at least")
    chat_template: Path | None = Field(None, description="the engine's --chat-template, where it is not the model's own")
    chat_template_content_format: Literal["string", "openai"] | None = Field(None, description="the engine's flag of that name")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="the engine's --default-chat-template-kwargs")
    exclude_tools_when_tool_choice_none: bool = Field(False, description="whether the engine has that flag")

    @field_validator("chat_template")
    @classmethod
    def _is_a_file(cls, file: Path | None) -> Path | None:
        if file is not None and not file.is_file():
            raise ValueError("must be a local file")
        return file

    @field_validator("tokenizer")
    @classmethod
    def _is_there(cls, directory: Path | None) -> Path | None:
        if directory is not None and not (directory / "tokenizer.json").is_file():
            raise ValueError("must be a local directory that holds a tokenizer.json")
        return directory


class KVEvents(Strict):
    """Where a worker publishes its KV events, when it does not tell by itself (GET /kv_event_sources, /server_info)."""

    endpoint: str = Field(description="tcp://host:port of its publisher (data-parallel rank r: port + r)")
    replay_endpoint: str | None = Field(None, description="tcp://host:port where it replays what was missed")
    topic: str = Field("", description="only what it publishes under this topic")
    ranks: int = Field(1, ge=1, description="data-parallel ranks behind this URL")

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_tcp(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"tcp://.+:\d+", endpoint):
            raise ValueError("must be tcp://host:port")
        return endpoint


class WorkerConfig(WorkerProfile):
    """One worker: its URL and its engine configuration."""

    url: str = Field(description="http(s)://host:port")
    name: str | None = Field(None, validate_default=True, description="name in metrics and logs; host:port when absent")
    api_key_env: str | None = Field(None, description="environment variable that holds the worker's API key")
    kv_events: Literal["auto", "off"] | KVEvents = Field(
        "auto", description="auto: asks the worker where it publishes KV events; off: only routing memory; or the endpoints"
    )

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")) or len(url.split("/")) < 3 or not url.split("/")[2]:
            raise ValueError("must be http://host:port or https://host:port")
        if "@" in url.split("/")[2]:  # it would show in names, metrics and logs
            raise ValueError("must not hold credentials; name an environment variable in api_key_env")
        return url.rstrip("/")

    @field_validator("name")
    @classmethod
    def _can_be_a_name(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and (why := _unfit_name(name)):
            raise ValueError(why)
        if name is None and "url" in info.data and (why := _unfit_name(_name_from(info.data["url"]))):
            raise ValueError(f"is needed, the url cannot stand for it: a name {why}")
        return name

    @field_validator("latency")
    @classmethod
    def _known_latency(cls, latency: LatencyModel | str) -> LatencyModel | str:
        if isinstance(latency, str) and latency != "auto" and latency not in LATENCY_MODELS:
            raise ValueError(f"unknown latency model {latency!r}; known: auto, {', '.join(LATENCY_MODELS)}")
        return latency

    @model_validator(mode="after")
    def _latency_follows(self) -> Self:
        try:
            self.latency_model()
        except KeyError as error:
            raise ValueError(error.args[0]) from None
        return self

    @property
    def id(self) -> str:
        return self.name or _name_from(self.url)

    def profile(self) -> WorkerProfile:
        """The engine configuration alone."""
        return WorkerProfile(**{name: getattr(self, name) for name in WorkerProfile.model_fields})

    def stated_profile(self) -> WorkerProfile:
        """The same with only those fields set that were given."""
        return WorkerProfile(**{name: getattr(self, name) for name in self.model_fields_set & WorkerProfile.model_fields.keys()})


def _name_from(url: str) -> str:
    return url.split("://", 1)[1]


def _unfit_name(name: str) -> str | None:
    """Why a worker cannot have this name, which is also a holder in the index, part of a rank's name and of keys; None if it can."""
    if not name:
        return "must not be empty"
    if len(name.encode("utf-8", "surrogatepass")) > MOST_NAME_BYTES:
        return f"must have {MOST_NAME_BYTES} bytes at most"
    if re.search(r"[\s@#|]", name):
        return "must be without whitespace, '@', '#' and '|'"
    if name.startswith("kv:"):
        return "must not begin with 'kv:', which stands for what a worker's KV events tell"
    return None


def _redis_node(node: str) -> str:
    if "@" in node:
        raise ValueError("must be host:port alone; user and password are those of url and password_env")
    host, _, port = node.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("must be host:port")
    return node


class RedisConfig(Strict):
    """The Redis or Valkey (7.0 or later) through which gateways share the index, load and sessions."""

    url: str = Field("redis://127.0.0.1:6379/0", description="redis://[user@]host:port/db, rediss://... or unix:///path; no password in it")
    nodes: list[Annotated[str, AfterValidator(_redis_node)]] = Field(
        default_factory=list, description="host:port of Sentinels or of further cluster nodes"
    )
    sentinel_master: str | None = Field(None, description="the master's name; `nodes` are the Sentinels then")
    cluster: bool = Field(False, description="whether it is a Redis Cluster")
    password_env: str | None = Field(None, description="environment variable that holds the password")
    ca_file: Path | None = Field(None, description="certificate authority for rediss://")
    cert_file: Path | None = Field(None, description="client certificate for rediss://")
    key_file: Path | None = Field(None, description="its key")
    pool: str = Field("default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="gateways that name the same pool share")
    secret_env: str = Field(
        "WARMROUTE_POOL_SECRET", description="environment variable with the secret that keys block hashes; the same on every gateway"
    )
    shards: int = Field(1, ge=1, le=256, description="parts of the index, each on its own cluster slot (by worker)")
    deadline_ms: float = Field(50.0, gt=0, description="a call that takes longer counts as failed; local knowledge goes on alone")

    @field_validator("url")
    @classmethod
    def _is_redis(cls, url: str) -> str:
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must be redis://host:port, rediss://host:port or unix:///path")
        if ":" in url.split("://", 1)[1].rpartition("@")[0]:  # it would show in logs and in the process list
            raise ValueError("must not hold a password; name an environment variable in password_env")
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:  # its text holds the url
            raise ValueError("must be redis://host:port with a port from 0 to 65535") from None
        if any("password" in name.lower() for name in parse_qs(parts.query, keep_blank_values=True)):
            raise ValueError("must not hold a password; name an environment variable in password_env")
        return url

    @field_validator("sentinel_master")
    @classmethod
    def _has_sentinels(cls, master: str | None, info: ValidationInfo) -> str | None:
        if master and info.data.get("nodes") == []:
            raise ValueError("needs 'nodes': the Sentinels' host:port, e.g. [sentinel1:26379, sentinel2:26379]")
        if master and info.data.get("url", "").startswith("unix://"):
            raise ValueError("cannot go with a unix:// url, which is one server; give redis:// or rediss://")
        return master

    @field_validator("cluster")
    @classmethod
    def _can_be_a_cluster(cls, cluster: bool, info: ValidationInfo) -> bool:
        if cluster and info.data.get("sentinel_master"):
            raise ValueError("cannot go with sentinel_master, a cluster has no Sentinels; remove one of the two")
        if cluster and info.data.get("url", "").startswith("unix://"):
            raise ValueError("cannot go with a unix:// url, which is one server; give redis:// or rediss://")
        return cluster

    @field_validator("ca_file", "cert_file", "key_file")
    @classmethod
    def _is_a_file(cls, file: Path | None) -> Path | None:
        if file is not None and not file.is_file():
            raise ValueError("must be a local file")
        return file


class IndexConfig(Strict):
    """What is cached where."""

    backend: Literal["memory", "redis"] = Field("memory", description="memory: embedded, nothing to install; redis: shared by gateways")
    redis: RedisConfig = Field(default_factory=RedisConfig, description="for backend: redis")
    block_tokens: int = Field(128, ge=16, description="index block, in tokens (text mode counts 4 bytes a token)")
    ttl_s: float = Field(3600.0, gt=0, description="what was routed longer ago than this counts as evicted")
    session_ttl_s: float = Field(900.0, gt=0, description="a session idle for longer no longer counts as living on its worker")
    prefix_memory_mb: float = Field(64.0, gt=0, description="memory for known raw prefixes, MiB")


class Tier(Strict):
    """A class of service. Parsed and checked; requests are labelled with their tier."""

    ttft_s: float | None = Field(None, gt=0, description="objective for the time to the first token")
    tokens_per_s: float | None = Field(None, gt=0, description="objective for tokens per second per user")
    weight: float = Field(1.0, gt=0, description="share under contention")


TierName = Literal["latency", "standard", "throughput"]


def _default_tiers() -> dict[TierName, Tier]:
    return {"latency": Tier(), "standard": Tier(), "throughput": Tier()}


class Admin(Strict):
    """The admin routes (/admin/...)."""

    token_env: str | None = Field(None, description="environment variable with the admin token; without it, loopback clients only")


class RegistryConfig(Strict):
    """Workers that register themselves through Redis (`warmroute worker agent`)."""

    enabled: bool = Field(False, description="whether this gateway takes them in")
    secret_env: str = Field(
        "WARMROUTE_REGISTRY_SECRET", description="environment variable with the secret that signs entries; the same for agents and gateways"
    )
    allow: list[str] = Field(
        default_factory=list, description="where they may be: networks (10.0.0.0/8), hosts (gpu1) and domains (.gpu.internal)"
    )
    api_key_env: str | None = Field(None, description="environment variable with the API key that all of them get")

    @field_validator("allow")
    @classmethod
    def _can_be_read(cls, allow: list[str]) -> list[str]:
        if any("@" in item for item in allow):
            raise ValueError("must be networks, hosts and domains alone, without credentials")
        AllowedURLs(allow)
        return allow

    @model_validator(mode="after")
    def _says_where(self) -> RegistryConfig:
        if self.enabled and not self.allow:
            raise ValueError("needs 'allow': the networks and domains that workers may be in, e.g. [10.0.0.0/8, .gpu.internal]")
        return self


class Config(BaseSettings):
    """The whole configuration."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix="WARMROUTE_", env_nested_delimiter="__")

    listen: Listen = Field(default_factory=Listen)
    upstream: Upstream = Field(default_factory=Upstream)
    models: list[ModelConfig] = Field(default_factory=list, description="names and aliases; models are discovered when absent")
    workers: list[WorkerConfig] = Field(default_factory=list)
    index: IndexConfig = Field(default_factory=IndexConfig)
    policy: POLICY_NAMES = Field("warm", description="routing policy")
    tiers: dict[TierName, Tier] = Field(default_factory=_default_tiers)
    admin: Admin = Field(default_factory=Admin)
    registry: RegistryConfig = Field(default_factory=RegistryConfig)
    strip_volatile_prefix: bool = Field(True, description="cut lines that change with every request (x-anthropic-billing-header)")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings  # the environment overrides the file

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        seen: dict[str, str] = {}
        for worker in self.workers:
            for key in (worker.url, worker.id):
                if seen.get(key, worker.url) != worker.url or (key == worker.url and key in seen):
                    raise ValueError(f"two workers are called {key!r}; give each its own url and name")
                seen[key] = worker.url
        if self.registry.enabled and self.index.backend != "redis":
            raise ValueError("registry.enabled needs index.backend redis: workers register there")
        names: dict[str, str] = {}
        for model in self.models:
            for name in (model.name, *model.aliases):
                if name in names:
                    raise ValueError(f"model name {name!r} is given twice (for {names[name]!r} and {model.name!r})")
                names[name] = model.name
        return self


def missing_secrets(config: Config) -> list[str]:
    """What `serve` will want from the environment and this process's does not have; each a line that says what to do."""
    redis, wanted = config.index.redis, []
    if config.index.backend == "redis":
        wanted.append(("index.backend redis", redis.secret_env, "the same on every gateway of the pool"))
    if config.registry.enabled:
        wanted.append(("the registry of workers", config.registry.secret_env, "the same for agents and gateways"))
    missing = [
        f"{who} needs a secret of {LEAST_SECRET} characters or more in {variable}, {where}; make one with: openssl rand -hex 32"
        for who, variable, where in wanted
        if len(os.environ.get(variable, "")) < LEAST_SECRET
    ]
    if config.index.backend == "redis" and redis.password_env and not os.environ.get(redis.password_env):
        missing.append(f"index.redis.password_env names {redis.password_env}, which is not set in the environment")
    return missing


class ConfigError(Exception):
    """One or more faults in a configuration; each a line that says where and what to do."""

    def __init__(self, faults: list[str]):
        super().__init__("\n".join(faults))
        self.faults = faults


def load(path: str | Path) -> Config:
    """Read and check a configuration file. Raises ConfigError."""
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: is not UTF-8 text"]) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError([f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}"]) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError([f"{path}:1: the file must be a mapping of settings, e.g. 'listen: {{port: 8000}}'"])
    try:
        return Config(**data)
    except ValidationError as error:
        raise ConfigError([_describe(path, node, fault) for fault in error.errors() if not _is_of_another_kind(fault)]) from None
    except TypeError as error:  # a key that is not a string
        raise ConfigError([f"{path}: {error}"]) from None


def load_or_exit(path: Path | None) -> Config:
    """For commands: the file's configuration, or the environment's alone; faults are printed, and the program ends with status 1."""
    try:
        return load(path) if path is not None else from_environment()
    except ConfigError as error:
        for fault in error.faults:
            print(fault, file=sys.stderr)
        sys.exit(1)


def from_environment() -> Config:
    """The configuration without a file. Raises ConfigError."""
    try:
        return Config()
    except ValidationError as error:
        raise ConfigError([_describe("environment", None, fault) for fault in error.errors() if not _is_of_another_kind(fault)]) from None


def reason(error: ValidationError) -> str:
    """The first fault of a setting that stands in no file, e.g. a flag's; without the value when that may hold a secret."""
    fault = error.errors()[0]
    return _reason(fault, list(fault["loc"]))


def _is_of_another_kind(fault: Any) -> bool:
    """Whether this says only that a mapping is no word, or a word no mapping: the union's other member says what is wrong."""
    kind, given = fault["type"], fault.get("input")
    in_union = any(isinstance(part, str) and _UNION_MEMBER.match(part) for part in fault["loc"])
    return in_union and ((kind == "literal_error" and isinstance(given, dict)) or (kind.startswith("model_") and isinstance(given, str)))


_UNION_MEMBER = re.compile(r"(LatencyModel|KVEvents|Speculation|str)$|literal\[")


def _describe(path: str | Path, node: yaml.Node | None, fault: Any) -> str:
    # pydantic names the members of a union: they are not in the file
    location = [part for part in fault["loc"] if not (isinstance(part, str) and _UNION_MEMBER.match(part))]
    line = _line(node, location)
    dotted = ".".join(str(part) for part in location) or "configuration"
    override = "WARMROUTE_" + "__".join(str(part).upper() for part in location)
    if override in os.environ:
        return f"environment {override}: {_reason(fault, location)}"
    where = f"{path}:{line}" if node is not None else str(path)
    return f"{where}: {dotted}: {_reason(fault, location)}"


def _reason(fault: Any, location: list[Any]) -> str:
    kind = fault["type"]
    if kind == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key; {hint}"
    if kind == "missing":
        return "is required; add it"
    if kind.startswith("model_"):
        return f"must be a mapping of settings; known keys: {', '.join(_known_keys(location))}"
    message = fault["msg"].removeprefix("Value error, ")
    given = fault.get("input")
    shown = f" (got {given!r})" if isinstance(given, str | int | float | bool) and not _may_hold_a_secret(given, location) else ""
    return f"{message[0].lower()}{message[1:]}{shown}"


def _may_hold_a_secret(given: Any, location: list[Any]) -> bool:
    """Whether this is not to be shown: Redis's URL, and whatever may be a URL with credentials."""
    return location[-2:] == ["redis", "url"] or (isinstance(given, str) and "@" in given)


def _known_keys(location: list[Any]) -> list[str]:
    model: Any = Config
    for part in location:
        if isinstance(part, int):
            continue
        model = {
            "listen": Listen, "upstream": Upstream, "models": ModelConfig, "workers": WorkerConfig, "index": IndexConfig,
            "redis": RedisConfig, "tiers": Tier, "admin": Admin, "registry": RegistryConfig, "latency": LatencyModel, "kv_events": KVEvents,
            "speculation": Speculation,
        }.get(part, model)  # fmt: skip
    return list(model.model_fields)


def _line(node: yaml.Node | None, location: list[Any]) -> int:
    """The 1-based line of a setting: the deepest node on its path that the file has."""
    line = 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    line, node = key.start_mark.line + 1, value
                    break
            else:
                return line
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return line
    return line
