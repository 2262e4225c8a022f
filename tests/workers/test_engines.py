"""One neutral profile becomes each engine's command line; what an engine cannot do is an error that says so."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.stack import ScriptedWorker, WorkerRequest
from workers.engines import ENGINE_METRICS, engine_command, sglang, trtllm, vllm
from workers.engines.command import Elsewhere, Rule, UnsupportedError
from workers.launchprofile import GATEWAY_ONLY, LaunchProfile, ProfileError, load_launch_profile
from workers.monitor import Endpoint, Monitor, kv_capacity
from workers.profile import WorkerProfile

HERE = Path(__file__).parent
PROFILES = sorted((HERE.parent.parent / "deploy" / "profiles").glob("*.yaml"))
RULES: dict[str, dict[str, Rule]] = {"vllm": vllm.RULES, "sglang": sglang.RULES, "trtllm": trtllm.RULES}
FLAG_FILES = {"vllm": "vllm-0.32.0.txt", "sglang": "sglang-0.5.23.txt", "trtllm": "trtllm-1.4.txt"}
FLAGS = {engine: frozenset((HERE / "flags" / name).read_text("utf-8").split()) for engine, name in FLAG_FILES.items()}
# Keys of trtllm-serve's options file that the adapter may write.
TRTLLM_OPTIONS = {
    "return_perf_metrics": None,
    "enable_iter_perf_stats": None,
    "enable_attention_dp": None,
    "dtype": None,
    "quant_config": {"quant_algo"},
    "kv_cache_config": {
        "dtype", "max_gpu_total_bytes", "max_tokens", "tokens_per_block", "enable_block_reuse", "use_kv_cache_manager_v2",
        "kv_events_config", "host_cache_size",
    },
    "kv_connector_config": {"connector"},
    "cache_transceiver_config": {"backend"},
    "speculative_config": {
        "decoding_type", "max_draft_len", "use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens", "speculative_model",
        "max_matching_ngram_size",
    },
    "enable_lora": None,
    "lora_config": {"max_lora_rank", "max_loras"},
    "cuda_graph_config": None,
}  # fmt: skip


def profile(engine: str, **fields: Any) -> LaunchProfile:
    return LaunchProfile.model_validate({"engine": engine, "model": "m", **fields})


def words(engine: str, **fields: Any) -> str:
    return shlex.join(engine_command(profile(engine, **fields)).argv("options.yaml"))


def problems(engine: str, **fields: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        engine_command(profile(engine, **fields))
    return str(caught.value)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_shipped_profile_gives_the_expected_command(path: Path) -> None:
    expected = (HERE / "commands" / f"{path.stem}.txt").read_text("utf-8")
    assert engine_command(load_launch_profile(path)).shell(f"{path.stem}-options.yaml") == expected


def test_every_expected_command_has_its_profile() -> None:
    assert [path.stem for path in sorted((HERE / "commands").glob("*.txt"))] == [path.stem for path in PROFILES]
    engines = {load_launch_profile(path).engine for path in PROFILES}
    assert len(PROFILES) >= 12
    assert engines == set(RULES)


NEUTRAL = {
    "served_model_name": "coder",
    "tp": 1,
    "attention_dp": 8,
    "ep": 8,
    "quantization": "fp8",
    "quantization_source": "load",
    "kv_dtype": "fp8_e4m3",
    "max_model_len": 131072,
    "memory_share": 0.9,
    "block_size": 32,
    "prefix_caching": True,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "chunked_prefill": True,
    "kv_events": {"endpoint": "tcp://*:5557"},
    "speculation": {"method": "mtp", "num_tokens": 2},
    "eager": True,
}


def test_the_same_profile_for_vllm() -> None:
    assert engine_command(profile("vllm", **NEUTRAL)).shell("") == (
        """\
