"""Prompt text -> the token ids an engine sees, and their block chain, at a cost that follows the new turn.

Two memories make that so. Token ids are cached by piece: text is cut where no merge can cross (at added tokens, and inside
long pieces where the tokenizer's own pre-tokenizer proves it), so a history that comes back in another order costs look-ups.
And the chain is cached by prefix: a rendered prompt that begins like an earlier one is neither tokenised nor hashed again up
to there. Which prefix is known is told by a 128-bit digest of the whole text up to it, so what is equal is known to be equal,
and a checkpoint need not keep the text: a session of 100,000 tokens costs tens of kilobytes here.

Token ids are bytes: unsigned 32-bit, little-endian.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

from kvindex.chain import BlockChain, ChainState
from kvindex.token_cuts import battery, plain_tokens, safe_cuts
from kvindex.token_words import BYTE_LEVEL, ascii_words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger("warmroute.tokenizer")

RAW_BLOCK = 8192  # characters; granularity at which known prefixes are found
CHUNK = 2048  # characters; a longer piece is cut at the next place that is proved safe
MAX_WORDS = 1 << 16  # about 10 MB
LONGEST_WORD = 64  # characters; longer ones hardly come again
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(Exception):
    """A tokenizer cannot be loaded; says what to do."""


class NotEncodable(ValueError):
    """A text that is no Unicode (a lone surrogate): engines refuse it as well."""


def pack(ids: Iterable[int]) -> bytes:
    """Token ids as unsigned 32-bit little-endian. Raises OverflowError or TypeError for what is no token id."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def read_json(path: Path) -> Any:
    """A JSON file of a model directory, None where it is absent. Raises TokenizerError when it is not JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json gives a name, e.g. bos_token; templates see them as variables."""
    named = {name: value for name, value in config.items() if name in NAMED_TOKENS or name.endswith("_token")}
    for extra in (config.get("extra_special_tokens"), config.get("model_specific_special_tokens")):
        if isinstance(extra, dict):
            named |= extra
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def load_backend(directory: Path) -> Tokenizer:
    """The `tokenizers` tokenizer of a model directory, with the tokens that tokenizer_config.json adds. Raises TokenizerError."""
    try:
        from tokenizers import AddedToken, Tokenizer
    except ImportError:
        raise TokenizerError("token mode needs the tokenizers package: pip install 'warmroute[exact]'") from None
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{path} is missing; point to a model directory that holds a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise TokenizerError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(directory / "tokenizer_config.json") or {}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda entry: int(entry[0]))
    added = [
        AddedToken(
            token["content"], single_word=token.get("single_word", False), lstrip=token.get("lstrip", False),
            rstrip=token.get("rstrip", False), normalized=token.get("normalized", True), special=token.get("special", False),
        )
        for _, token in declared
        if token["content"] not in known
    ]  # fmt: skip
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = [*named_tokens(config).values(), *([token for token in extra if isinstance(token, str)] if isinstance(extra, list) else [])]
    known |= {token.content for token in added}
    added += [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(special) if text not in known]
    if added:
        tokenizer.add_tokens(added)
    return tokenizer


@dataclass(slots=True)
class _Checkpoint:
    """The chain of a prompt up to a place where it may be cut."""

    offset: int  # of the place, in the text
    hashes: list[int] = field(repr=False)  # shared with the chain it came from
    blocks: int  # how many of them lie before the place
    pending: bytes = field(repr=False)
    length: int  # bytes of token ids before the place
    cost: int

    def state(self, seed: int, block_bytes: int) -> ChainState:
        hashes = self.hashes[: self.blocks]
        return ChainState(block_bytes, hashes[-1] if hashes else seed, hashes, self.pending, self.length)


