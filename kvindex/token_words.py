"""The words of ASCII text as a tokenizer's pre-tokenizer cuts them, found by Python's own regular expressions.

A word's tokens never depend on its neighbours, so with the words at hand most new text costs dictionary look-ups, a fraction
of what the tokenizer takes. The pattern is the tokenizer's own, rewritten for ASCII, and is used only if it is proved equal.
"""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How ByteLevel writes ASCII for the model: what does not print (and the space) as letters from U+0100 on.
BYTE_LEVEL = {code: chr(0x100 + at) for at, code in enumerate((*range(33), 127))}
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # built into ByteLevel
_NONE = "\x80"  # stands in a character class for kinds that have no ASCII member
_ASCII = {
    "L": "a-zA-Z", "Lu": "A-Z", "Ll": "a-z", "Lt": _NONE, "Lm": _NONE, "Lo": _NONE, "M": _NONE, "N": "0-9", "Nd": "0-9",
    "P": r"!\"#%&'()*,\-./:;?@\[\\\]_{}", "S": r"$+<=>^`|~",
}  # fmt: skip
_COMPOSING = ("NFC", "NFD", "NFKC", "NFKD")  # normalizers that leave ASCII as it is

_KINDS = ("a", "S", "t", "1", " ", "\n", "\r", "\t", "'", ".", "/", "_", "<", "-", "\x0b", "\x1c", "\x00")
_FRAGMENTS = (*_KINDS, "  ", "\n\n", "    ", "'re", "'LL", "don't", "Word", "camelCase", "12345", "==", "://", " \n ", "\r\n", "});")


def ascii_words(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern whose `findall` gives an ASCII text's words; None where that cannot be proved.

    Proof: it cuts every text of up to three kinds of characters as the pre-tokenizer does, and some thousand longer ones made
    of what such patterns treat apart (contractions, runs of white space, digits, mixed case). They look ahead no further.
    """
    pre_tokenizer = tokenizer.pre_tokenizer
    if pre_tokenizer is None or not _leaves_ascii(tokenizer):
        return None
    source = _source(json.loads(pre_tokenizer.__getstate__()))
    if source is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # set operations, which the tokenizer's dialect has and this one has not
            pattern = re.compile(_for_ascii(source), re.ASCII)
    except (re.error, KeyError, Warning):
        return None
    for text in _texts():
        if pattern.findall(text) != [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]:
            return None
    return pattern


def _leaves_ascii(tokenizer: Tokenizer) -> bool:
    if tokenizer.normalizer is None:
        return True
    state = json.loads(tokenizer.normalizer.__getstate__())
    return all(step.get("type") in _COMPOSING for step in state.get("normalizers", [state]))


def _source(state: dict[str, Any]) -> str | None:
    """The one pattern that a pre-tokenizer splits by; None for another kind."""
    steps = state.get("pretokenizers", [state])
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2 if last.get("use_regex", True) else None
    split = steps[0]
    if len(steps) != 2 or split.get("type") != "Split" or split.get("invert") or last.get("use_regex", True):
        return None
    pattern = split.get("pattern", {}).get("Regex")
    return pattern if split.get("behavior") == "Isolated" and isinstance(pattern, str) else None


def _for_ascii(source: str) -> str:
    """The pattern with each \\p{...} replaced by its ASCII members. Raises KeyError for one that is not known."""
    made = []
    inside = False  # a character class
    at = 0
    while at < len(source):
        char = source[at]
        if char == "\\":
            if source.startswith("p{", at + 1):
                end = source.index("}", at)
                members = _ASCII[source[at + 3 : end]]
                made.append(members if inside else f"[{members}]")
                at = end + 1
                continue
            if source[at + 1] in "PhHX":
                raise KeyError(source[at : at + 2])
            made.append(source[at : at + 2])
            at += 2
            continue
        if char == "[":
            inside = True
        elif char == "]":
            inside = False
        made.append(char)
        at += 1
    return "".join(made)


def _texts() -> Iterator[str]:
    for length in (1, 2, 3):
        yield from map("".join, product(_KINDS, repeat=length))
    rng = random.Random(0)
    for _ in range(3000):
        yield "".join(rng.choices(_FRAGMENTS, k=rng.randint(4, 16)))