vllm serve m \\
  --served-model-name coder \\
  --host 127.0.0.1 \\
  --port 8000 \\
  --tensor-parallel-size 1 \\
  --data-parallel-size 8 \\
  --enable-expert-parallel \\
  --quantization fp8 \\
  --kv-cache-dtype fp8_e4m3 \\
  --max-model-len 131072 \\
  --gpu-memory-utilization 0.9 \\
  --block-size 32 \\
  --enable-prefix-caching \\
  --max-num-seqs 64 \\
  --max-num-batched-tokens 8192 \\
  --enable-chunked-prefill \\
  --enable-prompt-tokens-details \\
  --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","buffer_steps":10000,"topic":""}' \\
  --speculative-config '{"method":"mtp","num_speculative_tokens":2}' \\
  --enforce-eager
"""
    )


def test_the_same_profile_for_sglang() -> None:
    """Its tensor-parallel group, slots and chunk are those of all ranks; its draft tokens include the model's own."""
    assert engine_command(profile("sglang", **NEUTRAL)).shell("") == (
        """\
python3 -m sglang.launch_server \\
  --model-path m \\
  --served-model-name coder \\
  --host 127.0.0.1 \\
  --port 8000 \\
  --tp-size 8 \\
  --attn-dp-size 8 \\
  --ep-size 8 \\
  --quantization fp8 \\
  --kv-cache-dtype fp8_e4m3 \\
  --context-length 131072 \\
  --mem-fraction-static 0.9 \\
  --page-size 32 \\
  --max-running-requests 512 \\
  --chunked-prefill-size 65536 \\
  --enable-cache-report \\
  --kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557","buffer_steps":10000,"topic":""}' \\
  --speculative-algorithm NEXTN \\
  --speculative-num-steps 2 \\
  --speculative-eagle-topk 1 \\
  --speculative-num-draft-tokens 3 \\
  --cuda-graph-backend-decode disabled \\
  --cuda-graph-backend-prefill disabled \\
  --enable-metrics
"""
    )


def test_the_same_profile_for_tensorrt_llm() -> None:
    """Much is in its options file."""
    assert engine_command(profile("trtllm", **NEUTRAL)).shell("o.yaml") == (
        """\
# memory_share: TensorRT-LLM takes it of what the weights leave free, for the KV cache alone
cat > o.yaml <<'EOF'
return_perf_metrics: true
enable_iter_perf_stats: true
enable_attention_dp: true
quant_config:
  quant_algo: FP8
kv_cache_config:
  dtype: fp8
  tokens_per_block: 32
  enable_block_reuse: true
  use_kv_cache_manager_v2: true
  kv_events_config:
    enable_kv_cache_events: true
    publisher: zmq
    endpoint: tcp://*:5557
    buffer_steps: 10000
    topic: ''
speculative_config:
  decoding_type: MTP
  max_draft_len: 2
cuda_graph_config: null
EOF
trtllm-serve m \\
  --served_model_name coder \\
  --host 127.0.0.1 \\
  --port 8000 \\
  --tp_size 8 \\
  --ep_size 8 \\
  --max_seq_len 131072 \\
  --kv_cache_free_gpu_memory_fraction 0.9 \\
  --max_batch_size 64 \\
  --max_num_tokens 8192 \\
  --enable_chunked_prefill \\
  --config o.yaml
"""
    )


@pytest.mark.parametrize("engine", RULES)
def test_no_field_of_a_profile_is_unknown_to_an_adapter(engine: str) -> None:
    assert set(RULES[engine]) | GATEWAY_ONLY == set(LaunchProfile.model_fields)
    assert not set(RULES[engine]) & GATEWAY_ONLY


