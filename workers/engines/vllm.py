"""vLLM (0.32): its command line and metrics."""

from __future__ import annotations

from typing import Any

from workers.engines.command import Command, Draft, Elsewhere, OneOf, Refused, Rule, Switch, apply_rules, quantization
from workers.engines.metrics import EngineMetrics
from workers.launchprofile import LaunchProfile

METRICS = EngineMetrics(
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    kv_use="vllm:kv_cache_usage_perc",
    cache_info="vllm:cache_config_info",
    prefix_queries="vllm:prefix_cache_queries_total",
    prefix_hits="vllm:prefix_cache_hits_total",
    drafted="vllm:spec_decode_num_draft_tokens_total",
    accepted="vllm:spec_decode_num_accepted_tokens_total",
)

METHODS = (
    "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8", "experts_int8", "fbgemm_fp8", "fp8", "fp_quant",
    "gpt_oss_mxfp4", "gptq", "gptq_marlin", "humming", "inc", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "moe_wna16",
    "mxfp4", "mxfp8", "quark", "torchao",
)  # fmt: skip
# Neutral format -> the method that quantizes to it while loading.
QUANTIZE_ON_LOAD = {
    "fp8": "fp8",
    "fp8_per_tensor": "fp8_per_tensor",
    "fp8_per_block": "fp8_per_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4_per_token",
    "int8": "int8_per_channel_weight_only",
}
KV_DTYPES = {name: name for name in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4")}
ALL2ALL = (
    "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "deepep_v2", "flashinfer_nvlink_one_sided",
    "flashinfer_nvlink_two_sided", "mori_high_throughput", "mori_low_latency", "nixl_ep", "pplx",
)  # fmt: skip
CONNECTORS = {
    "nixl": "NixlConnector",
    "mooncake": "MooncakeConnector",
    "lmcache": "LMCacheConnectorV1",
    "lmcache_mp": "LMCacheMPConnector",
    "multi": "MultiConnector",
}
# Where a connector listens for its peers: the variables of its address and port.
SIDE_CHANNELS = {
    "nixl": ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
    "mooncake": (None, "VLLM_MOONCAKE_BOOTSTRAP_PORT"),
}
HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
KV_ROLES = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}


def _dp(profile: LaunchProfile, draft: Draft) -> None:
    if profile.dp > 1:
        _data_parallel(profile, draft)


def _attention_dp(profile: LaunchProfile, draft: Draft) -> None:
    """vLLM's data-parallel ranks replicate attention; with expert parallelism they share the experts."""
    if profile.attention_dp > 1:
        _data_parallel(profile, draft)


def _data_parallel(profile: LaunchProfile, draft: Draft) -> None:
    draft.flag("--data-parallel-size", profile.ranks)
    if (nodes := profile.nodes) is None:
        return
    if profile.ranks % nodes.count:
        draft.refuse(f"nodes: vLLM puts equally many data-parallel ranks on each node; {profile.ranks} on {nodes.count} do not go")
        return
    local = profile.ranks // nodes.count
    draft.flag("--data-parallel-size-local", local)
    draft.flag("--data-parallel-address", nodes.address)
    draft.flag("--data-parallel-rpc-port", nodes.port)
    if nodes.rank:
        draft.flag("--data-parallel-start-rank", nodes.rank * local)


def _nodes(profile: LaunchProfile, draft: Draft) -> None:
    nodes = profile.nodes
    assert nodes is not None
    if profile.ranks == 1:  # else the data-parallel flags say it
        draft.flag("--nnodes", nodes.count)
        draft.flag("--node-rank", nodes.rank)
        draft.flag("--master-addr", nodes.address)
        draft.flag("--master-port", nodes.port)
    if nodes.rank:
        draft.flag("--headless")


def _expert_parallel(profile: LaunchProfile, draft: Draft) -> None:
    width = profile.tp * profile.ranks
    if profile.ep == width and width > 1:
        draft.flag("--enable-expert-parallel")
    elif profile.ep > 1:
        draft.refuse(f"ep: vLLM spreads experts over all {width} accelerators of tp x dp x attention_dp; set ep to {width}, or to 1")


def _expert_balancing(profile: LaunchProfile, draft: Draft) -> None:
    assert profile.expert_balancing is not None
    draft.flag("--enable-eplb")
    draft.json("--eplb-config", {"num_redundant_experts": profile.expert_balancing.redundant_experts})


