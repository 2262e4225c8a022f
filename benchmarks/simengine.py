"""What the simulated engine costs in virtual time: a trace of prompts with block hashes, dealt in turn to a fleet of engines.

Only the engines are timed, with the driver's queue of events; no router decides. `--stream` tells every token, as the HTTP server does.
"""

from __future__ import annotations

import argparse
import cProfile
import gzip
import heapq
import json
import pstats
import time
from pathlib import Path

from workers.profile import WorkerProfile
from workers.simengine import SimEngine, SimRequest

FAR = 1 << 30


def read_mooncake(path: Path, limit: int | None) -> list[tuple[float, SimRequest]]:
    """(seconds, request) of a trace in Mooncake's format, whose hash ids already stand for whole prefixes of 512-token blocks."""
    requests: list[tuple[float, SimRequest]] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines):
            if number == limit:
                break
            row = json.loads(line)
            hashes = row["hash_ids"][: row["input_length"] // 512]
            request = SimRequest(str(number), hashes, max(1, row["input_length"]), max(1, row["output_length"]))
            requests.append((row["timestamp"] / 1000, request))
    return requests


class Fleet:
    """Engines in virtual time."""

    def __init__(self, engines: list[SimEngine]) -> None:
        self.engines = engines
        self.flights = 0
        self.first_tokens = 0.0
        self._started = [0.0] * len(engines)
        self._versions = [0] * len(engines)
        self._events: list[tuple[float, int, int]] = []

    def play(self, requests: list[tuple[float, SimRequest]]) -> float:
        """Serve all requests; returns the virtual time when the last one ends."""
        now = 0.0
        for number, (now, request) in enumerate(requests):
            self._advance(now)
            place = number % len(self.engines)
            engine = self.engines[place]
            engine.add(request)
            if not engine.stepping:
                self._start(place, now)
            elif engine.steps_under_way > 1:
                self._push(place, self._started[place] + engine.shorten_step(now - self._started[place]))
        return self._advance(float("inf"), now)

    def _start(self, place: int, now: float) -> None:
        duration = self.engines[place].start_step(FAR)
        if duration is not None:
            self.flights += 1
            self._started[place] = now
            self._push(place, now + duration)

    def _push(self, place: int, when: float) -> None:
        self._versions[place] += 1
        heapq.heappush(self._events, (when, place, self._versions[place]))

    def _advance(self, until: float, last: float = 0.0) -> float:
        events = self._events
        while events and events[0][0] <= until:
            now, place, version = heapq.heappop(events)
            if version == self._versions[place]:
                result = self.engines[place].finish_step()
                self.first_tokens += sum(now for output in result.outputs if output.first)
                self._start(place, now)
                last = now
        return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a trace in Mooncake's format (.jsonl or .jsonl.gz)")
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--requests", type=int, help="only the first ones")
    parser.add_argument("--kv-capacity", type=int, default=1_000_000, help="tokens of KV cache of each engine")
    parser.add_argument("--latency", default="gpt-oss-120b-h200")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--stream", action="store_true", help="tell every token")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    requests = read_mooncake(options.trace, options.requests)
    profile = WorkerProfile(latency=options.latency, block_size=512, kv_capacity_tokens=options.kv_capacity)
    fleet = Fleet([SimEngine(profile, options.speed, stream=options.stream) for _ in range(options.engines)])
    profiler = cProfile.Profile() if options.profile else None
    began = time.process_time()
    if profiler is not None:
        profiler.enable()
    end = fleet.play(requests)
    if profiler is not None:
        profiler.disable()
    cpu = time.process_time() - began
    counters = [engine.counters for engine in fleet.engines]
    figures = {
        "requests": sum(c.finished for c in counters),
        "output_tokens": sum(c.generation_tokens for c in counters),
        "virtual_s": round(end, 1),
        "mean_ttft_s": round((fleet.first_tokens - sum(when for when, _ in requests)) / len(requests), 4),
        "hit_rate": round(sum(c.prefix_hits for c in counters) / sum(c.prefix_queries for c in counters), 4),
        "preemptions": sum(c.preemptions for c in counters),
        "evicted_blocks": sum(engine.cache.evicted for engine in fleet.engines),
        "flights": fleet.flights,
        "cpu_s": round(cpu, 3),
        "us_per_flight": round(cpu / fleet.flights * 1e6, 1),
    }
    for name, value in figures.items():
        print(f"{name:16} {value:>14,}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
