"""The run of SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from harmless_settings import Run

from cornplug.engine_common.engine_config import FieldTables
from cornplug.sglang_hooks.model.environment import ENVIRONMENT
from cornplug.sglang_hooks.model.server_args_fields import SERVER_ARGS

SERVER: Final = Run(
    flags="""
    --tokenizer-path {given}/tokenizer --tokenizer-mode slow --allow-auto-truncate
    --disable-tokenizer-batch-decode
    --completion-template deepseek_coder --default-chat-template-kwargs '{"enable_thinking": false}'
    --enable-dynamic-batch-tokenizer --dynamic-batch-tokenizer-batch-size 8
    --dynamic-batch-tokenizer-batch-timeout 0.001 --trust-request-chat-template

    --admin-api-key secret --asr-max-buffer-seconds 30 --asr-max-concurrent-sessions 4 --batch-notify-size 4
    --enable-response-store --fastapi-root-path /proxy --file-storage-path {given}/files
    --return-input-ids --return-output-ids --skip-server-warmup --stream-interval 2
    --incremental-streaming-output --enable-streaming-session
    --stream-response-default-include-usage --tool-call-parser qwen25 --weight-version v7

    --disable-outlines-disk-cache --enable-custom-logit-processor --grammar-backend none --random-seed 7
    --sampling-backend pytorch --sampling-defaults openai --sampling-mask-max-tokens 1024
    --constrained-json-disable-any-whitespace --preferred-sampling-params '{"presence_penalty": 0.0}'
    --enable-fp32-lm-head --mamba-ssm-dtype float32
    --enable-return-hidden-states --return-hidden-states-mode last

    --weight-loader-disable-mmap --weight-loader-drop-cache-after-load --weight-loader-prefetch-checkpoints
    --weight-loader-prefetch-num-threads 2 --engine-info-bootstrap-port 6800

    --allowed-media-domains example.org --limit-mm-data-per-request '{"image": 4}'
    --media-url-max-file-size-mb 8 --mm-feature-transport cpu --mm-io-worker-num 2
    --mm-processor-worker-num 2 --mm-preprocess-cache-size-mb 64 --trust-mm-content-hashes

    --chunked-prefill-size 256 --max-prefill-tokens 1024 --prefill-max-requests 4
    --max-queued-requests 64 --max-running-requests 8 --max-total-tokens 4096 --mem-fraction-static 0.4
    --enable-priority-scheduling --default-priority-value 1 --disable-priority-preemption
    --priority-scheduling-preemption-threshold 5 --schedule-low-priority-values-first
    --schedule-conservativeness 0.5 --disable-overlap-schedule --num-continuous-decode-steps 2
    --scheduler-recv-interval 2 --disable-chunked-prefix-cache --enable-mixed-chunk
    --retraction-policy priority --min-free-slots-delay 1 --prefill-decode-interval 1
    --prefill-decode-interval-min-bs 2

    --page-size 32 --radix-eviction-policy lfu --enable-hierarchical-cache --hicache-ratio 3
    --hicache-io-backend direct --hicache-mem-layout page_first_direct
    --hicache-write-policy write_through_selective
    --hicache-storage-prefetch-policy wait_complete --hicache-storage-prefetch-retry-max-attempts 4
    --hicache-storage-prefetch-retry-poll-interval 4 --hicache-host-memory-fraction 0.7

    --dist-timeout 600 --nccl-port 28900 --gc-threshold 700 10 10 --soft-watchdog-timeout 120
    --watchdog-timeout 600 --disable-cuda-graph

    --log-level debug --log-level-http warning --log-requests --log-requests-format json
    --log-requests-level 1 --log-requests-target stdout --show-time-cost --crash-dump-folder {given}/crash
    --decode-log-interval 1 --enable-mfu-metrics --enable-request-time-stats-logging
    --enable-metrics-for-all-schedulers --extra-metric-labels '{"run": "harmless"}'
    --export-metrics-to-file --export-metrics-to-file-dir {given}/metrics --gc-warning-threshold-secs 1
    --bucket-e2e-request-latency 0.1 1 --bucket-inter-token-latency 0.1 1 --bucket-time-to-first-token 0.1 1
    --prompt-tokens-buckets custom 8 64 --generation-tokens-buckets custom 8 64
    --load-snapshot-publish-interval 4 --tokenizer-metrics-allowed-custom-labels tenant
    --tokenizer-metrics-custom-labels-header x-tenant --uvicorn-access-log-exclude-prefixes /health
    --kv-events-config '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:28650"}'
    """,
    variables="""
    SGLANG_AUTO_NUMA_BIND=0 SGLANG_NUMA_BIND_V2=0 SGLANG_CPU_WORKERS=2 SGLANG_DETOKENIZER_MAX_STATES=1024
    SGLANG_HOST_IP=127.0.0.1 SGLANG_PORT=28500 SGLANG_RUN_ID=harmless SGLANG_WAIT_PORT_TIMEOUT=30
    SGLANG_WAIT_WEIGHTS_READY_TIMEOUT=100 SGLANG_WARMUP_TIMEOUT=300
    SGLANG_PLUGINS=cornplug,cornplug_dev_hicache_cpu
    SGLANG_USE_PICKLE_IPC=0 SGLANG_LOG_PICKLE_IPC_OBJECTS=1 SGLANG_ENABLE_TORCH_INFERENCE_MODE=1
    SGLANG_ENABLE_COLOCATED_BATCH_GEN=1
    HF_HUB_DISABLE_XET=1 SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 SGLANG_CACHE_DIR={given}/cache

    SGLANG_DIAG_BYPASS_HEALTH_GENERATE=1 SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0
    SGLANG_HEALTH_CHECK_TIMEOUT=30 SGLANG_ENABLE_REQUEST_DECOMPRESSION=1
    SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1 SGLANG_EXPOSE_OWN_ENV_VARS=1 SGLANG_TIMEOUT_KEEP_ALIVE=10
    SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT=20 SGLANG_OLLAMA_CHAT_ROUTE=/ollama/chat
    SGLANG_OLLAMA_GENERATE_ROUTE=/ollama/generate SGLANG_OLLAMA_ROOT_ROUTE=/ollama
    SGLANG_OLLAMA_SHOW_ROUTE=/ollama/show SGLANG_OLLAMA_TAGS_ROUTE=/ollama/tags DISABLE_OPENAPI_DOC=1
    SGLANG_REQUEST_STATE_WAIT_TIMEOUT=8

    SGLANG_CHECK_KV_PAGE_INVARIANTS=1 SGLANG_DEBUG_MEMORY_POOL=1 SGLANG_ENABLE_NAN_LOGITS_CHECK=1
    SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY=1 SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0
    SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK=1 SGLANG_INVARIANT_CHECK=1 SGLANG_LOG_FORWARD_ITERS=1
    SGLANG_LOG_GC=1 SGLANG_LOG_MS=1 SGLANG_LOG_REQUEST_EXCEEDED_MS=1 SGLANG_LOG_REQUEST_HEADERS=x-tenant
    SGLANG_LOG_SCHEDULER_STATUS_INTERVAL=5 SGLANG_LOG_SCHEDULER_STATUS_TARGET=stdout
    SGLANG_MEM_PROFILE_MAX_ENTRIES=1000 SGLANG_PROFILE_RECORD_SHAPES=0 SGLANG_PROFILE_V2=1
    SGLANG_PROFILE_WITH_STACK=0 SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS=2 SGLANG_PYSPY_DUMP_BEFORE_CRASH=0
    SGLANG_PHASE_CHECKER_DEBUG=1 SGLANG_RECORD_STEP_TIME=1 SGLANG_ROUTING_KEY_POLICY_DEBUG_LOG=1
    SGLANG_TORCH_PROFILER_DIR={given}/profile SGLANG_TRACE_LOGITS_E2E=1
    SGLANG_TRACE_SAMPLER_E2E=1 SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0
    SGLANG_BUCKET_EVICTION_DURATION=0.1,1 SGLANG_BUCKET_LOAD_BACK_DURATION=0.1,1
    SGLANG_CACHE_HIT_RATE_WINDOW_SECONDS=30 SGLANG_CRASH_ON_NUMA_BIND_FAILURE=1
    SGLANG_TEST_REQUEST_TIME_STATS=1

    SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION=1024 SGLANG_ENABLE_WAITING_PREFIX_REFRESH=0
    SGLANG_EXACT_CHUNK_FILL=0 SGLANG_FORCE_STREAM_INTERVAL=10 SGLANG_INIT_NEW_TOKEN_RATIO=0.5
    SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION=1 SGLANG_MAX_NEW_TOKENS_LIMIT=100
    SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR=0.1 SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS=300
    SGLANG_REQ_RUNNING_TIMEOUT=600 SGLANG_REQ_WAITING_TIMEOUT=600 SGLANG_RETRACT_DECODE_STEPS=10
    SGLANG_SCHEDULER_MAX_RECV_PER_POLL=8 SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE=2
    SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT=500 SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_NONE=2
    SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY=2

    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 SGLANG_ENABLE_WEIGHT_LOADER_V2=1
    SGLANG_SORT_WEIGHT_FILES=1 SGLANG_PREFETCH_BLOCK_SIZE_MB=8 SGLANG_NATIVE_MOVE_KV_CACHE=1
    SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM=1
    SGLANG_EAGER_INPUT_NO_COPY=1 SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS=2
    SGLANG_ROPE_CACHE_ALIGN=64 SGLANG_ROPE_CACHE_SAFETY_MARGIN=128

    SGLANG_FORCE_CPU_IMAGE_PREPROCESSING=1 SGLANG_IO_WORKERS=2 SGLANG_MM_AVOID_RETOKENIZE=0
    SGLANG_MM_PRECOMPUTE_HASH=1 SGLANG_VLM_CACHE_SIZE_MB=50

    SGLANG_DEFAULT_THINKING=1 SGLANG_DISABLE_OUTLINES_DISK_CACHE=1 SGLANG_ENABLE_FAST_INPUT_LOGPROBS=0
    SGLANG_ENABLE_LOGPROB_CHUNK=0 SGLANG_ENABLE_RESPONSE_TEMPLATE_TURN_GRAMMAR=0
    SGLANG_EXA_INCLUDE_HIGHLIGHTS=0 SGLANG_EXA_NUM_RESULTS=5 SGLANG_EXA_SEARCH_TYPE=fast
    SGLANG_FORWARD_UNKNOWN_TOOLS=1 SGLANG_GRAMMAR_MAX_POLL_ITERATIONS=1000
    SGLANG_GRAMMAR_POLL_INTERVAL=0.01 SGLANG_LOGPROB_CHUNK_SIZE=512 SGLANG_PARALLEL_PROMPT_ENCODE=0
    SGLANG_PARALLEL_PROMPT_ENCODE_MIN_CHARS=1024 SGLANG_PATCH_TOKENIZER=0 SGLANG_RETURN_ORIGINAL_LOGPROB=1
    SGLANG_SANITIZE_NAN_LOGITS=1 SGLANG_TOOL_STRICT_LEVEL=1
    """,
)


def _group(tables: FieldTables, begins: str, *, but: str = "") -> str:
    """Names of a group of the product's harmless settings, by how its reason begins."""
    names = [name for name, why in tables.harmless.items() if why.startswith(begins)]
    if not names:
        raise ValueError(f"no reason begins with {begins!r}")
    return " ".join(name for name in names if name not in but.split())


