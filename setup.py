"""Metadata is in pyproject.toml. With WARMROUTE_COMPILE=1 what every request passes is compiled by mypyc (`make compile`).

Compiled are a decision and the relay. The index is not: its sets and hashes are shared objects, which compiled integers would copy.
"""

import os

from setuptools import setup

ROUTING = [
    f"routing/{name}.py"
    for name in (
        "calibration", "elsewhere", "fleet", "policies/ablation", "policies/placement", "policies/warm", "responses", "router", "sessions",
        "tickets", "trust",
    )
]  # fmt: skip
GATEWAY = [f"gateway/{name}.py" for name in ("body", "connection", "dialects", "inference", "outbox", "session_key", "upstream")]

extensions = []
if os.environ.get("WARMROUTE_COMPILE") == "1":
    from mypyc.build import mypycify

    # two libraries, so that two cores compile them; more optimisation takes twice as long and was no faster
    extensions = mypycify(
        [*ROUTING, *GATEWAY],
        opt_level="1",
        debug_level="0",
        separate=[(ROUTING, "warmroute_routing"), (GATEWAY, "warmroute_gateway")],
    )

setup(ext_modules=extensions)