SAMPLES: dict[str, Any] = {
    "served_model_name": "x", "tokenizer": "t", "trust_remote_code": True, "host": "10.0.0.1", "port": 9, "tp": 2, "pp": 2, "dp": 2,
    "attention_dp": 2, "dtype": "bfloat16", "quantization": "fp8", "quantization_method": "fp8", "kv_dtype": "fp8", "max_model_len": 10,
    "memory_share": 0.5, "kv_cache_bytes": 10, "kv_capacity_tokens": 640, "block_size": 32, "prefix_caching": False,
    "prefix_hash_algo": "sha256_cbor", "max_num_seqs": 3, "max_num_batched_tokens": 99, "chunked_prefill": True,
    "long_prefill_token_threshold": 5, "max_queued_requests": 7, "scheduling_policy": "priority", "all2all_backend": "pplx",
    "kv_events": {}, "kv_offload": {"host_gib": 8}, "kv_transfer": {"connector": "nixl"}, "speculation": "mtp", "lora": {"max_rank": 8},
    "tool_parser": "p", "reasoning_parser": "p", "eager": True, "engine_options": {"a": 1},
    "nodes": {"count": 2, "address": "n0"}, "env": {"A": "b"}, "extra_args": ["--x"],
}  # fmt: skip
# What an engine does anyway, so that stating it changes nothing.
DEFAULTS = {("sglang", "chunked_prefill")}


@pytest.mark.parametrize("engine", RULES)
@pytest.mark.parametrize("field", SAMPLES)
def test_a_stated_field_changes_the_command_or_is_refused(engine: str, field: str) -> None:
    base = {"tp": 4} if field == "nodes" else {"block_size": 16} if field == "kv_capacity_tokens" else {}
    before = engine_command(profile(engine, **base))
    try:
        after = engine_command(profile(engine, **{**base, field: SAMPLES[field]}))
    except UnsupportedError as error:
        assert field in str(error)
        return
    assert (after != before) != ((engine, field) in DEFAULTS)