def _variables(names: str) -> str:
    """Variables whose names are given without SGLANG_."""
    return " ".join(f"SGLANG_{name}" for name in names.split())


_GPU: Final = "it is for a GPU, an NPU or Apple's Metal"
_RANKS: Final = "it needs several processes, hosts or replicas"
_OTHER_MODEL: Final = (
    "it needs another kind of model than this one: experts, windows, states, latents, reasoning, adapters"
)
_OTHER_CACHE: Final = "it is for another cache or storage than the one that cornplug uses"
_OTHER_SERVER: Final = "it is for servers that do a part of the work, or take weights from another server"
_PACKAGE: Final = "it needs a package that script/setup does not install"
_DEVELOPERS: Final = "it is for SGLang's own tests and developers"
_COMPILER: Final = "it is for compiled models, and compiling takes too long for a test"
_TWO_TOKENIZERS: Final = "it needs two tokenizers; tests/integration/test_sglang_kinds.py runs them"
_DRAFTS: Final = "it needs speculative decoding; tests/integration/test_sglang_kinds.py runs it"
_GRPC: Final = "it is for SGLang's gRPC or Rust server"
_OWN_FILE: Final = "its value names a file or code of the user's own"
_SERVERS_SET_IT: Final = "the tests' servers set it in every run"

