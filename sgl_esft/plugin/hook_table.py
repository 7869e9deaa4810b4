"""The hook ledger: every place where this package enters SGLang, and why.

Nothing else names a target inside SGLang. Each entry says what it hooks, how,
for which reason, with which SGLang it was tried and when it can go. `register.py`
installs them and refuses to serve when one is not in place.
"""

from __future__ import annotations

from sgl_esft import ports
from sgl_esft.health import heartbeat, load_file, process
from sgl_esft.hook_ledger import Hook, after, around, before, constant, replace
from sgl_esft.observe import json_logs
from sgl_esft.platform import collectives, cpu_hooks, lora_hooks
from sgl_esft.plugin import (
    contain_hooks,
    engine_hooks,
    grammar_hooks,
    graph_hooks,
    memory_hooks,
    registry_hooks,
    request_hooks,
    schedule_hooks,
    text_hooks,
    weave_hooks,
)

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_DP_ATTENTION = "sglang.srt.layers.dp_attention"
_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_MESSAGES = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
_TOOLS = "function_call.function_call_parser.FunctionCallParser"
_JSON_TOOLS = "function_call.json_array_parser.JsonArrayParser"
_REASONING = "parser.reasoning_parser.ReasoningParser"
_BREAKABLE = (
    "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend"
    ".BreakableCudaGraphBackend"
)
_QUANT = "sglang.srt.layers.quantization"
_SIGNALS = "sglang.srt.managers.tokenizer_manager.SignalHandler"

CPU_HOOKS: tuple[Hook, ...] = (
    constant(
        "sglang.srt.model_executor.forward_batch_info._is_cpu",
        True,
        why="otherwise prepare_mlp_sync_batch asks for pinned memory, which needs an accelerator",
        remove_when="it asks the platform's is_pin_memory_available, as its neighbours do",
    ),
    replace(
        f"{_DP_ATTENTION}.memcpy_func",
        cpu_hooks.memcpy,
        "dst src dim offset sz offset_src",
        why="DP attention copies rows by a Triton kernel unless SGLang's own CPU engine is on",
        remove_when="the choice is made by the tensor's device",
    ),
    *(
        replace(
            f"{_GROUP}.{function.__name__}",
            function,
            "self output input",
            why="goes through a custom operator registered for accelerators only",
            remove_when="GroupCoordinator treats out-of-tree CPU platforms as it treats CPU",
        )
        for function in (collectives.all_gather_into_tensor, collectives.reduce_scatter_tensor)
    ),
    replace(
        f"{_GROUP}.reduce_scatterv",
        collectives.reduce_scatterv,
        "self input_ output sizes",
        why="SGLang's version needs pynccl",
        remove_when="it has a gloo path",
    ),
    replace(
        f"{_GROUP}.all_gatherv",
        collectives.all_gatherv,
        "self input_ sizes output",
        why="SGLang's version needs pynccl",
        remove_when="it has a gloo path",
    ),
    replace(
        "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        cpu_hooks.add_gated_shared_expert,
        "hidden_states gate_weight shared_output final_hidden_states",
        why="Qwen2-MoE launches a Triton kernel here whatever the device",
        remove_when="it has a native path",
    ),
    *(
        replace(
            f"{_QUANT}.{method}.apply",
            cpu_hooks.forward_quantised,
            "self layer dispatch_output",
            why="SGLang's runner would prefer its function for Triton to the platform's core, and "
            "on arm64 int8 would look for SGLang's own CPU engine",
            remove_when="a runner core that is registered goes before a fused function",
        )
        for method in (
            "w8a8_int8.W8A8Int8MoEMethod",
            "fp8.Fp8MoEMethod",
            "moe_wna16.MoeWNA16Method",
        )
    ),
    after(
        f"{_QUANT}.moe_wna16.MoeWNA16Method.process_weights_after_loading",
        cpu_hooks.pack_loaded_experts,
        "self layer",
        why="torch's int4 kernel wants experts packed in an order of its own",
        remove_when="SGLang has a CPU path for moe_wna16",
    ),
    replace(
        "sglang.kernels.ops.quantization.fp8_kernel.scaled_fp8_quant",
        cpu_hooks.quantise_fp8,
        "input scale num_token_padding use_per_token_if_dynamic",
        why="experts in fp8 per tensor go through a compiled kernel once they are loaded, though "
        "it changes none whose gate and up have one scale",
        remove_when="it has a native path",
    ),
    before(
        "sglang.srt.model_loader.loader._get_quantization_config",
        cpu_hooks.refuse_other_quantisation,
        "model_config load_config",
        why="a quantisation that the platform does not compute fails somewhere later, unnamed",
        remove_when="SGLang asks the platform which quantisations it computes",
    ),
    *(
        after(
            f"{_QUANT}.{config}.get_quant_method",
            cpu_hooks.refuse_quantised_layer,
            "self layer prefix",
            why="the platform computes no quantised layers but routed experts, and not all of "
            "those; others would fail in their first forward",
            remove_when="SGLang asks the platform which quantisations it computes",
        )
        for config in ("w8a8_int8.W8A8Int8Config", "fp8.Fp8Config", "moe_wna16.MoeWNA16Config")
    ),
    around(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        cpu_hooks.wait_for_request,
        "self",
        why="the loop spins a whole core with non-blocking receives; ranks need that core",
        remove_when="SGLang's controller polls its socket",
    ),
    around(
        "sglang.srt.utils.common.get_available_gpu_memory",
        cpu_hooks.available_memory,
        "device gpu_id distributed empty_cache cpu_group",
        why="with --device-memory the KV cache is sized by what the device has left",
        remove_when="SGLang asks the platform for a CPU's free memory, per device",
    ),
    around(
        f"{_RUNNER}.load_model",
        cpu_hooks.load_model_on_device,
        "self",
        why="with --device-memory the books must know the model, and refuse one that does not fit",
        remove_when="allocations on the platform's device go through the platform",
    ),
    around(
        f"{_RUNNER}.alloc_memory_pool",
        cpu_hooks.alloc_memory_pool_on_device,
        "self memory_pool_config draft_parallel_layout",
        why="with --device-memory the books must know the KV pool",
        remove_when="allocations on the platform's device go through the platform",
    ),
)

