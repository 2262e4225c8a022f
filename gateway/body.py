"""Reading a request body: JSON fields and the prompt's block chain, at a cost that follows the new turn, not the history.

An agent's next request starts with the same bytes as its last one. So the reader keeps, for the raw bytes up to the end of
the conversation, the chain so far; a body that begins with those bytes is parsed only from there. Which prefix is known is
found by a rolling hash over fixed raw blocks and a comparison of the last bytes: no session id is needed.

The split is safe because JSON proves it: the text from the split on, put behind `{"messages":[`, is valid JSON only if the
split stood directly in the top-level array (anything deeper leaves brackets unbalanced).
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from gateway.dialects import BadRequest, Dialect
from kvindex.chain import BlockChain, ChainState, identity_seed, short

RAW_BLOCK = 8192  # bytes; granularity at which known raw prefixes are found
TRACKED_BLOCKS = 2  # bodies shorter than this many index blocks are placed by load alone
# Anthropic's clients mark the last messages with cache_control and unmark them in the next turn, so their bytes change.
_MARKED_ITEMS = 3


@dataclass(slots=True)
class _Checkpoint:
    """What is known about a raw prefix that ends between two items of the conversation, or at its end."""

    offset: int  # where the prefix ends in the raw body
    rest: bytes  # its bytes after the last whole raw block
    head_fields: dict[str, Any]  # top-level fields that stand before the conversation
    following: str | None  # the field that stands behind it
    seed: int
    head: bytes  # canonical bytes before the conversation (tools, system)
    state: ChainState  # chain over head and the items in the prefix
    volatile: bool
    head_cost: int  # bytes of `head_fields` as JSON, which the checkpoints of one conversation share
    cost: int  # bytes it keeps alive, roughly


@dataclass(slots=True)
class ParsedBody:
    """Fields (the conversation's field holds only the items from the reuse point on) and the chain of the whole prompt."""

    fields: dict[str, Any]
    chain: BlockChain
    volatile: bool  # a system prompt starts with a line that changes with every request


def loads(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises BadRequest with the place of the fault.

    A lone surrogate (`\\ud83d`), which clients do send and orjson refuses, is accepted: the session would be poisoned
    otherwise, since its history is sent again with every turn.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if b"\\ud" not in body and b"\\uD" not in body:
            raise BadRequest(f"the body is not valid JSON: {error}") from None
        try:
            fields = json.loads(body, parse_constant=_no_constants, parse_float=_finite)
        except (ValueError, RecursionError) as again:
            raise BadRequest(f"the body is not valid JSON: {again}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    return fields


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number} is out of range")
    return value


def _no_constants(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_SPACE = b" \t\r\n"


def _json_size(fields: dict[str, Any]) -> int:
    try:
        return len(orjson.dumps(fields))
    except (orjson.JSONEncodeError, RecursionError):  # lone surrogates, integers beyond 64 bits
        return len(repr(fields))


_OPENING = b'{"\\u0000":['
_CONTINUED = "\0"  # no client's field


def _continued(dialect: Dialect, text: bytes, following: str | None) -> dict[str, Any] | None:
    """Parse `text`, which goes on inside the conversation; None where it does not.

    What follows the array tells whether it is the conversation or another one further on: its field must come next, and the
    conversation must not come once more.
    """
    try:
        fields: dict[str, Any] = orjson.loads(_OPENING + text)
    except orjson.JSONDecodeError:
        return None
    names = iter(fields)
    next(names)
    if next(names, None) != following or dialect.items_key in fields:
        return None
    return fields


def _following(dialect: Dialect, fields: dict[str, Any]) -> str | None:
    """The field behind the conversation, None where that is the last."""
    names = iter(fields)
    for name in names:
        if name == dialect.items_key:
            break
    return next(names, None)


def _end_of_items(dialect: Dialect, body: bytes, following: str | None) -> int:
    """Where the bracket that closes the conversation stands, in all likelihood (a resumed parse proves it); 0 if unclear."""
    if following is None:
        return max(0, body.rfind(b"]"))
    at = body.rfind(b'"%b"' % following.encode("utf-8", "surrogatepass"))
    end = max(0, body.rfind(b"]", 0, at)) if at > 0 else 0
    # of a field that is given twice the last counts, and this end may be the first one's
    return end if body.find(b'"%b"' % dialect.items_key.encode(), end) < 0 else 0


class BodyReader:
    """Parses bodies and remembers prefixes, least recently used out first, within `max_bytes`."""

    def __init__(self, block_bytes: int = 512, max_bytes: int = 64 * 1024 * 1024):
        self.block_bytes = block_bytes
        self.max_bytes = max_bytes
        self.kept_bytes = 0
        self._checkpoints: OrderedDict[int, _Checkpoint] = OrderedDict()

    def read(self, dialect: Dialect, body: bytes, tenant: str = "") -> ParsedBody:
        """Parse `body`. Raises BadRequest."""
        if len(body) < TRACKED_BLOCKS * self.block_bytes:
            # a prompt this short costs less to prefill anew than any worker's prefill costs at least: no identity, only a length
            fields = loads(body)
            dialect.items(fields)
            return ParsedBody(fields, BlockChain([], len(body)), dialect.is_volatile(fields))
        if len(body) < 2 * RAW_BLOCK:
            return self._read_whole(dialect, body, tenant, None)
        view = memoryview(body)
        digest = identity_seed(dialect.name, tenant)
        digests = [
            digest := xxh3_64_intdigest(view[at : at + RAW_BLOCK], digest) for at in range(0, len(body) - RAW_BLOCK + 1, RAW_BLOCK)
        ]
        checkpoints = self._checkpoints
        for block in range(len(digests), 0, -1):
            known = checkpoints.get(digests[block - 1])
            if known is not None and body.startswith(known.rest, block * RAW_BLOCK):
                parsed = self._resume(dialect, body, known, digests, tenant)
                if parsed is not None:
                    checkpoints.move_to_end(digests[block - 1])
                    return parsed
        return self._read_whole(dialect, body, tenant, digests)

    def _resume(self, dialect: Dialect, body: bytes, known: _Checkpoint, digests: list[int], tenant: str) -> ParsedBody | None:
        """Parse from a checkpoint on; None where what follows it changes the prompt before it (new tools, model ...)."""
        tail_text = body[known.offset :].lstrip(_SPACE)
        if tail_text.startswith(b","):
            tail_text = tail_text[1:]
        tail = _continued(dialect, tail_text, known.following)
        if tail is None:
            return None
        items = tail.pop(_CONTINUED)
        fields = {**known.head_fields, dialect.items_key: items, **tail}
        if self._seed(dialect, fields, tenant) != known.seed or dialect.head_bytes(fields) != known.head:
            return None
        volatile = known.volatile or dialect.is_volatile(fields)
        return self._finish(
            dialect, body, fields, items, known.state, known.seed, known.head, digests, known.offset, volatile, known.head_cost
        )

    def _read_whole(self, dialect: Dialect, body: bytes, tenant: str, digests: list[int] | None) -> ParsedBody:
        fields = loads(body)
        items = dialect.items(fields)
        seed = self._seed(dialect, fields, tenant)
        head = dialect.head_bytes(fields)
        state = ChainState.start(seed, self.block_bytes)
        if head:
            state = state.extend(head)
        volatile = dialect.is_volatile(fields)
        if digests is None:
            return ParsedBody(fields, state.extend(dialect.items_bytes(items)).chain(), volatile)
        return self._finish(dialect, body, fields, items, state, seed, head, digests, 0, volatile)

    def _finish(
        self,
        dialect: Dialect,
        body: bytes,
        fields: dict[str, Any],
        items: list[Any],
        state: ChainState,
        seed: int,
        head: bytes,
        digests: list[int],
        start: int,
        volatile: bool,
        head_cost: int | None = None,
    ) -> ParsedBody:
        """Chain the items from `state` on, leaving a checkpoint as late in the body as the next turn can be sure to repeat."""
        following = _following(dialect, fields)
        if dialect.style == "anthropic":
            offset, after = self._late_item(dialect, body, items, start, following)
        else:
            offset, after = _end_of_items(dialect, body, following), 0
        before = len(items) - after
        state = state.extend(dialect.items_bytes(items[:before] if after else items))
        blocks = offset // RAW_BLOCK
        if blocks and offset > start:
            rest = body[blocks * RAW_BLOCK : offset]
            head_fields = dict(takewhile(lambda field: field[0] != dialect.items_key, fields.items()))
            if head_cost is None:
                head_cost = _json_size(head_fields)
            cost = 8 * len(state.hashes) + len(head) + len(rest) + head_cost + 1024
            checkpoint = _Checkpoint(offset, rest, head_fields, following, seed, head, state, volatile, head_cost, cost)
            self._keep(digests[blocks - 1], checkpoint)
        if after:
            state = state.extend(dialect.items_bytes(items[before:]))
        return ParsedBody(fields, state.chain(), volatile)

    def _late_item(
        self, dialect: Dialect, body: bytes, items: list[Any], start: int, following: str | None
    ) -> tuple[int, int]:
        """Where one of the last items starts, and how many items there are from it on; (0, 0) where that is not clear."""
        if len(items) <= _MARKED_ITEMS or not isinstance(items[-1], dict) or not items[-1]:
            return 0, 0
        pattern = b'{"%b"' % next(iter(items[-1])).encode("utf-8", "surrogatepass")
        offset = len(body)
        for _ in range(_MARKED_ITEMS):
            offset = body.rfind(pattern, start, offset)
            if offset <= start:
                return 0, 0
        continued = _continued(dialect, body[offset:], following)
        if continued is None:
            return 0, 0
        count = len(continued[_CONTINUED])
        return (offset, count) if count < len(items) else (0, 0)

    def _keep(self, digest: int, checkpoint: _Checkpoint) -> None:
        checkpoints = self._checkpoints
        replaced = checkpoints.pop(digest, None)
        self.kept_bytes += checkpoint.cost - (replaced.cost if replaced else 0)
        checkpoints[digest] = checkpoint
        while self.kept_bytes > self.max_bytes:
            _, oldest = checkpoints.popitem(last=False)
            self.kept_bytes -= oldest.cost

    def _seed(self, dialect: Dialect, fields: dict[str, Any], tenant: str) -> int:
        """The parts of the identity that stand outside the prompt text: model, tenant, salt, kind of rendering."""
        kind = dialect.name if dialect.name in ("completions", "embeddings") else "chat"
        return identity_seed(short(str(fields.get("model"))), kind, tenant, short(str(fields.get("cache_salt") or "")))