_COMPILED: Final = "enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs"
_WITHOUT_GRAPHS: Final = f"{_COMPILED} cuda_graph_config disable_cuda_graph"
_OF_ONE_PROCESS: Final = "dist_timeout nccl_port enable_p2p_check gated_launch_port"

FIELDS: Final[Mapping[str, str]] = {
    _SERVERS_SET_IT: """
        device enable_cache_report enable_metrics enable_multimodal host port served_model_name
        sleep_on_idle""",
    "SGLang computes it; no flag sets it": """
        _swa_full_tokens_ratio_explicitly_set aux_hidden_state_capture cuda_graph_config
        custom_sigquit_handler forward_pass_metrics_ipc_name forward_pass_metrics_worker_id stat_loggers
        watermark_context_window watermark_default_enabled watermark_enforce_all watermark_key
        watermark_key_b watermark_max_probability watermark_mixing_probability""",
    _GPU: f"""
        {_group(SERVER_ARGS, "the same operations, recorded", but=_WITHOUT_GRAPHS)}
        {_group(SERVER_ARGS, "the same arithmetic, tuned")} {_group(SERVER_ARGS, "location of weights while")}
        {_group(SERVER_ARGS, "reading of 4-bit KV")} base_gpu_id gpu_id_step mlx_enable_sampling
        enable_layerwise_nvtx_marker enable_p2p_check startup_weight_load_mode""",
    _COMPILER: _COMPILED,
    _RANKS: f"""
        {_group(SERVER_ARGS, "which process computes", but=_OF_ONE_PROCESS)}
        {_group(SERVER_ARGS, "transfer of sums")} enable_broadcast_mm_inputs_process enable_dp_lm_head
        enable_dynamic_chunking enable_prefill_delayer enable_tp_lm_head_all_to_all mm_enable_dp_encoder
        prefill_delayer_* use_ray""",
    _OTHER_MODEL: f"""
        {_group(SERVER_ARGS, "state of models", but="mamba_ssm_dtype")}
        {_group(SERVER_ARGS, "location of experts' weights")}
        {_group(SERVER_ARGS, "computation of --kt-weight-path")} c128_page_size disable_hybrid_swa_memory
        enable_linker_mla_dedup enable_page_major_kv_layout enable_return_indexer_topk
        enable_return_routed_experts enable_strict_thinking enable_unified_memory hf_chat_template_name
        prefill_only_disable_kv_cache reasoning_parser strip_thinking_cache swa_full_tokens_ratio
        swa_prefix_tails enable_return_aux_hidden_states return_aux_hidden_state_layer_ids""",
    "it needs adapters; tests/integration/test_adapted_engines.py runs them": _group(
        SERVER_ARGS, "location of adapters"
    ),
    _DRAFTS: _group(SERVER_ARGS, "affects only drafts"),
    _OTHER_SERVER: f"""
        {_group(SERVER_ARGS, "roles of disaggregated servers")} enable_prefix_mm_cache
        remote_instance_weight_loader_* weight_cache_*""",
    "a router or planner beside the server reads what it publishes": (
        "enable_forward_pass_metrics load_publish_endpoint"
    ),
    _OTHER_CACHE: f"""
        {_group(SERVER_ARGS, "KV of another cache")} mm_global_cache_backend""",
    "the test's client opens no session": "enable_session_radix_cache",
    "it sets in gigabytes what --hicache-ratio, which the run has, sets as a ratio": "hicache_size",
    "cornplug refuses it at the start: cornplug/sglang_hooks/kv/hicache_config.py": (
        "disable_radix_cache hicache_host_memory_mode"
    ),
    _TWO_TOKENIZERS: "tokenizer_worker_num detokenizer_worker_num enable_http_worker_reuseport",
    _GRPC: "grpc_* sidecar sidecar_args smg_*",
    _PACKAGE: """
        enable_http2 http2_* enable_trace modelopt_* otlp_* tokenizer_backend tool_server trace_modules""",
    "the test's client sends no key, and speaks HTTP without TLS": "api_key enable_ssl_refresh ssl_*",
    _OWN_FILE: "model_checksum warmups",
    "the prompts of the test are text": "skip_tokenizer_init",
    "it changes the prompt or the answer, which the test compares": """
        chat_template enable_watermark watermark_config""",
    "it needs another value of a setting that the run sets": """
        abort_on_priority_when_disabled constrained_json_max_whitespace_cnt
        constrained_json_whitespace_pattern enable_tokenizer_batch_encode radix_eviction_policy_config
        schedule_policy""",
    "it writes every tensor of every step to disk": "debug_tensor_dump_*",
    "the server waits for a client before it loads the model": "gated_launch_port",
    "it deletes the model that the test's engines read": "delete_ckpt_after_loading",
    "it binds processes to a NUMA node, and the host may have one": "numa_node",
}
"""Reason -> fields of `ServerArgs` that the run does not set."""

