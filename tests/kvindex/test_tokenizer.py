from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from benchmarks.tiny_tokenizer import source_text
from kvindex import tokenizer as module
from kvindex.chain import ChainState, token_seed
from kvindex.token_cuts import safe_cuts
from kvindex.token_words import ascii_words
from kvindex.tokenizer import NotEncodable, PromptTokenizer, TokenizerError, pack
from tests.tiny_tokenizer import NAMES, copy_of, model

SEED = token_seed("", "salt")
BLOCK = 16

FRAGMENTS = st.one_of(
    st.text(max_size=12),
    st.text("ab A\n\t'.1_", max_size=30),
    st.sampled_from((
        "<|im_start|>", "<|im_end|>", "<|im_end|", "|im_end|>", "<think>", "</think>", "<tool_call>", "<|eot_id|>", "<|im_<|im_end|>",
        "    return value\n", "def f(self):\n", "\n\n\n", "   ", " the quick brown fox jumps over the lazy dog", "don't", "日本語",
        "🎉👩‍👩‍👧",
        "e\u0301", "\u00a0", "\x1c", "\r\n", "camelCaseName", "1234567", "});", "{\"key\": [1.5, null]}",
    )),
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=40).map("".join)


@cache
def library(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def whole(directory: Path, text: str, add_special_tokens: bool = False) -> bytes:
    """What the tokenizer itself makes of the whole text."""
    return pack(library(directory).encode(text, add_special_tokens=add_special_tokens).ids)


@cache
def shared(template: str) -> PromptTokenizer:
    return PromptTokenizer(model(template))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks and raw blocks so small that short texts are full of cuts and checkpoints."""
    monkeypatch.setattr(module, "CHUNK", 24)
    monkeypatch.setattr(module, "RAW_BLOCK", 48)
    yield


def reference(directory: Path, text: str, add_special_tokens: bool = False) -> Any:
    return ChainState.start(SEED, 4 * BLOCK).extend(whole(directory, text, add_special_tokens)).chain()


# --- tokens ---


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("template", NAMES)
def test_tokens_by_piece_are_those_of_the_whole_text(template: str) -> None:
    tokenizer = shared(template)
    assert tokenizer.piecewise

    @settings(max_examples=60, deadline=None)
    @given(TEXTS, st.booleans())
    def check(text: str, special: bool) -> None:
        assert tokenizer.encode(text, special) == whole(model(template), text, special)

    check()


def test_a_bos_is_added_where_special_tokens_are() -> None:
    tokenizer = shared("llama")
    bos = library(model("llama")).token_to_id("<|begin_of_text|>")
    assert tokenizer.encode("hi", add_special_tokens=True) == pack([bos]) + tokenizer.encode("hi")


@pytest.mark.parametrize(("flags", "before", "after"), [
    ({"add_bos_token": True}, ["<|begin_of_text|>"], []),
    ({"add_bos_token": True, "add_eos_token": True}, ["<|begin_of_text|>"], ["<|eot_id|>"]),
    ({"add_bos_token": False}, [], []),
])  # fmt: skip
def test_flags_of_the_configuration_decide_over_bos_and_eos(
    tmp_path: Path, flags: dict[str, bool], before: list[str], after: list[str]
) -> None:
    directory = copy_of("llama", tmp_path)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | flags))
    tokenizer = PromptTokenizer(directory)
    ids = library(model("llama")).token_to_id
    text = "<|eot_id|>hello"
    expected = pack(map(ids, before)) + whole(model("llama"), text) + pack(map(ids, after))
    assert tokenizer.encode(text, add_special_tokens=True) == expected
    assert tokenizer.chain(text, SEED, 1, add_special_tokens=True) == ChainState.start(SEED, 4).extend(expected).chain()


def test_tokens_that_only_the_configuration_adds_are_found(tmp_path: Path) -> None:
    directory = copy_of("chatml", tmp_path)
    path = directory / "tokenizer_config.json"
    added = {"content": "<|extra|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": {"5000": added}}))
    assert len(PromptTokenizer(directory).encode("<|extra|>")) == 4


@pytest.mark.parametrize("text", ["a\ud83d", "x" * 3 * module.RAW_BLOCK + "\ud83d", "日本\udc00"])
def test_a_lone_surrogate_is_refused_as_engines_refuse_it(text: str) -> None:
    with pytest.raises(NotEncodable):
        shared("qwen").encode(text)
    with pytest.raises(NotEncodable):
        shared("qwen").chain(text, SEED, BLOCK)


# --- tokenizers of other kinds ---


def _trained(change: Callable[[Tokenizer], None]) -> Tokenizer:
    """A tokenizer that marks words by \u2581, as SentencePiece's do; `change` sets how."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    change(tokenizer)
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<|im_start|>", "<|im_end|>", "<think>"], show_progress=False)
    tokenizer.train_from_iterator(source_text(40_000), trainer)
    return tokenizer


def _prepend(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


def _metaspace(scheme: str) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)

    return change


def _split(pattern: str) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return change


def _prefix_space(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def _adds(*tokens: AddedToken) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.add_tokens(list(tokens))

    return change


def _lowercase(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def _merged_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")


# kind -> (how it is made, whether it can be used by piece)
OTHERS: dict[str, tuple[Callable[[Tokenizer], None], bool]] = {
    "prepend": (_prepend, True),
    "metaspace-first": (_metaspace("first"), True),
    "metaspace-always": (_metaspace("always"), True),
    "metaspace-never": (_metaspace("never"), True),
    "prefix-space": (_prefix_space, True),
    "greedy-spaces": (_adds(AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)), True),
    "single-word": (_adds(AddedToken("<word>", single_word=True, normalized=False)), True),
    "one-inside-another": (_adds(AddedToken("<|im_end|>user", normalized=False), AddedToken("<|im", normalized=False)), True),
    "greedy-overlap": (_adds(AddedToken("x<|im_end|>", lstrip=True, normalized=False)), False),
    "normalized-overlap": (_adds(AddedToken("x<|im", normalized=True)), True),
    "normalized-with-space": (_adds(AddedToken("fox jumps", normalized=True)), True),
    "lowercase": (_lowercase, True),
    "split-at-spaces": (_merged_spaces, True),
    "looks-behind": (_split(r"(?<=x)in|[^x]|x"), True),
}
_MORE = ("<mask>", " <mask> ", "<word>", "a<word>", "fox jumps over", "<|im_end|>user", "x<|im_end|>", "  x<|im_end|>user", "xin xin in")


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", OTHERS)
def test_any_kind_of_tokenizer_gives_its_own_tokens(kind: str, tmp_path: Path) -> None:
    directory = copy_of("chatml", tmp_path)
    change, by_piece = OTHERS[kind]
    if kind.startswith(("prepend", "metaspace")):
        own = _trained(change)
    else:
        own = Tokenizer.from_file(str(directory / "tokenizer.json"))
        change(own)
    own.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    tokenizer = PromptTokenizer(directory)
    assert tokenizer.piecewise == by_piece

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.one_of(FRAGMENTS, st.sampled_from(_MORE)), max_size=30).map("".join))
    @example("xin xin in")
    @example("a <word> b<word>, <mask> x")
    @example("the fox jumps over the fox jumps <|im_end|>user <|im_end|>us  x<|im_end|>")
    def check(text: str) -> None:
        expected = pack(own.encode(text, add_special_tokens=False).ids)
        assert tokenizer.encode(text) == expected
        assert tokenizer.chain(text, SEED, BLOCK) == ChainState.start(SEED, 4 * BLOCK).extend(expected).chain()

    check()