# Wherever our launcher runs: with and without weaving, on any device.
LAUNCHER_HOOKS: tuple[Hook, ...] = (
    after(
        "sglang.srt.server_args.PortArgs.init_new",
        ports.choose_rendezvous,
        "server_args dp_rank worker_ports",
        why="SGLang lets the kernel choose where ranks will meet, from the range of outgoing "
        "connections: one of those may have the port by then, and the server does not start",
        remove_when="SGLang holds the port until its ranks listen there",
    ),
    replace(
        "sglang.srt.managers.load_snapshot.shm_path_for",
        load_file.path_for,
        "ipc_name",
        why="SGLang never removes the file in shared memory in which ranks write their load",
        remove_when="it is gone when its last user is",
    ),
    before(
        "sglang.srt.managers.scheduler.Scheduler.ingest_requests",
        heartbeat.beat_rank,
        "self stop_at_pause",
        why="GET /readyz says whether the loop of every rank turns",
        remove_when="SGLang shows the progress of its loops without running the model",
    ),
    *(
        around(
            f"sglang.srt.managers.scheduler.Scheduler.{intake}",
            contain_hooks.end_it_alone,
            "self recv_req mm_input_error",
            why="whatever a rank raises as it takes a request in ends the engine, and so all "
            "other requests",
            remove_when="SGLang ends such a request alone",
        )
        for intake in ("handle_generate_request", "handle_embedding_request")
    ),
    before(
        "sglang.srt.layers.sampler.Sampler.forward",
        contain_hooks.zero_what_is_not_finite,
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs "
        "positions logprob_logits",
        why="sampling from a row with a NaN ends the engine, and its argmax is no answer",
        remove_when="SGLang ends the requests of such rows with an error",
    ),
    before(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        contain_hooks.end_not_finite,
        "self batch result",
        why="the requests of rows that are not finite end with an error, and no others",
        remove_when="SGLang ends the requests of such rows with an error",
    ),
    *(
        around(
            f"sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.{method}",
            grammar_hooks.timed,
            parameters,
            why="an ambiguous grammar takes the scheduler's thread for seconds a token",
            remove_when="xgrammar or SGLang bounds it",
        )
        for method, parameters in (
            ("accept_token", "self token"),
            ("fill_vocab_mask", "self vocab_mask idx"),
        )
    ),
    after(
        "sglang.srt.managers.scheduler.Scheduler._poll_timeout_aborts",
        grammar_hooks.end_slow,
        "self",
        why="requests whose grammars take too long end on all ranks in the same loop",
        remove_when="xgrammar or SGLang bounds it",
    ),
    after(
        "sglang.srt.managers.scheduler.Scheduler.abort_request",
        grammar_hooks.blame_grammar,
        "self recv_req",
        why="SGLang answers 503 to what it aborts itself, and clients would try again",
        remove_when="an abort carries its status",
    ),
    around(
        f"{_CHAT}._validate_request",
        text_hooks.check,
        "self request",
        why="it checks tools' schemas on the event loop, at 1 ms for each property",
        remove_when="SGLang checks them elsewhere, or for a bounded time",
    ),
    *(
        around(
            f"{_CHAT}.{method}",
            text_hooks.render,
            parameters,
            why="a chat template's work may grow faster than the messages",
            remove_when="SGLang bounds it",
        )
        for method, parameters in (
            ("_apply_jinja_template", "self request tools is_multimodal"),
            ("_apply_conversation_template", "self request is_multimodal"),
        )
    ),
    *(
        around(
            f"{_MESSAGES}.{method}",
            text_hooks.convert_aside,
            "self chat_request anthropic_request raw_request",
            why="it renders and tokenizes on the event loop, for seconds where a prompt is large",
            remove_when="it does so in a thread, as for chat requests",
        )
        for method in ("_handle_streaming", "_handle_non_streaming")
    ),
    around(
        f"{_CHAT}._convert_to_internal_request",
        text_hooks.convert,
        "self request raw_request",
        why="of a Messages request it was done already, in a thread",
        remove_when="the hooks of the Messages routes go",
    ),
    before(
        f"sglang.srt.{_TOOLS}.__init__",
        text_hooks.give_tools,
        "self tools tool_call_parser tokenizer tool_choice prefix constrained",
        why="/parse_function_call has tools of a class of its own, without the `strict` that "
        "glm47's parser reads",
        remove_when="that route takes tools of the class that chat requests have",
    ),
    *(
        around(
            f"sglang.srt.{parser}",
            text_hooks.parse,
            parameters,
            why="parsers of answers run on the event loop; some are quadratic, some raise, some "
            "find half pairs of UTF-16, which no answer can hold",
            remove_when="SGLang bounds their time, says which one failed, and escapes half pairs",
        )
        for parser, parameters in (
            (f"{_TOOLS}.has_tool_call", "self text"),
            (f"{_TOOLS}.parse_non_stream", "self full_text preserve_incomplete"),
            (f"{_TOOLS}.parse_stream_chunk", "self chunk_text"),
            (f"{_TOOLS}.parse_stream_end", "self"),
            (f"{_JSON_TOOLS}.parse_streaming_increment", "self new_text tools"),
            (f"{_JSON_TOOLS}.finish", "self tools"),
            (f"{_REASONING}.parse_non_stream", "self full_text"),
            (f"{_REASONING}.parse_non_stream_blocks", "self full_text"),
            (f"{_REASONING}.parse_stream_chunk", "self chunk_text"),
            (f"{_REASONING}.parse_stream_end", "self"),
        )
    ),
)

