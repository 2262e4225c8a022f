from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_traces() -> Path:
    """The recorded traces, which lie beside the repository and are not part of it."""
    path = Path(__file__).parents[3] / "shared" / "traces"
    if not path.is_dir():
        pytest.skip("the recorded traces (shared/traces beside the repository) are not here")
    return path
