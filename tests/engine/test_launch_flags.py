"""The installed vLLM's own parser takes every flag that the launcher writes, and its configuration classes every JSON value."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from workers.engines import engine_command, vllm
from workers.engines.vllm import ALL2ALL, HASHES, KV_DTYPES, LORA_RANKS, METHODS, QUANTIZE_ON_LOAD
from workers.launchprofile import LaunchProfile, load_launch_profile

pytestmark = pytest.mark.engine

PROFILES = sorted((Path(__file__).parent.parent.parent / "deploy" / "profiles").glob("*.yaml"))
KNOWN_FLAGS = Path(__file__).parent.parent / "workers" / "flags" / "vllm-0.32.0.txt"

# Runs in the engine's interpreter: name -> argument vector in, name -> what the parser made of it or its error out.
PARSE = """
import contextlib, dataclasses, io, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.config.speculative import SpeculativeConfig
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.tool_parsers import ToolParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

parser = make_arg_parser(FlexibleArgumentParser())
results = {}
for name, argv in json.load(sys.stdin).items():
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            args = vars(parser.parse_args(argv))
        speculation = args["speculative_config"] or {}
        fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
        wrong = [f"speculative_config.{key}" for key in speculation if key not in fields]
        if args["quantization"] not in (None, *QUANTIZATION_METHODS):
            wrong.append(f"quantization {args['quantization']}")
        if args["tool_call_parser"] not in (None, *ToolParserManager.list_registered()):
            wrong.append(f"tool_call_parser {args['tool_call_parser']}")
        if args["reasoning_parser"] not in (None, "", *ReasoningParserManager.list_registered()):
            wrong.append(f"reasoning_parser {args['reasoning_parser']}")
        connector = args["kv_transfer_config"].kv_connector if args["kv_transfer_config"] else None
        if connector is not None and connector not in KVConnectorFactory._registry:
            wrong.append(f"kv_connector {connector}")
        results[name] = {"error": ", ".join(wrong), "args": {key: repr(value) for key, value in args.items()}}
    except SystemExit:
        results[name] = {"error": error.getvalue().strip().splitlines()[-1], "args": {}}
    except Exception as failure:
        results[name] = {"error": repr(failure), "args": {}}
flags = sorted({option for action in parser._actions for option in action.option_strings})
print("RESULT" + json.dumps({"results": results, "flags": flags}))
"""


def single(**fields: Any) -> list[str]:
    profile = LaunchProfile.model_validate({"engine": "vllm", "model": "m", **fields})
    return engine_command(profile).argv("")[2:]  # after `vllm serve`


def vectors() -> dict[str, list[str]]:
    """Every shipped profile, and every value of the adapter's tables that the profiles leave out."""
    found = {}
    for path in PROFILES:
        profile = load_launch_profile(path)
        if profile.engine == "vllm":
            found[path.stem] = engine_command(profile).argv("")[2:]
    found |= {f"all2all {name}": single(all2all_backend=name) for name in ALL2ALL}
    found |= {f"hash {name}": single(prefix_hash_algo=name) for name in HASHES}
    found |= {f"kv dtype {name}": single(kv_dtype=name) for name in KV_DTYPES}
    found |= {f"lora rank {rank}": single(lora={"max_rank": rank}) for rank in LORA_RANKS}
    found |= {f"method {name}": single(quantization_method=name) for name in METHODS}
    found |= {f"load {name}": single(quantization=name, quantization_source="load") for name in QUANTIZE_ON_LOAD}
    found |= {f"connector {name}": single(kv_transfer={"connector": name}) for name in vllm.CONNECTORS}
    found |= {f"role {name}": single(role=name, kv_transfer={"connector": "nixl"}) for name in vllm.KV_ROLES}
    methods = {
        "suffix": {},
        "eagle": {"model": "d", "num_tokens": 2},
        "eagle3": {"model": "d", "num_tokens": 2},
        "draft_model": {"model": "d", "num_tokens": 2},
    }
    found |= {f"speculation {name}": single(speculation={"method": name, **more}) for name, more in methods.items()}
    for name, nodes in {"tensor parallel": {"tp": 16}, "data parallel": {"attention_dp": 16}}.items():
        found[f"nodes {name}"] = single(**nodes, nodes={"count": 2, "rank": 1, "address": "n0"})
    found["no to everything"] = single(prefix_caching=False, chunked_prefill=False, report_cached_tokens=False)
    found["nothing more"] = single(kv_capacity_tokens=640, block_size=32, tokenizer="t", pp=2, dp=2)
    return found


@pytest.fixture(scope="module")
def parsed(vllm_python: Path) -> dict[str, Any]:
    """What the engine's parser makes of all argument vectors; one start of its interpreter serves all tests."""
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    given = json.dumps(vectors() | {"wrong": ["m", "--no-such-flag"], "wrong value": ["m", "--block-size", "many"]})
    done = subprocess.run([vllm_python, "-c", PARSE], input=given, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return result


@pytest.mark.parametrize("name", vectors())
def test_the_engine_parses_the_command(parsed: dict[str, Any], name: str) -> None:
    assert parsed["results"][name]["error"] == ""


def test_a_wrong_flag_would_have_been_found(parsed: dict[str, Any]) -> None:
    assert "--no-such-flag" in parsed["results"]["wrong"]["error"]
    assert "many" in parsed["results"]["wrong value"]["error"]


def test_the_engine_understands_what_was_meant(parsed: dict[str, Any]) -> None:
    args = parsed["results"]["glm-5.2-fp8-wide-ep-vllm"]["args"]
    assert (args["model_tag"], args["data_parallel_size"], args["data_parallel_size_local"]) == ("'zai-org/GLM-5.2-FP8'", "16", "8")
    assert "num_redundant_experts=32" in args["eplb_config"]
    assert "replay_endpoint='tcp://*:5657'" in args["kv_events_config"]
    assert "kv_role='kv_consumer'" in parsed["results"]["pd-vllm-decode"]["args"]["kv_transfer_config"]


def test_the_flags_that_the_fast_tests_know_are_those_of_the_engine(parsed: dict[str, Any]) -> None:
    assert parsed["flags"] == sorted(KNOWN_FLAGS.read_text("utf-8").split())
