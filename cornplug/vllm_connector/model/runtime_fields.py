"""Tables that describe how the fields of vLLM's kernel, attention, compilation and scheduling configs, and of
VllmConfig itself, affect sharing. The tables have the same form as in `model_fields.py`.

The table `VLLM` also lists config classes without a table, because none of their fields can change a shared
entry.
"""

from __future__ import annotations

from typing import Final

from cornplug.engine_common.engine_config import AS_OVERRIDE, FieldTables
from cornplug.vllm_connector.model.model_fields import with_reason

_OWN_TABLE: Final = "covered by its own tables"
_OTHER_DISPATCH: Final = "dispatches the same operations differently"
_ONLY_ORDER: Final = "affects the order of tokens and the composition of batches"

VLLM: Final = FieldTables(
    class_name="VllmConfig",
    in_key={
        "additional_config": AS_OVERRIDE,
        **with_reason(
            _OWN_TABLE,
            """
            model_config cache_config parallel_config scheduler_config load_config offload_config
            attention_config engram_config mamba_config kernel_config lora_config speculative_config
            diffusion_config compilation_config ec_manager_config
            """,
        ),
        "quant_config": "derived from the checkpoint and ModelConfig.quantization",
    },
    harmless={
        **with_reason("runs the same operations on another device", "device_config"),
        **with_reason("affects sampled tokens, which are part of the key", "watermark_config"),
        **with_reason(
            "affects sampled tokens, which are part of the key", "structured_outputs_config reasoning_config"
        ),
        **with_reason("affects only outputs", "aux_output_config"),
        **with_reason(
            "affects only logs and measurements", "observability_config logging_config profiler_config"
        ),
        **with_reason("KV that other connectors load is not saved (page_keys.py)", "kv_transfer_config"),
        **with_reason("embeddings are identified by their content", "ec_transfer_config"),
        **with_reason("only written, never read", "kv_events_config"),
        **with_reason("weight updates end sharing (weight_updates.py)", "weight_transfer_config"),
        **with_reason(
            "sets fields of other classes, which have their own tables", "optimization_level performance_mode"
        ),
        **with_reason("affects only names and times", "instance_id shutdown_timeout watchdog_config"),
    },
    refused={},
    release_dependent=frozenset({"watchdog_config"}),
)

KERNEL: Final = FieldTables(
    class_name="KernelConfig",
    # Each kernel quantises the activations differently if the weights are quantised.
    in_key={
        "linear_backend": AS_OVERRIDE,
        "linear_backend_per_quant": AS_OVERRIDE,
        "moe_backend": AS_OVERRIDE,
        "monokernel": AS_OVERRIDE,
        "sparse_indexer_topk_backend": AS_OVERRIDE,
        "ir_op_priority": _OWN_TABLE,
    },
    harmless=with_reason(
        "selects the fastest of several equivalent kernels, and the time of compilation",
        """
        enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
        enable_jit_warmup
        """,
    ),
    refused={},
    release_dependent=frozenset({"monokernel"}),
)

IR_OPS: Final = FieldTables(
    class_name="IrOpPriorityConfig",
    in_key={},
    harmless=with_reason(
        "selects another kernel for the same unquantised norm or activation",
        "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
    ),
    refused={},
)

