"""What we say of each field that SGLang's request classes have: bounds, where it goes, or why not.

    SGLang's classes: names and types --┐
                 DESCRIBED, REFUSED ----┴--[table.py]--> the fields of each route

A field that is in neither is refused, so a new one of SGLang's opens nothing. A number that
becomes an index, a count or a size on the device has bounds: a worker that meets a wrong one ends,
and every client's requests with it. `Class.field` comes before `field`, which is of every class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

CONTEXT: Final = "context_length"  # of the model, as a bound
VOCAB: Final = "vocab_size"  # the same; a token id is below it
MAX_PROMPTS: Final = 256
# Messages, their parts, tools: SGLang tries each of them as every class that it may be of, at up to
# 0.5 ms, while nobody else is served.
MAX_PARTS: Final = 2000
# Where prompts are: of these, a list may be a batch.
PROMPTS: Final = frozenset({"text", "prompt", "input_ids", "input", "items"})
MAX_STOPS: Final = 16
MAX_LOGIT_BIASES: Final = 300
INT32: Final = (-(1 << 31), (1 << 31) - 1)
INT64: Final = (-(1 << 63), (1 << 63) - 1)
_FLOAT32: Final = (-3e38, 3e38)  # what is more becomes infinite on the device, and NaN after that


@dataclass(frozen=True)
class Bounds:
    """What a field may hold besides its type; null is none given."""

    where: str = "request"  # what it is for
    integers: tuple[int, int | str] = INT32  # of every integer in it
    numbers: tuple[float, float] = _FLOAT32  # of every number, where it may be no integer
    max_chars: int | None = None  # of every string in it
    max_json_chars: int | None = None  # if it is an object, as JSON
    max_items: int | None = None
    patterns: str | None = None  # whose repeats are counted: "itself", or those "inside" a schema
    may_be_empty: bool = True
    of_any_type: bool = False  # whatever its class says: checked elsewhere, or read by nobody


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _of(names: str, bounds: Bounds) -> dict[str, Bounds]:
    return dict.fromkeys(_names(names), bounds)


_PROMPT: Final = Bounds("prompt", (0, VOCAB), may_be_empty=False)
_SAMPLING: Final = Bounds("sampling")
_COUNT: Final = replace(_SAMPLING, integers=(0, CONTEXT))
_SCHEMA: Final = Bounds("grammar", max_json_chars=64 << 10, patterns="inside")
_ANSWER: Final = Bounds("answer")
_ID: Final = Bounds("identity", max_chars=256, max_items=MAX_PROMPTS)
NOT_READ: Final = Bounds("nothing", of_any_type=True)

# Of documents.
TOP_LEVEL: Final[Mapping[str, Bounds]] = {
    # The prompt. /generate and /encode have strings in `text`, /v1/responses how to answer.
    **_of("input_ids input items prompt", _PROMPT),
    **_of("query tokens", replace(_PROMPT, may_be_empty=True)),
    **_of("text messages system instructions state questions suffix", Bounds("prompt")),
    "ResponsesRequest.text": _SCHEMA,
    **_of("tools tool_choice parallel_tool_calls max_tool_calls", Bounds("prompt")),
    **_of("chat_template_kwargs reasoning thinking task", Bounds("prompt")),
    "reasoning_effort": Bounds("prompt", numbers=(0, 0.99)),
    **_of("require_reasoning output_config continue_final_message", Bounds("prompt")),
    **_of("add_generation_prompt add_special_tokens item_first truncation", Bounds("prompt")),
    **_of("prompt_format_version score_extraction_token", Bounds("prompt")),
    **_of("is_cross_encoder_request modalities", Bounds("prompt")),
    # Sampling: counts, sizes and indices on the device, and what its numbers are divided by.
    **_of("max_new_tokens max_tokens max_completion_tokens max_output_tokens", _COUNT),
    **_of("min_new_tokens min_tokens max_thinking_tokens thinking_budget", _COUNT),
    "sampling_params": _SAMPLING,
    "custom_params": _SAMPLING,
    "n": replace(_SAMPLING, integers=(0, 128)),
    "best_of": replace(_SAMPLING, integers=(0, 128)),
    "beam_width": replace(_SAMPLING, integers=(0, 16)),
    "top_k": replace(_SAMPLING, integers=(-1, 1 << 30)),
    "top_p": replace(_SAMPLING, numbers=(0, 1)),
    "min_p": replace(_SAMPLING, numbers=(0, 1)),
    "temperature": replace(_SAMPLING, numbers=(0, 1e9)),
    **_of("frequency_penalty presence_penalty", replace(_SAMPLING, numbers=(-2, 2))),
    # What divides as it is; a sampling temperature that is as small becomes top_k 1.
    "ScoringRequest.temperature": replace(_SAMPLING, numbers=(1e-6, 1e9)),
    "DecisionRequest.temperature": replace(_SAMPLING, numbers=(1e-6, 1e9)),
    "repetition_penalty": replace(_SAMPLING, numbers=(0.001, 2)),
    "logit_bias": replace(_SAMPLING, numbers=(-1e9, 1e9), max_items=MAX_LOGIT_BIASES),
    **_of("seed sampling_seed", replace(_SAMPLING, integers=INT64)),
    "stop_token_ids": replace(_SAMPLING, integers=(0, VOCAB)),
    "stop": replace(_SAMPLING, max_chars=1024, max_items=MAX_STOPS),
    "stop_sequences": replace(_SAMPLING, max_chars=1024, max_items=MAX_STOPS),
    "stop_regex": replace(_SAMPLING, max_chars=256, max_items=MAX_STOPS),
    "stream_interval": replace(_SAMPLING, integers=(0, 1 << 30)),
    "custom_logit_processor": replace(_SAMPLING, max_items=MAX_PROMPTS),
    **_of("ignore_eos no_stop_trim skip_special_tokens", _SAMPLING),
    "spaces_between_special_tokens": _SAMPLING,
    # Grammars are compiled, some in time that grows fast with their length.
    "regex": Bounds("grammar", max_chars=1024, patterns="itself"),
    "ebnf": Bounds("grammar", max_chars=16 << 10, patterns="itself"),
    "json_schema": replace(_SCHEMA, max_chars=64 << 10),
    "structural_tag": Bounds("grammar", max_chars=64 << 10, patterns="inside"),
    "response_format": _SCHEMA,
    # What the answer has in it.
    **_of("logprobs top_logprobs top_logprobs_num", replace(_ANSWER, integers=(0, 100))),
    "logprob_start_len": replace(_ANSWER, integers=(-1, CONTEXT)),
    "routed_experts_start_len": replace(_ANSWER, integers=(0, CONTEXT)),
    **_of("token_ids_logprob label_token_ids", replace(_ANSWER, integers=(0, VOCAB))),
    "dimensions": replace(_ANSWER, integers=(1, INT32[1])),
    **_of("stream stream_options stream_reasoning separate_reasoning echo include", _ANSWER),
    **_of("return_logprob return_text_in_logprobs return_sampling_mask", _ANSWER),
    **_of("return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64", _ANSWER),
    **_of("return_flat_raw_output_top_logprobs sampling_logprobs_mode", _ANSWER),
    **_of("return_hidden_states return_pooled_hidden_states return_routed_experts", _ANSWER),
    **_of("return_indexer_topk return_entropy return_prompt_token_ids return_token_ids", _ANSWER),
    **_of("return_cached_tokens_details return_spec_tokens_details return_meta_info", _ANSWER),
    **_of("return_input_ids_in_sglext return_output_ids_in_sglext", _ANSWER),
    **_of("return_token_logprobs return_blocks apply_softmax encoding_format", _ANSWER),
    # Where it runs, and for whom.
    **_of("model user", Bounds("identity")),
    **_of("lora_path adapter", Bounds("adapter", of_any_type=True)),  # http/adapter_names.py
    **_of("rid request_id session_id conversation_id routing_key", _ID),
    "cache_salt": replace(_ID, max_chars=1024),
    **_of("previous_response_id session_params", _ID),
    "priority": Bounds("schedule"),  # the radix cache's binding has an int64, less a sign
    **_of("routed_dp_rank data_parallel_rank", Bounds("schedule", (0, INT32[1]))),
    **_of("background log_metrics no_logs", Bounds("schedule")),
    **_of("store metadata service_tier betas", Bounds("nothing")),
    **_of("reasoning_parser tool_call_parser", Bounds("parser", max_chars=64)),
}
# Of objects in those, and of no document. A field of messages and tools that SGLang does not read
# is one of IGNORED_INSIDE.
_NESTED: Final[Mapping[str, Bounds]] = {
    **_of("type role content name id index phase prefix text title url data", Bounds("prompt")),
    **_of("reasoning_content tool_call_id tool_calls tool_use_id", Bounds("prompt")),
    **_of("tool_name is_error signature source detail format modalities", Bounds("prompt")),
    **_of("image_url video_url audio_url input_audio content_hash", Bounds("prompt")),
    **_of("max_long_side_pixel max_frames max_tokens_per_frame fps", Bounds("prompt")),
    **_of("max_image_tokens min_dynamic_patch max_dynamic_patch", Bounds("prompt")),
    **_of("function description parameters strict defer_loading key_order", Bounds("prompt")),
    **_of("arguments input_schema max_uses allowed_domains blocked_domains", Bounds("prompt")),
    **_of("display_width_px display_height_px display_number", Bounds("prompt")),
    **_of("disable_parallel_tool_use budget_tokens display effort summary", Bounds("prompt")),
    "task_budget": Bounds("prompt"),
    **_of("total remaining", Bounds("prompt", (0, INT32[1]))),
    **_of("question options levels yes no true false criteria", Bounds("prompt")),
    **_of("schema structures triggers at_least_one begin end verbosity", Bounds("grammar")),
    **_of("include_usage continuous_usage_stats", _ANSWER),
    **_of("offset replace drop_previous_output", Bounds("identity")),
    "SessionParams.id": _ID,
}
DESCRIBED: Final[Mapping[str, Bounds]] = {**_NESTED, **TOP_LEVEL}


@dataclass(frozen=True)
class CustomParams:
    """What `custom_params` has without a custom logit processor."""

    thinking_budget: int | None = None


# Of SGLang's requests, its own processes' to set, or reaching into them.
_INTERNAL: Final = """
    bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room decode_tp_size
    disagg_prefill_dp_rank encoder_urls external_trace_header http_worker_ipc is_normalized
    kv_hints need_wait_for_mm_inputs num_items_assigned received_time return_bytes
    ebnf_full_assistant stop_regex_max_len stop_regex_strs stop_str_max_len stop_strs
    decision_layout embed_override_token_id embed_overrides input_embeds item_embed_overrides
    multi_item_delimiter_indices positional_embed_overrides query_embed_overrides
    token_indices_to_pool lora_id extra_key watermark custom_labels
