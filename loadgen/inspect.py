"""What a trace holds: sizes, context lengths, gaps, and what a prefix cache could hit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from loadgen.bound import InfiniteCache, LruCache
from loadgen.conversation import Conversation
from loadgen.metrics import Samples
from loadgen.report import seconds
from loadgen.trace import Session

_PERCENTS = (50, 90, 99, 100)


@dataclass(slots=True)
class TraceShape:
    """Counts, token sums and percentiles (50, 90, 99, 100) of a trace, sub-agents included."""

    sessions: int
    agents: int
    requests: int
    input_tokens: int
    output_tokens: int
    hit_bound: float
    hit_bound_lru: float | None
    requests_per_session: list[float]
    context_tokens: list[float]
    answer_tokens: list[float]
    tool_gap_s: list[float]
    user_gap_s: list[float]

    def to_json(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in self.__slots__ if not isinstance(getattr(self, name), list)}
        lists = {name: getattr(self, name) for name in self.__slots__ if isinstance(getattr(self, name), list)}
        return numbers | {name: {f"p{p}": value for p, value in zip(_PERCENTS, values, strict=False)} for name, values in lists.items()}


def inspect(sessions: list[Session], kv_capacity_tokens: int | None = None) -> TraceShape:
    """The trace's shape. The LRU bound takes the requests in the order of their recorded times."""
    prompts = []  # (time, chain, blocks, block size, tokens)
    steps, contexts, answers, tool_gaps, user_gaps = Samples(), Samples(), Samples(), Samples(), Samples()
    for root in sessions:
        steps.add(len(root.requests))
        for session in root.tree():
            conversation = Conversation(session, scope=root.id, model="")
            begins = root.start_s + (session.start_s if session is not root else 0.0)
            for index, request in enumerate(session.requests):
                prompt = conversation.prompt(index)
                prompts.append((begins + request.t, prompt.chain, prompt.blocks, prompt.block_size, prompt.tokens))
                contexts.add(request.input_tokens)
                answers.add(request.output_tokens)
                if index:
                    (tool_gaps if request.kind == "tool" else user_gaps).add(request.gap_s)
    prompts.sort(key=lambda prompt: prompt[0])
    infinite = InfiniteCache()
    tokens = sum(prompt[4] for prompt in prompts)
    hits = sum(infinite.add(*prompt[1:]) for prompt in prompts)
    lru_hits = None
    if kv_capacity_tokens is not None:
        cache = LruCache(kv_capacity_tokens)
        lru_hits = sum(cache.add(*prompt[1:]) for prompt in prompts)
    requests = [request for root in sessions for session in root.tree() for request in session.requests]
    return TraceShape(
        sessions=len(sessions),
        agents=sum(len(list(root.tree())) - 1 for root in sessions),
        requests=len(requests),
        input_tokens=sum(request.input_tokens for request in requests),
        output_tokens=sum(request.output_tokens for request in requests),
        hit_bound=hits / tokens,
        hit_bound_lru=None if lru_hits is None else lru_hits / tokens,
        requests_per_session=_percentiles(steps),
        context_tokens=_percentiles(contexts),
        answer_tokens=_percentiles(answers),
        tool_gap_s=_percentiles(tool_gaps),
        user_gap_s=_percentiles(user_gaps),
    )


def _percentiles(samples: Samples) -> list[float]:
    return [value for percent in _PERCENTS if (value := samples.percentile(percent)) is not None]


def shape_table(shape: TraceShape) -> Table:
    table = Table(title="trace (lists are p50 / p90 / p99 / max)", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_row("sessions", f"{shape.sessions:,}")
    table.add_row("sub-agents", f"{shape.agents:,}")
    table.add_row("requests", f"{shape.requests:,}")
    table.add_row("input tokens", f"{shape.input_tokens:,}")
    table.add_row("output tokens", f"{shape.output_tokens:,}")
    table.add_row("hit bound (infinite cache)", f"{shape.hit_bound:.1%}")
    if shape.hit_bound_lru is not None:
        table.add_row("hit bound (pooled LRU)", f"{shape.hit_bound_lru:.1%}")
    for name, values in (
        ("requests per session", shape.requests_per_session),
        ("context tokens", shape.context_tokens),
        ("answer tokens", shape.answer_tokens),
    ):
        table.add_row(name, " / ".join(f"{value:,.0f}" for value in values) or "-")
    for name, values in (("gap after a tool call", shape.tool_gap_s), ("gap before a user message", shape.user_gap_s)):
        table.add_row(name, " / ".join(seconds(value) for value in values) or "-")
    return table
