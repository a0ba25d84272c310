"""Tables that classify each field of SGLang's `ServerArgs`: part of the key, harmless, or excluding sharing.

A field that a later release of SGLang adds is in none of these tables. If its value is not the default, the
server shares nothing, and the log names the field (`engine_common.engine_config`). Fields are grouped by
reason. The tables for environment variables are in `environment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cornplug.engine_common.engine_config import AS_OVERRIDE, FieldTables


def reason_by_name(groups: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Convert {reason: "name name ..."} to {name: reason}. Raises ValueError if a name occurs twice."""
    found: dict[str, str] = {}
    for reason, names in groups.items():
        for name in names.split():
            if found.setdefault(prefix + name, reason) != reason:
                raise ValueError(f"{name} is listed in two groups")
    return found


QUANTISED_WEIGHT_FIELDS: Final = (
    "disable_flashinfer_cutlass_moe_fp4_allgather",
    "flashinfer_mxfp4_moe_precision",
    "fp4_gemm_runner_backend",
    "fp8_gemm_runner_backend",
    "moe_runner_backend",
)
"""Settings that select kernels. If the weights are quantised, these kernels quantise activations
differently."""

_IDENTIFIED: Final = {
    "part of the fingerprint of the checkpoint's files": "model_path revision",
    "has a separate allow list, `model_config.READS_SAFETENSORS`": "load_format",
    "allowed only with keys for parallel reading, see `model_config.describe`": ("model_loader_extra_config"),
    "refused unless the model is a folder, see `model_config.describe`": "download_dir",
    "a digest of the checkpoint's own code, see `model_config.describe`": "trust_remote_code",
    "as `dtype`": "dtype",
    "part of the key as `max_model_len` if rotary embeddings depend on it": "context_length",
    "part of the key as `hf_overrides`": "json_model_override_args",
    "part of the key as `sglang_quantization` unless the checkpoint declares it": "quantization",
    "part of the page geometry, and other dtypes are not shared": "kv_cache_dtype",
    "part of the key as image processor arguments; video and audio are not shared": "mm_process_config",
    "pixels are compared with transformers' pixels (`preprocessing`)": (
        "image_processor_backend disable_fast_image_processor"
    ),
    "digests of adapters' files and of the modules to which they apply, see `namespace_roots`": (
        "lora_paths lora_target_modules"
    ),
    "part of the key if weights are quantised, see `QUANTISED_WEIGHT_FIELDS`": " ".join(
        QUANTISED_WEIGHT_FIELDS
    ),
}

_VALUES: Final = """
    attention_backend bf16_gemm_backend boundary_reduction decode_attention_backend
    deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode dsa_decode_backend
    dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_topk_backend dsa_triton_union dsv4_attn_backend
    dsv4_prefill_backend enable_amd_monokernel enable_decoder_swa_bounded_replay
    enable_deepseek_v4_fp4_indexer enable_deterministic_inference enable_dsa_fused_indexer
    enable_encoder_swa_bounded_replay enable_hisparse enable_megamoe_for_layernorm_sp
    enable_nvidia_megakernel enable_paged_experts enable_precise_embedding_interpolation
    enable_quant_communications enable_scattered_sconv enable_tf32_matmul enable_w4a4_mxfp4_megamoe
    ep_dispatch_algorithm experts_shared_outer_loras flashinfer_a2a_dispatch_type fuseep_mode
    hisparse_config is_embedding lora_use_virtual_experts mm_attention_backend model_config_parser
    model_impl modelopt_quant moe_a2a_backend paged_experts_num_resident prefill_attention_backend
    qsa_indexer_dtype rl_on_policy_target
"""

_EXACT_ATTENTION: Final = frozenset(
    {
        "aiter",
        "ascend",
        "fa3",
        "fa4",
        "flashinfer",
        "flashmla",
        "flex_attention",
        "intel_amx",
        "intel_xpu",
        "torch_native",
        "triton",
        "trtllm_mha",
        "trtllm_mla",
    }
)
"""Backends that compute full attention in the KV's own dtype. Their results differ only by the order of
additions."""

