"""Model directories with a small tokenizer, made once a run."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from benchmarks.tiny_tokenizer import TEMPLATES, write_model

NAMES = tuple(TEMPLATES)


@cache
def _made() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="tiny-models-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def model(template: str) -> Path:
    """The directory of the model with this chat template: chatml, llama (BOS, date) or qwen (NFC, thinking)."""
    return write_model(_made() / template, template)


def copy_of(template: str, directory: Path) -> Path:
    """A copy to change."""
    shutil.copytree(model(template), directory, dirs_exist_ok=True)
    return directory