def test_a_cut_that_only_some_pre_tokenizers_make_is_used_only_for_those() -> None:
    gpt2, qwen = safe_cuts(library(model("chatml"))), safe_cuts(library(model("qwen")))
    assert gpt2 is not None and qwen is not None
    # GPT-2's pattern leaves the last line end of a run to what follows: a run by itself is one word
    assert not gpt2.search(")\n\nb")
    assert qwen.search(")\n\nb")
    assert gpt2.search("one two") and qwen.search("one two")


def test_words_are_found_by_the_tokenizers_own_pattern_or_not_at_all() -> None:
    assert ascii_words(library(model("chatml"))) is not None
    assert ascii_words(library(model("qwen"))) is not None
    wrong = Tokenizer.from_file(str(model("qwen") / "tokenizer.json"))
    wrong.normalizer = normalizers.Lowercase()
    assert ascii_words(wrong) is None
    wrong = Tokenizer.from_file(str(model("qwen") / "tokenizer.json"))
    wrong.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert ascii_words(wrong) is None
    # \Z: before a last line end to the tokenizer, not to Python
    for pattern in (r"[a-z]+\Z|[\s\S]", r"[[:alpha:]]+|[\s\S]", r"\p{Greek}+|[\s\S]", r"\P{L}|\p{L}+"):
        _split(pattern)(wrong)
        assert ascii_words(wrong) is None


