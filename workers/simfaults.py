"""Faults that a simulated engine can be told to have."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Faults(BaseModel):
    """What goes wrong; the default is nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    freeze: bool = Field(default=False, description="accept connections and never answer, /health included; what runs stands still")
    error_rate: float = Field(default=0.0, ge=0, le=1, description="share of inference requests answered with error_status")
    error_status: int = Field(default=500, ge=400, le=599, description="HTTP status of injected errors")
    die_after_chunks: int | None = Field(default=None, ge=0, description="reset the connection of a stream after this many events")
    slow_factor: float = Field(default=1.0, gt=0, description="engine steps take this many times as long")
    before_first_token_delay_s: float = Field(default=0.0, ge=0, description="seconds a request is held before the engine sees it")
