"""Tables that describe how the fields of vLLM's config classes (0.32 and 0.33) affect sharing. Each class has
three tables (see `FieldTables`).

A field that a later vLLM release adds is in none of the tables. A test reports such a field. At run time, the
field prevents sharing if it is set. For some fields, the tables contain only a description, and
`model_config.py` computes the key entries.

This module has the tables for models, caches, parallelism, LoRA and speculative decoding, and for environment
variables. `runtime_fields.py` has all other tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from cornplug.engine_common.engine_config import AS_OVERRIDE, FieldTables

HARMLESS_LOADER_OPTIONS: Final = frozenset(
    {"concurrency", "memory_limit", "distributed", "enable_multithread_load", "num_threads"}
)
"""Keys of `model_loader_extra_config` that only affect the speed of reading the weight files."""
MAMBA: Final = FieldTables(
    class_name="MambaConfig",
    in_key={
        "enable_stochastic_rounding": AS_OVERRIDE,
        "stochastic_rounding_philox_rounds": AS_OVERRIDE,
        # Other kernels may order the values of a recurrent state differently.
        "backend": AS_OVERRIDE,
        "ssu_algorithm": AS_OVERRIDE,
    },
    harmless={},
    refused={},
)
_ONLY_PROPOSALS: Final = "affects only proposals: KV is saved only for tokens that the model has accepted"
HUB_VARIABLE: Final = "VLLM_USE_MODELSCOPE"
"""Environment variable that selects the model hub. It has no effect if the model is in a local folder."""
REFUSED_VARIABLES: Final[Mapping[str, str]] = {
    "VLLM_TEST_FORCE_LOAD_FORMAT": "weights are not read from the identified safetensors files",
    HUB_VARIABLE: "weights are downloaded from a hub that cornplug does not read",
    "VLLM_MODEL_REDIRECT_PATH": "the model is redirected to another model",
}
"""Environment variables that prevent sharing, each with the reason."""
HARMLESS_VARIABLES: Final = re.compile(
    "VLLM_("
    "(LOG|LOGGING|DEBUG|NVTX|USAGE|P2P|NIXL|MOONCAKE|RAY|DP|MEDIA|MAX_(?!TOKENS)[A-Z]+|BUILD|IMAGE|XGRAMMAR|V1|PORT|PRECOMPILED)_"
    "[A-Z0-9_]+"
    "|[A-Z0-9_]*(TIMEOUT|TIMEOUT_S|TIMEOUT_SECONDS|HOST|_PORT|_IP|CACHE_ROOT|CACHE_DIR|CONFIG_ROOT)"
    "|ALLOW_RUNTIME_LORA_UPDATING|API_KEY|ASSETS_CACHE(_MODEL_CLEAN)?|COMPILE_CACHE_SAVE_FORMAT"
    "|ALLOW_INSECURE_SERIALIZATION|BEAM_ALWAYS_CONSTRAIN_OUTPUT|CHAT_TEMPLATE_FUEL|HTTP_MAX_REQUEST_BODY_SIZE"
    "|REQUEST_BODY_LOG_LEVEL|CONFIGURE_LOGGING|CPU_CI_ENV|CPU_KVCACHE_SPACE|CPU_NUM_OF_RESERVED_CPU"
    "|CPU_OMP_THREADS_BIND|CUSTOM_SCOPES_FOR_PROFILING|DISABLE_COMPILE_CACHE|DISABLE_LOG_LOGO"
    "|DISABLE_REQUEST_ID_RANDOMIZATION|DO_NOT_TRACK|ENABLE_RESPONSES_API_STORE|ENABLE_V1_MULTIPROCESSING"
    "|ENFORCE_STRICT_TOOL_CALLING|FASTSAFETENSORS_QUEUE_SIZE|GC_DEBUG|KEEP_ALIVE_ON_ENGINE_DEATH"
    "|KV_CACHE_LAYOUT|KV_EVENTS_USE_INT_BLOCK_HASHES|NO_USAGE_STATS|OBJECT_STORAGE_SHM_BUFFER_NAME|PLUGINS|PORT|PP_LAYER_PARTITION"
    "|PROCESS_NAME_PREFIX|RPC_BASE_PATH|SERVER_DEV_MODE|SKIP_MODEL_NAME_VALIDATION|SKIP_P2P_CHECK"
    "|SYSTEM_START_DATE|TARGET_DEVICE|TRACE_FUNCTION|USE_FASTOKENS|USE_RUST_BENCH|USE_SPINLOOP_EXT|USE_BREAKABLE_CUDAGRAPH"
    # Both runners call the same layers. tests/integration/test_vllm_beds.py compares their outputs.
    "|USE_V2_MODEL_RUNNER"
    "|DISABLE_SHARED_EXPERTS_STREAM|SSM_CONV_STATE_LAYOUT|VIDEO_LOADER_BACKEND|WORKER_MULTIPROC_METHOD|ALLOW_LONG_MAX_MODEL_LEN"
    ")"
)
"""Pattern of environment variables that do not change results: paths, timeouts, logging and the model runner.
All other environment variables become part of the key if they are set, so only engines with the same values
share."""


def with_reason(reason: str, names: str) -> dict[str, str]:
    """Return a dict that maps each of the whitespace-separated names to the same reason."""
    return dict.fromkeys(names.split(), reason)


MODEL: Final = FieldTables(
    class_name="ModelConfig",
    in_key={
        "quantization_config": AS_OVERRIDE,
        "model_impl": AS_OVERRIDE,
        **with_reason("part of the checkpoint's fingerprint", "model revision"),
        **with_reason(
            "changes by vLLM to the config that transformers reads are part of the key",
            "hf_config hf_text_config",
        ),
        **with_reason("same as `hf_config`, but a function is refused", "hf_overrides"),
        **with_reason(
            "same as `hf_config`, because vLLM removes the window from it", "disable_sliding_window"
        ),
        **with_reason("in the spec", "dtype"),
        **with_reason(
            "part of the spec if the model depends on it", "max_model_len override_generation_config"
        ),
        **with_reason("same as max_model_len, together with generation_config.json", "generation_config"),
        **with_reason("the method's name is part of the key if it is not in the checkpoint", "quantization"),
        **with_reason("the digest of the checkpoint's own code is part of the key", "trust_remote_code"),
        **with_reason("covered by its own tables", "multimodal_config"),
    },
    harmless={
        **with_reason(
            "affects only the tokens, which are part of the key",
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin",
        ),
        **with_reason(
            "affects sampled tokens, which are part of the key",
            "seed use_fp64_gumbel logits_processors",
        ),
        **with_reason(
            "affects only outputs",
            "max_logprobs logprobs_mode return_sampling_mask enable_trace_replay served_model_name",
        ),
        **with_reason(
            "restricts access, and decoded media are part of the key",
            "allowed_local_media_path allowed_media_domains hf_token",
        ),
        **with_reason("dispatches the same operations differently", "enforce_eager disable_cascade_attn"),
        **with_reason("requests with prompt embeddings are not shared", "enable_prompt_embeds"),
        **with_reason(
            "affects memory, and a sleep that discards weights ends sharing (weight_updates.py)",
            """
            enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
            sleep_mode_offload_cudagraph
            """,
        ),
        **with_reason("memory", "enable_nccl_comm_suspend enable_cumem_allocator"),
        **with_reason("threads", "renderer_num_workers"),
        **with_reason("computed from values that are part of the key", "is_submodel_config"),
        **with_reason(
            "affects the output layer, which computes no KV", "word_embeddings_untied_by_checkpoint"
        ),
        **with_reason("affects drafts, which are only proposals", "spec_target_max_model_len"),
        **with_reason("affects only outputs, and pooling models are refused", "pooler_config"),
        **with_reason("affects only whether vLLM logs a warning", "allow_deprecated_quantization"),
    },
    refused={
        "hf_config_path": "the config comes from another checkpoint",
        "model_weights": "the weights are in an object store, not in the identified folder",
        "model_class_overrides": "the model runs other code",
        "code_revision": "the code has another revision than the checkpoint",
        "config_format": "the config is not config.json",
        "runner": "pooling models are not supported",
        "convert": "vLLM wraps the model in an adapter",
    },
    same_as_default={
        "model_impl": frozenset({"vllm"}),
        "config_format": frozenset({"hf"}),
        "runner": frozenset({"generate"}),
        "convert": frozenset({"none"}),
    },
)

MULTIMODAL: Final = FieldTables(
    class_name="MultiModalConfig",
    in_key={
        "mm_processor_kwargs": "part of the spec, where it replaces the preprocessor's values",
        "video_pruning_rate": AS_OVERRIDE,
        "video_pruning_method": AS_OVERRIDE,
    },
    harmless={
        **with_reason(
            "affects the number of media, not their content", "language_model_only limit_per_prompt"
        ),
        **with_reason(
            "embeddings from clients have no embedding key",
            "enable_mm_embeds allow_missing_mm_embeddings",
        ),
        **with_reason("decoded media are part of the key", "media_io_kwargs"),
        **with_reason(
            "normalises pixels on the device or before the copy to the device", "mm_device_do_normalize"
        ),
        **with_reason(
            "affects where processed inputs are buffered",
            """
            mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
            mm_tensor_ipc mm_ipc_gpu_memory_gb
            """,
        ),
        **with_reason("affects vLLM's own names of media, which cornplug replaces", "mm_hasher_algorithm"),
        **with_reason("affects whether the engine has a language model", "mm_encoder_only"),
        **with_reason("affects which rank computes which rows", "mm_encoder_tp_mode"),
        **with_reason("selects another kernel for the same attention", "mm_encoder_attn_backend"),
        **with_reason(
            "only written, never read", "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
        ),
        **with_reason("affects only the tokens, which are part of the key", "interleave_mm_strings"),
        **with_reason("memory", "skip_mm_profiling"),
    },
    refused={
        "mm_encoder_attn_dtype": "the tower quantises attention, with scales that may depend on its inputs",
        "mm_encoder_fp8_scale_path": "scales come from a file that cornplug has not identified",
    },
    same_as_default={"video_pruning_rate": frozenset({0.0})},
)

LOAD: Final = FieldTables(
    class_name="LoadConfig",
    in_key={"model_loader_extra_config": "refused, except for options that only affect speed"},
    harmless={
        **with_reason(
            "how files are read",
            """
            safetensors_prefetch_num_threads safetensors_prefetch_block_size device use_tqdm_on_load
            pt_load_map_location
            """,
        ),
        "download_dir": "is the hub's download folder, in which cornplug looks for the files",
    },
    refused={
        "load_format": "weights are not read from the identified safetensors files",
        "safetensors_load_strategy": "weights are converted while they are read",
        "ignore_patterns": "some files of the checkpoint are not read",
    },
    same_as_default={
        "load_format": frozenset(
            {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}
        ),
        "safetensors_load_strategy": frozenset({"lazy", "eager", "prefetch"}),
    },
)

CACHE: Final = FieldTables(
    class_name="CacheConfig",
    in_key={
        **with_reason("part of the page geometry, which refuses unknown dtypes", "cache_dtype"),
        **with_reason("like `ModelConfig.hf_config`", "sliding_window"),
    },
    harmless={
        **with_reason(
            "affects the layout of the engine's cache, while pages have their own layout",
            """
            block_size user_specified_block_size kv_cache_layout effective_attention_block_size
            _block_size_resolved hash_block_size
            """,
        ),
        **with_reason(
            "affects only hits of the engine's own cache", "prefix_match_unit enable_prefix_caching"
        ),
        **with_reason(
            "affects only hits of the engine's own cache",
            "prefix_cache_retention_interval cache_hit_alignment_tokens",
        ),
        **with_reason("KV from hits by a weak hash is not saved (page_keys.py)", "prefix_caching_hash_algo"),
        **with_reason(
            "amount of memory",
            """
            gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
            kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes
            """,
        ),
        **with_reason(
            "configures another connector, and KV that it loads is not saved (page_keys.py)",
            "kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks",
        ),
        **with_reason(
            "the page geometry contains shapes, dtypes and tokens",
            "mamba_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype",
        ),
        **with_reason("states are shared in one mode and refused in all other modes", "mamba_cache_mode"),
        **with_reason(
            "selects which states vLLM caches, each by the hash of its tokens",
            "enable_mamba_shared_prefix_checkpoint",
        ),
        **with_reason(
            "vLLM does not allow a KV connector with it",
            "use_replayssm use_kda_recoverssm replayssm_buffer_len",
        ),
        **with_reason(
            "KV of models with such layers is refused",
            "is_attention_free skip_page_size_padded swa_bounded_replay",
        ),
    },
    refused={
        "kv_cache_dtype_skip_layers": "some layers have another KV dtype",
        "kv_sharing_fast_prefill": "some layers write no KV",
    },
    release_dependent=frozenset({"simple_cpu_offload_num_blocks"}),
)


PARALLEL: Final = FieldTables(
    class_name="ParallelConfig",
    in_key={
        "all2all_backend": AS_OVERRIDE,
        "enable_hc_sp": AS_OVERRIDE,
    },
    harmless={
        **with_reason(
            "a page contains the whole model",
            """
            pipeline_parallel_size tensor_parallel_size world_size enable_expert_parallel
            enable_ep_weight_filter expert_placement_strategy enable_eplb eplb_config
            """,
        ),
        **with_reason("KV is not shared if ranks split a sequence", "prefill_context_parallel_size"),
        **with_reason(
            "KV is not shared if ranks split a sequence", "decode_context_parallel_size dcp_comm_backend"
        ),
        **with_reason(
            "KV is not shared if ranks split a sequence", "dcp_kv_cache_interleave_size dcp_q_replicate"
        ),
        **with_reason(
            "KV is not shared if ranks split a sequence",
            "cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size",
        ),
        **with_reason(
            "affects the number and index of replicas",
            """
            data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
            data_parallel_index data_parallel_external_lb data_parallel_hybrid_lb
            data_parallel_backend enable_elastic_ep elastic_ep_max_dp_size rank node_rank nnodes
            """,
        ),
        **with_reason(
            "addresses",
            """
            data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port master_addr
            master_port _data_parallel_master_port_list _coord_store_port
            """,
        ),
        **with_reason(
            "affects transport and timing",
            """
            dp_sync_interval disable_custom_all_reduce enable_shm_tensor_arena enable_dbo ubatch_size
            dbo_decode_token_threshold dbo_prefill_token_threshold distributed_timeout_seconds
            disable_nccl_for_dp_synchronization cpu_distributed_timeout_seconds enable_fault_tolerance
            fault_tolerance_config
            """,
        ),
        **with_reason("affects sampled tokens, which are part of the key", "enable_batch_sharded_sampling"),
        **with_reason("derived from the checkpoint", "is_moe_model"),
        **with_reason(
            "affects processes and cores",
            "max_parallel_loading_workers ray_workers_use_nsight ray_runtime_env",
        ),
        **with_reason(
            "affects processes and cores",
            """
            placement_group numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
            _api_process_count _api_process_rank
            """,
        ),
        **with_reason(
            "adds methods without replacing any, and calls of these methods end sharing (weight_updates.py)",
            "worker_extension_cls",
        ),
    },
    refused={
        "worker_cls": "the worker class is not vLLM's",
        "distributed_executor_backend": "the executor class is not vLLM's",
    },
    same_as_default={
        "distributed_executor_backend": frozenset({"mp", "ray", "uni", "external_launcher"}),
    },
)

LORA: Final = FieldTables(
    class_name="LoRAConfig",
    in_key={
        "lora_dtype": AS_OVERRIDE,
        "target_modules": AS_OVERRIDE,
        "enable_mixed_moe_lora_format": AS_OVERRIDE,
        "enable_moe_shared_loras": AS_OVERRIDE,
    },
    harmless={
        **with_reason(
            "limits adapters, and a larger adapter is an error", "max_lora_rank max_loras max_cpu_loras"
        ),
        **with_reason(
            "distributes or dispatches the same product differently",
            "fully_sharded_loras specialize_active_lora",
        ),
        **with_reason("applied as the request's own adapter, which is part of the key", "default_mm_loras"),
        **with_reason("embeddings of such requests get no embedding key", "enable_tower_connector_lora"),
        **with_reason("affects only outputs", "max_lora_cls_labels"),
    },
    refused={},
)


SPECULATIVE: Final = FieldTables(
    class_name="SpeculativeConfig",
    in_key={},
    harmless=with_reason(
        _ONLY_PROPOSALS,
        """
        enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size
        quantization moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision
        index_share_for_mtp_iteration disable_padded_drafter_batch disable_eagle_block_drop
        use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min
        parallel_drafting target_model_config target_parallel_config num_speculative_tokens_per_batch_size
        draft_model_config draft_parallel_config suffix_decoding_max_tree_depth
        suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob
        draft_load_config rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length
        enable_adaptive_verification draft_sample_method dspark_draft_topk
        disable_lookahead_block_hashes draft_lm_head_quantization xpress_topc
        fly_window_size fly_entropy_threshold fly_entropy_top_k
        """,
    ),
    refused={},
    release_dependent=frozenset(
        {"disable_lookahead_block_hashes", "draft_lm_head_quantization", "xpress_topc"}
        | {"fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"}
    ),
)