# --- chains ---


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("template", NAMES)
def test_chains_of_growing_forking_and_rewritten_prompts_are_those_from_scratch(template: str) -> None:
    tokenizer = PromptTokenizer(model(template))

    @settings(max_examples=20, deadline=None)
    @given(st.lists(FRAGMENTS, min_size=5, max_size=60), st.data())
    def check(fragments: list[str], data: st.DataObject) -> None:
        for _ in range(4):
            text = "".join(fragments)
            special = data.draw(st.booleans())
            assert tokenizer.chain(text, SEED, BLOCK, special) == reference(model(template), text, special)
            keep = data.draw(st.integers(0, len(fragments)))
            kind = data.draw(st.sampled_from(("grow", "fork", "rewrite")))
            new = data.draw(st.lists(FRAGMENTS, max_size=8))
            if kind == "grow":  # the tail is rewritten and the rest goes on
                fragments = fragments[:-1] + new
            elif kind == "fork":
                fragments = fragments[:keep] + new
            else:  # something in the middle falls out: thinking, or a compaction
                fragments = fragments[:keep] + fragments[keep + 2 :] + new

    check()


@pytest.mark.usefixtures("small_pieces")
def test_a_checkpoint_is_not_used_where_what_follows_changes_the_text_before_it() -> None:
    """The prompts agree up to a raw block's end, where one of them goes on to make another, longer token."""
    tokenizer = PromptTokenizer(model("chatml"))
    for cut in range(1, 12):
        begin = "<|im_end|>" + "a b " * 20
        begin = begin[: module.RAW_BLOCK * 2 - cut] + "<|im_end|>"[:cut]
        for tail in ("<|im_end|>"[cut:] + " x y", "<|im_end|>x"[:-1], "z " * 40, " b"):
            assert tokenizer.chain(begin + tail, SEED, BLOCK) == reference(model("chatml"), begin + tail)


def test_identities_do_not_share_chains() -> None:
    tokenizer = PromptTokenizer(model("chatml"))
    text = "word " * 8000
    first = tokenizer.chain(text, SEED, BLOCK)
    assert not set(tokenizer.chain(text, token_seed("", "other"), BLOCK).hashes) & set(first.hashes)
    assert len(tokenizer.chain(text, SEED, 2 * BLOCK).hashes) == len(first.hashes) // 2
    assert tokenizer.chain(text, SEED, BLOCK) == first