_UNQUANT = f"{_QUANT}.unquant.UnquantizedFusedMoEMethod"

WEAVE_HOOKS: tuple[Hook, ...] = (
    around(
        f"{_UNQUANT}.create_weights",
        weave_hooks.create_weights_with_adapter_slots,
        "self layer num_experts hidden_size intermediate_size_per_partition params_dtype with_bias "
        "extra_weight_attrs",
        why="the engine finds an expert by its row in the weight; adapters need rows",
        remove_when="SGLang lets a plugin reserve physical expert slots",
    ),
    *(
        around(
            f"{_QUANT}.{method}.create_weights",
            weave_hooks.create_quantised_weights_with_adapter_slots,
            f"self layer num_experts hidden_size intermediate_size_per_partition params_dtype "
            f"{more}extra_weight_attrs",
            why="as for unquantised experts; scales are found by their rows too",
            remove_when="SGLang lets a plugin reserve physical expert slots",
        )
        for method, more in (
            ("w8a8_int8.W8A8Int8MoEMethod", ""),
            ("fp8.Fp8MoEMethod", "with_bias "),
            ("moe_wna16.MoeWNA16Method", ""),
        )
    ),
    replace(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager",
        weave_hooks.install_esft_manager,
        "self",
        why="the ESFT manager takes LoRA's place in SGLang's adapter machinery",
        remove_when="SGLang lets a plugin supply the adapter manager class",
    ),
    after(
        "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
        schedule_hooks.prefer_running_adapters,
        "self waiting_queue running_batch processed_tokens",
        why="a step reads the experts of every adapter in it; requests of adapters that run "
        "already go ahead of others, within --max-overtakes",
        remove_when="SGLang lets a plugin supply a scheduling policy",
    ),
    around(
        "sglang.srt.managers.scheduler.Scheduler.can_schedule_lora_req",
        schedule_hooks.hold_back_for_the_oldest,
        "self req running_loras",
        why="SGLang admits requests of running adapters past one whose adapter has no slot, for as "
        "long as they come",
        remove_when="SGLang bounds how long a request waits for an adapter's slot",
    ),
    around(
        "sglang.srt.managers.scheduler.Scheduler._set_or_validate_priority",
        schedule_hooks.refuse_unknown_adapter,
        "self req",
        why="a batch with an adapter that the rank does not have ends the rank",
        remove_when="SGLang refuses such a request where it queues it",
    ),
    after(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        memory_hooks.add_report,
        "self recv_req",
        why="GET /v1/memory asks every rank for its expert memory, GET /v1/heat for the heat",
        remove_when="SGLang lets a plugin add to a scheduler's internal state",
    ),
    around(
        "sglang.srt.lora.lora_registry.LoRARef.deterministic_id",
        weave_hooks.adapter_id_with_content,
        "lora_name lora_path",
        why="the id keys the prefix cache; other weights in the same folder need another id",
        remove_when="SGLang derives the id from the adapter's content",
    ),
)

