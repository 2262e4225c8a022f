"""Synthetic agentic sessions, drawn from the percentile tables.

What a session looks like: one of a few harnesses gives it its tools and system prompt, so that sessions of one harness share their
leading blocks; a first message; then turns that each add the previous answer and a tool's result or a user's message. When the
context would exceed the limit, the session is compacted: tools and system prompt stay, a summary replaces the rest. Some steps spawn
sub-agents, which have a shorter prefix of their own. Block ids are global: shared prefixes use the low ids, each session its own range.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.quantiles import (
    FIRST_INPUT_TOKENS,
    NEW_TOKENS,
    OUTPUT_TOKENS,
    REQUESTS_PER_SESSION,
    TOOL_GAP_S,
    USER_GAP_S,
    Quantiles,
    draw,
    position_of,
)
from loadgen.trace import Request, Session, StepKind, block_runs

BLOCK_TOKENS = 64
MODEL = "agent"
USER_STEP_SHARE = 0.09
SESSIONS_WITH_AGENTS = 0.25  # 68 of 273 recorded sessions
AGENTS_PER_SESSION = (1, 1, 2, 2, 2, 3, 5)  # mean 2.3
AGENT_STEPS = (3, 6, 8, 10, 10, 13, 20)  # p50 10
MAX_GAP_S = 600.0
_SESSION_IDS = 1 << 20  # block ids set aside for each session


@dataclass(slots=True)
class _Harness:
    """An agent program: its share of the sessions, its tools and system prompt, and those of its sub-agents (tokens; first block id)."""

    share: float
    tool_tokens: int
    system_tokens: int
    first_block: int
    agent_tool_tokens: int
    agent_system_tokens: int
    agent_first_block: int


def generate(sessions: int, seed: int, max_context: int) -> list[Session]:
    """`sessions` sessions whose prompts and answers stay within `max_context` tokens (at least 4,096).

    The same arguments give the same sessions.
    """
    if max_context < 4096:
        raise ValueError("max_context must be at least 4096 tokens")
    harnesses = _harnesses(max_context)
    made = []
    for number in range(sessions):
        rng = random.Random(f"{seed}/{number}")
        harness = rng.choices(harnesses, [h.share for h in harnesses])[0]
        made.append(_SessionMaker(rng, harness, number, max_context).session())
    return made


def _harnesses(max_context: int) -> list[_Harness]:
    """Four harnesses around the recorded median of 15k tokens of tools and system prompt, smaller where the context limit is."""
    scale = min(1.0, max_context / 48_000)
    harnesses = []
    first_block = 1
    for share, tools, system in ((0.4, 12_200, 2_800), (0.3, 13_600, 3_900), (0.2, 8_900, 2_600), (0.1, 6_100, 1_500)):
        parts = [int(tokens * scale) for tokens in (tools, system, tools * 0.6, system * 0.3)]
        agent_first = first_block + (parts[0] + parts[1]) // BLOCK_TOKENS + 1
        harnesses.append(_Harness(share, parts[0], parts[1], first_block, parts[2], parts[3], agent_first))
        first_block = agent_first + (parts[2] + parts[3]) // BLOCK_TOKENS + 1
    return harnesses


class _Context:
    """A conversation's blocks: the harness's shared ones, then its own."""

    def __init__(self, prefix_tokens: int, first_block: int, ids: Iterator[int]) -> None:
        self._shared = list(range(first_block, first_block + prefix_tokens // BLOCK_TOKENS))
        self._ids = ids
        self.blocks = list(self._shared)
        self.tokens = prefix_tokens

    def grow(self, tokens: int) -> None:
        """Append `tokens` tokens; only full blocks have an id."""
        self.tokens += tokens
        self.blocks.extend(next(self._ids) for _ in range(self.tokens // BLOCK_TOKENS - len(self.blocks)))

    def compact(self, prefix_tokens: int, summary_tokens: int) -> None:
        """Replace everything behind the shared prefix by a summary."""
        self.blocks = list(self._shared)
        self.tokens = prefix_tokens
        self.grow(summary_tokens)


class _SessionMaker:
    def __init__(self, rng: random.Random, harness: _Harness, number: int, max_context: int) -> None:
        self._rng = rng
        self._harness = harness
        self._number = number
        self._max_context = max_context
        self._ids = iter(range((number + 1) * _SESSION_IDS, (number + 2) * _SESSION_IDS))

    def session(self) -> Session:
        harness = self._harness
        session = Session(
            id=f"session-{self._number:04d}",
            requests=[],
            block_size=BLOCK_TOKENS,
            scope="global",
            tool_tokens=harness.tool_tokens,
            system_tokens=harness.system_tokens,
            start_s=self._number * 10.0,
        )
        prefix = session.prefix_tokens
        first = max(prefix + 400, int(self._below(FIRST_INPUT_TOKENS, 0.6 * self._max_context)))
        steps = max(1, round(draw(REQUESTS_PER_SESSION, self._rng.random())))
        self._steps(session, _Context(prefix, harness.first_block, self._ids), first - prefix, steps, USER_STEP_SHARE)
        if len(session.requests) > 3 and self._rng.random() < SESSIONS_WITH_AGENTS:
            self._spawn_agents(session)
        return session

    def _steps(self, session: Session, context: _Context, first_tokens: int, steps: int, user_share: float) -> None:
        """Fill `session` with `steps` turns, `user_share` of which end with the user's turn."""
        prefix = session.prefix_tokens
        now = 0.0
        kind: StepKind = "user"
        gap = 0.0
        new_tokens = first_tokens
        for step in range(steps):
            output = max(1, int(self._below(OUTPUT_TOKENS, self._max_context / 8)))
            if step:
                # What is new is at least the answer before and the fewest tokens a tool result takes.
                before = session.requests[-1].output_tokens
                new_tokens = max(before + 16, int(self._below(NEW_TOKENS, self._max_context / 4)))
            if context.tokens + new_tokens + output > self._max_context:
                room = self._max_context - prefix - output
                context.compact(prefix, min(room, self._rng.randint(2_000, 6_000)))
            else:
                context.grow(new_tokens)
            now += gap
            request = Request(
                context.tokens, output, block_runs(context.blocks), t=round(now, 2), kind=kind, gap_s=round(gap, 3), model=MODEL
            )
            session.requests.append(request)
            now += 1.0 + output / 60  # a plausible answer time; closed-loop replay does not use it
            ends_turn = self._rng.random() < user_share or step == steps - 1
            request.stop = "end_turn" if ends_turn else "tool_use"
            kind = "user" if ends_turn else "tool"
            gap = min(MAX_GAP_S, draw(USER_GAP_S if ends_turn else TOOL_GAP_S, self._rng.random()))

    def _spawn_agents(self, session: Session) -> None:
        """Let a few steps spawn sub-agents; two of one step run side by side."""
        harness = self._harness
        for number in range(self._rng.choice(AGENTS_PER_SESSION)):
            parent = self._rng.choice([request for request in session.requests[:-1] if request.stop == "tool_use"] or session.requests[:1])
            agent = Session(
                id=f"agent_{number:03d}",
                requests=[],
                block_size=BLOCK_TOKENS,
                scope="global",
                tool_tokens=harness.agent_tool_tokens,
                system_tokens=harness.agent_system_tokens,
                start_s=parent.t + 1.0 + parent.output_tokens / 60,
                subagent_type=self._rng.choice(("Explore", "Plan", "general-purpose")),
            )
            context = _Context(agent.prefix_tokens, harness.agent_first_block, self._ids)
            self._steps(agent, context, self._rng.randint(400, 2_500), self._rng.choice(AGENT_STEPS), 0.0)  # nobody types to one
            parent.spawns.append(agent)

    def _below(self, table: Quantiles, limit: float) -> float:
        """A draw from the part of the table up to `limit`."""
        return draw(table, self._rng.random() * position_of(table, limit))
