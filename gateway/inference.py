"""The inference routes: one raw ASGI application, since every token passes here.

A request is read and parsed once, placed, and relayed. Nothing reaches the client before the worker's first output, so until
then any failure is answered by trying another worker; after that a broken stream ends with an in-band error of its dialect.
Every exit path releases the reservation and closes what is open towards the worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import time
from typing import Any

import orjson

from gateway.body import BodyReader, loads
from gateway.config import Config
from gateway.dialects import DIALECTS, SERVICE_TIERS, TIERS, VOLATILE_PREFIX, BadRequest, Dialect, Usage, scan_usage
from gateway.fleet import Fleet
from gateway.metrics import Histogram, Metrics
from gateway.session_key import session_key
from gateway.upstream import Exchange, Interrupted, Splice, UpstreamError
from routing.fleet import Worker
from routing.responses import Responses
from routing.router import Decision, NoWorker, RouteRequest

logger = logging.getLogger("warmroute.inference")

clock = time.perf_counter

Scope = dict[str, Any]

_BUFFER_LIMIT = 1 << 20  # an answer that is not a stream is held up to this size, so that a failure in it can still be retried
_USAGE_TAIL = 16 * 1024
_EVENT_LIMIT = 1 << 20  # a longer server-sent event is passed on unseen
_FORWARDED = frozenset((
    b"accept", b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta", b"x-session-id", b"endpoint-load-metrics-format",
))  # fmt: skip
_DROPPED = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"date", b"server", b"content-length", b"x-request-id",
))  # fmt: skip
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_EMPTY_CONTENT = re.compile(rb'"content"\s*:\s*(?:""|null)|"choices"\s*:\s*\[\s*\]|"delta"\s*:\s*\{\s*"role"\s*:\s*"\w+"\s*\}')
_CHAT_CONTENT = re.compile(rb'"(?:tool_calls|reasoning|reasoning_content|error)"\s*:\s*[^n\s]|"finish_reason"\s*:\s*"')
_RESPONSES_CONTENT = re.compile(rb'"type"\s*:\s*"(?:response\.(?!created|queued|in_progress)|error)')
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class _PAUSED:
    write_paused = True


class _Failed(Exception):
    """No worker could serve the request; the answer to the client."""

    def __init__(self, status: int, message: str, code: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s


class _WorkerError(Exception):
    """A worker answered with a 5xx before anything was sent; kept whole, to be passed on if no other worker does better."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes):
        super().__init__(str(status))
        self.status = status
        self.headers = headers
        self.body = body


class Relay:
    """One request on its way."""

    __slots__ = (
        "connection", "content_sent", "dialect", "exchange", "first_at", "gone", "hide_usage", "itl", "last_at", "marks", "output_events",
        "request_id", "send", "started", "started_at", "status", "streamed", "tier", "usage",
    )  # fmt: skip

    def __init__(self, dialect: Dialect, send: Any, connection: Any, started_at: float):
        self.dialect = dialect
        self.send = send
        self.connection = connection
        self.started_at = started_at
        self.exchange: Exchange | None = None
        self.gone = False  # the client left
        self.started = False  # a response head was sent
        self.content_sent = False  # something the client cannot see twice was sent
        self.streamed = False
        self.hide_usage = False  # the usage event was asked for by the gateway, not by the client
        self.first_at = 0.0
        self.last_at = started_at
        self.marks: list[float] = []  # when output events came, since `settle` was last called
        self.itl: Histogram | None = None
        self.output_events = 0
        self.status = 0
        self.tier = "standard"
        self.request_id = b""
        self.usage = Usage()

    def settle(self) -> bool:
        """Turn the marks of the events that have come into gaps; whether there were any."""
        marks = self.marks
        if not marks:
            return False
        if self.itl is not None:
            self.itl.observe_gaps(self.last_at, marks)
        self.output_events += len(marks)
        self.last_at = marks[-1]
        marks.clear()
        return True

    def client_left(self) -> None:
        """Called by the server when the client's connection is lost."""
        self.gone = True
        if self.exchange is not None:
            self.exchange.interrupt("client")