class PromptTokenizer:
    """Token ids exactly as the whole-text tokenizer gives them, from caches of at most `piece_bytes` and `checkpoint_bytes`.

    `directory` holds tokenizer.json and tokenizer_config.json. Raises TokenizerError.
    """

    def __init__(self, directory: str | Path, *, piece_bytes: int = 64 * 1024 * 1024, checkpoint_bytes: int = 64 * 1024 * 1024):
        self.directory = Path(directory)
        self.piece_bytes = piece_bytes
        self.checkpoint_bytes = checkpoint_bytes
        self.kept_piece_bytes = 0
        self.kept_checkpoint_bytes = 0
        self._tokenizer = load_backend(self.directory)
        self._pieces: OrderedDict[str, bytes] = OrderedDict()
        self._checkpoints: OrderedDict[int, _Checkpoint] = OrderedDict()
        self._prefix, self._suffix = self._surrounding()
        self._plain: dict[str, bytes] = {}
        self._added: re.Pattern[str] | None = None  # finds added tokens: leftmost, then longest
        self._cuts: re.Pattern[str] | None = None  # finds places inside of a piece where it may be cut
        self._words: re.Pattern[str] | None = None  # finds the words of ASCII text
        self._word_tokens: dict[str, bytes] = {}
        self._margin = 0  # characters behind a cut that can still undo it
        self._lead = ""  # an added token that pieces behind the first are tokenised after
        self._cut_up()

    @property
    def piecewise(self) -> bool:
        """Whether texts are tokenised by piece; otherwise each is tokenised whole (the tokenizer allows no cut)."""
        return self._added is not None or self._cuts is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        """Token ids of a whole text. Raises NotEncodable for text with a lone surrogate."""
        tokens = b"".join(self._lookup(self._segments(text, 0)[0]))
        return self._prefix + tokens + self._suffix if add_special_tokens else tokens

    def chain(self, text: str, seed: int, block_tokens: int, add_special_tokens: bool = False) -> BlockChain:
        """The block chain of a text's token ids (its `length` is 4 bytes a token). Raises NotEncodable."""
        size = 4 * block_tokens
        digests = self._digests(text, seed, size, add_special_tokens)
        known, checkpoint = self._known(digests)
        if checkpoint is not None:
            state = checkpoint.state(seed, size)
            offset = checkpoint.offset
        else:
            state = ChainState.start(seed, size)
            offset = 0
            if add_special_tokens:
                state = state.extend(self._prefix)
        parts, ends = self._segments(text, offset)
        tokens = self._lookup(parts)
        stream = b"".join(tokens)
        start = state
        state = state.extend(stream)
        if known < len(digests):
            self._remember(digests, known, offset, start, start.pending + stream, state.hashes, ends, tokens)
        if add_special_tokens and self._suffix:
            state = state.extend(self._suffix)
        return state.chain()

    def unknown_from(self, text: str, seed: int, block_tokens: int, add_special_tokens: bool = False) -> int:
        """Where the text goes on behind its longest known prefix: what is from there on has to be tokenised."""
        _, checkpoint = self._known(self._digests(text, seed, 4 * block_tokens, add_special_tokens))
        return checkpoint.offset if checkpoint is not None else 0

    def longest_piece(self, text: str, start: int) -> int:
        """Characters of the longest piece from `start` on, a place where the text may be cut."""
        return max((len(part) for part in self._segments(text, start)[0] if type(part) is str), default=0)

    def tokenize_ahead(self, text: str, start: int) -> dict[str, bytes]:
        """Token ids of the pieces from `start` on that are not known; changes nothing, so another thread may do it. See `learn`."""
        cache = self._pieces
        missing = list(dict.fromkeys(part for part in self._segments(text, start)[0] if type(part) is str and part not in cache))
        return dict(zip(missing, self._encode(missing), strict=True))

    def learn(self, pieces: dict[str, bytes]) -> None:
        """Keep what `tokenize_ahead` found."""
        cache = self._pieces
        for piece, tokens in pieces.items():
            if piece not in cache:
                cache[piece] = tokens
                self.kept_piece_bytes += _piece_cost(piece, tokens)
        while self.kept_piece_bytes > self.piece_bytes:
            self.kept_piece_bytes -= _piece_cost(*cache.popitem(last=False))

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    # --- prefixes ---

    def _digests(self, text: str, seed: int, size: int, add_special_tokens: bool) -> list[int]:
        """A digest of everything up to the end of each raw block, the identity that it is chained to included."""
        hasher = xxh3_128(struct.pack("<QQ?", seed, size, add_special_tokens))
        update, digest = hasher.update, hasher.intdigest
        digests = []
        try:
            for at in range(0, len(text) - RAW_BLOCK + 1, RAW_BLOCK):
                update(text[at : at + RAW_BLOCK].encode())
                digests.append(digest())
        except UnicodeEncodeError:
            raise NotEncodable("the text holds a lone surrogate") from None
        return digests

    def _known(self, digests: list[int]) -> tuple[int, _Checkpoint | None]:
        """The longest known prefix: how many raw blocks it has, and its checkpoint."""
        checkpoints = self._checkpoints
        for blocks in range(len(digests), 0, -1):
            checkpoint = checkpoints.get(digests[blocks - 1])
            if checkpoint is not None:
                checkpoints.move_to_end(digests[blocks - 1])
                return blocks, checkpoint
        return 0, None

    def _remember(
        self,
        digests: list[int],
        known: int,
        offset: int,
        start: ChainState,
        stream: bytes,
        hashes: list[int],
        ends: list[int],
        tokens: list[bytes],
    ) -> None:
        """Leave a checkpoint for each raw block that holds a place where the text may be cut.

        `stream` holds the token ids from the last full block before `start` on. A place counts only when nothing behind the
        raw block's end can undo it: the digest vouches for the text up to that end alone.
        """
        size = start.block_bytes
        first = start.length - len(start.pending)
        places: list[tuple[int, int, int]] = []  # (raw block, offset, length)
        place, length = offset, start.length
        blocks = known + 1
        last = offset
        for end, piece in zip((*ends, sys.maxsize), (*tokens, b""), strict=True):
            while blocks <= len(digests) and end > blocks * RAW_BLOCK - self._margin:
                if place > last:
                    places.append((blocks, place, length))
                    last = place
                blocks += 1
            place = end
            length += len(piece)
        if not places:
            return
        shared = (8 * len(hashes) + 32 * (len(hashes) - len(start.hashes))) // len(places)
        for block, place, length in places:
            full = length // size
            pending = stream[full * size - first : length - first]
            checkpoint = _Checkpoint(place, hashes, full, pending, length, shared + len(pending) + 400)
            replaced = self._checkpoints.pop(digests[block - 1], None)
            self._checkpoints[digests[block - 1]] = checkpoint
            self.kept_checkpoint_bytes += checkpoint.cost - (replaced.cost if replaced else 0)
        while self.kept_checkpoint_bytes > self.checkpoint_bytes:
            _, oldest = self._checkpoints.popitem(last=False)
            self.kept_checkpoint_bytes -= oldest.cost

    # --- pieces ---

    def _segments(self, text: str, start: int) -> tuple[list[str | bytes], list[int]]:
        """The text from `start` on in parts, and where each ends: added tokens as their id, pieces of text between them.

        `start` is the text's begin or a place where it may be cut.
        """
        parts: list[str | bytes] = []
        ends: list[int] = []
        at = start
        if self._added is not None:
            plain = self._plain
            for match in self._added.finditer(text, start):
                begin, end = match.span()
                if begin > at:
                    self._cut(text, at, begin, parts, ends)
                parts.append(plain[match.group()])
                ends.append(end)
                at = end
        if at < len(text):
            self._cut(text, at, len(text), parts, ends)
        return parts, ends

    def _cut(self, text: str, at: int, stop: int, parts: list[str | bytes], ends: list[int]) -> None:
        """Add the piece text[at:stop], in chunks where it is long."""
        if self._cuts is not None:
            while stop - at > CHUNK and (match := self._cuts.search(text, at + CHUNK - 1, stop)):
                parts.append(text[at : match.end()])
                ends.append(at := match.end())
        parts.append(self._lead + text[at:stop] if at and self._lead else text[at:stop])
        ends.append(stop)

    def _lookup(self, parts: list[str | bytes]) -> list[bytes]:
        """Token ids of each part; pieces that are not known yet are tokenised in one call."""
        cache = self._pieces
        missing: dict[str, bytes] = {}
        for part in parts:
            if type(part) is str:
                if part in cache:
                    cache.move_to_end(part)
                else:
                    missing[part] = b""
        if not missing:
            return [part if type(part) is bytes else cache[part] for part in parts]  # type: ignore[index]
        others = []
        for piece in missing:
            tokens = self._by_words(piece) if self._words is not None and piece.isascii() else None
            if tokens is None:
                others.append(piece)
            else:
                missing[piece] = tokens
        if others:
            missing |= zip(others, self._encode(others), strict=True)
        found = [part if type(part) is bytes else missing[part] if part in missing else cache[part] for part in parts]  # type: ignore[index]
        self.learn(missing)
        return found

    def _by_words(self, piece: str) -> bytes | None:
        """Token ids of ASCII text, word by word; None where a word's own tokens cannot be told."""
        assert self._words is not None
        words = self._words.findall(piece)
        known = self._word_tokens
        try:
            return b"".join(map(known.__getitem__, words))
        except KeyError:
            new = list({word for word in words if word not in known})
        if any(self._words.findall(word) != [word] for word in new):
            return None  # by itself it is cut further
        tokenize = self._tokenizer.model.tokenize  # a word needs nothing of what the tokenizer does around its model
        tokens = {word: pack([token.id for token in tokenize(word.translate(BYTE_LEVEL))]) for word in new}
        joined = b"".join([tokens[word] if word in tokens else known[word] for word in words])
        if len(known) + len(tokens) > MAX_WORDS:
            known.clear()
        known |= {word: ids for word, ids in tokens.items() if len(word) <= LONGEST_WORD}
        return joined

    def _encode(self, texts: list[str]) -> list[bytes]:
        try:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            raise NotEncodable("the text holds a lone surrogate") from None
        if not self._lead:
            return [pack(encoding.ids) for encoding in encoded]
        skips = [1 if text.startswith(self._lead) else 0 for text in texts]
        return [pack(encoding.ids[skip:]) for skip, encoding in zip(skips, encoded, strict=True)]

    # --- loading ---

    def _surrounding(self) -> tuple[bytes, bytes]:
        """Token ids that `add_special_tokens` puts before and behind a text (BOS, EOS)."""
        config = read_json(self.directory / "tokenizer_config.json") or {}
        if "add_bos_token" in config or "add_eos_token" in config or self._tokenizer.post_processor is None:
            named = named_tokens(config)
            ends = []
            for flag, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
                token_id = self._tokenizer.token_to_id(named.get(name, "")) if config.get(flag) else None
                ends.append(pack([] if token_id is None else [token_id]))
            return ends[0], ends[1]
        bare = self._tokenizer.encode("x", add_special_tokens=False).ids
        full = self._tokenizer.encode("x", add_special_tokens=True).ids
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return pack(full[:at]), pack(full[at + len(bare) :])
        raise TokenizerError(f"{self.directory}: its post-processor changes the text's own tokens; such tokenizers are not supported")

    def _cut_up(self) -> None:
        """Find out where texts may be cut; whatever does not stand the self-check is not used."""
        plain = plain_tokens(self._tokenizer)
        if plain:
            self._plain = {text: pack([token_id]) for text, token_id in plain.items()}
            self._added = re.compile("|".join(map(re.escape, sorted(plain, key=len, reverse=True))))
        self._margin = max(map(len, plain or ("",))) + 2
        if plain is not None:
            self._cuts = safe_cuts(self._tokenizer)
            if len(plain) == len(self._tokenizer.get_added_tokens_decoder()):  # no others are looked for inside of pieces
                self._words = ascii_words(self._tokenizer)
        for lead in ("", *list(plain or ())[:1]):
            self._lead = lead
            if lead:
                self._cuts = self._words = None  # such tokenizers mark a text's begin, and a chunk has none
            if self._agrees():
                return
        logger.warning("%s: tokenised by piece it differs from tokenised whole; prompts are tokenised whole, which is slow", self.directory)
        self._lead, self._added, self._cuts, self._words = "", None, None, None
        self._forget()

    def _agrees(self) -> bool:
        """Whether tokenising by piece gives what tokenising whole gives, on texts that are known to be awkward."""
        self._forget()
        tokens = list(self._plain)
        texts = battery(dict.fromkeys(tokens[:4] + tokens[-4:]), 4 * CHUNK)
        return all(self.encode(text) == pack(self._tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)

    def _forget(self) -> None:
        self._pieces.clear()
        self._word_tokens.clear()
        self.kept_piece_bytes = 0


def _piece_cost(piece: str, tokens: bytes) -> int:
    return sys.getsizeof(piece) + len(tokens) + 200  # bytes it keeps alive, roughly