_LOGGING = "sglang.srt.utils.common"


# Only with --log-format json.
JSON_LOG_HOOKS: tuple[Hook, ...] = (
    after(
        "sglang.srt.server_args.prepare_server_args",
        json_logs.use_json_while_resolving,
        "argv",
        why="it sets up logging as text, before it resolves the arguments and says what it does",
        remove_when="SGLang has a flag for JSON logs",
    ),
    after(
        f"{_LOGGING}.configure_logger",
        json_logs.use_json,
        "server_args prefix",
        why="every process of SGLang sets up its own logging, as text",
        remove_when="SGLang has a flag for JSON logs",
    ),
    after(
        f"{_LOGGING}.set_uvicorn_logging_configs",
        json_logs.use_json_in_uvicorn,
        "server_args",
        why="the HTTP server's lines are text, and its access lines have no request id",
        remove_when="SGLang has a flag for JSON logs",
    ),
)

# Only with --enable-lora on the CPU platform.
LORA_HOOKS: tuple[Hook, ...] = tuple(
    replace(
        f"sglang.srt.lora.deepseek_mla_correction.{name}",
        function,
        parameters,
        why="LoRA of kv_b_proj is added to absorbed MLA by a Triton kernel, whatever the device",
        remove_when="the correction goes through the LoRA backend",
    )
    for name, function, parameters in (
        ("apply_q_correction", lora_hooks.apply_q_correction, "attn_module q_nope q_nope_out"),
        (
            "apply_v_correction",
            lora_hooks.apply_v_correction,
            "attn_module attn_output attn_bmm_flat",
        ),
    )
)

