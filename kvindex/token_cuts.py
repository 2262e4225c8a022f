"""Where a text may be cut so that its pieces, tokenised one by one, give the tokens of the whole.

At added tokens: no merge crosses one. Inside a piece only where the tokenizer's own pre-tokenizer proves it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Between the two halves of each: (what stands before, what stands behind). Which of them a tokenizer allows is proved at load.
_CUTS = (
    (r"[A-Za-z]", r" [A-Za-z]"),
    (r"[A-Za-z]", r"\n[A-Za-z]"),
    (r"\n", r"[A-Za-z]"),
)
# One of each kind of character that pre-tokenizers tell apart.
_KINDS = ("a", "S", "é", "中", "\u0301", "1", " ", "\n", "\r", "\t", "'", ".", "/", "_", "🎉", "\u00a0", "\u3000", "<")
_FARTHER = ("", "a", " ", "\n", "'")  # a place two characters away matters to fewer: runs, contractions
_BEFORE = {r"[A-Za-z]": ("a", "Z"), r"\n": ("\n",)}
_BEHIND = {r" [A-Za-z]": (" s", " S"), r"\n[A-Za-z]": ("\ns", "\nS"), r"[A-Za-z]": ("s", "S")}


def safe_cuts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern whose every match ends where the pre-tokenizer always cuts; None where there is no such place.

    Proof: the pre-tokenizer cuts there, and cuts the halves as it cuts the whole, in every combination of the kinds of
    characters it can tell apart around the place (two before, one behind). A model never looks across pre-tokens.
    """
    pre_tokenizer = tokenizer.pre_tokenizer
    if pre_tokenizer is None or not _keeps_letters(tokenizer):
        return None
    if any(token.normalized and " " in token.content for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # they are found in what the normalizer leaves of a piece, so a cut could split one

    def pieces(text: str) -> list[str]:
        return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]

    proved = []
    for before, behind in _CUTS:
        lefts = [(left, pieces(left)) for left in map("".join, product(_FARTHER, _KINDS, _BEFORE[before]))]
        rights = [(right, pieces(right)) for right in map("".join, product(_BEHIND[behind], ("", *_KINDS)))]
        if all(pieces(left + right) == cut_left + cut_right for left, cut_left in lefts for right, cut_right in rights):
            proved.append(f"{before}(?={behind})")
    return re.compile("|".join(proved)) if proved else None


def _keeps_letters(tokenizer: Tokenizer) -> bool:
    """Whether the normalizer only composes characters (NFC and its kin), which never crosses a space or a line end."""
    normalizer = tokenizer.normalizer
    if normalizer is None:
        return True
    state = json.loads(normalizer.__getstate__())
    steps = state.get("normalizers", [state])
    return all(step.get("type") in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase") for step in steps)


def _crossing(one: str, other: str) -> bool:
    """Whether two texts can overlap in a third."""
    return one in other or other in one or any(one[-n:] == other[:n] or other[-n:] == one[:n] for n in range(1, min(len(one), len(other))))


def plain_tokens(tokenizer: Tokenizer) -> dict[str, int] | None:
    """Added tokens that are found in the text as they stand, and their ids; None where others could overlap with them."""
    plain: dict[str, int] = {}
    others: list[AddedToken] = []
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if not token.content or token.normalized:
            continue  # normalized ones are looked for in what the plain ones leave, that is inside of pieces
        if token.lstrip or token.rstrip or token.single_word:
            others.append(token)
        else:
            plain[token.content] = token_id
    if any(_crossing(token.content, text) for token in others for text in plain):
        return None
    return plain


_AWKWARD = (
    "", "a", "\n", " ", "\n\n", "  two  spaces ", "Hello, world!\n", "\n\n  indented\n\ttabbed\r\nend", "don't I'LL we're",
    "1234567890", "naïve café e\u0301 \u212b ﬁ", "日本語のテキスト。中文", "👩‍👩‍👧‍👦🎉", "\u00a0\u200b\ufeff",
    '{"a": [1, 2.5e-3]}', "def f(x):\n    return x**2\n", "▁ ▁▁", "\u0000\u0001\x7f",
)  # fmt: skip


def battery(tokens: Iterable[str], length: int) -> Iterator[str]:
    """Texts that are known to be awkward, alone and around each of `tokens`, and one of at least `length` characters."""
    yield from _AWKWARD
    for token in tokens:
        for text in _AWKWARD:
            yield f"{text}{token}user\n {token}{token}{text}\n{token}"
        yield f"{token[:-1]}{token}{token[1:]} {token}x"
    prose = "".join(_AWKWARD) + "the quick brown fox\njumps over; the lazy dog\n\nagain. "
    yield prose * (1 + length // len(prose))