ATTENTION: Final = FieldTables(
    class_name="AttentionConfig",
    in_key={
        "backend": AS_OVERRIDE,
        "backend_per_kind": AS_OVERRIDE,
        "disable_flashinfer_q_quantization": AS_OVERRIDE,
        "hisparse_config": AS_OVERRIDE,
        "indexer_kv_dtype": AS_OVERRIDE,
        "indexer_sparse_logits": AS_OVERRIDE,
        "minimax_m3_msa_decode_backend": AS_OVERRIDE,
        "mla_prefill_backend": AS_OVERRIDE,
        "sparse_mla_force_mqa": AS_OVERRIDE,
        "trtllm_ragged_backend": AS_OVERRIDE,
        "use_non_causal": AS_OVERRIDE,
        "use_prefill_query_quantization": AS_OVERRIDE,
        "use_trtllm_attention": AS_OVERRIDE,
    },
    harmless={
        **with_reason(
            "affects only the order of additions",
            """
            flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
            tq_max_kv_splits_for_cuda_graph flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
            flex_attn_kv_block_size
            """,
        ),
        **with_reason("memory", "sparse_mla_prefill_workspace_factor"),
        **with_reason(
            "affects which rank computes which rows", "indexer_tp_shard_min_rows minimax_m3_indexer_cp"
        ),
    },
    refused={},
    # Backends are compared by name (see `setting_verdicts`). Backends for full attention in the same dtype as
    # the KV differ only in the order of additions.
    same_as_default={
        "backend": frozenset(
            {"CPU_ATTN", "FLASHINFER", "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLEX_ATTENTION", "ROCM_AITER_FA"}
            | {"ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"}
            | {"CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "ROCM_AITER_MLA", "TRITON_MLA"}
        ),
    },
    release_dependent=frozenset(
        {"indexer_tp_shard_min_rows", "minimax_m3_indexer_cp", "trtllm_ragged_backend"}
    ),
)

COMPILATION: Final = FieldTables(
    class_name="CompilationConfig",
    in_key={
        "inductor_compile_config": "all options are part of the key, except options that only affect speed",
        **with_reason(_OWN_TABLE, "pass_config dynamic_shapes_config"),
    },
    harmless={
        **with_reason(
            _OTHER_DISPATCH,
            """
            mode custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder compile_sizes
            compile_ranges_endpoints use_inductor_graph_partition fast_moe_cold_start
            """,
        ),
        **with_reason(
            "replays the same kernels from a graph",
            """
            cudagraph_mm_encoder encoder_cudagraph_token_budgets
            encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch
            cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
            cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs
            cudagraph_specialize_lora max_cudagraph_capture_size
            """,
        ),
        **with_reason(
            "contains files, counts and state of the compiler",
            """
            debug_dump_path cache_dir compile_cache_save_format local_cache_dir enabled_custom_ops
            disabled_custom_ops traced_files compilation_time encoder_compilation_time
            static_forward_context static_all_moe_layers
            """,
        ),
    },
    refused={
        "backend": "code outside vLLM compiles the graph",
        "inductor_passes": "code outside vLLM rewrites the graph",
    },
    same_as_default={"backend": frozenset({"eager", "inductor"})},
)
HARMLESS_INDUCTOR: Final = frozenset(
    {
        *("alignment_asserts", "nan_asserts", "scalar_asserts", "size_asserts"),
        *("benchmark_combo_kernel", "combo_kernels", "coordinate_descent_tuning", "max_autotune"),
        *("cpp.dynamic_threads", "dce", "deterministic", "epilogue_fusion", "use_static_cuda_launcher"),
        "enable_auto_functionalized_v2",
    }
)
"""Keys of `inductor_compile_config` that vLLM sets itself, or that only select the fastest of several
equivalent kernels."""

PASSES: Final = FieldTables(
    class_name="PassConfig",
    in_key={},
    harmless=with_reason(
        "fuses the same operations, as vLLM selects by platform and optimisation level",
        """
        fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms
        enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm
        fuse_rope_kvcache fuse_qk_norm_rope_kvcache rope_kvcache_fusion_max_token_num
        fi_allreduce_fusion_max_size_mb
        """,
    ),
    refused={},
)

SHAPES: Final = FieldTables(
    class_name="DynamicShapesConfig",
    in_key={},
    harmless=with_reason(_OTHER_DISPATCH, "type evaluate_guards assume_32_bit_indexing"),
    refused={},
)

SCHEDULER: Final = FieldTables(
    class_name="SchedulerConfig",
    in_key={},
    harmless={
        **with_reason("pooling models are refused by ModelConfig.runner", "runner_type"),
        **with_reason("derived from the checkpoint", "is_multimodal_model"),
        **with_reason(
            _ONLY_ORDER,
            """
            max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
            long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_queued_reqs
            max_num_queued_tokens enable_chunked_prefill max_num_encoder_input_tokens policy
            disable_chunked_mm_input scheduler_cls scheduler_reserve_full_isl watermark
            prefill_schedule_interval async_scheduling stream_interval
            """,
        ),
        **with_reason("memory", "encoder_cache_size disable_hybrid_kv_cache_manager"),
    },
    refused={},
)

_ONLY_LOCATION: Final = "affects the location of the weights in memory"

OFFLOAD: Final = FieldTables(
    class_name="OffloadConfig",
    in_key={},
    harmless=with_reason(_ONLY_LOCATION, "offload_backend uva prefetch"),
    refused={},
)

ENGRAM: Final = FieldTables(
    class_name="EngramConfig",
    in_key={},
    harmless=with_reason(_ONLY_LOCATION, "cpu_offload embedding_across_dp dp_shared_memory use_thp"),
    refused={},
)

DIFFUSION: Final = FieldTables(
    class_name="DiffusionConfig",
    in_key={"canvas_length": AS_OVERRIDE, "max_denoising_steps": AS_OVERRIDE},
    harmless={},
    refused={},
)

EC_MANAGER: Final = FieldTables(
    class_name="EncoderCacheManagerConfig",
    in_key={},
    harmless=with_reason(
        "contains arguments of the class, which is vLLM's or cornplug's own", "manager_config"
    ),
    refused={"encoder_cache_manager_cls": "code outside vLLM manages embeddings"},
    same_as_default={
        "encoder_cache_manager_cls": frozenset(
            {"cornplug.vllm_connector.media.early_prefill.InFlightEncoderCacheManager"}
        )
    },
)
