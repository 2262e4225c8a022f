"""Synthetic workloads of published studies, as sessions. The same arguments give the same sessions.

| workload | what it stands for                                     | defined by                                             |
|----------|--------------------------------------------------------|--------------------------------------------------------|
| b2b_saas | a service's customers, each with a long prompt prefix  | llm-d: 150 groups x 5 prompts, open loop in stages     |
| code_gen | conversations over a code base, a long prefix for each | llm-d: 3K-100K system prompt, 2-20 turns, closed loop  |
| uniform  | requests that share nothing: load alone matters        | lengths evenly spread between two bounds               |

Requests of `b2b_saas` and `uniform` are lone ones: their clients name no session. Those of `code_gen` are conversations of coding
agents, which do (session headers, `prompt_cache_key`); `named=False` takes the names away, as in llm-d's own study.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from loadgen.trace import BlockRuns, Request, Session

BLOCK_TOKENS = 64
MODEL = "workload"
_IDS = 1 << 20  # block ids set aside for each prompt or conversation

Stage = tuple[float, float]
"""(requests per second, seconds)."""

# llm-d's rates: a warm-up, then these. 50 s each is ours: the study holds some of them longer.
B2B_STAGES: tuple[Stage, ...] = tuple((float(rate), 50.0) for rate in (15, 3, 10, 15, 20, 22, 25, 30, 35, 40, 43, 46, 49, 52, 55, 57, 60))


def poisson_times(stages: Sequence[Stage], rng: random.Random) -> Iterator[float]:
    """Arrival times in seconds: Poisson at each stage's rate for the stage's time."""
    begin = 0.0
    for rate, seconds in stages:
        now = begin
        while rate > 0 and (now := now + rng.expovariate(rate)) < begin + seconds:
            yield now
        begin += seconds


def b2b_saas(
    stages: Sequence[Stage] = B2B_STAGES,
    seed: int = 0,
    *,
    groups: int = 150,
    prompts_per_group: int = 5,
    system_tokens: int = 6_000,
    question_tokens: int = 1_200,
    output_tokens: int = 1_000,
) -> list[Session]:
    """llm-d's b2b-saas: each group shares a system prompt; all prompts are sent in one shuffled order, over and over.

    A prompt comes again whole, so that a cache of `groups * system_tokens + groups * prompts_per_group * question_tokens` tokens (1.8M)
    hits nearly everything.
    """
    rng = random.Random(f"{seed} b2b-saas")
    system_blocks, whole_blocks = system_tokens // BLOCK_TOKENS, (system_tokens + question_tokens) // BLOCK_TOKENS
    prompts: list[BlockRuns] = []
    for number in range(groups * prompts_per_group):
        group = number // prompts_per_group
        own = (groups + number) * _IDS
        prompts.append(((group * _IDS, system_blocks), (own, whole_blocks - system_blocks)))
    rng.shuffle(prompts)
    sessions = []
    for number, start in enumerate(poisson_times(stages, rng)):
        request = Request(system_tokens + question_tokens, output_tokens, prompts[number % len(prompts)], model=MODEL)
        sessions.append(
            Session(f"b2b-{number}", [request], BLOCK_TOKENS, "global", system_tokens=system_tokens, start_s=start, named=False)
        )
    return sessions


def code_gen(conversations: int, seed: int = 0, *, named: bool = True) -> list[Session]:
    """llm-d's code-gen: every conversation has a system prompt of its own of 3K to 100K tokens (mean 55K) and 2 to 20 turns (mean 6);
    a turn adds 100 to 10K tokens (mean 1,500) to all that was said before and is answered with 50 to 4K (mean 800). No think time.

    Bounds and means are the study's; the shape between them is the one that assumes nothing else (see `bounded`).
    """
    sessions = []
    for number in range(conversations):
        rng = random.Random(f"{seed} code-gen {number}")
        system = int(bounded(rng, 3_000, 100_000, 55_000))
        turns = round(bounded(rng, 2, 20, 6))
        requests, tokens = [], system
        for _ in range(turns):
            tokens += int(bounded(rng, 100, 10_000, 1_500))
            output = int(bounded(rng, 50, 4_000, 800))
            requests.append(Request(tokens, output, ((number * _IDS, tokens // BLOCK_TOKENS),), model=MODEL))
            tokens += output
        sessions.append(Session(f"code-{number}", requests, BLOCK_TOKENS, "global", system_tokens=system, named=named))
    return sessions


def uniform(
    requests: int,
    seed: int = 0,
    *,
    rate: float = 1.0,
    input_tokens: tuple[int, int] = (500, 8_000),
    output_tokens: tuple[int, int] = (50, 500),
) -> list[Session]:
    """Lone requests that share nothing, lengths evenly spread between the bounds, Poisson arrivals at `rate` per second."""
    rng = random.Random(f"{seed} uniform")
    sessions, now = [], 0.0
    for number in range(requests):
        now += rng.expovariate(rate)
        tokens, output = rng.randint(*input_tokens), rng.randint(*output_tokens)
        request = Request(tokens, output, ((number * _IDS, tokens // BLOCK_TOKENS),), model=MODEL)
        sessions.append(Session(f"uniform-{number}", [request], BLOCK_TOKENS, "global", start_s=now, named=False))
    return sessions


def bounded(rng: random.Random, low: float, high: float, mean: float) -> float:
    """A draw between two bounds with the given mean: of all such distributions the one of greatest entropy, an exponential cut off at
    both ends (rising where the mean is above the middle)."""
    if not low < mean < high:
        raise ValueError(f"the mean {mean:g} must lie between {low:g} and {high:g}")
    slope = _slope((mean - low) / (high - low))
    share = rng.random()
    if abs(slope) < 1e-6:
        return low + (high - low) * share
    return low + (high - low) * math.log1p(share * math.expm1(slope)) / slope


@lru_cache(maxsize=64)
def _slope(mean: float) -> float:
    """k of the density ~ exp(k x) on [0, 1] whose mean is `mean`."""
    low, high = -500.0, 500.0
    for _ in range(80):
        middle = (low + high) / 2
        if _mean(middle) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _mean(slope: float) -> float:
    if abs(slope) < 1e-6:
        return 0.5 + slope / 12
    if slope < 0:  # by symmetry, so that nothing overflows
        return 1.0 - _mean(-slope)
    return 1.0 / -math.expm1(-slope) - 1.0 / slope