@pytest.mark.parametrize(
    ("engine", "fields", "says"),
    [
        ("vllm", {"kv_events": {"endpoint": "tcp://127.0.0.1:5557"}}, "tcp://*:PORT"),
        ("vllm", {"tp": 8, "ep": 4}, "set ep to 8, or to 1"),
        ("vllm", {"kv_capacity_tokens": 10_000}, "set block_size too"),
        ("vllm", {"engine_options": {"a": 1}}, "use extra_args"),
        ("vllm", {"all2all_backend": "deepep"}, "deepep_low_latency"),
        ("vllm", {"quantization": "awq", "quantization_source": "load"}, "vLLM while loading knows fp8"),
        ("vllm", {"lora": {"max_rank": 1024}}, "goes up to 512"),
        ("vllm", {"kv_offload": {"host_gib": 8}, "kv_transfer": {"connector": "nixl"}}, "connector 'multi'"),
        ("vllm", {"speculation": {"method": "eagle3", "model": "d", "num_tokens": 7, "steps": 3, "topk": 4}}, "vLLM drafts a chain"),
        ("vllm", {"attention_dp": 3, "tp": 2, "nodes": {"count": 2, "address": "n"}}, "equally many data-parallel ranks"),
        ("vllm", {"speculation": {"method": "dflash", "model": "d"}}, "vLLM needs it for dflash"),
        ("sglang", {"speculation": {"method": "suffix"}}, "not suffix"),
        ("sglang", {"long_prefill_token_threshold": 4096}, "lower max_num_batched_tokens"),
        ("sglang", {"kv_transfer": {"connector": "nixl"}}, "set role to prefill or decode"),
        ("sglang", {"role": "decode", "kv_transfer": {"connector": "lmcache"}}, "not lmcache"),
        ("sglang", {"kv_offload": {"host_gib": 1}, "tp": 2}, "set at least 2"),
        ("sglang", {"kv_cache_bytes": 1}, "set kv_capacity_tokens"),
        ("trtllm", {"dp": 2}, "start a worker for each"),
        ("trtllm", {"attention_dp": 4, "tp": 2}, "set attention_dp to 8 and tp to 1"),
        ("trtllm", {"scheduling_policy": "priority"}, "let the gateway order the requests"),
        ("trtllm", {"tp": 16, "nodes": {"count": 2, "address": "n"}}, "trtllm-llmapi-launch"),
        ("trtllm", {"kv_transfer": {"connector": "nixl", "port": 1}}, "leave it out"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_what_to_do(engine: str, fields: dict[str, Any], says: str) -> None:
    assert says in problems(engine, **fields)


def test_all_problems_are_told_at_once() -> None:
    text = problems("trtllm", dp=2, prefix_hash_algo="sha256", long_prefill_token_threshold=1)
    assert all(name in text for name in ("dp:", "prefix_hash_algo:", "long_prefill_token_threshold:"))


def test_low_priority_values_come_first_in_every_engine_that_has_priorities() -> None:
    assert "--scheduling-policy priority" in words("vllm", scheduling_policy="priority")
    assert "--enable-priority-scheduling --schedule-low-priority-values-first" in words("sglang", scheduling_policy="priority")


def test_the_kv_cache_of_the_worker_is_divided_among_its_ranks() -> None:
    assert "--num-gpu-blocks-override 100" in words("vllm", attention_dp=4, kv_capacity_tokens=12_800, block_size=32)
    assert "--max-total-tokens 3200" in words("sglang", attention_dp=4, kv_capacity_tokens=12_800)
    options = engine_command(profile("trtllm", attention_dp=4, kv_capacity_tokens=12_800)).options
    assert options["kv_cache_config"] == {"max_tokens": 3200}


def test_host_memory_for_kv_is_divided_as_each_engine_counts_it() -> None:
    """vLLM: per data-parallel rank. SGLang and TensorRT-LLM: per accelerator."""
    fields = {"attention_dp": 4, "kv_offload": {"host_gib": 64}}
    assert "--kv-offloading-size 16 " in words("vllm", **fields)
    assert "--hicache-size 16 " in words("sglang", **fields)
    assert engine_command(profile("trtllm", **fields)).options["kv_cache_config"]["host_cache_size"] == 16 << 30


def test_nodes_by_data_parallel_rank_and_by_tensor_parallelism() -> None:
    second = {"count": 2, "rank": 1, "address": "n0", "port": 7}
    by_rank = words("vllm", attention_dp=16, nodes=second)
    assert "--data-parallel-size-local 8 --data-parallel-address n0 --data-parallel-rpc-port 7 --data-parallel-start-rank 8" in by_rank
    assert "--headless" in by_rank
    assert "--nnodes" not in by_rank
    by_tensor = words("vllm", tp=16, nodes=second)
    assert "--nnodes 2 --node-rank 1 --master-addr n0 --master-port 7 --headless" in by_tensor
    assert not engine_command(profile("vllm", tp=16, nodes=second)).serves_http
    assert "--nnodes 2 --node-rank 1 --dist-init-addr n0:7" in words("sglang", tp=16, nodes=second)


def test_a_draft_tree() -> None:
    tree = {"method": "eagle3", "model": "d", "num_tokens": 7, "steps": 3, "topk": 4}
    assert "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8" in words("sglang", speculation=tree)
    assert engine_command(profile("trtllm", speculation=tree)).options["speculative_config"] == {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 7,
        "speculative_model": "d",
    }


def test_roles_and_connectors() -> None:
    transfer = {"connector": "nixl", "host": "h", "port": 5600, "options": {"kv_buffer_device": "cpu", "backends": ["UCX"]}}
    command = engine_command(profile("vllm", role="decode", kv_transfer=transfer))
    config = next(group[1] for group in command.args if group[0] == "--kv-transfer-config")
    assert json.loads(config) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"backends": ["UCX"]},
    }
    assert command.env == {"VLLM_NIXL_SIDE_CHANNEL_HOST": "h", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    # a variable that the profile sets itself is left alone
    own = profile("vllm", role="decode", kv_transfer=transfer, env={"VLLM_NIXL_SIDE_CHANNEL_PORT": 1})
    assert engine_command(own).env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "1"
    sided = words("sglang", role="prefill", kv_transfer={"connector": "mooncake", "port": 8998})
    assert "--disaggregation-mode prefill --disaggregation-transfer-backend mooncake --disaggregation-bootstrap-port 8998" in sided
    options = engine_command(profile("trtllm", role="prefill", kv_transfer={"connector": "nixl"})).options
    assert options["cache_transceiver_config"] == {"backend": "NIXL"}


def test_event_ports_are_those_of_the_ranks_on_this_machine() -> None:
    events = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}
    assert engine_command(profile("vllm", attention_dp=2, kv_events=events)).ports == (8000, 5557, 5558, 5657, 5658)
    second = {"count": 2, "rank": 1, "address": "n0"}
    assert engine_command(profile("vllm", attention_dp=4, kv_events=events, nodes=second)).ports == (5559, 5560, 5659, 5660)


def test_extra_arguments_come_last_and_as_they_are() -> None:
    extra = ["--moe-backend", "deep_gemm", "--flag", "--json", '{"a": "b c"}', "-O3"]
    command = engine_command(profile("vllm", extra_args=extra))
    assert command.argv("")[-len(extra) :] == extra
    assert shlex.split(command.shell("").replace("\\\n", ""))[-len(extra) :] == extra


def test_engine_options_override_what_the_adapter_wrote() -> None:
    options = engine_command(profile("trtllm", block_size=32, engine_options={"kv_cache_config": {"tokens_per_block": 64, "x": 1}})).options
    assert options["kv_cache_config"] == {"tokens_per_block": 64, "x": 1}


def test_the_interpreter_of_the_engine_can_be_named() -> None:
    assert engine_command(profile("vllm"), "/e/python").program == ("/e/python", "-m", "vllm.entrypoints.cli.main", "serve", "m")
    assert engine_command(profile("sglang"), "/e/python").program == ("/e/python", "-m", "sglang.launch_server")
    assert engine_command(profile("trtllm"), "/e/python").program == ("/e/python", "-m", "tensorrt_llm.commands.serve", "m")


SPECULATIONS = st.one_of(
    st.sampled_from(["suffix", "mtp", "dspark"]),
    st.builds(
        lambda method, tokens: {"method": method, "num_tokens": tokens, "model": "d"},
        st.sampled_from(["eagle", "eagle3", "dflash", "draft_model", "dspark", "mtp"]),
        st.integers(1, 16),
    ),
    st.builds(lambda tokens: {"method": "ngram", "num_tokens": tokens, "ngram_max": 5}, st.integers(1, 9)),
    st.builds(
        lambda steps, topk: {"method": "eagle3", "model": "d", "num_tokens": steps * topk, "steps": steps, "topk": topk},
        st.integers(1, 5),
        st.integers(2, 4),
    ),
)
sizes = st.sampled_from([1, 2, 4, 8])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "served_model_name": st.sampled_from(["a", "b c"]),
    "trust_remote_code": st.booleans(),
    "tp": sizes, "pp": sizes, "dp": sizes, "attention_dp": sizes, "ep": sizes,
    "all2all_backend": st.sampled_from(["deepep", "deepep_low_latency", "pplx"]),
    "expert_balancing": st.just({"redundant_experts": 8}),
    "nodes": st.builds(lambda count, rank: {"count": count, "rank": rank, "address": "n"}, st.integers(2, 4), st.integers(0, 3)),
    "quantization": st.sampled_from(["fp8", "mxfp4", "nvfp4", "int8"]),
    "quantization_source": st.sampled_from(["checkpoint", "load"]),
    "quantization_method": st.sampled_from(["fp8", "modelopt_fp4", "nothing"]),
    "kv_dtype": st.sampled_from(["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4", "int4"]),
    "max_model_len": st.integers(1, 1 << 20),
    "memory_share": st.floats(0.1, 1.0),
    "kv_cache_bytes": st.integers(1, 1 << 40),
    "kv_capacity_tokens": st.integers(1, 1 << 30),
    "block_size": st.sampled_from([1, 16, 32, 128]),
    "prefix_caching": st.booleans(),
    "prefix_hash_algo": st.sampled_from(["sha256", "sha256_cbor"]),
    "max_num_seqs": st.integers(1, 512),
    "max_num_batched_tokens": st.integers(1, 32768),
    "chunked_prefill": st.booleans(),
    "long_prefill_token_threshold": st.integers(0, 8192),
    "max_queued_requests": st.integers(1, 512),
    "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    "report_cached_tokens": st.booleans(),
    "kv_events": st.just({"replay_endpoint": "tcp://*:5657"}),
    "kv_offload": st.sampled_from([{"host_gib": 64}, {"backend": "lmcache"}, {"backend": "lmcache", "host_gib": 8}]),
    "role": st.sampled_from(["both", "prefill", "decode"]),
    "kv_transfer": st.sampled_from([{"connector": "nixl"}, {"connector": "mooncake", "port": 1}, {"connector": "lmcache"}]),
    "speculation": SPECULATIONS,
    "lora": st.sampled_from([{"adapters": {"a": "/a"}}, {"max_rank": 16, "max_loras": 2}]),
    "tool_parser": st.just("p"),
    "reasoning_parser": st.just("p"),
    "eager": st.booleans(),
}  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.data())
def test_any_profile_gives_flags_that_the_engine_knows_or_a_clear_refusal(engine: str, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=12))
    fields = {name: data.draw(FIELDS[name], name) for name in names}
    try:
        launch = profile(engine, **fields)
    except ValidationError:
        return
    try:
        command = engine_command(launch)
    except UnsupportedError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.split(":")[0].split(".")[0] in fields
            assert len(problem) > 30
        return
    flags = [group[0] for group in command.args]
    assert set(flags) <= FLAGS[engine]
    assert len(set(flags)) == len(flags)
    assert shlex.split(shlex.join(command.argv("o.yaml"))) == command.argv("o.yaml")
    for key, value in command.options.items():
        known = TRTLLM_OPTIONS[key]
        assert known is None or set(value) <= known
    assert yaml.safe_load(command.options_text()) == command.options


