"""A Qwen3 of 1.4 M random parameters that vLLM loads offline: `python -m tests.engine.tiny_model DIRECTORY` (torch, transformers).

The same seed gives the same bytes, so that several engines answer alike. 512 bytes of KV cache a token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.tiny_tokenizer import ADDED, SPECIAL, write_model


def build(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    write_model(directory, "qwen")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ends = {"eos_token_id": tokenizer.token_to_id("<|im_end|>"), "pad_token_id": tokenizer.token_to_id("<|endoftext|>")}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2304, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=131_072, tie_word_embeddings=False, initializer_range=0.05, bos_token_id=None, **ends,
    )  # fmt: skip
    assert tokenizer.get_vocab_size() <= config.vocab_size
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # never the likeliest: an answer does not end before max_tokens, and has no token that a client would not see
        for token in (*SPECIAL, *ADDED):
            model.lm_head.weight[tokenizer.token_to_id(token)].zero_()
        model.lm_head.weight[tokenizer.get_vocab_size() :].zero_()
    model.to(torch.bfloat16).save_pretrained(directory, safe_serialization=True)
    (directory / "generation_config.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
