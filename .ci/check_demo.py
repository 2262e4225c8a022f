"""The demo keeps its promises: `python .ci/check_demo.py RESULT.json`, exits 1 where it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HIT_SHARE = 0.9  # warm's hit rate, of what one LRU cache as large as all workers' KV memory would hit
TTFT_SHARE = 0.5  # warm's TTFT p90, of round-robin's


def main() -> int:
    result = json.loads(Path(sys.argv[1]).read_text())
    warm, other = result["warm"], result["round-robin"]
    checks = [
        ("requests without errors", warm["errors"] + other["errors"] == 0 and min(warm["requests"], other["requests"]) > 100),
        (f"hit rate {warm['hit_rate']:.3f} of {warm['hit_bound_lru']:.3f}", warm["hit_rate"] >= HIT_SHARE * warm["hit_bound_lru"]),
        (
            f"TTFT p90 {warm['ttft_p90_s'] * 1e3:.0f} ms, round-robin's {other['ttft_p90_s'] * 1e3:.0f} ms",
            warm["ttft_p90_s"] <= TTFT_SHARE * other["ttft_p90_s"],
        ),
    ]
    for text, kept in checks:
        print(f"{'ok' if kept else 'FAILED'}: demo, {text}")
    return 0 if all(kept for _, kept in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
