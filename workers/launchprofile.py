"""What an engine is started with, in words that are the same for every engine."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from workers.profile import Speculation, WorkerProfile

LaunchEngine = Literal["vllm", "sglang", "trtllm"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Nodes(_Part):
    """This machine's place among those that run one worker together."""

    count: int = Field(ge=2, description="machines")
    rank: int = Field(0, ge=0, description="this machine's number; 0 serves HTTP")
    address: str = Field(description="address of machine 0, as the others reach it")
    port: int = Field(29501, ge=1, le=65535, description="port on machine 0 where they meet")

    @model_validator(mode="after")
    def _in_range(self) -> Nodes:
        if self.rank >= self.count:
            raise ValueError(f"rank {self.rank} is not below count {self.count}")
        return self


class ExpertBalancing(_Part):
    """Expert-parallel load balancing (EPLB)."""

    redundant_experts: int = Field(0, ge=0, description="extra copies of busy experts, over all ranks")


class KVEvents(_Part):
    """Where the engine publishes what enters and leaves its KV cache. Data-parallel rank r uses port + r."""

    endpoint: str = Field("tcp://*:5557", description="ZMQ endpoint to publish on")
    replay_endpoint: str | None = Field(None, description="ZMQ endpoint that answers what was missed")
    buffer_steps: int = Field(10_000, ge=1, description="batches of events kept for replay")
    topic: str = Field("", description="ZMQ topic")

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _has_port(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and endpoint.startswith("tcp://") and not endpoint.rpartition(":")[2].isdigit():
            raise ValueError("must end with a port, e.g. tcp://*:5557")
        return endpoint


class KVOffload(_Part):
    """A second tier of KV cache in host memory."""

    backend: Literal["native", "lmcache"] = Field("native", description="the engine's own, or LMCache")
    host_gib: int | None = Field(None, ge=1, description="GiB of host memory, over the whole worker")

    @model_validator(mode="after")
    def _sized(self) -> KVOffload:
        if self.backend == "native" and self.host_gib is None:
            raise ValueError("native offload needs 'host_gib'")
        return self


class KVTransfer(_Part):
    """How KV moves between prefill and decode workers."""

    connector: str = Field(description="nixl, mooncake, lmcache ..., or the engine's own name of a connector")
    host: str | None = Field(None, description="this worker's address for its peers' side channel")
    port: int | None = Field(None, ge=1, le=65535, description="port of that side channel or bootstrap server")
    options: dict[str, Any] = Field(default_factory=dict, description="further options of the connector, as is")


class LoRA(_Part):
    """LoRA adapters."""

    adapters: dict[str, str] = Field(default_factory=dict, description="model name that clients use -> directory or Hugging Face name")
    max_rank: int | None = Field(None, ge=1, description="largest rank of an adapter")
    max_loras: int | None = Field(None, ge=1, description="adapters in one batch")


class LaunchProfile(WorkerProfile):
    """A worker's profile with what its engine needs to start.

    What a profile does not state is left to the engine. `max_num_seqs` and `max_num_batched_tokens` are per data-parallel rank, each of
    which schedules for itself; `kv_capacity_tokens` and `kv_offload` are of the whole worker. `tp` is the number of accelerators that
    share one rank's attention: a worker has tp x pp x dp x attention_dp of them.
    """

    engine: LaunchEngine = Field(description="vllm, sglang or trtllm")
    model: str = Field(min_length=1, description="what to load: a Hugging Face name or a directory")
    served_model_name: str | None = Field(None, description="model name that clients use; the model itself when absent")
    tokenizer: str | None = Field(None, description="tokenizer, where it is not the model's own")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")

    dp: int = Field(1, ge=1, description="replicas of the whole model behind one port")
    all2all_backend: str | None = Field(None, description="expert-parallel exchange, by the engine's own name")
    expert_balancing: ExpertBalancing | None = Field(None, description="expert-parallel load balancing")
    nodes: Nodes | None = Field(None, description="this machine's place, where one worker spans several")

    dtype: str | None = Field(None, description="type of weights and activations that are not quantized, e.g. bfloat16")
    quantization_source: Literal["checkpoint", "load"] = Field(
        "checkpoint", description="checkpoint: the weights are stored so, and the engine reads it there; load: it quantizes while loading"
    )
    quantization_method: str | None = Field(
        None, description="the engine's own name of the method, where it has to be told for a stored quantization"
    )
    max_model_len: int | None = Field(None, ge=1, description="longest context in tokens")
    memory_share: float | None = Field(None, gt=0, le=1, description="share of each accelerator's memory that the engine may use")
    kv_cache_bytes: int | None = Field(None, ge=1, description="KV cache of each accelerator, in bytes")

    chunked_prefill: bool | None = Field(None, description="prefill in chunks of max_num_batched_tokens")
    max_queued_requests: int | None = Field(None, ge=1, description="waiting requests above which the engine refuses")

    prefix_caching: bool | None = Field(None, description="keep the KV cache of finished requests for those with the same prefix")
    prefix_hash_algo: str | None = Field(None, description="hash of KV blocks, by the engine's own name")
    report_cached_tokens: bool = Field(True, description="tell in each answer how many prompt tokens were cached; routing learns from it")
    kv_events: KVEvents | None = Field(None, description="publish what enters and leaves the KV cache; routing is exact with it")
    kv_offload: KVOffload | None = Field(None, description="second tier of KV cache")
    kv_transfer: KVTransfer | None = Field(None, description="connector between prefill and decode workers")

    speculation: Speculation | None = Field(None, description="speculative decoding; a method alone may stand for it")

    lora: LoRA | None = Field(None, description="LoRA adapters")
    tool_parser: str | None = Field(None, description="parser of tool calls, by the engine's own name")
    reasoning_parser: str | None = Field(None, description="parser of reasoning, by the engine's own name")
    eager: bool = Field(False, description="no CUDA graphs: starts faster, decodes slower")

    extra_args: list[str] = Field(default_factory=list, description="further arguments, as they are")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="further keys of the options file, as they are (trtllm)")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables")

    @field_validator("speculation", mode="before")
    @classmethod
    def _method_alone(cls, value: object) -> object:
        return {"method": value} if isinstance(value, str) else value

    @field_validator("env", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        """YAML reads `VAR: 1` as a number."""
        if not isinstance(value, dict):
            return value
        return {name: str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item for name, item in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> LaunchProfile:
        if self.dp > 1 and self.attention_dp > 1:
            raise ValueError("dp replicates the whole model and attention_dp only its attention; use one of them")
        width = self.tp * self.dp * self.attention_dp
        if width % self.ep:
            raise ValueError(f"ep {self.ep} does not divide the {width} accelerators of tp x dp x attention_dp")
        if self.gpus is not None and self.gpus != self.accelerators:
            raise ValueError(f"gpus is {self.gpus}, but tp x pp x dp x attention_dp is {self.accelerators}; leave it out")
        if self.nodes is not None and self.accelerators % self.nodes.count:
            raise ValueError(f"{self.accelerators} accelerators (tp x pp x dp x attention_dp) do not spread over {self.nodes.count} nodes")
        if self.role != "both" and self.kv_transfer is None:
            raise ValueError(f"a {self.role} worker needs 'kv_transfer'")
        if self.quantization_source == "load" and self.quantization is None:
            raise ValueError("quantization_source 'load' needs 'quantization'")
        if self.quantization_source == "load" and self.quantization_method is not None:
            raise ValueError("quantization_method names a stored quantization; leave it out with quantization_source 'load'")
        ports = (self.port, *self._event_ports(range(self.ranks)))
        if len(set(ports)) < len(ports) or max(ports) > 65535:
            raise ValueError(
                f"ports collide or leave the range: rank r uses the ports of kv_events plus r, so keep endpoint and replay_endpoint"
                f" at least {self.ranks} apart, and away from port {self.port}"
            )
        if self.expert_balancing is not None and self.ep == 1:
            raise ValueError("expert_balancing needs ep above 1")
        return self

    @property
    def ranks(self) -> int:
        """Data-parallel ranks, each with a scheduler and a KV cache of its own."""
        return self.dp * self.attention_dp

    @property
    def accelerators(self) -> int:
        return self.tp * self.pp * self.ranks

    def event_ports(self) -> tuple[int, ...]:
        """Ports of KV events and their replay on this machine: one of each for every data-parallel rank that runs here."""
        if self.nodes is None:
            return self._event_ports(range(self.ranks))
        each = max(1, self.ranks // self.nodes.count)
        return self._event_ports(range(self.nodes.rank * each, (self.nodes.rank + 1) * each))

    def _event_ports(self, ranks: range) -> tuple[int, ...]:
        if self.kv_events is None:
            return ()
        endpoints = (self.kv_events.endpoint, self.kv_events.replay_endpoint)
        bases = [int(endpoint.rpartition(":")[2]) for endpoint in endpoints if endpoint and endpoint.startswith("tcp://")]
        return tuple(base + rank for base in bases for rank in ranks)

    def states(self, name: str) -> bool:
        """Whether a field is for the engine to know: the profile gives it, or the gateway cannot do without it."""
        return (name in self.model_fields_set or name in _ALWAYS) and getattr(self, name) is not None


# Told to the engine even where the profile leaves them at their defaults, which are not the engines' own.
_ALWAYS = frozenset(("model", "host", "port", "report_cached_tokens"))

# Fields that no engine is told: the gateway's own knowledge of the worker, and those that other fields and the launcher take in.
GATEWAY_ONLY = frozenset(
    (
        "engine", "accelerator", "gpus", "price_per_hour", "latency", "kernel_factor", "restore_host_s", "restore_disk_s",
        "quantization_source", "extra_args", "env",
    )
)  # fmt: skip


class ProfileError(ValueError):
    """Faults in a launch profile, each a line that says where and what to do."""

    def __init__(self, faults: list[str]):
        super().__init__("\n".join(faults))
        self.faults = faults


def load_launch_profile(path: Path, settings: tuple[str, ...] = ()) -> LaunchProfile:
    """Read a profile and apply `a.b=value` settings on top (values as YAML; null removes). Raises ProfileError."""
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ProfileError([f"{path}: cannot be read: {error.strerror}"]) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProfileError([f"{path}: not valid YAML: {error}"]) from None
    if not isinstance(data, dict):
        raise ProfileError([f"{path}: must be a mapping, e.g. 'engine: vllm'"])
    for setting in settings:
        _apply(data, setting)
    try:
        return LaunchProfile.model_validate(data)
    except ValidationError as error:
        raise ProfileError([f"{path}: {_describe(fault)}" for fault in error.errors()]) from None


def _apply(data: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise ProfileError([f"--set {setting}: must be KEY=VALUE, e.g. tp=2 or kv_events.endpoint=tcp://*:5557"])
    *parents, last = key.split(".")
    node = data
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        elif not isinstance(child, dict):
            raise ProfileError([f"--set {setting}: {parent} is {child!r} in the profile and has no parts; set it whole"])
        node = child
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:  # e.g. tcp://*:5557 in a flow context; what is no YAML is meant as text
        value = text
    if value is None:
        node.pop(last, None)
    else:
        node[last] = value


def _describe(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"] if part not in ("Speculation", "LatencyModel", "str"))
    if fault["type"] == "extra_forbidden":
        known = list(LaunchProfile.model_fields)
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        return f"{where}: unknown key" + (f"; did you mean {near[0]!r}?" if near and len(fault["loc"]) == 1 else "")
    message = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
