"""Options that several commands of `loadgen` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click
import orjson

from loadgen.readers import Gaps, TraceFormat


class TokenCount(click.ParamType):
    """A number of tokens: 600000, 600k or 2.4M."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower().replace("_", "").replace(",", "")
        scale = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}.get(text[-1:], 1)
        try:
            count = int(float(text.rstrip("kmg")) * scale)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a number of tokens; write 600000, 600k or 2.4M", param, ctx)
        if count < 1:
            self.fail(f"{value!r} must be at least 1", param, ctx)
        return count


TOKENS = TokenCount()
json_option = click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the result as JSON.")
format_option = click.option(
    "--format", "trace_format", type=click.Choice(get_args(TraceFormat)), default="auto", show_default=True, help="Format of the trace."
)
gaps_option = click.option(
    "--gaps",
    type=click.Choice(get_args(Gaps)),
    default="quantiles",
    show_default=True,
    help="Gaps of a trace without tool_wait_s: drawn from measured percentiles, or as the trace recorded them "
    "(Weka's think times after tool results are about 30 times too long).",
)
max_context_option = click.option("--max-context", type=TOKENS, help="Cut sessions before a step whose prompt and answer exceed this.")
kv_capacity_option = click.option(
    "--kv-capacity", type=TOKENS, help="KV cache of all workers together, e.g. 2.4M: adds the hit rate of one LRU cache of this size."
)


def write_json(file: Path | None, data: dict[str, Any]) -> None:
    """Where `--json` names a file. Raises ClickException where it cannot be written."""
    if file is not None:
        try:
            file.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")
        except OSError as error:
            raise click.ClickException(f"{file}: cannot be written: {error}") from None
