"""The simulated engine's decode batch, at the cost of what happens in a step instead of the batch's size."""

from __future__ import annotations

import heapq
import math

from workers.simrequest import SimSequence


class DecodeBatch:
    """The requests that decode, in the order in which they began.

    All of them gain tokens at one `rate` (tokens per step), so everything follows from one number, the decode `steps` done so far, and
    only two kinds of events need looking after: a request ends, or it needs another KV block. Each waits in a heap under the step at
    which it is due; entries of requests that left are dropped when they surface.
    """

    def __init__(self, rate: float, block_size: int) -> None:
        self.rate = rate
        self.block_size = block_size
        self.steps = 0
        self.members: dict[SimSequence, None] = {}
        self._ends: list[tuple[int, int, int, SimSequence]] = []
        self._full: list[tuple[int, int, int, SimSequence]] = []
        self._entries = 0
        self._tokens = 0.0  # KV tokens of all members, less what has come since: rate x members x steps

    def __len__(self) -> int:
        return len(self.members)

    @property
    def kv_tokens(self) -> float:
        """KV tokens that a step reads; with a fractional rate, members count with their fractions."""
        return self._tokens + self.rate * len(self.members) * self.steps

    def emitted(self, sequence: SimSequence) -> int:
        """Output tokens of a member so far."""
        return self._emitted_at(sequence, self.steps)

    def join(self, sequence: SimSequence) -> None:
        """Let a request decode from the next step on; its `base` output tokens are out."""
        sequence.decoding = True
        sequence.start = self.steps
        self.members[sequence] = None
        self._tokens += self._offset(sequence)
        due = self.steps + self._steps_for(sequence.request.max_tokens - sequence.base)
        self._entries += 1
        heapq.heappush(self._ends, (due, self._entries, sequence.version, sequence))
        self.blocks_given(sequence)

    def leave(self, sequence: SimSequence) -> None:
        """Take a member out and fix its output so far."""
        self._tokens -= self._offset(sequence)
        del self.members[sequence]
        if not self.members:
            self._tokens = 0.0  # no rounding errors over millions of steps
        sequence.base = self._emitted_at(sequence, self.steps)
        sequence.decoding = False
        sequence.version += 1

    def steps_to_end(self) -> int:
        """Steps until the first member ends; there must be one."""
        ends = self._ends
        while ends[0][2] != ends[0][3].version:
            heapq.heappop(ends)
        return ends[0][0] - self.steps

    def ended(self) -> list[SimSequence]:
        """Members that have all their tokens. Each is told once."""
        return self._due(self._ends, self.steps)

    def growing(self, ahead: int) -> list[SimSequence]:
        """Members that need blocks for the next `ahead` steps. Each is told once: `blocks_given` asks for its next time."""
        return self._due(self._full, self.steps + ahead)

    def missing_blocks(self, sequence: SimSequence, ahead: int) -> int:
        """Blocks that a member needs for `ahead` more steps and has not. The newest token's KV is only written by the step after it."""
        kv_tokens = sequence.request.prompt_tokens + self._emitted_at(sequence, self.steps + ahead) - 1
        return -(-kv_tokens // self.block_size) - sequence.blocks

    def blocks_given(self, sequence: SimSequence) -> None:
        """A member has got what it was missing: look after the next block."""
        outgrown = sequence.blocks * self.block_size - sequence.request.prompt_tokens + 2
        if outgrown <= sequence.request.max_tokens:
            due = sequence.start + self._steps_for(outgrown - sequence.base)
            self._entries += 1
            heapq.heappush(self._full, (due, self._entries, sequence.version, sequence))

    def steps_within(self, steps: int, blocks: int) -> int:
        """How many of `steps` steps can be done with `blocks` more blocks; at least 1."""
        if len(self.members) * (math.ceil(steps * self.rate / self.block_size) + 1) <= blocks:
            return steps
        low, high = 1, steps
        while low < high:
            middle = (low + high + 1) // 2
            if sum(max(0, self.missing_blocks(sequence, middle)) for sequence in self.members) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def _emitted_at(self, sequence: SimSequence, steps: int) -> int:
        # 1e-9: 5 steps at a rate of 2.6 are 13 tokens, whatever the floats say
        return min(sequence.request.max_tokens, sequence.base + int((steps - sequence.start) * self.rate + 1e-9))

    def _steps_for(self, tokens: int) -> int:
        """Steps after which at least `tokens` have come."""
        if self.rate == 1.0:
            return max(0, tokens)
        steps = max(0, math.ceil((tokens - 1e-9) / self.rate))
        while int(steps * self.rate + 1e-9) < tokens:
            steps += 1
        while steps and int((steps - 1) * self.rate + 1e-9) >= tokens:
            steps -= 1
        return steps

    def _offset(self, sequence: SimSequence) -> float:
        return sequence.request.prompt_tokens + sequence.base - self.rate * sequence.start

    @staticmethod
    def _due(heap: list[tuple[int, int, int, SimSequence]], steps: int) -> list[SimSequence]:
        found: list[SimSequence] = []
        while heap and heap[0][0] <= steps:
            _, _, version, sequence = heapq.heappop(heap)
            if version == sequence.version:
                found.append(sequence)
        return found