@pytest.mark.parametrize("engine", RULES)
def test_the_adapter_names_only_flags_that_the_engine_has(engine: str) -> None:
    direct = {rule for rule in RULES[engine].values() if isinstance(rule, str)}
    assert direct <= FLAGS[engine]
    assert all(rule.where for rule in RULES[engine].values() if isinstance(rule, Elsewhere))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dp": 2, "attention_dp": 2}, "use one of them"),
        ({"tp": 4, "ep": 3}, "does not divide"),
        ({"role": "prefill"}, "needs 'kv_transfer'"),
        ({"quantization_source": "load"}, "needs 'quantization'"),
        ({"speculation": "eagle3"}, "needs a draft model"),
        ({"speculation": {"method": "ngram", "num_tokens": 3, "topk": 2}}, "drafts no tree"),
        ({"speculation": {"method": "ngram", "num_tokens": 3, "model": "d"}}, "leave out 'model'"),
        ({"speculation": {"method": "mtp", "topk": 2}}, "needs 'steps' and 'num_tokens'"),
        ({"nodes": {"count": 2, "rank": 2, "address": "n"}, "tp": 2}, "not below count"),
        ({"nodes": {"count": 2, "address": "n"}, "tp": 3}, "do not spread over 2 nodes"),
        ({"tp": 2, "gpus": 4}, "leave it out"),
        ({"kv_events": {"endpoint": "tcp://*"}}, "must end with a port"),
        ({"kv_events": {"endpoint": "tcp://*:10", "replay_endpoint": "tcp://*:13"}, "attention_dp": 4}, "at least 4 apart"),
        ({"kv_events": {"endpoint": "tcp://*:8000"}}, "away from port 8000"),
        ({"kv_events": {"endpoint": "tcp://*:65535"}, "dp": 2}, "leave the range"),
        ({"kv_offload": {}}, "needs 'host_gib'"),
    ],
)
def test_a_contradictory_profile_is_explained(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        profile("vllm", **fields)
    assert says in str(caught.value)


def test_settings_override_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("engine: vllm\nmodel: m\ntp: 2\nkv_events: {topic: t}\nquantization: fp8\n", "utf-8")
    changes = ("tp=4", "kv_events.endpoint=tcp://*:7", "quantization=null", "speculation.method=suffix", "extra_args=[--x, '1']")
    launch = load_launch_profile(path, changes)
    assert (launch.tp, launch.quantization, launch.extra_args) == (4, None, ["--x", "1"])
    assert launch.kv_events is not None
    assert (launch.kv_events.endpoint, launch.kv_events.topic) == ("tcp://*:7", "t")
    assert launch.speculation is not None
    assert launch.speculation.method == "suffix"


@pytest.mark.parametrize(
    ("text", "change", "says"),
    [
        ("engine: vllm\nmodel: m\ntpp: 2", (), "tpp: unknown key; did you mean 'tp'?"),
        ("engine: vllm\nmodel: m\ntp: none", (), "tp: input should be a valid integer"),
        ("engine: vllm\nmodel: [", (), "not valid YAML"),
        ("- a", (), "must be a mapping"),
        ("model: m", (), "engine: field required"),
        ("engine: auto\nmodel: m", (), "engine: input should be 'vllm', 'sglang' or 'trtllm'"),
        ("engine: vllm\nmodel: m", ("tp",), "must be KEY=VALUE"),
        ("engine: vllm\nmodel: m\nspeculation: mtp", ("speculation.num_tokens=2",), "set it whole"),
        ("engine: vllm\nmodel: m", ("kv_events.port=1",), "kv_events.port: unknown key"),
        ("engine: vllm\nmodel: m\nspeculation: {method: magic}", (), "speculation.method: input should be"),
    ],
)
def test_a_faulty_profile_says_where(tmp_path: Path, text: str, change: tuple[str, ...], says: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(ProfileError) as caught:
        load_launch_profile(path, change)
    assert says.lower() in str(caught.value).lower()


def test_kv_capacity_by_each_engines_metrics() -> None:
    ranks = "".join(f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="100"}} 1\n' for rank in range(2))
    assert kv_capacity(ranks) == (3200, 16)
    pages = "".join(f'sglang:max_total_num_tokens{{r="{rank}"}} 640.0\nsglang:page_size{{r="{rank}"}} 64.0\n' for rank in range(2))
    assert kv_capacity(pages) == (1280, 64)
    assert kv_capacity("trtllm_kv_cache_max_blocks 50.0\ntrtllm_kv_cache_tokens_per_block 32.0\n") == (1600, 32)
    assert kv_capacity("trtllm_kv_cache_max_blocks 50.0\ntrtllm_kv_cache_tokens_per_block NaN\n") == (None, None)


async def test_a_tensorrt_llm_worker_is_scraped_where_its_prometheus_metrics_are() -> None:
    async def script(request: WorkerRequest) -> None:
        assert request.path == "/prometheus/metrics"
        request.respond(b"trtllm_num_requests_running 3.0\ntrtllm_num_requests_waiting 2.0\ntrtllm_kv_cache_utilization 0.5\n")

    async with ScriptedWorker(script, metrics="[]") as worker:
        endpoint = Endpoint("w", worker.url, WorkerProfile(engine="trtllm"))
        monitor = Monitor([endpoint], lambda *_: None)
        await monitor.start()
        await monitor.stop()
    assert (endpoint.running, endpoint.waiting, endpoint.kv_use) == (3.0, 2.0, 0.5)


def test_every_engine_has_its_metric_names() -> None:
    assert set(ENGINE_METRICS) == set(RULES)
