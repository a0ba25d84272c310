"""The runs of vLLM.

There are two because some settings exclude each other. vLLM compiles no graphs with `--enable-lora` on a CPU.
It takes several renderers only without a cache of media, and a batch below the longest prompt only with
chunked prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from harmless_settings import Run

PLAIN: Final = ""
"""Flags of the engine that the runs are compared with: those of `VllmServer` alone."""

_SERVER: Final = Run(
    flags="""
    --tokenizer {given}/tokenizer --tokenizer-mode hf --tokenizer-revision main
    --seed 7 --use-fp64-gumbel --max-logprobs 30 --hf-token none
    --allowed-local-media-path {given} --allowed-media-domains example.org
    --enable-prompt-embeds --renderer-num-workers 2 --allow-deprecated-quantization

    --limit-mm-per-prompt '{"image": 4}' --media-io-kwargs '{"video": {"num_frames": 4}}'
    --enable-mm-embeds --no-mm-device-do-normalize --mm-processor-cache-gb 0 --mm-hasher-algorithm sha256
    --mm-encoder-tp-mode data --mm-encoder-attn-backend TORCH_SDPA --mm-encoder-fp8-scale-save-margin 2.0
    --interleave-mm-strings --skip-mm-profiling

    --safetensors-prefetch-num-threads 2 --safetensors-prefetch-block-size 1048576
    --no-use-tqdm-on-load --pt-load-map-location '{"cuda:0": "cpu"}' --download-dir {given}/downloads

    --block-size 32
    --prefix-caching-hash-algo sha256_cbor --gpu-memory-utilization 0.5 --num-gpu-blocks-override 256

    --distributed-timeout-seconds 300 --cpu-distributed-timeout-seconds 300 --master-port 29777
    --dp-sync-interval 8

    --max-num-batched-tokens 512 --max-num-scheduled-tokens 448 --max-num-seqs 8 --max-num-active-seqs 4
    --max-num-queued-reqs 64 --max-num-queued-tokens 100000
    --long-prefill-token-threshold 128 --long-prefill-token-threshold-adaptive
    --scheduling-policy priority --disable-chunked-mm-input --no-scheduler-reserve-full-isl
    --watermark 0.01 --prefill-schedule-interval 2 --stream-interval 2 --disable-hybrid-kv-cache-manager

    --structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'
    --kv-cache-metrics --enable-mfu-metrics --enable-logging-iteration-details
    --log-level DEBUG --shutdown-timeout 5
    --profiler-config '{"profiler": "torch", "torch_profiler_dir": "{given}/profile"}'
    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "null"}'
    """,
    variables="""
    VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_NUM_OF_RESERVED_CPU=1
    VLLM_HOST_IP=127.0.0.1 VLLM_LOOPBACK_IP=127.0.0.1 VLLM_RPC_BASE_PATH=/var/tmp
    VLLM_ENGINE_READY_TIMEOUT_S=900 VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=600
    VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1 VLLM_PROCESS_NAME_PREFIX=harmless
    VLLM_SERVER_DEV_MODE=1 VLLM_TARGET_DEVICE=cpu VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=10

    VLLM_ASSETS_CACHE={given}/assets VLLM_ASSETS_CACHE_MODEL_CLEAN=1 VLLM_CACHE_ROOT={given}/cache
    VLLM_CONFIG_ROOT={given}/config VLLM_LORA_RESOLVER_CACHE_DIR={given} VLLM_FASTSAFETENSORS_QUEUE_SIZE=2
    VLLM_ALLOW_INSECURE_SERIALIZATION=1 VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    VLLM_SKIP_MODEL_NAME_VALIDATION=1

    VLLM_AUDIO_FETCH_TIMEOUT=20 VLLM_IMAGE_FETCH_TIMEOUT=20 VLLM_VIDEO_FETCH_TIMEOUT=20
    VLLM_MEDIA_CACHE={given}/media VLLM_MEDIA_CACHE_MAX_SIZE_MB=64 VLLM_MEDIA_CACHE_TTL_HOURS=1
    VLLM_MEDIA_FETCH_MAX_RETRIES=1 VLLM_MEDIA_LOADING_THREAD_COUNT=2 VLLM_MEDIA_URL_ALLOW_REDIRECTS=0
    VLLM_MAX_AUDIO_CLIP_FILESIZE_MB=5 VLLM_MAX_AUDIO_DECODE_BYTES=1000000
    VLLM_MAX_AUDIO_DECODE_DURATION_S=60 VLLM_MAX_AUDIO_PREPROCESS_WORKERS=1
    VLLM_MAX_EMBED_DECODE_BYTES=1000000 VLLM_MAX_IMAGE_PIXELS=1000000 VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB=8

    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS=64 VLLM_MAX_COMPLETION_PROMPTS=8 VLLM_MAX_NUM_BAD_WORDS=8
    VLLM_MAX_N_SEQUENCES=8 VLLM_MAX_STOP_STRINGS=8 VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT=60
    VLLM_REGEX_COMPILATION_TIMEOUT_S=4 VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS=2
    VLLM_ENFORCE_STRICT_TOOL_CALLING=0 VLLM_ENABLE_RESPONSES_API_STORE=1 VLLM_SYSTEM_START_DATE=2026-01-01
    VLLM_V1_OUTPUT_PROC_CHUNK_SIZE=4 VLLM_V1_USE_OUTLINES_CACHE=1 VLLM_XGRAMMAR_CACHE_MB=64

    VLLM_BUILD_COMMIT=c0ffee VLLM_BUILD_PIPELINE=test VLLM_BUILD_URL=http://127.0.0.1 VLLM_IMAGE_TAG=test
    VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1 VLLM_USAGE_SOURCE=test
    VLLM_USAGE_STATS_SERVER=http://127.0.0.1
    VLLM_DISABLE_LOG_LOGO=1 VLLM_LOGGING_COLOR=1 VLLM_LOGGING_PREFIX='[harmless] '
    VLLM_LOGGING_STREAM=ext://sys.stderr VLLM_LOG_BATCHSIZE_INTERVAL=1 VLLM_LOG_MODEL_INSPECTION=1
    VLLM_LOG_STATS_INTERVAL=1 VLLM_GC_DEBUG=1 VLLM_CUSTOM_SCOPES_FOR_PROFILING=1
    VLLM_DEBUG_LOG_API_SERVER_RESPONSE=true VLLM_DEBUG_WORKSPACE=1
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
    """,
)

_COMPILED: Final = Run(
    flags="""
    --no-enforce-eager --performance-mode interactivity --optimization-level 1
    --compilation-config '{"debug_dump_path": "{given}/dump"}'
    --no-enable-chunked-prefill --no-enable-prefix-caching --logprobs-mode processed_logprobs
    --mm-processor-cache-gb 1 --mm-processor-cache-type shm --mm-shm-cache-max-object-size-mb 64
    --mm-tensor-ipc torch_shm
    --speculative-config
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    """,
    variables="""
    VLLM_CPU_CI_ENV=1 VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_PORT=27800
    VLLM_PLUGINS=cornplug,one_process_cpu,host_offloading_cpu
    VLLM_COMPILE_CACHE_SAVE_FORMAT=unpacked VLLM_DEBUG_DUMP_PATH={given}/dump VLLM_DISABLE_COMPILE_CACHE=1
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 VLLM_LOGGING_LEVEL=DEBUG
    """,
)

_NEXT: Final = Run(
    flags="""
    --watchdog-config '{"dump_dir": "{given}/stacks"}'
    --enable-lora --max-loras 2 --max-lora-rank 8 --max-cpu-loras 4
    """,
    variables="""
    VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT=0 VLLM_CHAT_TEMPLATE_FUEL=400000
    VLLM_HTTP_MAX_REQUEST_BODY_SIZE=10000000 VLLM_REQUEST_BODY_LOG_LEVEL=INFO
    VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES=100000000 VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB=64
    """,
)
"""Settings of the server that vLLM has since 0.33."""


def runs(release: str) -> Mapping[str, Run]:
    """The runs of a release of vLLM, by name."""
    return {"server": _SERVER + _NEXT if release == "0.33" else _SERVER, "compiled": _COMPILED}


_COMPUTED: Final = "vLLM computes it; no flag sets it"
_GPU: Final = "vLLM reads or takes it on a GPU only"
_RANKS: Final = "it needs several processes, hosts or replicas"
_OWN_FILE: Final = "its value names a file or code of the user's own"
_OTHER_MODEL: Final = (
    "it needs another kind of model than this one (layers, towers, adapters, quantised weights)"
)
_OTHER_CONNECTOR: Final = "a connector or an engine beside cornplug's reads it"
_OTHER_DRAFT: Final = "it is about a draft model, or about another kind of draft than n-grams"
_V2: Final = (
    "it needs vLLM's V2 runner, which has no real CPU kernels; tests/integration/test_vllm_beds.py runs it"
)

FIELDS: Final[Mapping[str, str]] = {
    "with adapters on a CPU, vLLM 0.32 shares no KV of requests without one (`lora_neighbour`)": (
        "LoRAConfig.*"
    ),
    _COMPUTED: """
        ModelConfig.is_submodel_config ModelConfig.word_embeddings_untied_by_checkpoint
        ModelConfig.spec_target_max_model_len MultiModalConfig.allow_missing_mm_embeddings LoadConfig.device
        CacheConfig._block_size_resolved CacheConfig.kv_cache_layout CacheConfig.hash_block_size
        CacheConfig.effective_attention_block_size CacheConfig.cache_hit_alignment_tokens
        CacheConfig.num_gpu_blocks CacheConfig.num_cpu_blocks CacheConfig.kv_cache_size_tokens
        CacheConfig.kv_cache_max_concurrency CacheConfig.simple_cpu_offload_num_blocks
        CacheConfig.mamba_page_size_padded CacheConfig.skip_page_size_padded CacheConfig.is_attention_free
        CacheConfig.use_kda_recoverssm ParallelConfig._allow_auto_resolve_cp_interleave_size
        ParallelConfig._coord_store_port ParallelConfig.is_moe_model
        SchedulerConfig.runner_type SchedulerConfig.is_multimodal_model VllmConfig.device_config
        CompilationConfig.local_cache_dir CompilationConfig.enabled_custom_ops
        CompilationConfig.disabled_custom_ops CompilationConfig.traced_files
        CompilationConfig.compilation_time CompilationConfig.encoder_compilation_time
        CompilationConfig.static_forward_context CompilationConfig.static_all_moe_layers""",
    "vLLM sets it by itself on a CPU": """
        ParallelConfig.disable_custom_all_reduce CompilationConfig.ir_enable_torch_wrap""",
    "vLLM warns about it, and ignores it": """
        ModelConfig.disable_cascade_attn ParallelConfig.max_parallel_loading_workers""",
    _GPU: """
        ModelConfig.enable_sleep_mode ModelConfig.sleep_* ModelConfig.enable_nccl_comm_suspend
        ModelConfig.enable_cumem_allocator MultiModalConfig.mm_ipc_gpu_memory_gb OffloadConfig.*
        KernelConfig.* AttentionConfig.* PassConfig.* IrOpPriorityConfig.*
        CompilationConfig.cudagraph_* CompilationConfig.encoder_cudagraph_* CompilationConfig.decoder_replay_*
        CompilationConfig.max_cudagraph_capture_size CompilationConfig.splitting_ops
        ParallelConfig.enable_dbo ParallelConfig.ubatch_size ParallelConfig.dbo_*
        ParallelConfig.numa_bind ParallelConfig.numa_bind_* ParallelConfig.assigned_physical_gpu_ids
        LoRAConfig.specialize_active_lora""",
    "its effect needs inductor, which compiles too long for a test": """
        CompilationConfig.cache_dir CompilationConfig.compile_cache_save_format
        CompilationConfig.compile_sizes CompilationConfig.use_inductor_graph_partition
        PassConfig.eliminate_noops DynamicShapesConfig.*""",
    _RANKS: "ParallelConfig.* LoRAConfig.fully_sharded_loras",
    _OWN_FILE: """
        ModelConfig.io_processor_plugin ModelConfig.logits_processors ParallelConfig.worker_extension_cls
        SchedulerConfig.scheduler_cls EncoderCacheManagerConfig.manager_config""",
    _OTHER_MODEL: """
        ModelConfig.pooler_config MultiModalConfig.mm_encoder_fp8_scale_save_path CacheConfig.mamba_*
        CacheConfig.enable_mamba_shared_prefix_checkpoint CacheConfig.use_replayssm
        CacheConfig.replayssm_buffer_len CacheConfig.swa_bounded_replay
        CacheConfig.prefix_match_unit CacheConfig.prefix_cache_retention_interval
        CompilationConfig.compile_mm_encoder
        CompilationConfig.fast_moe_cold_start EngramConfig.* LoRAConfig.default_mm_loras
        LoRAConfig.enable_tower_connector_lora LoRAConfig.max_lora_cls_labels VllmConfig.aux_output_config
        VllmConfig.reasoning_config""",
    _OTHER_DRAFT: "SpeculativeConfig.*",
    _OTHER_CONNECTOR: "CacheConfig.kv_offloading_*",
    "cornplug's own flags set it in every run": (
        "VllmConfig.kv_transfer_config VllmConfig.ec_transfer_config"
    ),
    "the tests' servers set it in every run": "ModelConfig.served_model_name",
    _V2: """
        ModelConfig.return_sampling_mask ModelConfig.enable_trace_replay SchedulerConfig.async_scheduling""",
    "the prompts of the test are text, and one has an image": """
        ModelConfig.skip_tokenizer_init MultiModalConfig.language_model_only
        MultiModalConfig.mm_encoder_only""",
    "it changes which tokens are sampled, and the test compares them": "VllmConfig.watermark_config",
    "it is for weights that a trainer sends": "VllmConfig.weight_transfer_config",
}
"""Reason -> fields of vLLM's config classes that no run sets."""

