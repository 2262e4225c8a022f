"""Who sends what when: a trace's sessions in virtual time, with the meanings that `replay` has in real time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from routing.router import DECODE_WEIGHT

Mode = Literal["closed", "open"]


@dataclass(slots=True)
class Load:
    """How a trace is played. Raises ValueError for what no clock can do.

    Without `requests` and `duration_s` every session is played once. Measured are the requests sent after the first `warmup` ones and
    after `warmup_s`; they are awaited, and others go on being sent meanwhile, so that the last ones meet the same load.
    """

    mode: Mode = "closed"
    live_sessions: int = 32  # closed loop: lanes
    requests: int | None = None  # measured requests
    duration_s: float | None = None  # measured window
    warmup: int = 0  # first requests that are not measured
    warmup_s: float = 0.0  # first seconds that are not measured
    advance: float = 0.0  # closed loop: a lane's first session starts at a random step within this share of it
    shuffle: bool = False  # sessions come in an order drawn by the seed, not the trace's
    time_scale: float = 1.0  # gaps are multiplied by this
    max_gap_s: float = 300.0  # longer gaps are cut to this, before scaling
    ramp_s: float = 10.0  # closed loop: the lanes start over this time
    rate: float | None = None  # open loop: sessions per second (Poisson) instead of the trace's times
    speedup: float = 1.0  # open loop: the trace's times are divided by this
    tiers: dict[str, float] = field(default_factory=lambda: {"standard": 1.0})  # share of the sessions, by tier

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, found {value}")
        for name in ("live_sessions", "requests", "duration_s", "rate", "speedup"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be above 0")
        if self.advance > 1:
            raise ValueError(f"advance is a share, at most 1; found {self.advance}")
        if unknown := self.tiers.keys() - DECODE_WEIGHT:
            raise ValueError(f"tiers: there is no tier {min(unknown)!r}; the tiers are {', '.join(DECODE_WEIGHT)}")
        shares = self.tiers.values()
        if not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares) > 0:
            raise ValueError("tiers: shares are finite numbers of at least 0, and one is above 0")

    @property
    def endless(self) -> bool:
        """Whether sessions start over when the trace is through."""
        return self.requests is not None or self.duration_s is not None
