"""Adapters of the load test, two versions of each, and what each version's merged model answers.

    the zoo's adapters --[write_versions]--> a folder a version, below the adapter root
    versions, prompts  --[reference_texts]--> plain SGLang on each merged model -> greedy texts

A version takes each layer's experts from one of the zoo's adapters, so all of them are trained ones
and no two are alike. Prompts on which any of the models nearly ties are left out: there another
batch may round to the other token.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save_file

from bench.expertweave.steps import WEIGHTS_ROUTE
from sgl_esft import zoo
from sgl_esft.formats.adapter_config import (
    EXPERT_CONFIG_NAME,
    read_expert_config,
    write_expert_config,
)
from sgl_esft.formats.model_spec import PROJS, read_moe_spec
from sgl_esft.tools.merge import merge_adapter
from sgl_esft.zoo import serving

NUM_NAMES = 8  # that the traffic asks for
NUM_EXTRAS = 2  # that come and go besides
TIE_LOGPROB = 1e-4


@dataclass(frozen=True)
class Versions:
    """One adapter name and its two contents."""

    name: str
    old: str  # folders below the root; the first one has the adapter's name
    new: str


def names() -> tuple[str, ...]:
    """Of all adapters, those of the traffic first."""
    mixed = [f"mixed-{number}" for number in range(NUM_NAMES + NUM_EXTRAS - len(zoo.tasks()))]
    return (*zoo.tasks(), *mixed)


def write_versions(root: Path) -> dict[str, Versions]:
    """Two folders below `root` for each name."""
    found = {}
    for place, name in enumerate(names()):
        each = Versions(name, name, f"{name}.v2")
        for number, folder in enumerate((each.old, each.new)):
            _write_mixed(root / folder, _sources(2 * place + number))
        found[name] = each
    return found


def _sources(number: int) -> tuple[str, str, str]:
    """A zoo adapter for each MoE layer of the zoo's base; another triple for each number."""
    tasks = zoo.tasks()
    return (
        tasks[number % len(tasks)],
        tasks[number // len(tasks) % len(tasks)],
        tasks[(2 * number + 1) % len(tasks)],
    )


def _write_mixed(folder: Path, sources: Sequence[str]) -> None:
    spec = read_moe_spec(zoo.base_path())
    experts, tensors = {}, {}
    for layer, source in zip(spec.moe_layer_ids, sources, strict=True):
        adapter = zoo.adapter_paths()[source]
        experts[layer] = read_expert_config(adapter / EXPERT_CONFIG_NAME)[layer]
        with safe_open(adapter / "model.safetensors", framework="numpy") as file:
            for expert in experts[layer]:
                for proj in PROJS:
                    name = spec.expert_tensor_name(layer, expert, proj)
                    tensors[name] = file.get_tensor(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_expert_config(folder / EXPERT_CONFIG_NAME, experts)
    save_file(tensors, folder / "model.safetensors")


Texts = dict[tuple[str, str], str]  # (folder, prompt) -> greedy answer


def plain_arguments() -> list[str]:
    """A plain SGLang server of the zoo's base that takes other weights."""
    merged = serving.merged_arguments(zoo.base_path())
    return [*merged, "--skip-server-warmup", "--enable-route", WEIGHTS_ROUTE]


def reference_texts(
    url: str, root: Path, folders: Sequence[str], prompts: Sequence[str], num_tokens: int
) -> Texts:
    """Answers of the merged models to the prompts on which none of them ties.

    url: a plain server's. It has the base's weights again afterwards.
    """
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory(dir=root.parent) as work:
        for folder in folders:
            merged = Path(work) / folder
            merge_adapter(zoo.base_path(), root / folder, merged)
            _use_weights(url, merged)
            found[folder] = _ask(url, prompts, num_tokens)
            shutil.rmtree(merged)
    _use_weights(url, zoo.base_path())
    return clear_texts(prompts, found)


def _use_weights(url: str, checkpoint: Path) -> None:
    reply = _post(f"{url}{WEIGHTS_ROUTE}", {"model_path": str(checkpoint)})
    if not reply["success"]:
        raise serving.ServerError(f"{url} did not take {checkpoint}: {reply['message']}")


def clear_texts(prompts: Sequence[str], found: Mapping[str, Sequence[Any]]) -> Texts:
    """Without the prompts on which any model ties; `found` has an answer for each prompt."""
    ties = {
        prompt
        for answers in found.values()
        for prompt, answer in zip(prompts, answers, strict=True)
        if _smallest_gap(answer) <= TIE_LOGPROB
    }
    return {
        (folder, prompt): str(answer["text"])
        for folder, answers in found.items()
        for prompt, answer in zip(prompts, answers, strict=True)
        if prompt not in ties
    }


def _smallest_gap(answer: Any) -> float:
    """Least distance of the best two tokens' log-probabilities over the answer's positions."""
    best_two = answer["meta_info"]["output_top_logprobs"]
    return float(min(first[0] - second[0] for first, second in best_two))


def sampling(num_tokens: int) -> dict[str, object]:
    """What makes an answer one that can be compared: greedy, of a set length, all of its text."""
    return {
        "temperature": 0,
        "max_new_tokens": num_tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


def _ask(url: str, prompts: Sequence[str], num_tokens: int) -> list[Any]:
    body = {
        "text": list(prompts),
        "sampling_params": sampling(num_tokens),
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    answers: list[Any] = _post(f"{url}/generate", body)
    return answers


def _post(url: str, body: Mapping[str, object]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)