VARIABLES: Final[Mapping[str, str]] = {
    _GPU: """
        VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_SKIP_P2P_CHECK
        VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_KV_CACHE_LAYOUT""",
    _RANKS: "VLLM_DP_* VLLM_RAY_* VLLM_PP_LAYER_PARTITION VLLM_USE_SPINLOOP_EXT",
    _OTHER_CONNECTOR: "VLLM_EC_SIDE_CHANNEL_* VLLM_MOONCAKE_* VLLM_NIXL_* VLLM_P2P_*",
    _OTHER_MODEL: "VLLM_SSM_CONV_STATE_LAYOUT VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    _OWN_FILE: "VLLM_MEDIA_CONNECTOR VLLM_LOGGING_CONFIG_PATH",
    _V2: "VLLM_USE_V2_MODEL_RUNNER",
    "it is for videos, and the test sends none": "VLLM_VIDEO_LOADER_BACKEND",
    "it needs a package that script/setup does not install": "VLLM_USE_FASTOKENS",
    "`vllm bench` reads it, no engine": "VLLM_USE_RUST_BENCH",
    "vLLM writes a random name into it for `--mm-processor-cache-type shm`": (
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"
    ),
    "it is for the class `LLM`; tests/integration/test_offline_llm.py runs it": (
        "VLLM_ENABLE_V1_MULTIPROCESSING"
    ),
    "the test's client sends no key": "VLLM_API_KEY",
    "the test reads the engine's log": "VLLM_CONFIGURE_LOGGING",
    "it logs every call of Python, too slowly for a test": "VLLM_TRACE_FUNCTION",
    "vLLM's front end cannot read what the engine core sends with it": "VLLM_DEBUG_MFU_METRICS",
}
"""Reason -> variables that no run sets."""