_SAME: Final[Mapping[str, frozenset[Any]]] = {
    "attention_backend": _EXACT_ATTENTION,
    "decode_attention_backend": _EXACT_ATTENTION,
    "prefill_attention_backend": _EXACT_ATTENTION,
    "bf16_gemm_backend": frozenset({"cutedsl", "gemv", "torch"}),
    "boundary_reduction": frozenset({"ar", "rs", "rsv", "rs+rsv"}),
    "enable_dsa_fused_indexer": frozenset({False}),
    "enable_quant_communications": frozenset({False}),
    "enable_tf32_matmul": frozenset({False}),
    "ep_dispatch_algorithm": frozenset({"dynamic", "static"}),
    "mm_attention_backend": frozenset(
        {"aiter_attn", "amx_attn", "ascend_attn", "fa3", "fa4", "flashinfer_cudnn", "sdpa", "triton_attn"}
        | {"xpu_attn"}
    ),
    "model_impl": frozenset({"sglang"}),
}

_HARMLESS: Final = {
    "affects only the tokens, which are in the key": """
        allow_auto_truncate chat_template completion_template default_chat_template_kwargs
        disable_tokenizer_batch_decode dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_dynamic_batch_tokenizer
        enable_tokenizer_batch_encode hf_chat_template_name skip_tokenizer_init strip_thinking_cache
        tokenizer_backend tokenizer_mode tokenizer_path trust_request_chat_template""",
    "transport of requests and responses": """
        admin_api_key api_key asr_max_buffer_seconds asr_max_concurrent_sessions batch_notify_size
        detokenizer_worker_num enable_cache_report enable_http2 enable_http_worker_reuseport
        enable_response_store enable_ssl_refresh enable_streaming_session fastapi_root_path
        file_storage_path grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads host
        http2_initial_connection_window_size http2_max_concurrent_streams incremental_streaming_output
        port reasoning_parser return_input_ids return_output_ids served_model_name sidecar sidecar_args
        skip_server_warmup smg_grpc_mode ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password
        stream_interval stream_response_default_include_usage tokenizer_worker_num tool_call_parser
        tool_server warmups weight_version""",
    "affects sampled tokens, which are in the key of the next page": """
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        constrained_json_whitespace_pattern disable_outlines_disk_cache enable_custom_logit_processor
        enable_strict_thinking enable_watermark grammar_backend mlx_enable_sampling
        preferred_sampling_params random_seed sampling_backend sampling_defaults
        sampling_mask_max_tokens watermark_config watermark_context_window watermark_default_enabled
        watermark_enforce_all watermark_key watermark_key_b watermark_max_probability
        watermark_mixing_probability""",
    "used after the last layer's KV is computed": """
        aux_hidden_state_capture enable_dp_lm_head enable_fp32_lm_head enable_return_aux_hidden_states
        enable_return_hidden_states enable_return_indexer_topk enable_return_routed_experts
        enable_tp_lm_head_all_to_all return_aux_hidden_state_layer_ids return_hidden_states_mode""",
    "reading, checking, caching and forwarding of the checkpoint's files": """
        delete_ckpt_after_loading engine_info_bootstrap_port model_checksum
        modelopt_checkpoint_save_path modelopt_export_path remote_instance_weight_loader_backend
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_start_seed_via_transfer_engine startup_weight_load_mode
        weight_cache_socket weight_cache_timeout weight_loader_disable_mmap
        weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads""",
    "transfer of media; shared media are identified by their pixels": """
        allowed_media_domains enable_broadcast_mm_inputs_process enable_multimodal
        enable_prefix_mm_cache limit_mm_data_per_request media_url_max_file_size_mb mm_enable_dp_encoder
        mm_feature_transport mm_global_cache_backend mm_io_worker_num mm_preprocess_cache_size_mb
        mm_processor_worker_num trust_mm_content_hashes""",
    "the order of tokens, and the composition of batches": """
        abort_on_priority_when_disabled chunked_prefill_size default_priority_value
        disable_chunked_prefix_cache disable_overlap_schedule disable_priority_preemption
        enable_dynamic_chunking enable_mixed_chunk enable_prefill_delayer enable_priority_scheduling
        max_prefill_tokens max_queued_requests max_running_requests min_free_slots_delay
        num_continuous_decode_steps prefill_decode_interval prefill_decode_interval_min_bs
        prefill_delayer_forward_passes_buckets prefill_delayer_max_delay_ms
        prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
        prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets
        prefill_max_requests priority_scheduling_preemption_threshold retraction_policy
        schedule_conservativeness schedule_low_priority_values_first schedule_policy
        scheduler_recv_interval""",
    "location and lifetime of KV, not its values": """
        _radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set c128_page_size
        disable_hybrid_swa_memory disable_radix_cache enable_hierarchical_cache enable_linker_mla_dedup
        enable_page_major_kv_layout enable_session_radix_cache enable_unified_memory
        hicache_host_memory_fraction hicache_host_memory_mode hicache_io_backend hicache_mem_layout
        hicache_ratio hicache_size hicache_storage_prefetch_policy
        hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
        hicache_write_policy max_total_tokens mem_fraction_static page_size
        prefill_only_disable_kv_cache radix_eviction_policy radix_eviction_policy_config
        swa_full_tokens_ratio swa_prefix_tails""",
    "KV of another cache is not shared, see `kv.hicache_config`": """
        enable_flexkv enable_lmcache enable_unified_cache_external_linker flexkv_config_file
        hicache_storage_backend hicache_storage_backend_extra_config lmcache_config_file
        radix_cache_backend unified_cache_external_linker_backend unified_cache_external_linker_config""",
    "which process computes which part; only the order of additions differs": """
        attn_cp_size attn_dp_size cp_strategy dcp_comm_backend dcp_replicate_q_proj dcp_size
        disable_attn_tp_gather dist_init_addr dist_timeout dp_size dwdp_size
        enable_attn_tp_input_scattered enable_cp_decode_attn_tp enable_cp_tp_group_sharing
        enable_dense_mlp_attn_tp enable_dp_attention enable_dp_attention_local_control_broadcast
        enable_dsa_cache_layer_split enable_kv_cache_sharding enable_layernorm_sp enable_p2p_check
        enable_prefill_cp enable_shared_experts_attn_tp ep_size gated_launch_port load_balance_method
        moe_dense_tp_size moe_dp_size nccl_port nnodes node_rank pp_async_batch_depth
        pp_max_micro_batch_size pp_size shared_experts_tp_size tp_size""",
    "transfer of sums between processes in full precision": """
        disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill
        disable_custom_all_reduce enable_aiter_allreduce_fusion enable_flashinfer_allreduce_fusion
        enable_mscclpp enable_nccl_nvls enable_symm_mem enable_torch_symm_mem
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend pre_warm_nccl""",
    "the computing device; results differ by rounding": """
        base_gpu_id custom_sigquit_handler device gc_threshold gpu_id_step numa_node sleep_on_idle
        soft_watchdog_timeout use_ray watchdog_timeout""",
    "metrics, logs and traces": """
        bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token
        crash_dump_folder debug_tensor_dump_layers debug_tensor_dump_output_folder decode_log_interval
        enable_forward_pass_metrics enable_layerwise_nvtx_marker enable_metrics
        enable_metrics_for_all_schedulers enable_mfu_metrics enable_request_time_stats_logging
        enable_trace export_metrics_to_file export_metrics_to_file_dir extra_metric_labels
        forward_pass_metrics_ipc_name forward_pass_metrics_worker_id gc_warning_threshold_secs
        generation_tokens_buckets kv_events_config load_publish_endpoint load_snapshot_publish_interval
        log_level log_level_http log_requests log_requests_format log_requests_level log_requests_target
        otlp_service_name otlp_traces_endpoint prompt_tokens_buckets show_time_cost
        smg_http_sidecar_port stat_loggers tokenizer_metrics_allowed_custom_labels
        tokenizer_metrics_custom_labels_header trace_modules uvicorn_access_log_exclude_prefixes""",
    "the same arithmetic, tuned, fused or split differently": """
        disable_flashinfer_autotune disable_shared_experts_fusion enable_fused_moe_sum_all_reduce
        enable_fused_qk_norm_rope enable_lean_attention enable_single_batch_overlap
        enable_two_batch_overlap enforce_shared_experts_fusion flashinfer_autotune_skip_ops
        flashinfer_mla_disable_ragged tbo_token_distribution_threshold triton_attention_num_kv_splits
        triton_attention_reduce_in_fp32 triton_attention_split_tile_size""",
    "the same operations, recorded or compiled": """
        cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        cuda_graph_config cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
        cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context debug_cuda_graph
        disable_cuda_graph disable_cuda_graph_padding disable_decode_cuda_graph
        disable_prefill_cuda_graph enable_cudagraph_gc enable_profile_cuda_graph enable_torch_compile
        enable_torch_compile_debug_mode torch_compile_max_bs""",
    "state of models whose KV is not shared; towers do not use it": """
        enable_int8_mamba_checkpoint enable_linear_replayssm enable_linear_replayssm_spec
        enable_mamba_cache_stochastic_rounding int8_mamba_ckpt_size linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
        linear_replayssm_cache_len mamba_backend mamba_cache_philox_rounds mamba_full_memory_ratio
        mamba_max_states_per_path mamba_radix_cache_strategy mamba_ssm_dtype mamba_track_interval
        max_mamba_cache_size uses_mamba_radix_cache""",
    "location of experts' weights, and statistics of their load": """
        deepep_config enable_eplb enable_waterfill ep_num_redundant_experts eplb_algorithm
        eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk
        eplb_rebalance_num_iterations expert_balancedness_report_mode
        expert_distribution_recorder_buffer_size expert_distribution_recorder_mode init_expert_location
        mooncake_ib_device""",
    "reading of 4-bit KV, which is not shared": "prefill_kv_cache_dequant_dtype",
    "computation of --kt-weight-path's experts; nothing is shared with that option": """
        kt_cpuinfer kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts kt_threadpool_count""",
    "affects only drafts, and is in the key of a draft's KV (`draft_model`)": """
        _speculative_draft_quantization_explicitly_set decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role
        decrypted_draft_config_file enable_multi_layer_eagle spec_trace_dir
        speculative_accept_threshold_acc speculative_accept_threshold_single speculative_adaptive
        speculative_adaptive_config speculative_algorithm speculative_attention_mode
        speculative_boundary_reduction speculative_dflash_block_size
        speculative_domino_candidate_pool_size speculative_draft_attention_backend
        speculative_draft_kv_cache_dtype speculative_draft_load_format speculative_draft_model_path
        speculative_draft_model_quantization speculative_draft_model_revision
        speculative_draft_sink_size speculative_draft_window_size speculative_dsa_topk_backend
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size
        speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path speculative_eagle_topk
        speculative_enable_w4a4_mxfp4_megamoe speculative_moe_a2a_backend speculative_moe_runner_backend
        speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_match_type speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth
        speculative_ngram_min_bfs_breadth speculative_num_draft_tokens speculative_num_steps
        speculative_token_map speculative_use_block_verification speculative_use_rejection_sampling
        uno_lora_path""",
    "roles of disaggregated servers; received KV is not shared": """
        disaggregation_bootstrap_port disaggregation_decode_allocation_policy
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache
        disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold
        disaggregation_decode_polling_interval disaggregation_decode_retraction_backup
        disaggregation_enable_kv_checksum disaggregation_ib_device disaggregation_mode
        disaggregation_transfer_backend enable_adaptive_dispatch_to_encoder enable_pd_role_switch
        enable_pdmux encoder_bootstrap_port encoder_only encoder_register_urls encoder_transfer_backend
        encoder_urls language_model_only language_only num_reserved_decode_tokens
        optimistic_prefill_attempts pdmux_config_path sm_group_num""",
    "location of adapters, whose files are digested": """
        enable_lora enable_lora_overlap_loading lora_backend lora_drain_wait_threshold
        lora_eviction_policy lora_strict_loading max_loaded_loras max_lora_chunk_size max_lora_rank
        max_loras_per_batch""",
    "location of weights while they are not used": """
        cpu_offload_gb enable_draft_weights_cpu_backup enable_memory_saver enable_weights_cpu_backup
        offload_group_size offload_mode offload_num_in_group offload_prefetch_step ple_offload_embedding""",
}

