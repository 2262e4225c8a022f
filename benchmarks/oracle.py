"""The built-in latency models against aiconfigurator-core: its kernel database, and the measured engines that its wheel lists.

First table: time per output token of 1,100 measured runs (InferenceX and others; silicon_sample.csv in the wheel) against the built-in
shapes, with the prefills of the other requests added. The time to the first token is left out: it was measured under load, so it is mostly
queueing. Second table: prefills and decode steps as the built-in shapes and the oracle estimate them.

Needs aiconfigurator-core, numpy, pandas, pyyaml and packaging. Run from the project's folder: python -m benchmarks.oracle
"""

from __future__ import annotations

import csv
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.calibrate import CalibrationError
from loadgen.calibrate.oracle import fit_oracle
from workers.hardware import latency_model
from workers.latency import LatencyModel

SILICON = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-70B": "llama-3-70b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "zhipuai/GLM-5": "glm-5",
}
WEIGHTS = {"fp8": "fp8", "fp4": "nvfp4", "bf16": "bf16", "": "bf16"}
MOST_BATCH = 64
# oracle's model and system, tp; the same in our words
CONFIGURATIONS: list[tuple[str, str, int, str, str, dict[str, Any]]] = [
    ("Qwen/Qwen3-32B-FP8", "h200_sxm", 1, "qwen3-32b", "h200", {"weights": "fp8"}),
    ("Qwen/Qwen3-32B-FP8", "h200_sxm", 4, "qwen3-32b", "h200", {"weights": "fp8"}),
    ("Qwen/Qwen3-32B-FP8", "b200_sxm", 2, "qwen3-32b", "b200", {"weights": "fp8"}),
    ("openai/gpt-oss-120b", "h100_sxm", 2, "gpt-oss-120b", "h100", {}),
    ("openai/gpt-oss-120b", "h200_sxm", 1, "gpt-oss-120b", "h200", {}),
    ("zai-org/GLM-5.2-FP8", "h200_sxm", 8, "glm-5.2", "h200", {"weights": "fp8"}),
    ("nvidia/GLM-5.2-NVFP4", "b200_sxm", 8, "glm-5.2", "b200", {"weights": "nvfp4"}),
    ("moonshotai/Kimi-K3", "gb300", 8, "kimi-k3", "gb300", {}),
    ("deepseek-ai/DeepSeek-V4-Pro", "b200_sxm", 8, "deepseek-v4-pro", "b200", {}),
]
POINTS = (("8k cold", 8192, 8192), ("100k cold", 100_000, 100_000), ("2k on 100k", 2000, 102_000))
STEPS = ((1, 8192), (16, 8192), (16, 65_536))


def silicon(file: Path) -> Table:
    """Measured time per output token against the built-in shapes, by model, system, engine and weights."""
    errors: dict[tuple[str, ...], list[float]] = defaultdict(list)
    models: dict[tuple[str, str, str, int], LatencyModel] = {}
    for row in csv.DictReader(file.open()):
        name, system = SILICON.get(row["model_path"]), row["system"].partition("_")[0]
        if name is None or row["mode"] != "agg" or system not in ("h100", "h200", "b200", "b300"):
            continue
        tp, batch, prompt, output = (int(row[key] or 1) for key in ("tp_size", "batch_size", "isl", "osl"))
        if int(row["attention_dp_size"] or 1) > 1 or tp > 8 or batch > MOST_BATCH or float(row["silicon_ttft_ms"]) > 5000:
            continue
        weights = "mxfp4" if name == "gpt-oss-120b" else WEIGHTS[row["precision"]]
        key = name, system, weights, tp
        if key not in models:
            models[key] = latency_model(name, system, tp=tp, weights=weights, kv_dtype="bf16" if weights == "bf16" else "fp8")
        model = models[key]
        # the prompts of the other requests are prefilled while this one decodes
        others = model.prefill_s(prompt, prompt) * (batch - 1) / output
        modelled = model.step_s(batch, batch * (prompt + output / 2)) + others
        errors[name, system, row["backend"], weights].append(modelled / (float(row["silicon_tpot_ms"]) / 1e3) - 1)
    table = Table("model", "system", "engine", "weights", "runs", "median error", "median |error|", title="Time per output token, measured")
    for key4, found in sorted(errors.items()):
        if len(found) >= 5:
            table.add_row(*key4, str(len(found)), f"{median(found):+.0%}", f"{median(map(abs, found)):.0%}")
    return table


def oracle() -> Table:
    """The oracle's estimates against the built-in shapes: built-in over oracle."""
    columns = [name for name, _, _ in POINTS] + [f"step {batch} x {context // 1024}k" for batch, context in STEPS]
    table = Table("configuration", *columns, "fit", title="Built-in over oracle (vLLM), and the error of our form fitted to the oracle")
    for theirs, system, tp, model, accelerator, options in CONFIGURATIONS:
        label = f"{model} {options.get('weights', '')} {tp} x {accelerator}"
        try:
            found = fit_oracle(theirs, system, "vllm", tp=tp)
        except CalibrationError as error:
            table.add_row(label, *["-"] * len(columns), str(error)[-60:])
            continue
        ours, their = latency_model(model, accelerator, tp=tp, **options), found.latency
        cells = [f"{ours.prefill_s(new, total) / their.prefill_s(new, total):.2f}" for _, new, total in POINTS]
        cells += [f"{ours.step_s(b, b * context) / their.step_s(b, b * context):.2f}" for b, context in STEPS]
        table.add_row(label, *cells, f"{found.prefill_error.median:.0%} / {found.decode_error.median:.0%}")
    return table


def main() -> None:
    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("aiconfigurator-core is not installed: pip install --no-deps aiconfigurator-core numpy pandas pyyaml packaging")
    console = Console(width=150)
    console.print(silicon(Path(spec.submodule_search_locations[0], "systems", "silicon_sample.csv")))
    console.print(oracle())


if __name__ == "__main__":
    main()
