"""TensorRT-LLM (1.4): the command line and the options file of trtllm-serve, and its metrics.

Much is a key of the options file only. It overrides the command line, so each setting is in one of the two.
"""

from __future__ import annotations

from typing import Any

from workers.engines.command import Command, Draft, Elsewhere, Option, Refused, Rule, Switch, apply_rules, choose
from workers.engines.metrics import EngineMetrics
from workers.launchprofile import LaunchProfile

METRICS = EngineMetrics(
    path="/prometheus/metrics",  # /metrics is JSON of the last iterations, emptied by each reader
    running="trtllm_num_requests_running",
    waiting="trtllm_num_requests_waiting",
    kv_use="trtllm_kv_cache_utilization",
    capacity_blocks="trtllm_kv_cache_max_blocks",
    block_tokens="trtllm_kv_cache_tokens_per_block",
    prefix_queries="trtllm_prompt_tokens_total",
    prefix_hits="trtllm_prompt_cached_tokens_total",
    drafted="trtllm_spec_decode_num_draft_tokens_total",
    accepted="trtllm_spec_decode_num_accepted_tokens_total",
)

QUANTIZE_ON_LOAD = {"fp8": "FP8", "fp8_block": "FP8_BLOCK_SCALES", "nvfp4": "NVFP4"}
KV_DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8_ds_mla", "nvfp4": "nvfp4"}
TRANSCEIVERS = {"nixl": "NIXL", "ucx": "UCX", "mooncake": "MOONCAKE", "mpi": "MPI"}
DECODING_TYPES = {
    "ngram": "NGram",
    "suffix": "SA",
    "eagle": "Eagle",
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "dspark": "DSpark",
    "dflash": "DFlash",
    "draft_model": "Draft_Target",
}
_GIB = 1 << 30


def _tensor_parallel(profile: LaunchProfile, draft: Draft) -> None:
    if profile.attention_dp == 1:
        draft.flag("--tp_size", profile.tp)


def _attention_dp(profile: LaunchProfile, draft: Draft) -> None:
    """TensorRT-LLM's attention is either tensor parallel or data parallel, over the same group."""
    if profile.attention_dp == 1:
        return
    if profile.tp > 1:
        group = profile.tp * profile.attention_dp
        draft.refuse(f"attention_dp: TensorRT-LLM gives each accelerator its own attention; set attention_dp to {group} and tp to 1")
        return
    draft.flag("--tp_size", profile.attention_dp)
    draft.option("enable_attention_dp", True)


def _expert_balancing(profile: LaunchProfile, draft: Draft) -> None:
    assert profile.expert_balancing is not None
    experts = profile.expert_balancing.redundant_experts
    draft.refuse(
        f"expert_balancing: TensorRT-LLM takes the number of slots, the model's experts plus {experts}, as"
        " engine_options: {moe_config: {load_balancer: {num_slots: ...}}}"
    )


def _quantization(profile: LaunchProfile, draft: Draft) -> None:
    assert profile.quantization is not None
    if profile.quantization_source == "load":
        if algorithm := choose(draft, "quantization", profile.quantization, QUANTIZE_ON_LOAD, "TensorRT-LLM while loading"):
            draft.option("quant_config.quant_algo", algorithm)
    else:
        draft.note(f"{profile.quantization} weights: TensorRT-LLM reads the method from the checkpoint")


def _kv_dtype(profile: LaunchProfile, draft: Draft) -> None:
    assert profile.kv_dtype is not None
    if name := choose(draft, "kv_dtype", profile.kv_dtype, KV_DTYPES, "TensorRT-LLM"):
        draft.option("kv_cache_config.dtype", name)


def _memory_share(profile: LaunchProfile, draft: Draft) -> None:
    draft.flag("--kv_cache_free_gpu_memory_fraction", profile.memory_share)
    draft.note("memory_share: TensorRT-LLM takes it of what the weights leave free, for the KV cache alone")


