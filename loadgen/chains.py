"""Prefix-chained keys of a trace's prompts: equal keys are equal prefixes.

Sessions of scope "local" share nothing with each other. A repeated play of a session (`lap`) shares its tools and system prompt with
the earlier ones, as a new session of the same agent would, and nothing behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.prompts import seed_of
from loadgen.trace import BlockRuns, Session, block_count, block_ids, common_blocks

MOST_BRANCHES = 4  # histories remembered per session: agents interleave side requests (titles, summaries) with the main one


@dataclass(slots=True, frozen=True)
class ChainSeeds:
    """What a session's block ids are told apart by: `prefix` for tools and system prompt, `own` for what follows them."""

    prefix: int
    own: int
    prefix_blocks: int

    @classmethod
    def of(cls, session: Session, scope: str, salt: str = "", lap: int = 0) -> ChainSeeds:
        """`scope` names the space of local block ids: the root session's id, which its sub-agents share."""
        prefix = seed_of(salt, scope if session.scope == "local" else "")
        return cls(prefix, seed_of(prefix, lap) if lap else prefix, session.prefix_tokens // session.block_size)


def extend_chain(chain: list[int], blocks: BlockRuns, seeds: ChainSeeds) -> None:
    """Append the keys of those of `blocks` that the chain does not have yet."""
    parent = chain[-1] if chain else seeds.prefix
    for position, block in enumerate(block_ids(blocks, len(chain)), len(chain)):
        if position == seeds.prefix_blocks and seeds.own != seeds.prefix:
            parent = hash((parent, seeds.own))
        parent = hash((parent, block))
        chain.append(parent)


class SessionChains:
    """The keys of a session's prompts, one per recorded block, each at the cost of what is new in it."""

    def __init__(self, session: Session, scope: str, salt: str = "", lap: int = 0) -> None:
        self._session = session
        self._seeds = ChainSeeds.of(session, scope, salt, lap)
        self._branches: list[tuple[BlockRuns, list[int]]] = []  # most recently used first

    def of(self, index: int) -> list[int]:
        """Keys of the session's request `index`. The list may grow later; its first `block_count(request.blocks)` are this prompt's."""
        blocks = self._session.requests[index].blocks
        shared, place = 0, -1
        for i, (other, _) in enumerate(self._branches):
            if (common := common_blocks(other, blocks)) > shared:
                shared, place = common, i
        if place < 0:
            chain: list[int] = []
        elif shared == len(self._branches[place][1]):
            chain = self._branches.pop(place)[1]
        else:
            chain = self._branches[place][1][:shared]
        extend_chain(chain, blocks, self._seeds)
        assert len(chain) == block_count(blocks)
        self._branches = [(blocks, chain), *self._branches[: MOST_BRANCHES - 1]]
        return chain