class Inference:
    """ASGI application for the routes in `DIALECTS`."""

    def __init__(self, config: Config, fleet: Fleet, metrics: Metrics):
        self.config = config
        self.fleet = fleet
        self.router = fleet.router
        self.sharing = fleet.sharing
        self.responses = Responses()
        self.metrics = metrics
        self.reader = BodyReader(fleet.router.block_units, int(config.index.prefix_memory_mb * (1 << 20)))
        self.max_body = int(config.listen.max_body_mb * (1 << 20))
        self.active: set[Relay] = set()
        self._ids = itertools.count(1)
        self._id_prefix = b"req_" + os.urandom(4).hex().encode()
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick(), name="keepalives and write timeouts")

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        dialect = DIALECTS[scope["path"]]
        extensions = scope.get("extensions") or {}
        connection = extensions.get("warmroute.connection")
        relay = Relay(dialect, send, connection, clock())
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        valid = given is not None and _REQUEST_ID.fullmatch(given)
        relay.request_id = given if valid else b"%b%x" % (self._id_prefix, next(self._ids))  # type: ignore[assignment]
        watcher: asyncio.Task[None] | None = None
        try:
            if connection is not None:
                connection.on_lost = relay.client_left
                if connection.disconnected:
                    return
                body = self._checked(headers, connection.take_body())
            else:  # another ASGI server, or a pipelined request: only receive() tells that the client left
                whole = await self._read_body(receive, headers)
                if whole is None:
                    return
                body = whole
                watcher = asyncio.create_task(_watch(receive, relay))
            await self._serve(relay, scope, headers, body)
        except BadRequest as error:
            await self._refuse(relay, error.status, error.message, code=error.code, param=error.param)
        except _Failed as failure:
            await self._refuse(relay, failure.status, failure.message, code=failure.code, retry_after_s=failure.retry_after_s)
        except Interrupted:
            self.metrics.disconnects += 1
        except Exception:
            logger.exception("request %s failed in the gateway", relay.request_id.decode())
            await self._refuse(relay, 500, "internal error of the gateway", code="internal_error")
        finally:
            self.active.discard(relay)
            if relay.exchange is not None:
                relay.exchange.close()
            if watcher is not None:
                watcher.cancel()

    # --- reading ---

    def _checked(self, headers: dict[bytes, bytes], body: bytes) -> bytes:
        """The body, where it is of a size and an encoding that can be read. Raises BadRequest."""
        if len(body) > self.max_body:
            limit = self.config.listen.max_body_mb
            raise BadRequest(f"the body is larger than {limit:g} MiB (listen.max_body_mb)", status=413, code="request_too_large")
        encoding = headers.get(b"content-encoding")
        if encoding and encoding != b"identity":
            raise BadRequest(f"content-encoding {encoding.decode('latin-1')!r} is not supported; send plain JSON", status=415)
        return body

    async def _read_body(self, receive: Any, headers: dict[bytes, bytes]) -> bytes | None:
        """The whole body through ASGI, or None when the client left. Raises BadRequest for what cannot be read."""
        parts: list[bytes] = []
        size = 0
        while size <= self.max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body"):
                break
        return self._checked(headers, b"".join(parts))

    def _tier(self, headers: dict[bytes, bytes], fields: dict[str, Any]) -> str:
        named = headers.get(b"x-warmroute-tier")
        if named is not None:
            tier = named.decode("latin-1").lower()
            if tier not in TIERS:
                raise BadRequest(f"unknown tier {tier!r} in X-Warmroute-Tier; one of {', '.join(TIERS)}", code="invalid_tier")
            return tier
        service_tier = fields.get("service_tier")
        return SERVICE_TIERS.get(service_tier, "standard") if isinstance(service_tier, str) else "standard"

    def _rewritten(self, relay: Relay, body: bytes, fields: dict[str, Any], model: str, served: str, volatile: bool) -> bytes:
        """The body to send on: the client's own bytes, unless an alias, a volatile line or the usage option is due."""
        options = fields.get("stream_options")
        wants_usage = relay.streamed and relay.dialect.name in ("chat", "completions")
        if wants_usage and not (isinstance(options, dict) and options.get("include_usage")):
            relay.hide_usage = True
        if served != model or (relay.hide_usage and "stream_options" in fields):
            whole = loads(body)
            whole["model"] = served
            if relay.hide_usage:
                whole["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
            body = _dumps(whole)
        elif relay.hide_usage:
            at = body.index(b"{") + 1
            body = b'%b"stream_options":{"include_usage":true},%b' % (body[:at], body[at:])
        if volatile and self.config.strip_volatile_prefix:
            at = body.find(_VOLATILE)
            # only in a system prompt: the nearest mark before it is "system", as a key or as a role
            if at >= 0 and body.rfind(b'"system"', 0, at) > body.rfind(b'"role"', 0, at):
                body = _cut_volatile(body, at)
        return body

    # --- serving ---

    async def _serve(self, relay: Relay, scope: Scope, headers: dict[bytes, bytes], body: bytes) -> None:
        dialect = relay.dialect
        if self.fleet.token_modes:  # the prompt is needed whole, to be rendered as the engine does
            fields = loads(body)
            dialect.items(fields)
            parsed, volatile = None, dialect.is_volatile(fields)
        else:
            parsed = self.reader.read(dialect, body)
            fields, volatile = parsed.fields, parsed.volatile
        model = fields.get("model")
        if not isinstance(model, str):
            raise BadRequest("'model' is required and must be a string", param="model")
        served = self.fleet.aliases.get(model, model)
        relay.streamed = fields.get("stream") is True
        relay.tier = self._tier(headers, fields)
        sent = self._rewritten(relay, body, fields, model, served, volatile)
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens") or fields.get("max_output_tokens")
        request = RouteRequest(
            served, (), 0, session_key(headers, fields), relay.tier, limit if type(limit) is int and limit > 0 else None, relay.streamed
        )
        token_mode = self.fleet.token_modes.get(served) if parsed is None else None
        prompt = None
        if token_mode is not None:
            as_sent = loads(sent) if volatile and sent is not body else fields
            lora = served if served in self.fleet.loras else ""
            prompt = await token_mode.prompt_beside(dialect, as_sent, lora=lora, salt=str(fields.get("cache_salt") or ""))
        if token_mode is not None and prompt is not None:
            request.tokens, request.block_tokens = prompt.tokens, token_mode.block_tokens
            chain = prompt.chain
        else:
            chain = (parsed or self.reader.read(dialect, body)).chain
        request.hashes, request.length = chain.hashes, chain.length
        if isinstance(previous := fields.get("previous_response_id"), str):
            request.pinned = await self._worker_of(previous)
        known = await self.sharing.ask(request) if self.sharing is not None else None
        body = sent
        path = scope["path"].encode()
        if query := scope["query_string"]:
            path += b"?" + query
        extra = b"x-request-id: %b\r\n" % relay.request_id
        for name in _FORWARDED.intersection(headers):
            extra += b"%b: %b\r\n" % (name, headers[name])
        if relay.streamed:
            self.active.add(relay)

        tried: list[Worker] = []
        error: _WorkerError | None = None
        errors = 0
        trouble = ""
        for attempt in range(self.config.upstream.attempts):
            if errors > 1 or (errors and relay.started):
                break  # one other worker is asked, no more: the request may be what fails
            if relay.gone:
                raise Interrupted("client")
            try:
                decision = self.router.decide(request, clock(), tried, known)
            except NoWorker as none:
                if not tried:
                    raise self._no_worker(none, model) from None
                break
            if attempt:
                self.metrics.retries["worker_error" if error else "worker_lost"] = (
                    self.metrics.retries.get("worker_error" if error else "worker_lost", 0) + 1
                )
            worker = decision.worker
            series = self.metrics.of(served, relay.tier, worker.id)
            reason = (decision.policy, decision.reason)
            series.reasons[reason] = series.reasons.get(reason, 0) + 1
            series.queue.observe(decision.wait_s)
            if not attempt:
                series.overhead.observe(clock() - relay.started_at)
            head = self.fleet.request_head(worker.id, path, len(body), extra)
            try:
                if self.sharing is not None:
                    self.sharing.placed(decision)
                await self._attempt(relay, decision, head, body)
                self._account(relay, decision)
                return
            except _WorkerError as failed:
                self.fleet.suspect(worker.id, f"answered {failed.status}", refused=False)
                trouble = f"worker {worker.id} answered {failed.status}"
                error, errors = failed, errors + 1
            except UpstreamError as lost:
                if lost.kind != "local":
                    self.fleet.suspect(worker.id, str(lost), refused=lost.kind == "connect")
                trouble = f"worker {worker.id}: {lost}"
                if relay.content_sent:
                    await self._break_off(relay, decision, trouble)
                    return
            except Interrupted as interrupted:
                if interrupted.cause == "client":
                    relay.status = 499
                    self._account(relay, decision)
                    raise
                trouble = f"worker {worker.id} stopped answering"
                if relay.content_sent:
                    await self._break_off(relay, decision, trouble)
                    return
            finally:
                decision.reservation.release(clock())
                if self.sharing is not None:
                    self.sharing.changed()
                if relay.status != 200:
                    self.router.failed(decision)
            tried.append(worker)
        if error is not None and not relay.started:
            await self._pass_on(relay, error)
            return
        if not relay.started:
            logger.warning("request %s failed: %s", relay.request_id.decode(), trouble)
        raise _Failed(502, f"no worker could answer: {trouble}", "upstream_failed", retry_after_s=1.0)

    async def _worker_of(self, response_id: str) -> str | None:
        """The worker that keeps a response which a request continues."""
        worker = self.responses.worker_of(response_id, clock())
        if worker is None and self.sharing is not None:
            worker = await self.sharing.worker_of(response_id)
        return worker

    def _note_response(self, data: bytes, decision: Decision) -> None:
        """Remember who keeps the response that begins in `data`."""
        if found := _RESPONSE_ID.search(data, 0, _USAGE_TAIL):
            response_id = found.group(1).decode()
            self.responses.placed(response_id, decision.worker.id, clock())
            if self.sharing is not None:
                self.sharing.answered(response_id, decision.worker.id)

    def _no_worker(self, none: NoWorker, model: str) -> _Failed | BadRequest:
        names = self.fleet.model_names()
        if none.known or not names:
            return _Failed(
                503, "no worker of this model is up now; try again, and see /ready for which are", "no_worker_available", retry_after_s=2.0
            )
        return BadRequest(
            f"the model {model!r} does not exist; available: {', '.join(names[:20])}", status=404, code="model_not_found", param="model"
        )

    async def _attempt(self, relay: Relay, decision: Decision, head: bytes, body: bytes) -> None:
        """Send the request to the chosen worker and relay its answer. Raises UpstreamError, Interrupted or _WorkerError."""
        pool = self.fleet.pools[decision.worker.id]
        exchange = relay.exchange = await pool.send(head, body)
        if relay.gone or not decision.worker.up:  # while it was connecting: what ends a worker's requests did not see this one
            exchange.close()
            raise Interrupted("client" if relay.gone else "worker")
        try:
            try:
                status = await exchange.head()
            except UpstreamError as error:
                if not error.stale:
                    raise
                self.metrics.retries["stale_connection"] = self.metrics.retries.get("stale_connection", 0) + 1
                exchange = relay.exchange = await pool.send(head, body, fresh=True)
                if relay.gone or not decision.worker.up:
                    raise Interrupted("client" if relay.gone else "worker") from None
                status = await exchange.head()
            while not status:  # nudged: the worker is silent
                await self._keepalive(relay, decision)
                status = await exchange.head()
            if relay.streamed and status == 200 and _is_event_stream(exchange.headers):
                await self._relay_stream(relay, decision, exchange)
            else:
                await self._relay_whole(relay, decision, exchange)
        finally:
            relay.exchange = None
            exchange.close()

    async def _relay_whole(self, relay: Relay, decision: Decision, exchange: Exchange) -> None:
        """An answer that is not a stream: held whole where it is small enough, so that a failure in it can still be retried."""
        data = await exchange.read()
        while data is None:
            data = await exchange.read()
        status = exchange.status
        if not exchange.complete:
            parts, size = [data], len(data)
            while not exchange.complete or exchange.unread:
                if size > _BUFFER_LIMIT:
                    await self._relay_large(relay, decision, exchange, b"".join(parts))
                    return
                more = await exchange.read()
                if more:
                    parts.append(more)
                    size += len(more)
            data = b"".join(parts)
        if status >= 500:
            raise _WorkerError(status, exchange.headers, data)
        scan_usage(data if len(data) < 4 * _USAGE_TAIL else data[-_USAGE_TAIL:], relay.usage)
        if relay.started:  # keepalives of a stream were sent, and then the worker refused
            await self._break_off(relay, decision, f"the worker answered {status}")
            return
        relay.status = status
        if relay.dialect.name == "responses" and status == 200:
            self._note_response(data, decision)
        await self._respond(relay, status, self._response_headers(relay, decision, exchange), data)

    async def _respond(self, relay: Relay, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole response; its content-length is added here."""
        relay.started = relay.content_sent = True
        if relay.connection is not None:
            relay.connection.respond(status, headers, body)
        else:
            headers.append((b"content-length", b"%d" % len(body)))
            await relay.send({"type": "http.response.start", "status": status, "headers": headers})
            await relay.send({"type": "http.response.body", "body": body})

    async def _relay_large(self, relay: Relay, decision: Decision, exchange: Exchange, held: bytes) -> None:
        headers = self._response_headers(relay, decision, exchange)
        headers += [(n, v) for n, v in exchange.headers if n == b"content-length"]
        relay.status = exchange.status
        relay.started = True
        await relay.send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        relay.content_sent = exchange.committed = True
        tail = b""
        data: bytes | None = held
        while data != b"":
            if data:
                tail = (tail + data)[-_USAGE_TAIL:]
                await relay.send({"type": "http.response.body", "body": data, "more_body": True})
            data = await exchange.read()
        scan_usage(tail, relay.usage)
        await relay.send({"type": "http.response.body", "body": b""})

    async def _relay_stream(self, relay: Relay, decision: Decision, exchange: Exchange) -> None:
        """Server-sent events: passed on as they come, one write per read; scanned, not parsed, except for usage."""
        connection, send = relay.connection, relay.send
        held = b""  # a preamble without content, kept back so that another worker can still take over
        carry = b""  # an event of which only a part has come
        while not held or (len(held) < _BUFFER_LIMIT and not _content_begun(relay.dialect, held)):
            data = await exchange.read()
            if data is None:
                await self._keepalive(relay, decision)
                continue
            if not data:
                break
            held += data
        now = relay.first_at = relay.last_at = clock()
        relay.output_events = 1
        decision.reservation.first_token(now)
        if self.sharing is not None:
            self.sharing.changed()
        if relay.dialect.name == "responses":
            self._note_response(held, decision)
        look_for = relay.dialect.usage_mark
        if look_for in held or not held.endswith(b"\n\n"):
            held, carry = self._whole_events(relay, held)
        await self._start_stream(relay, decision, exchange)
        relay.content_sent = exchange.committed = True
        await send({"type": "http.response.body", "body": held, "more_body": True})

        relay.itl = self.metrics.of(decision.request.model, relay.tier, decision.worker.id).itl
        unsent: list[bytes] = []
        if connection is not None:
            write, flow = connection.chunk_writer(), connection.flow
            connection.on_paused = exchange.stop_piping
        else:
            write, flow = unsent.append, _PAUSED  # another ASGI server: each read is sent by this task

        def looked_at(data: bytes) -> bytes:
            # what of it the client may see now
            nonlocal carry
            splice.mark(clock())
            if carry or look_for in data or not data.endswith(b"\n\n"):
                data, carry = self._whole_events(relay, carry + data)
                splice.looking = bool(carry)
            return data

        def deliver(data: bytes) -> bool:
            # what the splice does not pass on by itself
            if data := looked_at(data):
                write(data if flow is _PAUSED else b"%x\r\n%b\r\n" % (len(data), data))
            return not flow.write_paused

        splice = Splice(write, relay.marks.append, look_for if flow is not _PAUSED else b"", deliver)
        splice.looking = bool(carry)
        last = b""
        while True:
            if data := exchange.take():
                if exchange.complete:  # goes out with the end of the body, in one write
                    last = looked_at(data)
                    break
                deliver(data)
            if unsent:
                await send({"type": "http.response.body", "body": b"".join(unsent), "more_body": True})
                unsent.clear()
            elif connection is not None and flow.write_paused:
                await flow.drain()
            if exchange.unread:  # came while the client was waited for
                continue
            if exchange.complete:
                break
            if await exchange.pipe(splice):
                await self._keepalive(relay, decision)
                if connection is not None:
                    connection.chunk_writer()
        scan_usage(carry, relay.usage)
        await send({"type": "http.response.body", "body": last + carry})

    def _whole_events(self, relay: Relay, data: bytes) -> tuple[bytes, bytes]:
        """Read the usage in the complete events of `data`; returns what to pass on now and the event that has come in part.

        A part of an event is of no use to the client, and it cannot be told yet whether it reports usage. If the worker dies in
        the middle of it, the error that follows is an event of its own. The usage event that only the gateway asked for
        (`choices: []`) is taken out of the stream.
        """
        end = _end_of_events(data)
        if not end:
            return (data, b"") if len(data) > _EVENT_LIMIT else (b"", data)
        complete, rest = data[:end], data[end:]
        scan_usage(complete, relay.usage)
        if relay.hide_usage:
            at = complete.find(b'"usage"')
            while at >= 0:
                start, end = _event_around(complete, at)
                if _is_usage_only(complete[start:end]):
                    complete = complete[:start] + complete[end:]
                    end = start
                at = complete.find(b'"usage"', end)
        return complete, rest

    async def _start_stream(self, relay: Relay, decision: Decision, exchange: Exchange | None) -> None:
        if relay.started:
            return
        relay.started = True
        relay.status = 200
        headers = self._response_headers(relay, decision, exchange)
        if exchange is None:
            headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        headers += _STREAM_HEADERS
        if relay.connection is not None:
            relay.connection.start_chunked(200, headers)
        else:
            await relay.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _keepalive(self, relay: Relay, decision: Decision) -> None:
        """The worker is silent: say something, so that neither the client nor a proxy between gives up."""
        relay.last_at = clock()
        await self._start_stream(relay, decision, None)
        await relay.send({"type": "http.response.body", "body": relay.dialect.keepalive(), "more_body": True})

    async def _break_off(self, relay: Relay, decision: Decision, message: str) -> None:
        """A response broke after its first byte: an in-band error in a stream; a truncated body says it otherwise."""
        logger.warning("request %s broke off: %s", relay.request_id.decode(), message)
        relay.status = 502
        self._account(relay, decision)
        if relay.streamed:
            await relay.send({"type": "http.response.body", "body": relay.dialect.stream_error(message)})
        elif relay.connection is not None:
            relay.connection.transport.close()

    async def _pass_on(self, relay: Relay, error: _WorkerError) -> None:
        self._count_rejected(relay, error.status)
        headers = [(n, v) for n, v in error.headers if n not in _DROPPED]
        headers.append((b"x-request-id", relay.request_id))
        await self._respond(relay, error.status, headers, error.body)

    def _response_headers(self, relay: Relay, decision: Decision, exchange: Exchange | None) -> list[tuple[bytes, bytes]]:
        headers = [pair for pair in exchange.headers if pair[0] not in _DROPPED] if exchange is not None else []
        headers.append((b"x-request-id", relay.request_id))
        headers.append((b"x-warmroute-worker", decision.worker.id.encode("latin-1", "replace")))
        return headers

    async def _refuse(
        self,
        relay: Relay,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Answer with an error in the dialect's own shape."""
        dialect = relay.dialect
        if status == 503 and dialect.style == "anthropic":
            status = 529  # what Anthropic's clients know as overloaded
        self._count_rejected(relay, status)
        if relay.started:
            if relay.streamed:
                await relay.send({"type": "http.response.body", "body": dialect.stream_error(message)})
            elif relay.connection is not None:
                relay.connection.transport.close()
            return
        body = dialect.error(status, message, code=code, param=param, request_id=relay.request_id.decode())
        headers = [(b"content-type", b"application/json"), (b"x-request-id", relay.request_id)]
        if retry_after_s is not None:
            headers += [(b"retry-after", b"%d" % max(1, round(retry_after_s))), (b"retry-after-ms", b"%d" % (retry_after_s * 1000))]
        elif status < 500:
            headers.append((b"x-should-retry", b"false"))
        if status in (413, 415):
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        await self._respond(relay, status, headers, body)

    # --- accounting ---

    def _count_rejected(self, relay: Relay, status: int) -> None:
        key = (relay.dialect.name, str(status))
        self.metrics.rejected[key] = self.metrics.rejected.get(key, 0) + 1

    def _account(self, relay: Relay, decision: Decision) -> None:
        """Metrics and calibration of one finished request (whole, broken or left by its client)."""
        now = clock()
        usage, request, worker = relay.usage, decision.request, decision.worker
        series = self.metrics.of(request.model, relay.tier, worker.id)
        status = relay.status
        series.statuses[status] = series.statuses.get(status, 0) + 1
        relay.settle()
        ttft = None
        if relay.first_at:
            series.ttft.observe(relay.first_at - relay.started_at)
            ttft = relay.first_at - decision.placed_at  # this worker's part of it, without what was tried before
        if relay.status != 200:
            return
        series.e2e.observe(now - relay.started_at)
        prompt = usage.prompt_tokens or decision.prompt_tokens
        cached = decision.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
        series.prompt_tokens += prompt
        series.cached_tokens += cached
        series.uncached_tokens += max(0.0, prompt - cached)
        series.predicted_cached_tokens += decision.cached_tokens
        if usage.cached_tokens is not None:
            series.prediction_error.observe(abs(decision.cached_tokens - usage.cached_tokens))
        output = usage.completion_tokens if usage.completion_tokens is not None else relay.output_events
        series.output_tokens += output
        if relay.output_events > 1 and output > 1:
            worker.observe_decode((relay.last_at - relay.first_at) / (output - 1), worker.step_s())
        self.router.learn(decision, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, ttft_s=ttft)

    # --- the clock's work ---

    async def _tick(self) -> None:
        """Once a second: keepalives for silent streams, an end to clients that take nothing, stale connections closed."""
        while True:
            await asyncio.sleep(min(1.0, self.config.upstream.keepalive_s / 4))
            try:
                self._look_after(clock())
            except Exception:  # a fault in one turn must not be the end of all
                logger.exception("looking after the requests under way failed")

    def _look_after(self, now: float) -> None:
        upstream, write_timeout_s = self.config.upstream, self.config.listen.write_timeout_s
        for relay in list(self.active):
            exchange = relay.exchange
            if relay.settle() and exchange is not None:
                exchange.heard()
            if exchange is None:
                continue
            silent_s = now - relay.last_at
            if exchange.waiting:
                if silent_s > upstream.keepalive_s:
                    exchange.nudge()
            elif silent_s > write_timeout_s and relay.connection is not None:
                logger.warning("request %s: its client took nothing for %g s", relay.request_id.decode(), write_timeout_s)
                relay.connection.transport.abort()
        for pool in self.fleet.pools.values():
            pool.drop_stale()
        self.router.expire(now)


async def _watch(receive: Any, relay: Relay) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    relay.client_left()


def _is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def _end_of_events(data: bytes, before: int | None = None) -> int:
    """Where the last complete event in `data[:before]` ends; 0 where there is none."""
    lf, crlf = data.rfind(b"\n\n", 0, before), data.rfind(b"\r\n\r\n", 0, before)
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def _event_around(data: bytes, at: int) -> tuple[int, int]:
    """Where the event that holds the byte at `at` begins and ends; `data` is complete events."""
    lf, crlf = data.find(b"\n\n", at), data.find(b"\r\n\r\n", at)
    return _end_of_events(data, at), min(lf + 2 if lf >= 0 else len(data), crlf + 4 if crlf >= 0 else len(data))


def _content_begun(dialect: Dialect, data: bytes) -> bool:
    """Whether the events so far hold output, not only a preamble (role chunk, message_start, response.created)."""
    if not data.endswith(b"\n\n"):
        data = data[: _end_of_events(data)]
        if not data:
            return False
    if dialect.name == "chat":
        return not _EMPTY_CONTENT.search(data) or data.count(b"data:") > 1 or _CHAT_CONTENT.search(data) is not None
    if dialect.name == "messages":
        return b"content_block_delta" in data or b"message_delta" in data or b"event: error" in data
    if dialect.name == "responses":
        return _RESPONSES_CONTENT.search(data) is not None
    return True


def _is_usage_only(event: bytes) -> bool:
    if b'"usage"' not in event or not event.startswith(b"data:"):
        return False
    try:
        payload = orjson.loads(event[5:])
    except orjson.JSONDecodeError:
        return False
    return isinstance(payload, dict) and payload.get("choices") == [] and isinstance(payload.get("usage"), dict)


def _dumps(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except (orjson.JSONEncodeError, TypeError):  # lone surrogates, integers beyond 64 bits
        import json

        return json.dumps(fields, separators=(",", ":")).encode()


_VOLATILE = b'"' + VOLATILE_PREFIX.encode()


def _cut_volatile(body: bytes, at: int) -> bytes:
    """Cut the volatile line that starts a JSON string at `at`, up to its escaped newline or the string's end."""
    start = at + 1
    end = start
    while True:
        end = body.find(b'"', end)
        if end < 0:
            return body
        slashes = len(body[:end]) - len(body[:end].rstrip(b"\\"))
        if slashes % 2 == 0:
            break
        end += 1
    newline = body.find(b"\\n", start, end)
    cut = end if newline < 0 else newline + 2
    return body[:start] + body[cut:]
