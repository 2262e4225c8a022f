"""Programs that the end-to-end tests need and that are not Python."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str, package: str | None = None) -> str:
    """The path of a program. Without it a test is skipped, but in CI, which installs them all, it fails."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed (Debian package {package or name})"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path
