"""SGLang (0.5.23): its command line and metrics."""

from __future__ import annotations

from workers.engines.command import Command, Draft, Elsewhere, OneOf, Refused, Rule, Switch, apply_rules, choose, quantization
from workers.engines.metrics import EngineMetrics
from workers.launchprofile import LaunchProfile

METRICS = EngineMetrics(
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    kv_use="sglang:token_usage",
    capacity_tokens="sglang:max_total_num_tokens",
    block_tokens="sglang:page_size",
    prefix_queries="sglang:prompt_tokens_total",
    prefix_hits="sglang:cached_tokens_total",
    acceptance_rate="sglang:spec_accept_rate",
)

METHODS = (
    "auto-round", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fp8", "gguf", "gptq", "gptq_marlin", "modelopt",
    "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "moe_wna16", "mxfp4", "mxfp8", "petit_nvfp4", "quark", "w4afp8", "w8a8_fp8",
    "w8a8_int8",
)  # fmt: skip
# Neutral format -> the method that quantizes to it while loading.
QUANTIZE_ON_LOAD = {"fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4_online", "mxfp4": "mxfp4"}
KV_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
ALL2ALL = ("none", "deepep", "deepep_v2", "mooncake", "nixl", "mori", "flashinfer", "megamoe", "flashinfer_megamoe", "pplx")
TRANSFER_BACKENDS = {name: name for name in ("mooncake", "mooncake_tcp", "nixl", "mori", "ascend")}
ALGORITHMS = {
    "ngram": "NGRAM",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "dspark": "DSPARK",
    "dflash": "DFLASH",
    "draft_model": "STANDALONE",
}


def _tensor_parallel(profile: LaunchProfile, draft: Draft) -> None:
    """SGLang's tensor-parallel group holds all accelerators of attention data parallelism, which divides it."""
    if profile.attention_dp == 1:
        draft.flag("--tp-size", profile.tp)


def _attention_dp(profile: LaunchProfile, draft: Draft) -> None:
    if profile.attention_dp > 1:
        draft.flag("--tp-size", profile.tp * profile.attention_dp)
        draft.flag("--attn-dp-size", profile.attention_dp)


def _expert_parallel(profile: LaunchProfile, draft: Draft) -> None:
    group = profile.tp * profile.attention_dp
    if group % profile.ep:
        draft.refuse(f"ep: SGLang spreads experts within one replica of {group} accelerators; set ep to a divisor of {group}")
        return
    draft.flag("--ep-size", profile.ep)


def _expert_balancing(profile: LaunchProfile, draft: Draft) -> None:
    assert profile.expert_balancing is not None
    draft.flag("--enable-eplb")
    draft.flag("--ep-num-redundant-experts", profile.expert_balancing.redundant_experts)


def _nodes(profile: LaunchProfile, draft: Draft) -> None:
    nodes = profile.nodes
    assert nodes is not None
    draft.flag("--nnodes", nodes.count)
    draft.flag("--node-rank", nodes.rank)
    draft.flag("--dist-init-addr", f"{nodes.address}:{nodes.port}")


