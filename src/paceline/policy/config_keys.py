"""Which keys of a `config.json` may stand there: those that are read, and those that change nothing.

A model with a key that is neither might silently compute something else than `decoder.py` does: logits that
are capped, embeddings that are scaled, layers without RoPE. So every other key is refused by name. A value of
null is a key that is not set.
"""

from typing import Any

# What `config.py` and `rope_config.py` read, or check themselves.
READ = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"),
    *("tie_word_embeddings", "attention_bias", "bos_token_id", "eos_token_id", "quantization_config"),
    *("use_sliding_window", "layer_types", "architectures"),
}
READ_OF_FAMILY = {
    "llama": {"mlp_bias"},
    "qwen2": {"sliding_window", "max_window_layers"},
    "qwen3": {"sliding_window", "max_window_layers"},
    "qwen3_moe": {
        *("sliding_window", "max_window_layers", "num_experts", "num_local_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    },
}
# About files, training, classifiers, generation, or how transformers runs: nothing that logits depend on.
HARMLESS = {
    *("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "torch_dtype", "dtype"),
    *("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "dropout"),
    *("use_cache", "pretraining_tp", "gradient_checkpointing", "router_aux_loss_coef", "router_jitter_noise"),
    *("output_router_logits", "output_attentions", "output_hidden_states", "return_dict", "use_return_dict"),
    *("return_dict_in_generate", "output_scores", "torchscript", "use_bfloat16", "tf_legacy_loss"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "tie_encoder_decoder"),
    *("finetuning_task", "problem_type", "task_specific_params", "num_labels", "id2label", "label2id"),
    *("tokenizer_class", "prefix", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *("max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "top_k"),
    *("num_beam_groups", "diversity_penalty", "temperature", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "exponential_decay_length_penalty", "remove_invalid_values"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("_attn_implementation_autoset", "_flash_attn_2_enabled", "_experts_implementation"),
    *("_experts_implementation_internal", "experts_implementation", "use_flash_attention_2"),
    *("model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side", "max_sequence_length"),
    *("is_llama_config", "transformers.js_config", "unsloth_version", "unsloth_fixed", "license"),
    *("_from_model_config", "num_nextn_predict_layers", "ep_size", "model_name", "seed", "trl_version"),
}
# Keys that change what is computed, with the values that turn them off.
OFF: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "mlp_bias": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, []),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "use_parallel_residual": (False,),
}


def refuse_unknown_keys(config: dict[str, Any], family: str, architecture: str) -> None:
    named = config.get("architectures") or [architecture]
    if not isinstance(named, list) or architecture.casefold() not in [str(name).casefold() for name in named]:
        raise ValueError(
            f"architectures = {named!r} is not supported for {family}; supported: {architecture}"
        )
    known = READ | READ_OF_FAMILY[family] | HARMLESS
    changing = {
        key: value
        for key, value in config.items()
        if key not in known and value is not None and value not in OFF.get(key, ())
    }
    if changing:
        listed = ", ".join(f"{key} = {value!r:.60}" for key, value in changing.items())
        raise ValueError(
            f"{listed}: not known for {family}, so this model may compute something that Paceline does not; "
            "remove what changes nothing from the file"
        )