VARIABLES: Final[Mapping[str, str]] = {
    _GPU: _variables("""
        TRACE_LOGITS_E2E_SYNC
        AITER_* CUDA_* DEEPGEMM_* DG_* FLASHINFER_* IN_DEEPGEMM_* JIT_* MLX_* NPU_* TRITON_* TRTLLM_* ZBAL_*
        BATCH_INVARIANT_OPS_* CRASH_ON_JIT_COMPILE CRASH_ON_TRITON_LOAD_AFTER_READY CUTE_AOT_CACHE_DIR
        CUSTOM_ALL_REDUCE_* FORCE_CUSTOM_ALL_REDUCE_* OPT_USE_CUSTOM_ALL_REDUCE_V2 USE_1STAGE_ALLREDUCE
        DEBUG_SYMM_MEM SYMM_MEM_* DETERMINISTIC_NCCL_NCHANNELS ENABLE_PCIE_IPC_ALLREDUCE PCIE_IPC_MAX_NUMEL
        DISABLE_LEAN_ATTENTION FORCE_LEAN_GRID_CU_MULT MLA_DECODE_TUNE ENABLE_FP8_GEMM_CONFIG_TUNE
        EMPTY_CACHE_INTERVAL ENABLE_ASYNC_ASSERT ENABLE_CUDA_GRAPH_* ENABLE_GRAPH_POOL_*
        ENABLE_METRICS_DEVICE_TIMER ENABLE_NVTX_* ENABLE_POST_CAPTURE_KV_SIZING ENABLE_PREFILL_WAR_READ_DONE
        ENABLE_WAR_BARRIER FORCE_COARSE_WAR_BARRIER FORCE_CONFIDENTIAL_COMPUTE GFX_ASM_CTX_GATHER_CHECK
        GRAPH_BATCH_CAPTURE HICACHE_HOST_REGISTER_CHUNK_GB HICACHE_TMA_TRANSFER IS_FLASHINFER_AVAILABLE
        LOG_DECODE_GRAPH_KEY MEMORY_SAVER_CUDA_GRAPH MM_BUFFER_SIZE_MB MM_FEATURE_CACHE_MB
        MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC NCCL_SO_PATH NSYS_PROFILING ONE_VISIBLE_DEVICE_PER_PROCESS
        OPT_CUDA_GRAPH_FILL_FAST_PATH PREFILL_TILE_BUDGET PREFILL_TILE_BUDGET_MODE SET_CPU_AFFINITY
        SKIP_P2P_CHECK USE_BREAKABLE_CUDA_GRAPH USE_CUDA_IPC_TRANSPORT USE_CUSTOM_TRITON_KERNEL_CACHE
        USE_HND_KVCACHE USE_IPC_POOL_HANDLE_CACHE USE_SGL_FA3_KERNEL VIT_ENABLE_CUDA_GRAPH
        """),
    _COMPILER: _variables("ENABLE_TORCH_COMPILE TORCH_COMPILE_MODE TORCH_DYNAMIC_SHAPE"),
    _RANKS: _variables("""
        BACKUP_PORT_BASE BLOCK_NONZERO_RANK_CHILDREN DETECT_SLOW_RANK DISTRIBUTED_INIT_METHOD_OVERRIDE DP_*
        DYNAMIC_CHUNKING_SMOOTH_FACTOR ENABLE_EMBED_REPLICATION ENABLE_KV_SHARD_ZERO_SM_GATHER
        ENABLE_METRICS_DP_ATTENTION ENABLE_RANK_CONSENSUS_CHECKER IS_FIRST_RANK_ON_NODE
        LOAD_SNAPSHOT_USE_ZMQ NCCL_ALL_GATHER_IN_OVERLAP_SCHEDULER_SYNC_BATCH PP_* PREFILL_DELAYER_*
        RAY_BUNDLE_INDICES RINGBUFFER_WARNING_INTERVAL SCHEDULER_DECREASE_PREFILL_IDLE
        SCHEDULER_SKIP_ALL_GATHER TCP_STORE_PORT USE_MESSAGE_QUEUE_BROADCASTER ZMQ_*
        """),
    _OTHER_MODEL: _variables("""
        DEEPEP_* DSA_* DSV41_* DSV4_* EPLB_* EXPERT_* GDN_* INKLING_* KDA_* KIMI_K3_* LORA_* MAMBA_* MOE_*
        QWEN4_* ALT_STREAM QK_NORM_ALT_STREAM TWO_STREAM_MAX_TOKENS
        BLACKWELL_OVERLAP_SHARED_EXPERTS_OUTSIDE_SBO CHUNKED_PREFIX_CACHE_THRESHOLD COMPACTION_*
        DEBUG_POISON_POOL DISABLE_FUSED_MAMBA_SLOT_OPS DISABLE_HISPARSE_PREFETCH
        DISABLE_KDA_PREFILL_GRAPH_EXTEND DISABLE_LAZY_COMPACTION DISABLE_STATIC_WATERFILL
        ENABLE_QWEN_DEEPEP_SHARED_OVERLAP ENCODER_VIDEO_DECODE_NUM_THREADS LAZY_COMPACTION_*
        LOG_EXPERT_LOCATION_METADATA LOG_LAZY_COMPACTION_* MAX_KV_CHUNK_CAPACITY MAX_THINK_TOKENS
        MLA_DEDUP_CHUNK_TOKENS MM_LOAD_MAX_RETRIES OPT_MAMBA_SKIP_DECODE_LOCK OPT_RELEASE_PREFILL_SWA
        OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS SHARED_EXPERT_TP1 SWA_EVICTION_INTERVAL TBO_DEBUG
        TRACE_QWEN_MOE_DEEPEP_E2E VALIDATE_MAMBA_REPLAY_STATE_INDICES
        """),
    _DRAFTS: " ".join([_group(ENVIRONMENT, "affects drafts"), _variables("SPEC_EXPANSION_SAFETY_FACTOR")]),
    _OTHER_SERVER: " ".join(
        [
            _group(ENVIRONMENT, "transfer of KV between servers"),
            _variables("""
                EMBEDDING_POOL_SIZE_MB ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING ENCODER_*
                HICACHE_DECODE_OFFLOAD_STRIDE WEIGHT_CACHE_*
                """),
        ]
    ),
    _OTHER_CACHE: _variables("""
        ENABLE_HICACHE_SWA_TAIL_ONLY_BACKUP HICACHE_BUFFER_ANCHOR_LOCK_CAP HICACHE_FILE_* HICACHE_HF3FS_*
        HICACHE_HOST_HUGEPAGE HICACHE_HOST_HUGEPAGE_SIZE HICACHE_HOST_MEM_BACKEND HICACHE_HOST_NUMA_NODE
        HICACHE_HOST_PREFAULT HICACHE_MEMCACHE_* HICACHE_NIXL_* HICACHE_SIMM_*
        """),
    "SGLang 0.5.23 reads it nowhere in its Python modules": _variables("""
        DATA_PARALLEL_BUDGET_INTERVAL ENABLE_CP_V2 ENABLE_HICACHE_BUFFER_ANCHOR_LOCK FORCE_SHUTDOWN
        MAX_BATCH_REQS_PER_HTTP_REQ OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW PYTHON SKIP_RUST_TESTS
        SYNC_TOKEN_IDS_ACROSS_TP TRACE_QWEN35_FINAL_NORM
        """),
    _DEVELOPERS: " ".join(
        [_variables("DUMP_LOADER_DIR IS_IN_CI IS_IN_CI_AMD JIT_KERNEL_* ROLE_* TEST_*"), "IS_H200"]
    ),
    _GRPC: _variables("GRPC_* RUST_*"),
    _TWO_TOKENIZERS: _variables("BATCH_TOKENIZER_OUTPUTS HTTP_SERVER_APP_PATH"),
    _PACKAGE: _variables("LOCAL_IP_NIC OTLP_* TRACE_ASYNC TRACE_ASYNC_FLUSH_THRESHOLD TRACE_LEVEL"),
    "it needs an account of a search service": "EXA_API_KEY",
    _OWN_FILE: _variables("LOGGING_CONFIG_PATH"),
    "it is about overlap scheduling, which the run turns off": _variables(
        "DISABLE_CONSECUTIVE_PREFILL_OVERLAP ENABLE_DELAY_SAMPLE"
    ),
    "it needs huge pages, which the host must reserve": _variables("HUGEPAGE_SIZE"),
    "it binds the server to named cores; tests/integration/test_sglang_ranks.py runs it": _variables(
        "CPU_OMP_THREADS_BIND"
    ),
    _SERVERS_SET_IT: _variables("USE_CPU_ENGINE"),
    "with it no KV is shared: cornplug/sglang_hooks/kv/exclusions.py": _variables("RADIX_FORCE_MISS"),
    "it names each image at random, and the test counts hits of prompts with images": _variables(
        "MM_SKIP_COMPUTE_HASH"
    ),
}
"""Reason -> variables that the run does not set."""