def _kv_capacity(profile: LaunchProfile, draft: Draft) -> None:
    draft.flag("--max-total-tokens", max(1, profile.kv_capacity_tokens // profile.ranks))


def _batch(profile: LaunchProfile, draft: Draft) -> None:
    """SGLang counts the slots of all attention data-parallel ranks together."""
    draft.flag("--max-running-requests", profile.max_num_seqs * profile.attention_dp)


def _token_budget(profile: LaunchProfile, draft: Draft) -> None:
    """SGLang counts the chunk of all attention data-parallel ranks together."""
    if profile.chunked_prefill is False:
        draft.flag("--max-prefill-tokens", profile.max_num_batched_tokens)
    else:
        draft.flag("--chunked-prefill-size", profile.max_num_batched_tokens * profile.attention_dp)


def _queue_limit(profile: LaunchProfile, draft: Draft) -> None:
    if profile.role != "both":
        draft.refuse("max_queued_requests: SGLang ignores it in disaggregation; leave it out and let the gateway bound the queue")
        return
    draft.flag("--max-queued-requests", profile.max_queued_requests)


def _kv_events(profile: LaunchProfile, draft: Draft) -> None:
    assert profile.kv_events is not None
    draft.json("--kv-events-config", {"publisher": "zmq", **profile.kv_events.model_dump(exclude_none=True)})


def _kv_offload(profile: LaunchProfile, draft: Draft) -> None:
    offload = profile.kv_offload
    assert offload is not None
    if offload.backend == "lmcache":
        if offload.host_gib is not None:
            draft.refuse("kv_offload.host_gib: SGLang leaves it to LMCache; set LMCACHE_MAX_LOCAL_CPU_SIZE in env instead")
        draft.flag("--enable-lmcache")
        return
    assert offload.host_gib is not None
    share = offload.host_gib // profile.accelerators
    if share == 0:
        draft.refuse(f"kv_offload.host_gib: SGLang takes whole GiB for each accelerator; set at least {profile.accelerators}")
        return
    draft.flag("--enable-hierarchical-cache")
    draft.flag("--hicache-size", share)


def _kv_transfer(profile: LaunchProfile, draft: Draft) -> None:
    transfer = profile.kv_transfer
    assert transfer is not None
    if profile.role == "both":
        draft.refuse("kv_transfer: an SGLang worker is either side of disaggregation; set role to prefill or decode")
        return
    if transfer.options:
        draft.refuse("kv_transfer.options: SGLang has none; use extra_args, e.g. --disaggregation-ib-device")
    if transfer.host is not None:
        draft.refuse("kv_transfer.host: SGLang's bootstrap server listens on 'host'; leave it out")
    draft.flag("--disaggregation-mode", profile.role)
    if name := choose(draft, "kv_transfer.connector", transfer.connector, TRANSFER_BACKENDS, "SGLang"):
        draft.flag("--disaggregation-transfer-backend", name)
    if transfer.port is not None:
        draft.flag("--disaggregation-bootstrap-port", transfer.port)


def _speculation(profile: LaunchProfile, draft: Draft) -> None:
    speculation = profile.speculation
    assert speculation is not None
    algorithm = choose(draft, "speculation.method", speculation.method, ALGORITHMS, "SGLang")
    if algorithm is None:
        return
    draft.flag("--speculative-algorithm", algorithm)
    if speculation.model is not None:
        draft.flag("--speculative-draft-model-path", speculation.model)
    if speculation.ngram_min is not None:
        draft.refuse("speculation.ngram_min: SGLang matches from one token on; leave it out")
    if speculation.ngram_max is not None:
        draft.flag("--speculative-ngram-max-trie-depth", speculation.ngram_max)
    if (tokens := speculation.num_tokens) is None:
        return
    if speculation.method == "dspark":
        draft.flag("--speculative-dspark-block-size", tokens)
        return
    if speculation.method not in ("ngram", "dflash"):
        draft.flag("--speculative-num-steps", speculation.steps or tokens)
        draft.flag("--speculative-eagle-topk", speculation.topk or 1)
    draft.flag("--speculative-num-draft-tokens", tokens + 1)  # SGLang counts the model's own token too


def _lora(profile: LaunchProfile, draft: Draft) -> None:
    lora = profile.lora
    assert lora is not None
    draft.flag("--enable-lora")
    if lora.max_rank is not None:
        draft.flag("--max-lora-rank", lora.max_rank)
    if lora.max_loras is not None:
        draft.flag("--max-loras-per-batch", lora.max_loras)
    if lora.adapters:
        draft.flag("--lora-paths", *(f"{name}={path}" for name, path in lora.adapters.items()))


def _scheduling_policy(profile: LaunchProfile, draft: Draft) -> None:
    if profile.scheduling_policy == "fcfs":
        draft.flag("--schedule-policy", "fcfs")
    else:
        draft.flag("--enable-priority-scheduling")
        draft.flag("--schedule-low-priority-values-first")  # as in vLLM; SGLang's own order is higher first


def _eager(profile: LaunchProfile, draft: Draft) -> None:
    if profile.eager:
        draft.flag("--cuda-graph-backend-decode", "disabled")
        draft.flag("--cuda-graph-backend-prefill", "disabled")


# Neutral field -> flag, or the function that translates it.
RULES: dict[str, Rule] = {
    "model": "--model-path",
    "served_model_name": "--served-model-name",
    "tokenizer": "--tokenizer-path",
    "trust_remote_code": Switch(on=("--trust-remote-code",)),
    "host": "--host",
    "port": "--port",
    "tp": _tensor_parallel,
    "pp": "--pp-size",
    "dp": "--dp-size",
    "attention_dp": _attention_dp,
    "nodes": _nodes,
    "ep": _expert_parallel,
    "all2all_backend": OneOf("--moe-a2a-backend", ALL2ALL),
    "expert_balancing": _expert_balancing,
    "dtype": "--dtype",
    "quantization": quantization("SGLang", QUANTIZE_ON_LOAD),
    "quantization_method": OneOf("--quantization", METHODS),
    "kv_dtype": OneOf("--kv-cache-dtype", KV_DTYPES),
    "max_model_len": "--context-length",
    "memory_share": "--mem-fraction-static",
    "kv_cache_bytes": Refused("counts KV cache in tokens; set kv_capacity_tokens or memory_share"),
    "kv_capacity_tokens": _kv_capacity,
    "block_size": "--page-size",
    "prefix_caching": Switch(off=("--disable-radix-cache",)),
    "prefix_hash_algo": Refused("has one hash only; leave it out"),
    "max_num_seqs": _batch,
    "max_num_batched_tokens": _token_budget,
    "chunked_prefill": Switch(off=("--chunked-prefill-size", "-1")),
    "long_prefill_token_threshold": Refused("has no limit for one prompt; lower max_num_batched_tokens"),
    "max_queued_requests": _queue_limit,
    "scheduling_policy": _scheduling_policy,
    "report_cached_tokens": Switch(on=("--enable-cache-report",)),
    "kv_events": _kv_events,
    "kv_offload": _kv_offload,
    "role": Elsewhere("kv_transfer"),
    "kv_transfer": _kv_transfer,
    "speculation": _speculation,
    "lora": _lora,
    "tool_parser": "--tool-call-parser",
    "reasoning_parser": "--reasoning-parser",
    "eager": _eager,
    "engine_options": Refused("has no options file; use extra_args"),
}


def command(profile: LaunchProfile, python: str | None = None) -> Command:
    """The command line for a profile, with the SGLang of `python`. Raises UnsupportedError."""
    draft = apply_rules(profile, RULES, "SGLang", ("--enable-metrics",))
    return Command(
        program=(python or "python3", "-m", "sglang.launch_server"),
        args=tuple(draft.args),
        env=draft.env,
        host=profile.host,
        port=profile.port,
        notes=tuple(draft.notes),
        event_ports=profile.event_ports(),
    )
