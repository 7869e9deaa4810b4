"""One rank of SGLang in this process, whose decode steps replay graphs of the simulator.

    launcher's plan -> SGLang's ModelRunner, woven -> [make_rank] -> DecodeCudaGraphRunner, captured
    requests of adapters -> ScheduleBatch -> ForwardBatch -> [Rank.step] -> logits by graph, eagerly

All of it is SGLang's and ours as in a scheduler, but for three kernels; kernels.py says which.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.fast.graphs import kernels

CAPTURED = (1, 2, 4)  # batch sizes


@dataclass(frozen=True)
class Prompt:
    """A request: the name of its adapter (None = base) and its tokens."""

    adapter: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A decode step's logits [num_requests, vocabulary], twice from the same state."""

    graph: torch.Tensor
    eager: torch.Tensor


def resolve(argv: Sequence[str]) -> Any:
    """The launcher's plan for these arguments, as SGLang's resolved arguments."""
    from sglang.srt.plugins import load_plugins

    from sgl_esft.ports import pick_free_port
    from sgl_esft_launch import flags, plan, serve

    launch = plan.plan_launch(*flags.parse([*argv, "--port", str(pick_free_port())]))
    os.environ.update(launch.environment)
    assert launch.config is not None
    launch.config.export()
    load_plugins()
    return serve.resolve(launch)


def make_rank(
    server_args: Any,
    nccl_port: int,
    tp_rank: int,
    *,
    backend: str = "full",
    own_experts: bool = False,
) -> Rank:
    """A model runner as a scheduler makes it, then captured. Only where the simulator is.

    backend: SGLang's for decode graphs. own_experts: a layer's experts are the CPU platform's,
    which look at values.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish

    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=tp_rank, gpu_id=0))
    initialize_moe_config()
    model_config = ModelConfig.from_server_args(server_args)
    bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=nccl_port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=get_schedule().mem_fraction_static,
        gpu_id=0,
        nccl_port=nccl_port,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    kernels.install(runner, own_experts=own_experts)
    runner.init_cuda_graphs()
    return Rank(runner, backend)


class Rank:
    """A model runner with its captured graphs, and what a scheduler would do around it."""

    def __init__(self, runner: Any, backend: str) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
        from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
        from sglang.srt.runtime_context import get_exec

        self.runner = runner
        # As SGLang does where graphs are wanted later than at the start.
        decode = get_exec().graph.cuda_graph_config.decode
        decode.backend, decode.bs = backend, list(CAPTURED)
        runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(runner)
        self.adapters: dict[str | None, str | None] = {None: None}  # name -> SGLang's id
        # On a device called cpu, SGLang asks whether its own CPU runner has the mode.
        ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph  # type: ignore[method-assign]
        self.graphs = DecodeCudaGraphRunner(runner)

    def load(self, name: str, folder: str) -> None:
        """As the scheduler does when an adapter is loaded."""
        from sgl_esft import sglang_api

        ref = sglang_api.make_adapter_ref(name, folder, pinned=False)
        result = self.runner.lora_manager.load_lora_adapter(ref)
        assert result.success, result.error_message
        self.adapters[name] = ref.lora_id

    def unload(self, name: str) -> None:
        ref = SimpleNamespace(lora_id=self.adapters.pop(name))
        result = self.runner.lora_manager.unload_lora_adapter(ref)
        assert result.success, result.error_message

    def prefill(self, prompts: Sequence[Prompt]) -> Any:
        """A batch whose first tokens are chosen. Under DP attention every rank must call it."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        batch = self._make_batch([self._request(i, p) for i, p in enumerate(prompts)])
        if prompts:
            batch.prepare_for_extend()
            batch.input_ids = batch.prefill_input_ids_cpu
            batch.prefill_input_ids_cpu = None
        else:
            batch.prepare_for_idle()
        self._synchronise(batch)
        forward_batch = ForwardBatch.init_new(
            batch, self.runner, return_hidden_states_before_norm=False
        )
        logits = self.runner.forward(forward_batch).logits_output.next_token_logits
        batch.output_ids = logits.argmax(dim=-1)
        return batch

    @torch.no_grad()
    def step(self, batch: Any) -> Step:
        """One token more for each request; the eager logits choose it."""
        if len(batch.reqs):
            batch.input_ids = batch.output_ids.to(torch.int64)
            batch.prepare_for_decode()
        else:
            batch.prepare_for_idle()
        self._synchronise(batch)
        with self._replaying():
            graph = self._forward(batch, is_graph=True)
        eager = self._forward(batch, is_graph=False)
        batch.output_ids = eager.argmax(dim=-1)
        return Step(graph, eager)

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """No Python of the model, and nothing of SGLang's globals, is there for a replay."""
        from sglang.srt.layers import dp_attention

        self.runner.decode_cuda_graph_runner = self.graphs
        dp_attention.set_dp_buffer_len(-1, -1, False, None)
        wrong = AssertionError("a replay runs no Python of the model")
        with mock.patch.object(type(self.runner.model), "forward", side_effect=wrong):
            yield
        self.runner.decode_cuda_graph_runner = None

    def _forward(self, batch: Any, *, is_graph: bool) -> torch.Tensor:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        forward_batch = ForwardBatch.init_new(
            batch, self.runner, return_hidden_states_before_norm=False
        )
        output = self.runner.forward(forward_batch)
        assert output.can_run_graph == is_graph
        logits: torch.Tensor = output.logits_output.next_token_logits[: len(batch.reqs)]
        return logits.clone()

    def _synchronise(self, batch: Any) -> None:
        """Ranks under DP attention tell each other how many tokens they have."""
        from sglang.srt.managers.scheduler_components.dp_attn import prepare_mlp_sync_batch_raw
        from sglang.srt.utils import require_mlp_sync, require_mlp_tp_gather

        if require_mlp_sync():
            prepare_mlp_sync_batch_raw(
                batch,
                model_runner=self.runner,
                get_idle_batch=None,
                disable_cuda_graph=False,
                require_mlp_tp_gather=require_mlp_tp_gather(),
                disable_overlap_schedule=True,
                offload_tags=set(),
            )

    def _make_batch(self, requests: list[Any]) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        tree = SimpleNamespace(
            page_size=1,
            device=self.runner.device,
            token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
            supports_swa=lambda: False,
            supports_mamba=lambda: False,
            supports_prefix_sharing=lambda: True,
            maybe_hand_to_session=lambda _: None,
        )
        return ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=self.runner.req_to_token_pool,
            token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
            tree_cache=tree,
            model_config=self.runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )

    def _request(self, number: int, prompt: Prompt) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        request = Req(
            rid=str(number),
            origin_input_text="",
            origin_input_ids=array("q", prompt.token_ids),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=kernels.CONTEXT),
            lora_id=self.adapters[prompt.adapter],
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = len(request.origin_input_ids)
        return request
