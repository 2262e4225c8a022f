"""What goes into a simulated engine and what comes out: requests, outputs and counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.simcache import Run


@dataclass(slots=True, frozen=True)
class SimRequest:
    """A request as the engine sees it.

    `hashes` has one cumulative hash per full KV block of the prompt; it may go on over the output, so that a later prompt which
    contains the answer finds it cached. `max_tokens` is what is generated, to the token. Lower `priority` goes first, where the profile
    schedules by priority. A `transferred` prompt was prefilled elsewhere and its KV is at hand: it takes blocks but no computation, and
    the request's first step is a decode step (all `max_tokens` are generated here). Preempted, it loses its KV and is recomputed.
    """

    id: str
    hashes: Sequence[int]
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    transferred: bool = False


@dataclass(slots=True)
class Output:
    """What a step gave one request: `tokens` new output tokens, the first ones if `first`, the last ones if `finished`."""

    request_id: str
    tokens: int
    first: bool
    finished: bool
    cached_tokens: int


@dataclass(slots=True)
class StepResult:
    """`steps` engine steps that took `duration_s` seconds together; more than one only where all were alike (decode only)."""

    duration_s: float
    steps: int
    outputs: list[Output]


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start, as vLLM counts them (tokens, except `preemptions`, `finished` and `aborted`)."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0


@dataclass(slots=True, eq=False)
class SimSequence:
    """A request and where it stands. `target` tokens are to be prefilled: the prompt, and after a preemption also the output so far."""

    request: SimRequest
    key: tuple[int, int]  # order in the queue, and of preemption from behind
    tail: Run
    target: int
    transferred: bool
    admission: int = 0  # order in the batch
    computed: int = 0
    blocks: int = 0
    cached_blocks: int = 0
    cached_tokens: int = -1  # not known before the first admission
    counted: int = 0  # output tokens in the engine's counters
    delivered: int = 0  # output tokens in outputs
    # Output tokens that were out when the engine had done `start` decode steps; while it decodes, more follow from the steps since.
    base: int = 0
    start: int = 0
    decoding: bool = False
    version: int = 0  # of its place in the decode batch; marks what is out of date there
    gone: bool = False