def _kv_capacity(profile: LaunchProfile, draft: Draft) -> None:
    draft.option("kv_cache_config.max_tokens", max(1, profile.kv_capacity_tokens // profile.ranks))


def _kv_events(profile: LaunchProfile, draft: Draft) -> None:
    assert profile.kv_events is not None
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **profile.kv_events.model_dump(exclude_none=True)}
    draft.option("kv_cache_config.use_kv_cache_manager_v2", True)  # the other manager publishes none
    draft.option("kv_cache_config.kv_events_config", events)


def _kv_offload(profile: LaunchProfile, draft: Draft) -> None:
    offload = profile.kv_offload
    assert offload is not None
    if offload.backend == "lmcache":
        if offload.host_gib is not None:
            draft.refuse("kv_offload.host_gib: TensorRT-LLM leaves it to LMCache; set LMCACHE_MAX_LOCAL_CPU_SIZE in env instead")
        draft.option("kv_connector_config.connector", "lmcache")
        return
    assert offload.host_gib is not None
    draft.option("kv_cache_config.host_cache_size", offload.host_gib * _GIB // profile.accelerators)


def _kv_transfer(profile: LaunchProfile, draft: Draft) -> None:
    transfer = profile.kv_transfer
    assert transfer is not None
    for name in ("host", "port"):
        if getattr(transfer, name) is not None:
            draft.refuse(f"kv_transfer.{name}: TensorRT-LLM exchanges addresses in the requests; leave it out")
    if backend := choose(draft, "kv_transfer.connector", transfer.connector, TRANSCEIVERS, "TensorRT-LLM"):
        draft.option("cache_transceiver_config", {"backend": backend, **transfer.options})
    if profile.role != "both":
        draft.note(f"{profile.role}: TensorRT-LLM takes the phase from each request (disaggregated_params), not from a flag")


def _speculation(profile: LaunchProfile, draft: Draft) -> None:
    speculation = profile.speculation
    assert speculation is not None
    config: dict[str, Any] = {"decoding_type": DECODING_TYPES[speculation.method]}
    tree = (speculation.topk or 1) > 1
    if depth := speculation.steps if tree else speculation.num_tokens:
        config["max_draft_len"] = depth
    elif speculation.method != "mtp":
        draft.refuse(f"speculation.num_tokens: TensorRT-LLM needs it for {speculation.method}")
    if tree:
        config |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": speculation.topk, "max_total_draft_tokens": speculation.num_tokens}
    if speculation.model is not None:
        config["speculative_model"] = speculation.model
    if speculation.ngram_max is not None:
        config["max_matching_ngram_size"] = speculation.ngram_max
    if speculation.ngram_min is not None:
        draft.refuse("speculation.ngram_min: TensorRT-LLM matches from one token on; leave it out")
    draft.option("speculative_config", config)


def _lora(profile: LaunchProfile, draft: Draft) -> None:
    lora = profile.lora
    assert lora is not None
    if lora.adapters:
        draft.refuse("lora.adapters: TensorRT-LLM takes adapters from each request (lora_request); leave them out")
    limits = {"max_lora_rank": lora.max_rank, "max_loras": lora.max_loras}
    draft.option("enable_lora", True)
    draft.option("lora_config", {name: value for name, value in limits.items() if value is not None})


def _eager(profile: LaunchProfile, draft: Draft) -> None:
    if profile.eager:
        draft.option("cuda_graph_config", None)


def _engine_options(profile: LaunchProfile, draft: Draft) -> None:
    _merge(draft.options, profile.engine_options)


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


# Neutral field -> flag, key of the options file, or the function that translates it.
RULES: dict[str, Rule] = {
    "model": Elsewhere("positional"),
    "served_model_name": "--served_model_name",
    "tokenizer": "--tokenizer",
    "trust_remote_code": Switch(on=("--trust_remote_code",)),
    "host": "--host",
    "port": "--port",
    "tp": _tensor_parallel,
    "pp": "--pp_size",
    "dp": Refused("serves one replica; start a worker for each, on ports of their own"),
    "attention_dp": _attention_dp,
    "nodes": Refused("is spread by MPI: leave it out, and run what --print shows with trtllm-llmapi-launch under srun or mpirun"),
    "ep": "--ep_size",
    "all2all_backend": Refused("chooses the exchange itself; leave it out"),
    "expert_balancing": _expert_balancing,
    "dtype": Option("dtype"),
    "quantization": _quantization,
    "quantization_method": Refused("reads the method from the checkpoint; leave it out"),
    "kv_dtype": _kv_dtype,
    "max_model_len": "--max_seq_len",
    "memory_share": _memory_share,
    "kv_cache_bytes": Option("kv_cache_config.max_gpu_total_bytes"),
    "kv_capacity_tokens": _kv_capacity,
    "block_size": Option("kv_cache_config.tokens_per_block"),
    "prefix_caching": Option("kv_cache_config.enable_block_reuse"),
    "prefix_hash_algo": Refused("names hashes its own way; use engine_options: {kv_cache_config: {kv_cache_event_hash_algo: ...}}"),
    "max_num_seqs": "--max_batch_size",
    "max_num_batched_tokens": "--max_num_tokens",
    "chunked_prefill": Switch(on=("--enable_chunked_prefill",)),
    "long_prefill_token_threshold": Refused("has no limit for one prompt; lower max_num_batched_tokens"),
    "max_queued_requests": Refused("queues without limit; leave it out and let the gateway bound the queue"),
    "scheduling_policy": Refused("takes no priority over HTTP; leave it out and let the gateway order the requests"),
    "report_cached_tokens": Elsewhere("always on"),
    "kv_events": _kv_events,
    "kv_offload": _kv_offload,
    "role": Elsewhere("kv_transfer"),
    "kv_transfer": _kv_transfer,
    "speculation": _speculation,
    "lora": _lora,
    "tool_parser": "--tool_parser",
    "reasoning_parser": "--reasoning_parser",
    "eager": _eager,
    "engine_options": _engine_options,
}


def command(profile: LaunchProfile, python: str | None = None) -> Command:
    """The command line for a profile, with the TensorRT-LLM of `python` or else of the PATH. Raises UnsupportedError."""
    draft = apply_rules(profile, RULES, "TensorRT-LLM")
    # /prometheus/metrics exists with the first only, its load gauges with the second
    options = {"return_perf_metrics": True, "enable_iter_perf_stats": True, **draft.options}
    return Command(
        program=(*((python, "-m", "tensorrt_llm.commands.serve") if python else ("trtllm-serve",)), profile.model),
        args=tuple(draft.args),
        env=draft.env,
        host=profile.host,
        port=profile.port,
        options=options,
        options_flag="--config",
        notes=tuple(draft.notes),
        event_ports=profile.event_ports(),
    )
