"""Observed over modelled time, per worker and per engine configuration.

Workers of one configuration are alike, so they learn from each other: a worker's scale is its own mean, drawn towards the
mean of its configuration by as much as its own evidence is thin or old. Were every worker to learn alone, the first to be
found faster than modelled would get all the work, and the others would never be tried again.
"""

from __future__ import annotations

import math
from collections import deque

PRIOR = 4.0  # observations of its own that weigh as much as the configuration's mean
NOISE = math.log(1.2)  # a worker this much faster or slower than its kind is not told apart from it
MEMORY = 20.0  # observations that a mean goes back
FORGETS_AFTER = 64.0  # observations per worker of the configuration in which one without new evidence forgets its own
_LOG_RANGE = math.log(1e3)
_MOST_UNTOLD = 16
_LOG_ERROR = math.log(10.0)  # one observation tells of a factor of 10 at most


class ConfigurationScale:
    """What the workers of one configuration have shown together."""

    def __init__(self) -> None:
        self.members: list[WorkerScale] = []
        self.observations = 0
        self.mean = 0.0  # of log(observed / modelled)

    def refresh(self) -> None:
        """Let every member's scale follow the mean and the age of its evidence."""
        for member in self.members:
            member.refresh()


class WorkerScale:
    """One worker's scale: a factor on modelled times. Starts at 1."""

    __slots__ = ("_configuration", "_evidence", "_mean", "_seen_at", "untold", "value")

    def __init__(self, configuration: ConfigurationScale) -> None:
        self._configuration = configuration
        self._mean = 0.0
        self._evidence = 0.0  # observations that count, at `_seen_at`
        self._seen_at = 0  # the configuration's count of observations at this worker's last
        self.value = 1.0
        self.untold: deque[float] = deque(maxlen=_MOST_UNTOLD)  # own observations that other gateways have not heard of
        configuration.members.append(self)
        self.refresh()

    def leave(self) -> None:
        """The worker is gone, or has another configuration now."""
        self._configuration.members.remove(self)

    def observe(self, observed_s: float, modelled_s: float) -> None:
        """Learn from one time; `modelled_s` is what this scale made of it."""
        if observed_s <= 0.0 or modelled_s <= 0.0:
            return
        error = math.log(observed_s / modelled_s)
        seen = math.log(self.value) + min(max(error, -_LOG_ERROR), _LOG_ERROR)
        self.learn(seen)
        self.untold.append(seen)

    def learn(self, seen: float) -> None:
        """Learn from one observation: log of observed over modelled time, before any scale."""
        seen = min(max(seen, -_LOG_RANGE), _LOG_RANGE)
        configuration = self._configuration
        self._evidence = min(self._evidence_now() + 1.0, MEMORY)
        self._mean += (seen - self._mean) / self._evidence
        configuration.observations += 1
        self._seen_at = configuration.observations
        configuration.mean += (seen - configuration.mean) / min(configuration.observations, MEMORY * len(configuration.members))
        if configuration.observations % 8 == 0 or configuration.observations < 8:
            configuration.refresh()
        else:
            self.refresh()

    def refresh(self) -> None:
        """Take over what the others have shown since."""
        evidence = self._evidence_now()
        common = self._configuration.mean
        own = (self._mean - common) * evidence / (evidence + PRIOR)
        # equal workers must look exactly equal, or the placement of new sessions follows the noise
        own = max(own - NOISE, 0.0) + min(own + NOISE, 0.0)
        self.value = math.exp(common + own)

    def _evidence_now(self) -> float:
        elsewhere = self._configuration.observations - self._seen_at
        return self._evidence * math.exp(-elsewhere / (FORGETS_AFTER * len(self._configuration.members)))