# Only with --expert-cache.
TIER_HOOKS: tuple[Hook, ...] = tuple(
    replace(
        f"sglang.srt.model_loader.loader.{name}",
        weave_hooks.read_all_but_experts,
        parameters,
        why="it reads every tensor; experts in tiers are read when they are routed to",
        remove_when="a plugin can say which tensors a loader reads",
    )
    for name, parameters in (
        (
            "buffered_multi_thread_safetensors_weights_iterator",
            "hf_weights_files max_workers disable_mmap prefetch prefetch_num_threads "
            "drop_cache_after_load",
        ),
        (
            "safetensors_weights_iterator",
            "hf_weights_files disable_mmap prefetch prefetch_num_threads drop_cache_after_load",
        ),
    )
)

# Only with --expert-cache on an accelerator, whose decode graphs have breaks.
GRAPH_HOOKS: tuple[Hook, ...] = (
    around(
        f"{_BREAKABLE}.capture_one",
        graph_hooks.capture_tensors,
        "self shape_key forward_fn capture_inputs post_warmup_hook",
        why="a decode step answers with a LogitsProcessorOutput, which SGLang's backend refuses",
        remove_when="its output buffer takes a LogitsProcessorOutput",
    ),
    around(
        f"{_BREAKABLE}.replay",
        graph_hooks.replay_record,
        "self shape_key static_forward_batch kwargs",
        why="gives back the LogitsProcessorOutput whose tensors were captured",
        remove_when="its output buffer takes a LogitsProcessorOutput",
    ),
)

# Only with --reroute router: the hook is called in every layer.
ROUTER_HOOKS: tuple[Hook, ...] = (
    around(
        "sglang.srt.layers.moe.topk.select_experts",
        weave_hooks.route_to_slots,
        "hidden_states router_logits topk_config layer_id num_token_non_padded "
        "expert_location_dispatch_info dynamic_expert_bias router_logits_partials",
        why="top-k and rerouting are one kernel",
        remove_when="SGLang lets a plugin supply the router of a layer",
    ),
)

# ---- overrides: methods of subclasses that our launcher hands to SGLang's own factories ----

# The class of the process that serves HTTP, always.
REQUEST_OVERRIDES: tuple[Hook, ...] = (
    around(
        f"{_TOKENIZER}.generate_request",
        request_hooks.answer,
        "self obj request",
        why="the engine knows requests by ids of ours; answers have the client's",
        remove_when="SGLang's ids inside are not those of its clients",
    ),
    before(
        f"{_TOKENIZER}._set_default_priority",
        request_hooks.take_ids,
        "self obj",
        why="SGLang aborts every request whose id begins with the one it is told: one client's "
        "leaving ends another's request. Here it has settled ids, and nothing knows them yet",
        remove_when="SGLang aborts by equal ids, and two clients may use the same one",
    ),
    around(
        f"{_TOKENIZER}._tokenize_texts",
        text_hooks.tokenize,
        "self texts is_cross_encoder",
        why="a prompt of 2 MB holds the event loop for 6 s",
        remove_when="SGLang tokenizes large prompts in threads, and not those that cannot fit",
    ),
    around(
        f"{_TOKENIZER}.abort_request",
        request_hooks.abort,
        "self rid abort_all",
        why="who aborts a request names it as its client did",
        remove_when="SGLang's ids inside are not those of its clients",
    ),
)

