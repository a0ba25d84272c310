"""Tables like `model_fields` for vLLM's parallelism, LoRA and speculation, and for environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from cornplug.engine_common.allow_lists import AS_OVERRIDE, FieldTables
from cornplug.vllm_connector.model.model_fields import listed

PARALLEL: Final = FieldTables(
    of="ParallelConfig",
    in_key={
        "all2all_backend": AS_OVERRIDE,
        "enable_hc_sp": AS_OVERRIDE,
    },
    harmless={
        **listed(
            "a page is of the whole model",
            """
            pipeline_parallel_size tensor_parallel_size world_size enable_expert_parallel
            enable_ep_weight_filter expert_placement_strategy enable_eplb eplb_config
            """,
        ),
        **listed("KV is refused where ranks share a sequence", "prefill_context_parallel_size"),
        **listed(
            "KV is refused where ranks share a sequence", "decode_context_parallel_size dcp_comm_backend"
        ),
        **listed(
            "KV is refused where ranks share a sequence", "dcp_kv_cache_interleave_size dcp_q_replicate"
        ),
        **listed(
            "KV is refused where ranks share a sequence",
            "cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size",
        ),
        **listed(
            "which replica",
            """
            data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
            data_parallel_index data_parallel_external_lb data_parallel_hybrid_lb
            data_parallel_backend enable_elastic_ep elastic_ep_max_dp_size rank node_rank nnodes
            """,
        ),
        **listed(
            "addresses",
            """
            data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port master_addr
            master_port _data_parallel_master_port_list _coord_store_port
            """,
        ),
        **listed(
            "transport and time",
            """
            dp_sync_interval disable_custom_all_reduce enable_shm_tensor_arena enable_dbo ubatch_size
            dbo_decode_token_threshold dbo_prefill_token_threshold distributed_timeout_seconds
            disable_nccl_for_dp_synchronization cpu_distributed_timeout_seconds enable_fault_tolerance
            fault_tolerance_config
            """,
        ),
        **listed("what is sampled becomes tokens", "enable_batch_sharded_sampling"),
        **listed("of the checkpoint", "is_moe_model"),
        **listed(
            "processes and cores", "max_parallel_loading_workers ray_workers_use_nsight ray_runtime_env"
        ),
        **listed(
            "processes and cores",
            """
            placement_group numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
            _api_process_count _api_process_rank
            """,
        ),
        **listed(
            "adds methods, may replace none; calls of them end sharing (weights.py)", "worker_extension_cls"
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
    of="LoRAConfig",
    in_key={
        "lora_dtype": AS_OVERRIDE,
        "target_modules": AS_OVERRIDE,
        "enable_mixed_moe_lora_format": AS_OVERRIDE,
        "enable_moe_shared_loras": AS_OVERRIDE,
    },
    harmless={
        **listed("how many adapters fit; larger ones are errors", "max_lora_rank max_loras max_cpu_loras"),
        **listed(
            "the same product, otherwise spread or dispatched",
            "fully_sharded_loras specialize_active_lora",
        ),
        **listed("the request's own adapter, in the key as such", "default_mm_loras"),
        **listed("such embeddings get no embedding key", "enable_tower_connector_lora"),
        **listed("of outputs only", "max_lora_cls_labels"),
    },
    refused={},
)

_PROPOSES: Final = "proposals only: KV is saved of tokens that the model itself accepted"

SPECULATIVE: Final = FieldTables(
    of="SpeculativeConfig",
    in_key={},
    harmless=listed(
        _PROPOSES,
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
    not_in_all=frozenset(
        {"disable_lookahead_block_hashes", "draft_lm_head_quantization", "xpress_topc"}
        | {"fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"}
    ),
)

HUB_VARIABLE: Final = "VLLM_USE_MODELSCOPE"
"""Variable that selects the model hub. It has no effect on a model in a local folder."""

REFUSED_VARIABLES: Final[Mapping[str, str]] = {
    "VLLM_TEST_FORCE_LOAD_FORMAT": "weights are not read from the identified safetensors files",
    HUB_VARIABLE: "weights are downloaded from another hub than the one cornplug reads",
    "VLLM_MODEL_REDIRECT_PATH": "the model is redirected to another one",
}
"""Environment variables that prevent sharing, with the reason."""

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
"""Variables for paths, timeouts, logging and the model runner. All other variables that are set are part of
the key, so only engines with the same value share."""
