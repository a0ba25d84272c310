"""Effect of each field of vLLM's config classes (0.32 and 0.33) on sharing: three tables per class.

A new field of vLLM is in none of them. A test reports it, and at run time it prevents sharing if it is set.
`model_config.py` computes the entries that the tables only describe.
"""

from __future__ import annotations

from typing import Final

from cornplug.engine_common.allow_lists import AS_OVERRIDE, FieldTables


def listed(reason: str, names: str) -> dict[str, str]:
    """Map each of the names to the same reason."""
    return dict.fromkeys(names.split(), reason)


MODEL: Final = FieldTables(
    of="ModelConfig",
    in_key={
        "quantization_config": AS_OVERRIDE,
        "model_impl": AS_OVERRIDE,
        **listed("the checkpoint's bytes", "model revision"),
        **listed(
            "what vLLM made of config.json, against what transformers reads", "hf_config hf_text_config"
        ),
        **listed("as `hf_config`; a function is refused", "hf_overrides"),
        **listed("as `hf_config`, which loses its window", "disable_sliding_window"),
        **listed("named in the spec", "dtype"),
        **listed("in the spec, where the model reads it", "max_model_len override_generation_config"),
        **listed("as max_model_len; generation_config.json with it", "generation_config"),
        **listed("where the checkpoint does not say it: the method's name", "quantization"),
        **listed("digest of the code that the checkpoint brings", "trust_remote_code"),
        **listed("in tables of its own", "multimodal_config"),
    },
    harmless={
        **listed(
            "tokens are in the key, whoever made them",
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin",
        ),
        **listed(
            "what is sampled becomes tokens, and those are in the key",
            "seed use_fp64_gumbel logits_processors",
        ),
        **listed(
            "of outputs only",
            "max_logprobs logprobs_mode return_sampling_mask enable_trace_replay served_model_name",
        ),
        **listed(
            "who may read what; decoded media are in the key",
            "allowed_local_media_path allowed_media_domains hf_token",
        ),
        **listed("the same operations, otherwise dispatched", "enforce_eager disable_cascade_attn"),
        **listed("requests with prompt embeddings are not shared", "enable_prompt_embeds"),
        **listed(
            "memory; what sleep takes away ends sharing (weights.py)",
            """
            enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
            sleep_mode_offload_cudagraph
            """,
        ),
        **listed("memory", "enable_nccl_comm_suspend enable_cumem_allocator"),
        **listed("threads", "renderer_num_workers"),
        **listed("computed from what is in the key", "is_submodel_config"),
        **listed("of the output layer, which makes no KV", "word_embeddings_untied_by_checkpoint"),
        **listed("of the drafts, which are proposals", "spec_target_max_model_len"),
        **listed("of outputs only; pooling models are refused", "pooler_config"),
        **listed("whether vLLM warns", "allow_deprecated_quantization"),
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
    of="MultiModalConfig",
    in_key={
        "mm_processor_kwargs": "over the preprocessor's JSON, in the spec",
        "video_pruning_rate": AS_OVERRIDE,
        "video_pruning_method": AS_OVERRIDE,
    },
    harmless={
        **listed("how many media, not what they are", "language_model_only limit_per_prompt"),
        **listed(
            "embeddings from outside have no name of ours",
            "enable_mm_embeds allow_missing_mm_embeddings",
        ),
        **listed("decoded media are in the key", "media_io_kwargs"),
        **listed("the same normalisation, on the device or before", "mm_device_do_normalize"),
        **listed(
            "where inputs wait",
            """
            mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
            mm_tensor_ipc mm_ipc_gpu_memory_gb
            """,
        ),
        **listed("vLLM's own names, which are replaced", "mm_hasher_algorithm"),
        **listed("whether there is a language model", "mm_encoder_only"),
        **listed("who computes which rows", "mm_encoder_tp_mode"),
        **listed("the same attention by another kernel", "mm_encoder_attn_backend"),
        **listed("written, not read", "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"),
        **listed("tokens are in the key", "interleave_mm_strings"),
        **listed("memory", "skip_mm_profiling"),
    },
    refused={
        "mm_encoder_attn_dtype": "the tower quantises attention, with scales that may depend on its inputs",
        "mm_encoder_fp8_scale_path": "scales come from a file that cornplug has not identified",
    },
    same_as_default={"video_pruning_rate": frozenset({0.0})},
)

LOAD: Final = FieldTables(
    of="LoadConfig",
    in_key={"model_loader_extra_config": "refused but for what is known to change speed alone"},
    harmless={
        **listed(
            "how files are read",
            """
            safetensors_prefetch_num_threads safetensors_prefetch_block_size device use_tqdm_on_load
            pt_load_map_location
            """,
        ),
        "download_dir": "the hub's download folder, where cornplug looks for the files",
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
HARMLESS_LOADER_OPTIONS: Final = frozenset(
    {"concurrency", "memory_limit", "distributed", "enable_multithread_load", "num_threads"}
)
"""Keys of `model_loader_extra_config` that only affect how fast files are read."""

CACHE: Final = FieldTables(
    of="CacheConfig",
    in_key={
        **listed("in the page's geometry, which refuses what it has no name for", "cache_dtype"),
        **listed("as `ModelConfig.hf_config`", "sliding_window"),
    },
    harmless={
        **listed(
            "where KV lies; pages are laid out anew",
            """
            block_size user_specified_block_size kv_cache_layout effective_attention_block_size
            _block_size_resolved hash_block_size
            """,
        ),
        **listed("what the engine's own cache finds", "prefix_match_unit enable_prefix_caching"),
        **listed(
            "what the engine's own cache finds", "prefix_cache_retention_interval cache_hit_alignment_tokens"
        ),
        **listed(
            "what a hash with collisions finds is not saved (provenance.py)", "prefix_caching_hash_algo"
        ),
        **listed(
            "how much there is",
            """
            gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
            kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes
            """,
        ),
        **listed(
            "another connector's; what it loads is not saved here",
            "kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks",
        ),
        **listed(
            "in the pages of states, by their shapes, dtypes and tokens",
            "mamba_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype",
        ),
        **listed("states are shared in one mode, and refused in the others", "mamba_cache_mode"),
        **listed(
            "which states vLLM caches, each by the hash of its tokens",
            "enable_mamba_shared_prefix_checkpoint",
        ),
        **listed(
            "vLLM takes no KV connector beside it", "use_replayssm use_kda_recoverssm replayssm_buffer_len"
        ),
        **listed(
            "KV of models with such layers is refused",
            "is_attention_free skip_page_size_padded swa_bounded_replay",
        ),
    },
    refused={
        "kv_cache_dtype_skip_layers": "some layers have another KV dtype",
        "kv_sharing_fast_prefill": "some layers write no KV",
    },
    not_in_all=frozenset({"simple_cpu_offload_num_blocks"}),
)

MAMBA: Final = FieldTables(
    of="MambaConfig",
    in_key={
        "enable_stochastic_rounding": AS_OVERRIDE,
        "stochastic_rounding_philox_rounds": AS_OVERRIDE,
        # Another kernel may order a state's values differently.
        "backend": AS_OVERRIDE,
        "ssu_algorithm": AS_OVERRIDE,
    },
    harmless={},
    refused={},
)
