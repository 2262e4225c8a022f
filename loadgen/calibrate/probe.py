"""Measures a live engine: cold and warm prefills, and decode steps of several batches and context lengths."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import orjson

from loadgen.calibrate.fit import DecodePoint, PrefillPoint
from loadgen.client import Answer, StreamClient
from loadgen.conversation import PATHS, Dialect
from loadgen.prompts import block_text

_BLOCK = 64  # tokens of a piece of text
_LEAST_DECODE_S = 1e-6


class CalibrationError(RuntimeError):
    """The engine cannot be measured; the message says what it answered and what to do."""


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What is measured, in tokens. Prompts are unique to the run (`seed`), so that nothing is cached that should not be."""

    max_context: int = 16_384  # longest prompt
    max_batch: int = 16  # largest decode batch
    output_tokens: int = 48  # of a decode measurement
    repeat: int = 3
    pause_s: float = 0.2  # mean time before a prompt: as between turns, in which what computes clocks down and is used by others
    dialect: Dialect = "completions"
    seed: int = 0


@dataclass(slots=True)
class Measured:
    """What came out; each point is the median of its repetitions."""

    prefills: list[PrefillPoint] = field(default_factory=list)
    decodes: list[DecodePoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is measured


async def measure(client: StreamClient, model: str, options: ProbeOptions, progress: Progress | None = None) -> Measured:
    """Measure one idle engine. Raises CalibrationError."""
    return await _Probe(client, model, options, progress).run()


class _Probe:
    def __init__(self, client: StreamClient, model: str, options: ProbeOptions, progress: Progress | None) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._random = random.Random(options.seed)
        self._characters = 4.0  # per token; learned
        self._progress = progress
        self._done = 0
        self._measured = Measured()

    async def run(self) -> Measured:
        options = self._options
        lengths = _geometric(max(64, options.max_context // 64), options.max_context, 8)
        # new tokens on a cached prefix, short and long: what tells attention to the prefix from the cost of a token
        warm = [(prefix, new) for prefix in lengths[-4:] for new in (64, 256, 1024) if new < prefix // 2]
        batches = _geometric(1, options.max_batch, min(6, options.max_batch.bit_length()))
        contexts = (max(64, options.max_context // 32), options.max_context // 2)
        decodes = [(b, c) for b in batches for c in contexts if b * c <= 4 * options.max_context]
        steps = (len(lengths) + len(warm) + len(decodes)) * options.repeat + len(contexts)
        await self._learn_characters(lengths[0])
        # repetitions go round the whole list, so that a slow moment of the machine does not fall on one point alone
        colds: dict[int, list[Answer]] = {length: [] for length in lengths}
        for _ in range(options.repeat):
            for length in lengths:
                self._tell(steps, f"cold prefill of {length:,} tokens")
                colds[length].append(await self._ask_rested(self._text(length)))
        self._measured.prefills += [self._prefill(answers, cached=0) for answers in colds.values()]
        await self._warm(warm, steps)
        prompts = {context: [self._text(context) for _ in range(options.max_batch)] for context in contexts}
        for context in contexts:
            # cached first, so that the sequences of a batch begin together
            self._tell(steps, f"prefill of what is decoded, {context:,} tokens each")
            for prompt in prompts[context][: max((b for b, c in decodes if c == context), default=0)]:
                await self._ask(prompt, 1)
        runs: dict[tuple[int, int], list[DecodePoint]] = {point: [] for point in decodes}
        for _ in range(options.repeat):
            for batch, context in decodes:
                self._tell(steps, f"decode of {batch} sequences of {context:,} tokens")
                runs[batch, context].append(await self._decode(prompts[context][:batch]))
        for points in runs.values():
            self._measured.decodes.append(replace(points[0], seconds=median(point.seconds for point in points)))
        self._tell(steps, "fit")
        return self._measured

    async def _learn_characters(self, length: int) -> None:
        await self._ask(self._text(length), 2)  # the first request of an engine's life is slow
        text = self._text(length)
        answer = await self._ask(text, 1)
        if not answer.prompt_tokens:
            raise CalibrationError("the server sends no usage with its stream; it must understand stream_options.include_usage")
        self._characters = max(0.5, len(text) / answer.prompt_tokens)

    async def _warm(self, points: list[tuple[int, int]], steps: int) -> None:
        prefixes: dict[int, str] = {}
        answers: dict[tuple[int, int], list[Answer]] = {point: [] for point in points}
        for prefix in dict.fromkeys(prefix for prefix, _ in points):
            prefixes[prefix] = self._text(prefix)
        for _ in range(self._options.repeat):
            for prefix, new in points:
                self._tell(steps, f"{new:,} new tokens on {prefix:,} cached ones")
                if new == 64:
                    await self._ask(prefixes[prefix], 1)
                answers[prefix, new].append(await self._ask_rested(prefixes[prefix] + self._text(new)))
        for each in answers.values():
            if any(answer.cached_tokens is None for answer in each):
                self._measured.notes.append(
                    "the server does not tell cached tokens (vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report): "
                    "only cold prefills were fitted"
                )
                return
            if median(answer.cached_tokens or 0 for answer in each):
                self._measured.prefills.append(self._prefill(each))
        if all(point.uncached == point.total for point in self._measured.prefills):
            self._measured.notes.append(
                "nothing was ever cached: the engine's prefix cache seems to be off; only cold prefills were fitted"
            )

    async def _decode(self, prompts: list[str]) -> DecodePoint:
        """Seconds per token while all sequences decode."""
        batch = len(prompts)
        output = self._options.output_tokens
        answers = await asyncio.gather(*(self._ask(prompt, output + 2 * batch) for prompt in prompts))
        begin, end = max(answer.first_at for answer in answers), min(answer.ended_at for answer in answers)
        times = []
        for answer in answers:
            events, tokens, now, last = 0, (answer.output_tokens or answer.content_events) - 1, answer.first_at, begin
            for gap, count in answer.gaps:
                now += gap
                if begin < now <= end:
                    events += count
                    last = now
            if events:
                scale = tokens / max(1, answer.content_events - 1)  # several tokens may come in one event
                times.append((last - begin) / (events * scale))
        if not times:
            raise CalibrationError(f"{batch} sequences never decoded together; raise the output length or lower the largest batch")
        length = median(answer.prompt_tokens or 0 for answer in answers)
        return DecodePoint(batch, batch * (length + output / 2), max(_LEAST_DECODE_S, median(times)))

    def _prefill(self, answers: list[Answer], cached: int | None = None) -> PrefillPoint:
        total = int(median(answer.prompt_tokens or 0 for answer in answers))
        held = int(median(answer.cached_tokens or 0 for answer in answers)) if cached is None else cached
        return PrefillPoint(total - held, total, median(answer.ttft_s for answer in answers))

    def _text(self, tokens: int) -> str:
        """Text of about so many tokens that the engine has not seen."""
        size = int(tokens * self._characters)
        pieces = -(-size // (4 * _BLOCK))
        return "".join(block_text(self._random.getrandbits(48), _BLOCK, self._options.seed) for _ in range(pieces))[:size]

    async def _ask_rested(self, prompt: str) -> Answer:
        """A prefill of an engine that has not just done another, which would be a little faster than those of real traffic."""
        await asyncio.sleep(self._random.uniform(0, 2 * self._options.pause_s))
        return await self._ask(prompt, 1)

    async def _ask(self, prompt: str, output_tokens: int) -> Answer:
        content = {"prompt": prompt} if self._options.dialect == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        body = {
            "model": self._model, **content, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer = await self._client.post(PATHS[self._options.dialect], orjson.dumps(body))
        if answer.error:
            raise CalibrationError(answer.error)
        if not answer.first_at:  # a token without text of its own
            answer.first_at = answer.ended_at
        return answer

    def _tell(self, steps: int, what: str) -> None:
        if self._progress is not None:
            self._progress(self._done, steps, what)
        self._done += 1


def _geometric(low: int, high: int, count: int) -> list[int]:
    """At most `count` whole numbers from low to high, each about the same factor above the one before."""
    if high <= low or count < 2:
        return [high]
    return sorted({round(low * (high / low) ** (i / (count - 1))) for i in range(count)})
