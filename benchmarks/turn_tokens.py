"""What token mode costs a turn: an agent's session of so many tokens sends one more turn, and its prompt is rendered, tokenised
and chained again. Next to it, the same by tokenising the whole prompt, as is done without a memory.

CPU time of this process, median over turns. Parsing the body is shown apart: the gateway does it in any case.

Not called tokenize.py: scripts of this folder would import it in place of the standard library's module of that name.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from tiny_tokenizer import TEMPLATES, source_text, write_model

from gateway.dialects import CHAT
from gateway.rendering import Renderer
from kvindex.chain import ChainState, token_seed
from kvindex.tokenizer import PromptTokenizer, load_backend, pack

HISTORY = (1_000, 10_000, 50_000, 100_000)
NEW = (100, 1_000, 5_000)
TURNS = 15
BLOCK_TOKENS = 128
TOOLS = 12


class Session:
    """A coding agent's conversation: tool calls and their results, made of real source text."""

    def __init__(self, tokenizer: PromptTokenizer, seed: int):
        self.rng = random.Random(seed)
        self.source = "".join(source_text(6_000_000))
        self.chars_per_token = 200_000 / (len(tokenizer.encode(self.source[:200_000])) / 4)
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are a careful engineer. " + self.text(600)},
            {"role": "user", "content": "Find the fault and mend it."},
        ]
        parameters = {"type": "object", "properties": {"path": {"type": "string", "description": "a file"}}, "required": ["path"]}
        names = [f"tool_{number}" for number in range(TOOLS)]
        functions = [{"name": name, "description": self.text(60), "parameters": parameters} for name in names]
        self.tools = [{"type": "function", "function": function} for function in functions]
        self.calls = 0

    def text(self, tokens: int) -> str:
        length = int(tokens * self.chars_per_token)
        at = self.rng.randrange(len(self.source) - length)
        return self.source[at : at + length]

    def add_turn(self, tokens: int) -> None:
        """An assistant message with a tool call, and the tool's result; `tokens` together, roughly."""
        said = max(10, tokens // 12)
        call = {"name": f"tool_{self.calls % TOOLS}", "arguments": json.dumps({"path": f"/src/{self.calls}.py", "note": self.text(20)})}
        self.calls += 1
        calls = [{"id": f"call_{self.calls}", "type": "function", "function": call}]
        self.messages.append({"role": "assistant", "content": self.text(said), "tool_calls": calls})
        self.messages.append({"role": "tool", "content": self.text(max(10, tokens - said - 60)), "tool_call_id": f"call_{self.calls}"})

    def grow(self, tokens: int) -> None:
        """Turns of the sizes that agents' turns have, up to so many tokens of history."""
        while tokens > 0:
            turn = min(tokens, self.rng.choice((150, 400, 800, 2_000)))
            self.add_turn(turn)
            tokens -= turn

    def body(self) -> bytes:
        return orjson.dumps({"model": "m", "stream": True, "tools": self.tools, "messages": self.messages})


def cpu_ms(operation: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    begin = time.process_time()
    result = operation(*arguments)
    return (time.process_time() - begin) * 1e3, result


def prompt_length(renderer: Renderer, tokenizer: PromptTokenizer, session: Session) -> int:
    """Tokens of the session's prompt."""
    return len(tokenizer.encode(str(renderer.render(CHAT, orjson.loads(session.body())).prompt))) // 4


def measure(renderer: Renderer, tokenizer: PromptTokenizer, history: int, new: int, turns: int) -> dict[str, Any]:
    """Median milliseconds of CPU by part."""
    session = Session(tokenizer, seed=history + new)
    while (lacking := history - prompt_length(renderer, tokenizer, session)) > history // 200:  # words are not quite tokens
        session.grow(lacking)
    while len(session.messages) > 2 and prompt_length(renderer, tokenizer, session) > history:  # the tools alone may be longer
        session.messages = session.messages[:-2]
    seed = token_seed()
    tokenizer.chain(str(renderer.render(CHAT, orjson.loads(session.body())).prompt), seed, BLOCK_TOKENS)
    whole = load_backend(tokenizer.directory)
    times: dict[str, list[float]] = {"parse": [], "render": [], "tokens": [], "total": [], "whole": []}
    prompt_tokens = 0
    kept = list(session.messages)
    gc.collect()
    gc.freeze()  # as the gateway does at its start
    gc.set_threshold(20_000, 20, 50)
    for turn in range(turns):
        session.messages = list(kept)  # the same history each time, with another turn
        session.add_turn(new)
        body = session.body()
        parse, fields = cpu_ms(orjson.loads, body)
        render, rendered = cpu_ms(renderer.render, CHAT, fields)
        tokens, chain = cpu_ms(tokenizer.chain, rendered.prompt, seed, BLOCK_TOKENS)
        prompt_tokens = chain.length // 4
        for part, value in (("parse", parse), ("render", render), ("tokens", tokens), ("total", render + tokens)):
            times[part].append(value)
        if turn < 3:
            spent, encoding = cpu_ms(lambda: whole.encode(rendered.prompt, add_special_tokens=False))  # noqa: B023
            times["whole"].append(spent)
            if ChainState.start(seed, 4 * BLOCK_TOKENS).extend(pack(encoding.ids)).chain() != chain:
                raise SystemExit("the chain differs from that of the whole text's tokens")
    medians = {f"{part}_ms": round(statistics.median(values), 3) for part, values in times.items()}
    ratio = round(medians["whole_ms"] / medians["total_ms"], 1)
    return {"history": history, "new": new, "prompt_tokens": prompt_tokens, **medians, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="model directory; a small tokenizer is trained when absent")
    parser.add_argument("--template", choices=TEMPLATES, default="qwen", help="chat template of the small tokenizer")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns measured for each row")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = arguments.tokenizer or write_model(Path(made), arguments.template)
        renderer = Renderer(directory)
        rows = []
        for history in HISTORY:
            for new in NEW:
                tokenizer = PromptTokenizer(directory)
                rows.append(measure(renderer, tokenizer, history, new, arguments.turns))
    table = Table(title="Token mode: CPU milliseconds a turn (median)")
    columns = {
        "history": "history", "new": "new", "prompt_tokens": "tokens", "parse_ms": "parse JSON", "render_ms": "render",
        "tokens_ms": "tokenise + chain", "total_ms": "total", "whole_ms": "tokenise all", "ratio": "times cheaper",
    }  # fmt: skip
    for title in columns.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*(f"{row[key]:,}" for key in columns))
    console = Console()
    console.width = max(console.width, 112)
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"block_tokens": BLOCK_TOKENS, "rows": rows}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
