"""SGLang's own classes of what clients send: one for each open route, and of parts called `Dict`.

Late imports: SGLang takes seconds, and a server that checks bodies has it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from sgl_esft.fields.described import CustomParams


@functools.cache
def route_classes() -> Mapping[str, tuple[type, ...]]:
    """Path -> the classes whose fields a document may have; each is made of the same document.

    All routes for clients that take a body: tests/fast/access compares with TABLE.
    """
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.openai import protocol as openai
    from sglang.srt.entrypoints.systemone.protocol import SystemOneRequest
    from sglang.srt.managers import io_struct

    tokenize = (openai.TokenizeRequest, openai.ChatCompletionRequest)
    return {
        "/classify": (io_struct.EmbeddingReqInput,),
        "/detokenize": (openai.DetokenizeRequest,),
        "/encode": (io_struct.EmbeddingReqInput,),
        "/generate": (io_struct.GenerateReqInput,),
        "/invocations": (openai.ChatCompletionRequest,),
        "/parse_function_call": (io_struct.ParseFunctionCallReq,),
        "/separate_reasoning": (io_struct.SeparateReasoningReqInput,),
        "/tokenize": tokenize,
        "/v1/chat/completions": (openai.ChatCompletionRequest,),
        "/v1/classify": (openai.ClassifyRequest,),
        "/v1/completions": (openai.CompletionRequest,),
        "/v1/decisions": (openai.DecisionRequest,),
        "/v1/detokenize": (openai.DetokenizeRequest,),
        "/v1/embeddings": (openai.EmbeddingRequest,),
        "/v1/messages": (anthropic.AnthropicMessagesRequest,),
        "/v1/messages/count_tokens": (anthropic.AnthropicCountTokensRequest,),
        "/v1/responses": (openai.ResponsesRequest,),
        "/v1/score": (openai.ScoringRequest,),
        "/v1/systemone": (SystemOneRequest,),
        "/v1/tokenize": tokenize,
    }


def is_batched(path: str) -> bool:
    """Whether the scheduler's own class reads it, which takes lists of parameters."""
    kinds = route_classes().get(path, ())
    return any(hasattr(kind, "normalize_batch_and_arguments") for kind in kinds)


def is_of_messages(path: str) -> bool:
    """Whether objects where prompts are make one conversation; else each is a prompt."""
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

    return any(issubclass(kind, ResponsesRequest) for kind in route_classes().get(path, ()))


def makes_ids_of_one(path: str) -> bool:
    """Whether a batch may have one id, of which SGLang makes one for each prompt."""
    from sglang.srt.entrypoints.openai import protocol as openai
    from sglang.srt.managers import io_struct

    embeddings = (io_struct.EmbeddingReqInput, openai.EmbeddingRequest, openai.ClassifyRequest)
    return not any(issubclass(kind, embeddings) for kind in route_classes().get(path, ()))


@functools.cache
def part_classes() -> Mapping[str, type]:
    """Field that a class calls an object -> the class that SGLang makes of it."""
    from sglang.srt.managers.io_struct import SessionParams
    from sglang.srt.sampling.sampling_params import SamplingParams

    return {
        "custom_params": CustomParams,
        "sampling_params": SamplingParams,
        "session_params": SessionParams,
    }
