"""The simulated engine behind HTTP: looks like a vLLM server to gateways, clients and scrapers.

It answers chat completions, completions, responses, messages and embeddings, streamed or not, with the timing and the cache hits
that the engine's core says, and it can be told to fail (`/sim/faults`).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson
import xxhash
from pydantic import ValidationError

from workers.profile import WorkerProfile
from workers.simanswer import Answer, answer_to
from workers.simdialects import Dialect, Usage, dialect_for, error_body
from workers.simengine import SimEngine, SimRequest
from workers.simfaults import Faults
from workers.simhttp import Connection, HttpRequest
from workers.simmetrics import metrics_page
from workers.simpace import PacedEngine
from workers.simprompt import BYTES_PER_TOKEN, RENDERERS, PromptError, block_hashes, embedding_inputs

VERSION = "0.32.0+sim"
_PARTS_OF_ARGUMENTS = 4


class RequestError(Exception):
    """A request that the engine refuses."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


class Exchange:
    """One inference request on its way: takes the engine's tokens and writes them in the client's dialect."""

    def __init__(self, server: SimServer, connection: Connection, dialect: Dialect, request: SimRequest, stream: bool) -> None:
        self._server = server
        self._connection = connection
        self._dialect = dialect
        self._request = request
        self._stream = stream
        self._usage = Usage(request.prompt_tokens)
        self._written = 0
        self._events = 0
        self._begun = False
        self._finished = False
        self._delay: asyncio.TimerHandle | None = None
        connection.work = self
        if stream:
            connection.start_stream()

    def submit(self, delay_s: float) -> None:
        """Hand the request to the engine, after a delay if a fault wants one."""
        if delay_s > 0:
            self._delay = asyncio.get_running_loop().call_later(delay_s, self.submit, 0.0)
        else:
            self._delay = None
            self._server.paced.submit(self._request, self.deliver)

    def deliver(self, tokens: int, finished: bool, cached_tokens: int) -> None:
        """Tokens from the engine."""
        self._usage.cached = cached_tokens
        self._usage.completion += tokens
        self._finished = finished
        if finished:
            self._server.answered(self._dialect.answer.reason)
        if self._stream:
            if not self._connection.paused:
                self._write()
        elif finished and self._connection.open:
            self._connection.respond(200, self._dialect.body(self._usage))

    def writable(self) -> None:
        """The client takes data again: send what came in the meantime."""
        if self._usage.completion > self._written:
            self._write()

    def disconnected(self) -> None:
        """The client went away: the engine drops the request at once."""
        if self._delay is not None:
            self._delay.cancel()
        if not self._finished:
            self._server.aborted()
        self._server.paced.abort(self._request.id)

    def _write(self) -> None:
        events = b""
        if not self._begun:
            self._begun = True
            events = self._dialect.begin(self._usage)
        if self._dialect.answer.call is not None:
            events += self._arguments()
        elif self._usage.completion > self._written:
            events += self._dialect.text(self._dialect.answer.text(self._written, self._usage.completion))
        self._written = self._usage.completion
        if self._finished:
            events += self._dialect.end(self._usage)
        dies_after = self._server.faults.die_after_chunks
        if dies_after is not None:
            events = self._cut(events, dies_after)
            if self._events >= dies_after:
                if events:
                    self._connection.send_events(events)
                self._connection.reset()
                return
        if events:
            self._connection.send_events(events, last=self._finished)

    def _arguments(self) -> bytes:
        """The arguments' events that are due with the tokens so far, in a few pieces like a real parser's."""
        call, total = self._dialect.answer.call, self._dialect.answer.tokens
        assert call is not None
        events, length = b"", len(call.arguments)
        for part in range(_PARTS_OF_ARGUMENTS):
            if self._written * _PARTS_OF_ARGUMENTS < (part + 1) * total <= self._usage.completion * _PARTS_OF_ARGUMENTS:
                fragment = call.arguments[part * length // _PARTS_OF_ARGUMENTS : (part + 1) * length // _PARTS_OF_ARGUMENTS]
                if fragment:
                    events += self._dialect.arguments(fragment)
        return events

    def _cut(self, events: bytes, limit: int) -> bytes:
        """The events that still fit `limit`; counts them."""
        kept = events.split(b"\n\n")[:-1][: limit - self._events]
        self._events += len(kept)
        return b"".join(event + b"\n\n" for event in kept)


class SimServer:
    """A simulated engine on a port; port 0 takes a free one. Use `start` and `stop`, or `async with`.

    `speed` makes everything that many times faster. `max_model_len` is in tokens and never above the KV capacity.
    """

    def __init__(
        self,
        profile: WorkerProfile,
        *,
        model: str = "sim",
        max_model_len: int | None = None,
        speed: float = 1.0,
        faults: Faults | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if speed <= 0:
            raise ValueError("speed must be above 0")
        self.profile = profile
        self.model = model
        self.speed = speed
        self.host = host
        self.port = port
        self.engine = SimEngine(profile, speed)
        capacity = self.engine.cache.capacity * profile.block_size
        self.max_model_len = min(max_model_len or capacity, capacity)
        if self.max_model_len < 1:
            raise ValueError(f"a KV capacity of {profile.kv_capacity_tokens} tokens holds no block of {profile.block_size}")
        self.faults = Faults()
        self.paced: PacedEngine
        self.requests_total = 0
        self.aborted_total = 0
        self.errors_total = 0
        self._first_faults = faults or Faults()
        self._finished = Counter({"stop": 0, "length": 0, "abort": 0})
        self._connections: set[Connection] = set()
        self._held: list[tuple[HttpRequest, Connection]] = []
        self._random = random.Random(0)
        self._server: asyncio.Server | None = None
        self._created = int(time.time())
        self._routes: dict[tuple[str, str], Callable[[Connection], None]] = {
            ("GET", "/health"): lambda connection: connection.respond(200),
            ("GET", "/ping"): lambda connection: connection.respond(200),
            ("POST", "/ping"): lambda connection: connection.respond(200),
            ("GET", "/version"): lambda connection: connection.respond(200, orjson.dumps({"version": VERSION})),
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/sim/state"): lambda connection: connection.respond(200, orjson.dumps(self.state())),
        }

    @property
    def url(self) -> str:
        """Where it listens; known once it has started."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        loop = asyncio.get_running_loop()
        self.paced = PacedEngine(self.engine)
        self.set_faults(self._first_faults)
        self._server = await loop.create_server(lambda: Connection(self._handle, self._connections), self.host, self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and drop all connections; a no-op if it has not started."""
        if self._server is None:
            return
        self._server.close()
        self.paced.pause()
        for connection in list(self._connections):
            connection.transport.abort()
        await self._server.wait_closed()
        self._server = None

    async def __aenter__(self) -> SimServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def set_faults(self, faults: Faults) -> None:
        """Have these faults from now on, and no others."""
        self.faults = faults
        self.engine.speed = self.speed / faults.slow_factor
        if faults.freeze:
            self.paced.pause()
            return
        self.paced.resume()
        held, self._held = self._held, []
        for request, connection in held:
            if connection.open:
                self._handle(request, connection)

    def state(self) -> dict[str, Any]:
        """What /sim/state shows."""
        cache = self.engine.cache
        return {
            "model": self.model,
            "running": self.engine.running,
            "waiting": self.engine.waiting,
            "connections": len(self._connections),
            "frozen_requests": sum(connection.open for _, connection in self._held),
            "blocks": {"capacity": cache.capacity, "used": cache.used, "cached": cache.cached, "block_size": self.profile.block_size},
            "requests_total": self.requests_total,
            "finished_total": self.engine.counters.finished,
            "aborted_total": self.aborted_total,
            "errors_total": self.errors_total,
            "preemptions_total": self.engine.counters.preemptions,
            "prefix_queries_total": self.engine.counters.prefix_queries,
            "prefix_hits_total": self.engine.counters.prefix_hits,
            "steps_total": self.paced.steps,
            "lag_s": self.paced.lag_s,
            "faults": self.faults.model_dump(),
        }

    def answered(self, reason: str) -> None:
        """Count a request that ended well; vLLM counts tool calls as stop."""
        self._finished["length" if reason == "length" else "stop"] += 1

    def aborted(self) -> None:
        """Count a request whose client went away."""
        self.aborted_total += 1
        self._finished["abort"] += 1

    # Routes

    def _handle(self, request: HttpRequest, connection: Connection) -> None:
        if request.path == "/sim/faults":
            self._change_faults(request, connection)
        elif self.faults.freeze and not request.path.startswith("/sim/"):
            self._held.append((request, connection))
        elif (route := self._routes.get((request.method, request.path))) is not None:
            route(connection)
        elif request.method == "POST" and request.path in RENDERERS:
            self._infer(request, connection)
        elif request.method == "POST" and request.path == "/v1/messages/count_tokens":
            self._count_tokens(request, connection)
        else:
            connection.respond(404, b'{"detail":"Not Found"}')

    def _models(self, connection: Connection) -> None:
        model = {
            "id": self.model, "object": "model", "created": self._created, "owned_by": "warmroute-sim",
            "root": self.model, "parent": None, "max_model_len": self.max_model_len,
        }  # fmt: skip
        connection.respond(200, orjson.dumps({"object": "list", "data": [model]}))

    def _metrics(self, connection: Connection) -> None:
        page = metrics_page(self.engine, self.model, self._finished)
        connection.respond(200, page, "text/plain; version=0.0.4; charset=utf-8")

    def _change_faults(self, request: HttpRequest, connection: Connection) -> None:
        if not connection.local:
            connection.respond(403, b'{"detail":"faults are set from this machine only"}')
            return
        if request.method == "POST":
            try:
                faults = Faults.model_validate_json(request.body)
            except ValidationError as error:
                connection.respond(400, orjson.dumps({"detail": str(error)}))
                return
            self.set_faults(faults)
        elif request.method == "DELETE":
            self.set_faults(Faults())
        connection.respond(200, self.faults.model_dump_json().encode())

    def _count_tokens(self, request: HttpRequest, connection: Connection) -> None:
        try:
            stream = self._render("/v1/messages", self._parse(request.body))
        except RequestError as error:
            connection.respond(error.status, error_body(request.path, error.status, error.message, error.code, error.param))
            return
        connection.respond(200, orjson.dumps({"input_tokens": max(1, len(stream) // BYTES_PER_TOKEN)}))

    def _infer(self, request: HttpRequest, connection: Connection) -> None:
        self.requests_total += 1
        try:
            if self.faults.error_rate and self._random.random() < self.faults.error_rate:
                raise RequestError(self.faults.error_status, "injected fault")
            body = self._parse(request.body)
            dialect, sim_request = self._plan(request.path, body)
        except RequestError as error:
            self.errors_total += 1
            connection.respond(error.status, error_body(request.path, error.status, error.message, error.code, error.param))
            return
        stream = bool(body.get("stream")) and request.path != "/v1/embeddings"
        Exchange(self, connection, dialect, sim_request, stream).submit(self.faults.before_first_token_delay_s)

    # From a body to the engine's request

    def _parse(self, raw: bytes) -> dict[str, Any]:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise RequestError(400, f"the body is not valid JSON: {error}") from None
        if not isinstance(body, dict):
            raise RequestError(400, "the body must be a JSON object")
        model = body.get("model", self.model)
        if model != self.model:
            raise RequestError(404, f"The model `{model}` does not exist.", "model_not_found", "model")
        return body

    def _render(self, path: str, body: dict[str, Any]) -> bytes:
        try:
            return RENDERERS[path](body)
        except PromptError as error:
            raise RequestError(400, str(error)) from None
        except (AttributeError, TypeError) as error:
            raise RequestError(400, f"the body does not have the shape of a {path} request: {error}") from None

    def _plan(self, path: str, body: dict[str, Any]) -> tuple[Dialect, SimRequest]:
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens", "priority"):
            value = body.get(field)
            if value is not None and (not isinstance(value, int) or (value < 1 and field != "priority")):
                raise RequestError(400, f"{field} must be a positive integer, got {value!r}", param=field)
        prompt = self._render(path, body)
        # Bytes short of a token belong to the first output token, so that blocks and tokens agree.
        prompt_tokens = max(1, len(prompt) // BYTES_PER_TOKEN)
        if prompt_tokens >= self.max_model_len:
            raise self._too_long(path, prompt_tokens)
        block_bytes = self.profile.block_size * BYTES_PER_TOKEN
        seed = xxhash.xxh3_64_intdigest(str(body.get("cache_salt") or "").encode())
        hashes = block_hashes(prompt, block_bytes, seed)
        rest = prompt[len(hashes) * block_bytes :]
        parent = hashes[-1] if hashes else seed
        answer_seed = xxhash.xxh3_64_intdigest(rest, parent)
        id = os.urandom(16).hex()
        vectors = len(embedding_inputs(body)) if path == "/v1/embeddings" else 0
        try:
            answer = self._answer(path, body, answer_seed, self.max_model_len - prompt_tokens)
            dialect = dialect_for(path, body, id, int(time.time()), self.model, answer, vectors, answer_seed)
        except (AttributeError, TypeError, LookupError) as error:
            raise RequestError(400, f"the body does not have the shape of a {path} request: {error}") from None
        hashes += block_hashes(rest + answer.rendered(), block_bytes, parent)
        return dialect, SimRequest(id, hashes, prompt_tokens, answer.tokens, body.get("priority") or 0)

    def _answer(self, path: str, body: dict[str, Any], seed: int, room: int) -> Answer:
        if path == "/v1/embeddings":
            return Answer(seed, 1, "stop")
        answer = answer_to(path, body, seed, room)
        if answer.tokens > room:
            raise RequestError(400, f"a tool call of {answer.tokens} tokens does not fit the {room} tokens left", "context_length_exceeded")
        return answer

    def _too_long(self, path: str, tokens: int) -> RequestError:
        if path == "/v1/messages":
            # Clients look for these words.
            return RequestError(400, f"prompt is too long: {tokens} tokens > {self.max_model_len} maximum", "context_length_exceeded")
        message = f"This model's maximum context length is {self.max_model_len} tokens. However, your request has {tokens} input tokens."
        return RequestError(400, message, "context_length_exceeded")


async def serve(
    profile: WorkerProfile,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    model: str = "sim",
    max_model_len: int | None = None,
    speed: float = 1.0,
    faults: Faults | None = None,
    ready: asyncio.Event | None = None,
) -> None:
    """Run a simulated engine until cancelled; `ready` is set once it listens."""
    server = SimServer(profile, model=model, max_model_len=max_model_len, speed=speed, faults=faults, host=host, port=port)
    async with server:
        if ready is not None:
            ready.set()
        await asyncio.Event().wait()
