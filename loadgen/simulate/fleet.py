"""What is simulated: pools of equal workers, and how the gateway in front of them is set."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from loadgen.yamlfile import read_fields
from routing.policies import POLICIES
from routing.router import DECODE_WEIGHT
from workers.profile import WorkerProfile

# A prefilled prompt's way to the worker that decodes it: gpt-oss-120B on H200, measured 35 ms at 2,048 to 235 ms at 49,152 tokens
# (llm-d's P2P study: 21.9 ms + 4.32 us a token within 1 %).
TRANSFER_BASE_S = 0.0219
TRANSFER_TOKEN_S = 4.32e-6

Knowledge = Literal["memory", "exact"]


class FleetError(ValueError):
    """A fleet description cannot be used; the message names the file, the field and what is wrong."""


class PoolSpec(BaseModel):
    """Workers of one configuration. `profile.role` says what they do: both, or one side of prefill/decode disaggregation."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field("", description="prefix of the workers' names; w when absent")
    count: int = Field(1, ge=1, description="workers")
    speed: float = Field(1.0, gt=0, description="what the engines really are faster than their profile says (the router has to learn it)")
    tiers: list[str] = Field(default_factory=list, description="tiers these workers serve; all when empty")
    profile: WorkerProfile = Field(default_factory=WorkerProfile, description="the engine configuration")

    @field_validator("tiers", mode="after")
    @classmethod
    def _known(cls, tiers: list[str]) -> list[str]:
        for tier in tiers:
            if tier not in DECODE_WEIGHT:
                raise ValueError(f"unknown tier {tier!r}; known: {', '.join(DECODE_WEIGHT)}")
        return tiers

    @property
    def gpus(self) -> int:
        return self.count * self.profile.gpu_count


class FleetSpec(BaseModel):
    """A fleet behind one gateway."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    pools: list[PoolSpec] = Field(default_factory=lambda: [PoolSpec()], min_length=1)
    policy: str = Field("warm", description="routing policy: " + ", ".join(POLICIES))
    knowledge: Knowledge = Field("memory", description="how the router knows the caches: from what it sent, or exactly (KV events)")
    index_block_tokens: int = Field(128, ge=1, description="tokens of an index block; rounded to a multiple of the trace's block")
    session_ttl_s: float = Field(900.0, gt=0, description="a session idle for longer has ended")
    memory_ttl_s: float = Field(3600.0, gt=0, description="routing memory forgets what was not used for so long")
    overhead_s: float = Field(0.0, ge=0, description="seconds between a client and its engine: gateway, network, tokenisation")
    overhead_token_s: float = Field(0.0, ge=0, description="the same per prompt token: tokenisation, which passes over the whole prompt")
    transfer_base_s: float = Field(TRANSFER_BASE_S, ge=0, description="prefill to decode: seconds a transfer takes whatever its length")
    transfer_token_s: float = Field(TRANSFER_TOKEN_S, ge=0, description="prefill to decode: seconds a prompt token's KV takes")

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}; known: {', '.join(POLICIES)}")
        roles = {pool.profile.role for pool in self.pools}
        if roles == {"decode"} or ("prefill" in roles and roles.isdisjoint({"decode"})):
            raise ValueError("prefill workers need decode workers beside them, and decode workers somebody who prefills")
        return self

    @property
    def gpus(self) -> int:
        """Accelerators of the whole fleet."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def price_per_hour(self) -> float:
        """Of the whole fleet."""
        return sum(pool.count * pool.profile.price_per_hour for pool in self.pools)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV cache of all workers that keep prefixes (decode-only workers do not)."""
        return sum(pool.count * pool.profile.kv_capacity_tokens for pool in self.pools if pool.profile.role != "decode")


def load_fleet(file: Path) -> FleetSpec:
    """A fleet from a YAML file. Raises FleetError."""
    return parse_fleet(read_fields(file, FleetError, "'pools:' and 'policy:'"), str(file))


def parse_fleet(data: object, where: str) -> FleetSpec:
    """A fleet from plain data; `where` begins the message of a FleetError."""
    try:
        return FleetSpec.model_validate(data)
    except ValidationError as error:
        faults = [(".".join(map(str, f["loc"])) or "fleet", f["msg"].removeprefix("Value error, ")) for f in error.errors()]
        raise FleetError(f"{where}: " + "; ".join(f"{place}: {why}" for place, why in faults)) from None