# With weaving.
WEAVE_OVERRIDES: tuple[Hook, ...] = (
    before(
        f"{_TOKENIZER}._validate_one_request",
        registry_hooks.refuse_empty,
        "self obj input_ids",
        why="a prompt without tokens, from a text or as ids, ends the scheduler and so the server",
        remove_when="SGLang refuses it",
    ),
    before(
        f"{_TOKENIZER}._handle_abort_finish_reason",
        registry_hooks.blame_grammar,
        "self out state is_stream",
        why="a grammar that allows no token is the client's mistake; SGLang answers 500",
        remove_when="SGLang answers 400",
    ),
    replace(
        f"{_CONTROL}.load_lora_adapter",
        registry_hooks.load,
        "self obj _",
        why="loads go through lifecycle/sglang_engine.py, which validates a folder before any rank "
        "hears of it, and makes room by idle adapters",
        remove_when="SGLang lets a plugin supply the way an adapter is loaded",
    ),
    replace(
        f"{_CONTROL}.load_lora_adapter_from_tensors",
        registry_hooks.refuse_tensors,
        "self obj _",
        why="the ranks would unpickle what a client sent; a malformed body ends the server",
        remove_when="SGLang lets a server leave the route out",
    ),
    replace(
        f"{_CONTROL}.unload_lora_adapter",
        registry_hooks.unload,
        "self obj _",
        why="SGLang keeps the path of an unloaded adapter and loads it again when it is asked for",
        remove_when="an explicit unload clears lora_ref_cache",
    ),
    replace(
        f"{_TOKENIZER}._resolve_lora_path",
        registry_hooks.resolve,
        "self obj",
        why="an adapter may leave host memory between its load for a request and its use by it; "
        "SGLang would load it beside whoever loads it, and name all adapters to who asks for one",
        remove_when="SGLang holds an adapter from its load to its use",
    ),
    around(
        f"{_TOKENIZER}._release_lora_once",
        registry_hooks.release,
        "self state",
        why="SGLang gives back an id that a request which failed early never had, in a task whose "
        "TypeError nobody hears until the log has it, with a traceback",
        remove_when="SGLang releases what a request has acquired only",
    ),
)

# With weaving too.
OBSERVE_OVERRIDES: tuple[Hook, ...] = (
    after(
        f"{_TOKENIZER}._init_req_state",
        engine_hooks.note_sequences,
        "self obj request",
        why="the log says which adapters a request used, and its tokens, which answers need not",
        remove_when="SGLang's states of a request's sequences know its x-request-id",
    ),
    after(
        f"{_TOKENIZER}._create_tokenized_object",
        engine_hooks.note_prompt,
        "self obj input_text input_ids input_embeds mm_inputs token_type_ids",
        why="the log says how many prompt tokens a request has, which answers need not",
        remove_when="SGLang's states of a request's sequences have their prompts' lengths",
    ),
    before(
        f"{_TOKENIZER}.collect_metrics",
        engine_hooks.observe_output,
        "self state recv_obj i",
        why="metrics by adapter; SGLang's are of the whole server",
        remove_when="SGLang's request metrics have a label for the adapter",
    ),
)

# Only with --log-format json.
JSON_LOG_OVERRIDES: tuple[Hook, ...] = (
    around(
        f"{_TOKENIZER}.auto_create_handle_loop",
        json_logs.start_loop_for_nobody,
        "self",
        why="the first request starts the loop for all, and every line of it would have that "
        "request's id",
        remove_when="SGLang starts its loop before it serves",
    ),
)

# The class of the process that serves HTTP, always.
ENDING_OVERRIDES: tuple[Hook, ...] = (
    around(
        f"{_TOKENIZER}.handle_loop",
        process.keep_loop,
        "self",
        why="when it fails, SGLang holds the event loop for a minute of dumps and kills itself; "
        "its clients see broken connections",
        remove_when="SGLang ends its streams with an error before it exits",
    ),
)

# The class of its signal handlers, always.
SIGNAL_OVERRIDES: tuple[Hook, ...] = (
    replace(
        f"{_SIGNALS}.sigterm_handler",
        process.on_sigterm,
        "self signum frame",
        why="SGLang takes new requests while it drains, waits for ever, and hears no SIGINT",
        remove_when="SGLang's drain refuses new requests and has a time-out",
    ),
    replace(
        f"{_SIGNALS}.running_phase_sigquit_handler",
        process.on_sigquit,
        "self signum frame",
        why="SGLang kills itself when a process has failed; its clients see broken connections",
        remove_when="SGLang ends its streams with an error before it exits",
    ),
)
