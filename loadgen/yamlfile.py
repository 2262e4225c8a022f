"""YAML files of users: read once, refused in the words of whoever needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_fields(file: Path, fault: type[Exception], example: str) -> dict[str, Any]:
    """The fields of a file; `example` names some that it should have. Raises `fault` with the file's name and what is wrong."""
    try:
        data = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise fault(f"{file}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise fault(f"{file}: not YAML: {error}") from None
    if not isinstance(data, dict):
        raise fault(f"{file}: expected fields such as {example}")
    return data
