"""Token mode: a request's prompt as the exact tokens the engine will see, and their block chain."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config import ModelConfig
from gateway.dialects import Dialect
from gateway.rendering import NotReproducible, Rendered, Renderer, RenderOptions
from kvindex.chain import BlockChain, ChainState, token_seed
from kvindex.tokenizer import NotEncodable, PromptTokenizer, pack

logger = logging.getLogger("warmroute.token_mode")

LONG_TEXT = 48 * 1024  # characters; about 20 ms of tokenising
# What is beyond these is placed by its text: no agent sends it, and it would take seconds and flush what others have cached.
MOST_NEW = 4 * 1024 * 1024  # characters that were not seen before
LONGEST_PIECE = 128 * 1024  # characters between two places where a text may be cut


@dataclass(slots=True)
class TokenPrompt:
    """A prompt's block chain over token ids, and how many tokens it has."""

    chain: BlockChain
    tokens: int


class TokenMode:
    """Prompts of one model. `directory` holds its tokenizer and chat template; raises TokenizerError when it cannot be used.

    `block_tokens` is the index block and may be set later, before the first prompt, once the engine's own block is known.
    `fallbacks` counts, by reason, the requests whose prompt cannot be told; those are placed in text mode.
    """

    def __init__(self, directory: str | Path, block_tokens: int, options: RenderOptions | None = None):
        self.block_tokens = block_tokens
        self.fallbacks: dict[str, int] = {}
        self.renderer = Renderer(directory, options)
        self.tokenizer = PromptTokenizer(directory)
        self._beside = asyncio.Semaphore(2)  # threads at once

    def prompt(self, dialect: Dialect, fields: dict[str, Any], lora: str = "", salt: str = "") -> TokenPrompt | None:
        """The prompt of a request as it is forwarded; None where it cannot be told. `fields` stay as they are."""
        rendered = self._rendered(dialect, fields)
        return self._chained(rendered, token_seed(lora, salt)) if rendered is not None else None

    async def prompt_beside(self, dialect: Dialect, fields: dict[str, Any], lora: str = "", salt: str = "") -> TokenPrompt | None:
        """The same; a long text that was not seen before is tokenised by another thread, so that nobody else waits for it."""
        rendered = self._rendered(dialect, fields)
        if rendered is None:
            return None
        text, seed = rendered.prompt, token_seed(lora, salt)
        if isinstance(text, str) and len(text) > LONG_TEXT:
            try:
                start = self.tokenizer.unknown_from(text, seed, self.block_tokens, rendered.add_special_tokens)
                new = len(text) - start
                if new > MOST_NEW or (new > LONGEST_PIECE and self.tokenizer.longest_piece(text, start) > LONGEST_PIECE):
                    self._fell_back("too much new text at once, or too long a word")
                    return None
                if new > LONG_TEXT:
                    loop = asyncio.get_running_loop()
                    async with self._beside:
                        self.tokenizer.learn(await loop.run_in_executor(None, self.tokenizer.tokenize_ahead, text, start))
            except NotEncodable:
                pass  # found and counted below
        return self._chained(rendered, seed)

    def _rendered(self, dialect: Dialect, fields: dict[str, Any]) -> Rendered | None:
        try:
            if self.block_tokens < 1:
                raise NotReproducible("the engine's block is not known yet")
            return self.renderer.render(dialect, fields)
        except NotReproducible as error:
            self._fell_back(error.reason)
        return None

    def _chained(self, rendered: Rendered, seed: int) -> TokenPrompt | None:
        try:
            if isinstance(rendered.prompt, str):
                chain = self.tokenizer.chain(rendered.prompt, seed, self.block_tokens, rendered.add_special_tokens)
            else:
                chain = ChainState.start(seed, 4 * self.block_tokens).extend(_packed(rendered.prompt)).chain()
        except NotReproducible as error:
            self._fell_back(error.reason)
            return None
        except NotEncodable:
            self._fell_back("the prompt holds a lone surrogate, which engines refuse")
            return None
        return TokenPrompt(chain, chain.length // 4)

    def _fell_back(self, reason: str) -> None:
        count = self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        if count == 1:
            logger.info("%s: a prompt cannot be told (%s); such requests are placed by their text", self.renderer.directory, reason)


def _packed(ids: list[int]) -> bytes:
    try:
        return pack(ids)
    except OverflowError:
        raise NotReproducible("token ids out of range, which engines refuse") from None


def token_mode(model: ModelConfig) -> TokenMode:
    """Token mode as a model of the configuration asks for it. Raises TokenizerError."""
    assert model.tokenizer is not None
    options = RenderOptions(
        model.chat_template, model.chat_template_content_format, model.chat_template_kwargs, model.exclude_tools_when_tool_choice_none
    )
    return TokenMode(model.tokenizer, model.block_tokens or 0, options)