_REFUSED: Final = {
    "weights do not come from the checkpoint's files": """
        checkpoint_engine_wait_weights_before_ready custom_weight_loader decrypted_config_file
        kt_weight_path modelexpress_config modelopt_checkpoint_restore_path ple_offload_backend
        ple_offload_dir quantization_param_path quantize_and_serve rl_quant_profile weight_cache_mode""",
    "it changes what the model computes, and cornplug cannot identify how": """
        debug_tensor_dump_input_file forward_hooks kv_canary kv_canary_real_data
        kv_canary_sweep_interval msprobe_dump_config""",
    "embeddings come from a cache with 64-bit hashes": "enable_mm_global_cache",
    "the set of experts changes at run time": """
        elastic_ep_backend elastic_ep_initial_size elastic_ep_scale_timeout enable_elastic_expert_backup
        ep_join_mode ep_join_rank_offset max_ep_size""",
    "KV of earlier tokens depends on later tokens": ("dllm_algorithm dllm_algorithm_config dllm_fdfo"),
    "KV of a token depends on its item in the request": "enable_mis",
}

SERVER_ARGS: Final = FieldTables(
    class_name="ServerArgs",
    in_key={**dict.fromkeys(_VALUES.split(), AS_OVERRIDE), **reason_by_name(_IDENTIFIED)},
    harmless=reason_by_name(_HARMLESS),
    refused=reason_by_name(_REFUSED),
    same_as_default=_SAME,
)
