"""A session's requests as an agent would send them: chat messages that grow, encoded once.

A turn's prompt is a stream of blocks cut into messages: the system message (tools and system prompt), the user's first message, then
for every later turn the answer before it (an assistant message) and the tool result or user message that follows. Where a turn's
blocks extend the turn before, its messages extend that turn's messages, and its body starts with the same bytes; where they diverge,
the messages up to the divergence stay. The assistant's text is the recorded block content, not what the worker answered, so that a
prompt depends on the trace alone.

The encoded history is kept as bytes and only the new messages are encoded: a client that re-encodes a 100k-token history at every
turn becomes the bottleneck it is meant to measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import orjson
import xxhash

from loadgen.chains import MOST_BRANCHES, ChainSeeds, extend_chain
from loadgen.prompts import BYTES_PER_TOKEN, block_text
from loadgen.trace import BlockRuns, Request, Session, block_count, block_ids, block_runs, common_blocks

Dialect = Literal["chat", "completions"]
Role = Literal["system", "user", "assistant", "tool"]

PATHS: dict[Dialect, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_TEXT_BLOCK = 16  # tokens; granularity of the hit bound for real text, as fine as an engine's block


@dataclass(slots=True)
class Prompt:
    """One request ready to be sent."""

    body: bytes
    chain: list[int]  # prefix-chained keys of the prompt's blocks; may grow later, so only the first `blocks` are this prompt's
    blocks: int
    block_size: int  # tokens
    tokens: int  # as recorded


@dataclass(slots=True)
class _Message:
    role: Role
    start: int  # tokens
    end: int
    calls_tool: bool = False  # of an assistant: a tool message follows
    encoded_end: int = 0  # bytes of the encoded history up to this message's end


@dataclass(slots=True)
class _Branch:
    """One history of the session: the latest prompt along it, and its encoded messages."""

    stream: BlockRuns  # all blocks of the prompt, its partial last one included
    recorded: int  # how many of them the trace recorded; only these count for the hit bound
    tokens: int
    messages: list[_Message]
    encoded: bytearray
    chain: list[int]


class Conversation:
    """Renders the requests of one play of a session, in order.

    `salt` makes a run's prompts differ from every other run's. `lap` makes a repeated session differ from its earlier plays, except
    in the tools and system prompt, which a new session of the same agent shares. `scope` names the space of local block ids: the
    root session's id, which its sub-agents share.
    """

    def __init__(
        self,
        session: Session,
        *,
        scope: str,
        salt: str = "",
        lap: int = 0,
        model: str,
        dialect: Dialect = "chat",
        ignore_eos: bool = True,
    ) -> None:
        self.session = session
        self.dialect = dialect
        self._block = session.block_size
        self._seeds = ChainSeeds.of(session, scope, salt, lap)
        self._branches: list[_Branch] = []  # most recently used first
        self._salt_line = f"{salt}.{lap}"
        opening = b'"messages":[' if dialect == "chat" else b'"prompt":"'
        self._head = b'{"model":' + orjson.dumps(model) + b"," + opening
        self._close = b"]" if dialect == "chat" else b'"'
        self._options = b',"stream":true,"stream_options":{"include_usage":true}'
        if ignore_eos:
            self._options += b',"ignore_eos":true'

    def prompt(self, index: int) -> Prompt:
        """The body of the session's request `index` (call once for each, in the order of sending)."""
        request = self.session.requests[index]
        if request.text is not None:
            return self._text_prompt(request, request.text)
        branch = self._advance(index)
        body = self._body(bytes(branch.encoded), request.output_tokens)
        return Prompt(body, branch.chain, branch.recorded, self._block, request.input_tokens)

    def _body(self, encoded: bytes, output_tokens: int) -> bytes:
        return b'%b%b%b,"max_tokens":%d%b}' % (self._head, encoded, self._close, max(1, output_tokens), self._options)

    # Real text

    def _text_prompt(self, request: Request, text: str) -> Prompt:
        """A prompt the trace holds as text goes out whole, behind a line that separates runs and laps."""
        text = f"# session {self._salt_line}\n{text}"
        data = text.encode()
        chain: list[int] = []
        parent = self._seeds.own
        step = _TEXT_BLOCK * BYTES_PER_TOKEN
        for start in range(0, len(data) - step + 1, step):
            parent = xxhash.xxh3_64_intdigest(data[start : start + step], parent)
            chain.append(parent)
        encoded = orjson.dumps(text)
        content = b'{"role":"user","content":' + encoded + b"}" if self.dialect == "chat" else encoded[1:-1]
        body = self._body(content, request.output_tokens)
        return Prompt(body, chain, len(chain), _TEXT_BLOCK, max(1, len(data) // BYTES_PER_TOKEN))

    # Blocks

    def _stream(self, index: int) -> BlockRuns:
        """The blocks of the whole prompt, the partial last one (which some traces leave out) included.

        When a later turn extends this one, the left-out block is the one that the later turn has in its place: then this prompt's
        bytes are a prefix of that one's.
        """
        requests = self.session.requests
        request = requests[index]
        recorded = block_count(request.blocks)
        missing = -(-request.input_tokens // self._block) - recorded
        if missing <= 0:
            return request.blocks
        last = index  # of the turns that grow by less than a block and so have the same recorded blocks
        while recorded and last + 1 < len(requests) and requests[last + 1].blocks == request.blocks:
            last += 1
        rest: list[int] = []
        if recorded and last + 1 < len(requests) and common_blocks(request.blocks, requests[last + 1].blocks) == recorded:
            rest = block_ids(requests[last + 1].blocks, recorded)[:missing]
        unique = -((last + 1) << 24)  # recorded ids are not negative
        rest += range(unique, unique + missing - len(rest))
        return request.blocks + block_runs(rest)

    def _advance(self, index: int) -> _Branch:
        """The branch that now holds the prompt of request `index`."""
        request = self.session.requests[index]
        stream = self._stream(index)
        branch = max(self._branches, key=lambda b: common_blocks(b.stream, stream), default=None)
        if branch is None:
            branch = _Branch((), 0, 0, [], bytearray(), [])
        else:
            common = min(common_blocks(branch.stream, stream) * self._block, branch.tokens, request.input_tokens)
            if common == branch.tokens:
                self._branches.remove(branch)
            else:
                branch = self._fork(branch, stream, common)
        self._branches = [branch, *self._branches[: MOST_BRANCHES - 1]]
        self._lay_out(branch, index, stream)
        branch.stream, branch.recorded, branch.tokens = stream, block_count(request.blocks), request.input_tokens
        extend_chain(branch.chain, request.blocks, self._seeds)
        return branch

    def _fork(self, branch: _Branch, stream: BlockRuns, common: int) -> _Branch:
        """A copy of `branch` that ends before the message in which it diverges; that message is kept as a stub to be rendered anew."""
        whole = [message for message in branch.messages if message.end <= common]
        cut = next((message for message in branch.messages if message.start < common < message.end), None)
        encoded_end = whole[-1].encoded_end if whole else 0
        messages = [_Message(m.role, m.start, m.end, m.calls_tool, m.encoded_end) for m in whole]
        if cut is not None:
            messages.append(_Message(cut.role, cut.start, cut.end, cut.calls_tool, encoded_end=-1))
        shared = min(common_blocks(branch.stream, stream), branch.recorded)
        return _Branch((), 0, 0, messages, branch.encoded[:encoded_end], branch.chain[:shared])

    def _lay_out(self, branch: _Branch, index: int, stream: BlockRuns) -> None:
        """Append to the branch's messages what the prompt of request `index` adds, and encode it."""
        request = self.session.requests[index]
        total = request.input_tokens
        messages = branch.messages
        # The last message must be the user's or a tool's: an answer or a system prompt that would end this prompt is rendered anew.
        while messages and messages[-1].encoded_end >= 0 and messages[-1].end >= total and messages[-1].role in ("assistant", "system"):
            messages[-1].encoded_end = -1
        new = [messages.pop()] if messages and messages[-1].encoded_end < 0 else []
        if new:
            del branch.encoded[messages[-1].encoded_end if messages else 0 :]
            new[0].end = min(new[0].end, total)
        elif not messages and self.session.prefix_tokens:
            new.append(_Message("system", 0, max(1, min(self.session.prefix_tokens, total * 3 // 4))))
        last = new[-1] if new else messages[-1] if messages else None
        position = last.end if last else 0
        if position >= total:
            if last is not None and last.role in ("assistant", "system"):
                self._end_with_user(new, last, request)
        elif last is None or last.role == "system":
            new.append(_Message("user", position, total))
        elif last.role == "assistant":
            new.append(_Message("tool" if last.calls_tool else "user", position, total))
        else:
            answer = min(self.session.requests[index - 1].output_tokens if index else 0, total - position - 1)
            if answer > 0:
                calls_tool = request.kind == "tool"
                new.append(_Message("assistant", position, position + answer, calls_tool))
                new.append(_Message("tool" if calls_tool else "user", position + answer, total))
            else:
                new.append(_Message("user", position, total))
        for message in new:
            before = messages[-1] if messages else None
            if before is not None and self.dialect == "chat":
                branch.encoded += b","
            branch.encoded += self._encode(message, before, self._text(stream, message.start, message.end))
            message.encoded_end = len(branch.encoded)
            messages.append(message)

    @staticmethod
    def _end_with_user(new: list[_Message], last: _Message, request: Request) -> None:
        """Give the prompt's last token to a user or tool message, `last` being the answer or system prompt that would end it."""
        if last.end - last.start == 1:
            last.role, last.calls_tool = "user", False
            return
        role: Role = "tool" if last.calls_tool else "user"
        new.append(_Message(role, last.end - 1, last.end))
        last.end -= 1

    def _text(self, stream: BlockRuns, start: int, end: int) -> str:
        """The stream's text from token `start` to token `end`."""
        block = self._block
        first = start // block
        ids = block_ids(stream, first)[: -(-end // block) - first]
        parts = [
            block_text(block_id, block, self._seeds.prefix if position < self._seeds.prefix_blocks else self._seeds.own)
            for position, block_id in enumerate(ids, first)
        ]
        offset = first * block
        return "".join(parts)[(start - offset) * BYTES_PER_TOKEN : (end - offset) * BYTES_PER_TOKEN]

    def _encode(self, message: _Message, before: _Message | None, text: str) -> bytes:
        content = orjson.dumps(text)
        if self.dialect == "completions":
            return content[1:-1]
        if message.role == "tool" and before is not None:
            return b'{"role":"tool","tool_call_id":"call_%08x","content":%b}' % (before.start, content)
        if message.calls_tool:
            call = b'[{"id":"call_%08x","type":"function","function":{"name":"run","arguments":"{}"}}]' % message.start
            return b'{"role":"assistant","content":%b,"tool_calls":%b}' % (content, call)
        return b'{"role":"%b","content":%b}' % (message.role.encode(), content)