@pytest.mark.parametrize("template", NAMES)
def test_a_turn_costs_what_is_new(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PromptTokenizer(model(template))
    handled: list[int] = []
    segments = PromptTokenizer._segments

    def counted(self: PromptTokenizer, text: str, start: int) -> Any:
        handled.append(len(text) - start)
        return segments(self, text, start)

    monkeypatch.setattr(PromptTokenizer, "_segments", counted)
    turn = "<|im_start|>user\nPlease look at this function\n" + "def f(value):\n    return value + 1\n" * 30 + "<|im_end|>\n"
    history = "".join(f"{number} {turn}" for number in range(200))
    chain = tokenizer.chain(history + "<|im_start|>assistant\n", SEED, 128)
    handled.clear()
    longer = history + "<|im_start|>assistant\nDone.<|im_end|>\n" + turn
    grown = tokenizer.chain(longer, SEED, 128)
    assert handled[0] < 2 * module.RAW_BLOCK < len(history) / 10
    shared_blocks = len(chain.hashes) - 1
    assert grown.hashes[:shared_blocks] == chain.hashes[:shared_blocks]
    assert grown == ChainState.start(SEED, 512).extend(whole(model(template), longer)).chain()


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are tokenised from now on."""
    tokenised: list[str] = []
    encode = PromptTokenizer._encode

    def counted(self: PromptTokenizer, texts: list[str]) -> list[bytes]:
        tokenised.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(PromptTokenizer, "_encode", counted)
    return tokenised


def test_what_comes_back_elsewhere_is_not_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PromptTokenizer(model("qwen"))
    results = [f"<|im_start|>user\nresult {number}: é {'some text ' * 300}<|im_end|>\n" for number in range(20)]
    tokenizer.encode("".join(results))
    tokenised = counting(monkeypatch)
    # a template that drops something early (thinking) moves everything behind it
    text = "<|im_start|>system\nnew<|im_end|>\n" + "".join(results[3:])
    assert tokenizer.encode(text) == whole(model("qwen"), text)
    assert sum(map(len, tokenised)) < 50


def test_memory_stays_within_its_bounds() -> None:
    tokenizer = PromptTokenizer(model("qwen"), piece_bytes=200_000, checkpoint_bytes=20_000)
    for session in range(25):
        text = "".join(f"<|im_start|>user\n{session} {number} naïve text of its own {'words ' * 50}<|im_end|>\n" for number in range(80))
        chain = tokenizer.chain(text, SEED, BLOCK)
        assert tokenizer.kept_piece_bytes <= 200_000
        assert tokenizer.kept_checkpoint_bytes <= 20_000
    assert tokenizer._checkpoints
    assert tokenizer.kept_piece_bytes == sum(module._piece_cost(*entry) for entry in tokenizer._pieces.items())
    assert tokenizer.kept_checkpoint_bytes == sum(checkpoint.cost for checkpoint in tokenizer._checkpoints.values())
    assert chain == reference(model("qwen"), text)


def test_what_was_used_last_is_kept_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PromptTokenizer(model("qwen"), piece_bytes=20_000)
    tokenised = counting(monkeypatch)
    for number in range(100):
        tokenizer.encode("é the one that is asked for again<|im_end|>")
        tokenizer.encode(f"é{number} {'other ' * 50}<|im_end|>")
    assert sum(text.startswith("é the one") for text in tokenised) == 1
    assert len(tokenizer._pieces) < 50


def test_known_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WORDS", 100)
    tokenizer = PromptTokenizer(model("qwen"))
    letters = "abcdefghij"
    for number in range(100, 140):
        prefix = "".join(letters[int(digit)] for digit in str(number))
        text = " ".join(f"w{prefix}{letter}" for letter in letters) + " " + "z" * 500
        assert tokenizer.encode(text) == whole(model("qwen"), text)
        assert 0 < len(tokenizer._word_tokens) <= 100
        assert all(len(word) <= module.LONGEST_WORD for word in tokenizer._word_tokens)


# --- errors ---


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.json is missing; point to a model directory"):
        PromptTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        PromptTokenizer(tmp_path)
    directory = copy_of("chatml", tmp_path / "model")
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json cannot be read"):
        PromptTokenizer(directory)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'warmroute\[exact\]'"):
        PromptTokenizer(model("chatml"))
