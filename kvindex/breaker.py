"""A circuit breaker: stops asking a server that has just failed several times, and lets one probe find out when it is back."""

from __future__ import annotations

from collections import deque
from typing import Literal


class Breaker:
    """Closed: calls go through. Open: they are refused. Half-open: one probe is under way and decides.

    `failures` failures within `within_s` seconds open it; `probe_s` later a probe is due. Times are seconds of any one clock that
    never goes back; it is handed in with each call.
    """

    def __init__(self, failures: int = 3, within_s: float = 1.0, probe_s: float = 0.5) -> None:
        self.state: Literal["closed", "open", "half-open"] = "closed"
        self._within_s = within_s
        self._probe_s = probe_s
        self._failed_at: deque[float] = deque(maxlen=failures)
        self._opened_at = 0.0

    def allows(self, now: float) -> bool:
        """Whether to call. In the open state True means: this is the probe, report how it went."""
        if self.state == "closed":
            return True
        if self.state == "open" and now >= self._opened_at + self._probe_s:
            self.state = "half-open"
            return True
        return False

    def wait_s(self, now: float) -> float:
        """Seconds until a probe is due; 0 when closed."""
        return 0.0 if self.state == "closed" else max(0.0, self._opened_at + self._probe_s - now)

    def succeeded(self, now: float) -> None:
        """A call went well. Only a probe's success closes the breaker: in the open state it was a call from before."""
        if self.state == "half-open":
            self.state = "closed"
            self._failed_at.clear()

    def failed(self, now: float) -> None:
        """A call failed: no answer in time, or no connection."""
        if self.state == "closed":
            self._failed_at.append(now)
            if len(self._failed_at) < (self._failed_at.maxlen or 0) or now - self._failed_at[0] > self._within_s:
                return
        elif self.state == "open":
            return
        self.state = "open"
        self._opened_at = now