"""
NOT_FOR_CLIENTS: Final = "not for clients to set; leave it out"
INTERNAL: Final = _names(_INTERNAL)
# The model takes text only, unless --no-esft serves one that takes more.
MEDIA: Final = _names(
    """audio_data image image_data image_max_dynamic_patch images images_config max_dynamic_patch
    min_dynamic_patch mm_content_hashes mm_hashes mm_processor_kwargs use_audio_in_video video
    video_config video_data video_max_dynamic_patch"""
)

# Fields that clients send and SGLang's classes do not have: those of their own APIs, which SGLang
# leaves aside, and `adapter` and `model`, which http/adapter_names.py reads on every route.
EVERYWHERE: Final = ("adapter", "model")
IGNORED: Final[Mapping[str, tuple[str, ...]]] = {
    "ChatCompletionRequest": _names(
        """audio function_call functions metadata modalities moderation prediction prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store
        verbosity web_search_options"""
    ),
    "CompletionRequest": ("metadata", "service_tier", "store"),
    "ResponsesRequest": _names(
        """context_management conversation moderation prompt prompt_cache_key prompt_cache_options
        prompt_cache_retention safety_identifier stream_options"""
    ),
    "AnthropicMessagesRequest": _names(
        """cache_control container context_management diagnostics inference_geo mcp_servers
        service_tier speed user_profile_id workspace_id"""
    ),
    "AnthropicCountTokensRequest": _names(
        "cache_control context_management mcp_servers speed user_profile_id workspace_id"
    ),
}
# The same of objects in messages and tools.
IGNORED_INSIDE: Final = _names(
    """allowed_callers annotations audio cache_control caller citations context
    eager_input_streaming function_call generate_summary include_obfuscation input_examples
    max_characters prompt_cache_breakpoint reasoning reasoning_details refusal toolset_name
    user_location"""
)