def _kv_capacity(profile: LaunchProfile, draft: Draft) -> None:
    if not profile.states("block_size"):
        draft.refuse("kv_capacity_tokens: vLLM counts KV cache in blocks; set block_size too, or kv_cache_bytes instead")
        return
    draft.flag("--num-gpu-blocks-override", max(1, profile.kv_capacity_tokens // profile.ranks // profile.block_size))


def _kv_events(profile: LaunchProfile, draft: Draft) -> None:
    events = profile.kv_events
    assert events is not None
    if not any(mark in events.endpoint for mark in ("*", "::", "ipc://", "inproc://")):
        draft.refuse("kv_events.endpoint: vLLM connects to an address and publishes only where it binds; write tcp://*:PORT")
    value = {"enable_kv_cache_events": True, "publisher": "zmq", **events.model_dump(exclude_none=True)}
    draft.json("--kv-events-config", value)


def _kv_offload(profile: LaunchProfile, draft: Draft) -> None:
    offload = profile.kv_offload
    assert offload is not None
    if profile.kv_transfer is not None:
        draft.refuse("kv_offload: vLLM has one KV connector; with kv_transfer use its connector 'multi' and list both in its options")
        return
    if offload.host_gib is None:
        draft.refuse("kv_offload: vLLM needs 'host_gib' for LMCache too")
        return
    draft.flag("--kv-offloading-size", f"{offload.host_gib / profile.ranks:g}")  # of one data-parallel rank, over its accelerators
    draft.flag("--kv-offloading-backend", offload.backend)


def _kv_transfer(profile: LaunchProfile, draft: Draft) -> None:
    transfer = profile.kv_transfer
    assert transfer is not None
    value: dict[str, Any] = {
        "kv_connector": CONNECTORS.get(transfer.connector, transfer.connector),
        "kv_role": KV_ROLES[profile.role],
    }
    options = dict(transfer.options)
    if device := options.pop("kv_buffer_device", None):
        value["kv_buffer_device"] = device
    if options:
        value["kv_connector_extra_config"] = options
    draft.json("--kv-transfer-config", value)
    host_variable, port_variable = SIDE_CHANNELS.get(transfer.connector, (None, None))
    for name, variable, setting in (("host", host_variable, transfer.host), ("port", port_variable, transfer.port)):
        if setting is not None and variable is None:
            draft.refuse(f"kv_transfer.{name}: vLLM's {transfer.connector} takes none; use kv_transfer.options")
        elif setting is not None and variable is not None:
            draft.env.setdefault(variable, str(setting))


def _speculation(profile: LaunchProfile, draft: Draft) -> None:
    speculation = profile.speculation
    assert speculation is not None
    if (speculation.topk or 1) > 1:
        draft.refuse("speculation.topk: vLLM drafts a chain; leave out topk and steps, or use SGLang or TensorRT-LLM")
    if speculation.num_tokens is None and speculation.method == "dflash":
        draft.refuse("speculation.num_tokens: vLLM needs it for dflash; the draft model's block size less one")
    value: dict[str, Any] = {"method": speculation.method}
    if speculation.model is not None:
        value["model"] = speculation.model
    if speculation.num_tokens is not None:
        value["num_speculative_tokens"] = speculation.num_tokens
    if speculation.ngram_max is not None:
        value["prompt_lookup_max"] = speculation.ngram_max
    if speculation.ngram_min is not None:
        value["prompt_lookup_min"] = speculation.ngram_min
    draft.json("--speculative-config", value)


def _lora(profile: LaunchProfile, draft: Draft) -> None:
    lora = profile.lora
    assert lora is not None
    draft.flag("--enable-lora")
    if lora.max_rank is not None:
        rank = min((rank for rank in LORA_RANKS if rank >= lora.max_rank), default=None)
        if rank is None:
            draft.refuse(f"lora.max_rank: vLLM goes up to {LORA_RANKS[-1]}")
        else:
            draft.flag("--max-lora-rank", rank)
    if lora.max_loras is not None:
        draft.flag("--max-loras", lora.max_loras)
    if lora.adapters:
        draft.flag("--lora-modules", *(f"{name}={path}" for name, path in lora.adapters.items()))


def _tool_parser(profile: LaunchProfile, draft: Draft) -> None:
    draft.flag("--tool-call-parser", profile.tool_parser)
    draft.flag("--enable-auto-tool-choice")


# Neutral field -> flag, or the function that translates it.
RULES: dict[str, Rule] = {
    "model": Elsewhere("positional"),
    "served_model_name": "--served-model-name",
    "tokenizer": "--tokenizer",
    "trust_remote_code": Switch(on=("--trust-remote-code",)),
    "host": "--host",
    "port": "--port",
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": _dp,
    "attention_dp": _attention_dp,
    "nodes": _nodes,
    "ep": _expert_parallel,
    "all2all_backend": OneOf("--all2all-backend", ALL2ALL),
    "expert_balancing": _expert_balancing,
    "dtype": "--dtype",
    "quantization": quantization("vLLM", QUANTIZE_ON_LOAD),
    "quantization_method": OneOf("--quantization", METHODS),
    "kv_dtype": OneOf("--kv-cache-dtype", KV_DTYPES),
    "max_model_len": "--max-model-len",
    "memory_share": "--gpu-memory-utilization",
    "kv_cache_bytes": "--kv-cache-memory-bytes",
    "kv_capacity_tokens": _kv_capacity,
    "block_size": "--block-size",
    "prefix_caching": Switch(on=("--enable-prefix-caching",), off=("--no-enable-prefix-caching",)),
    "prefix_hash_algo": OneOf("--prefix-caching-hash-algo", HASHES),
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "chunked_prefill": Switch(on=("--enable-chunked-prefill",), off=("--no-enable-chunked-prefill",)),
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "max_queued_requests": "--max-num-queued-reqs",
    "scheduling_policy": "--scheduling-policy",  # lower priority values first
    "report_cached_tokens": Switch(on=("--enable-prompt-tokens-details",)),
    "kv_events": _kv_events,
    "kv_offload": _kv_offload,
    "role": Elsewhere("kv_transfer"),
    "kv_transfer": _kv_transfer,
    "speculation": _speculation,
    "lora": _lora,
    "tool_parser": _tool_parser,
    "reasoning_parser": "--reasoning-parser",
    "eager": Switch(on=("--enforce-eager",)),
    "engine_options": Refused("has no options file; use extra_args"),
}


def command(profile: LaunchProfile, python: str | None = None) -> Command:
    """The command line for a profile, with the vLLM of `python` or else of the PATH. Raises UnsupportedError."""
    draft = apply_rules(profile, RULES, "vLLM")
    return Command(
        # `vllm serve`: the bare API server knows neither --headless nor several data-parallel ranks
        program=(*((python, "-m", "vllm.entrypoints.cli.main") if python else ("vllm",)), "serve", profile.model),
        args=tuple(draft.args),
        env=draft.env,
        host=profile.host,
        port=profile.port,
        notes=tuple(draft.notes),
        serves_http=profile.nodes is None or profile.nodes.rank == 0,
        event_ports=profile.event_ports(),
    )
