"""What reads bytes of strangers, given any bytes: refused by name, or read and found true.

    python -m tests.fast.fuzz.targets --seconds 60 body FOUND CORPUS

    bytes --[libFuzzer keeps what reaches new code]--> TARGETS[name] --> True: taken, False: refused

A target raises for what must not be: another error than the package's own, or something that was
taken although it breaks a rule. The folders are libFuzzer's: it writes new inputs into the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import atheris

with atheris.instrument_imports(
    include=[
        "sgl_esft.access",
        "sgl_esft.fields.check",
        "sgl_esft.http.body",
        "sgl_esft.formats.adapter_config",
        "sgl_esft.formats.manifest",
        "sgl_esft.formats.adapter_paths",
        "sgl_esft.formats.safetensors_header",
        "sgl_esft.formats.strict_json",
    ]
):
    from sgl_esft.access import bodies, keys
    from sgl_esft.access.ask import MAX_SEQUENCES
    from sgl_esft.access.keys import KeyRing
    from sgl_esft.fields import table
    from sgl_esft.fields.rules import BodyRules, ModelBounds
    from sgl_esft.formats.manifest import content_digest, read_manifest
    from sgl_esft.formats.safetensors_header import read_header
    from sgl_esft.http.body import parse

from sgl_esft.errors import BadBodyError, ConfigError, UserError
from sgl_esft.formats.model_spec import MoeSpec

BOUNDS: Final = ModelBounds(vocab_size=300, context_length=1000)
CUT: Final = b"\n---\n"
_MAX_INPUT_BYTES: Final = 4096
# One input may take so long; a body of 2 MiB has as many times longer as it is larger.
_SECONDS_PER_INPUT: Final = 5
_SECRET: Final = "a-secret-that-no-message-may-show"
# Layers 1 and 2 have four experts each, of three tensors of a few bytes.
SPEC: Final = MoeSpec.from_config(
    {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2,
        "moe_intermediate_size": 1,
        "n_routed_experts": 4,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "torch_dtype": "bfloat16",
        "num_experts_per_tok": 2,
    }
)


def body(data: bytes) -> bool:
    """A request's body, as the gate reads it."""
    try:
        document = parse(data)
        rules = BodyRules(takes_stop_regex=True)
        ask = bodies.check_client_body(_route_of(document), document, len(data), rules, BOUNDS)
    except BadBodyError as error:
        _check_message(str(error))
        return False
    assert json.loads(data) == document
    assert 0 <= ask.sequences <= MAX_SEQUENCES, ask
    assert 0 <= ask.tokens < 1 << 40, ask
    if isinstance(document, dict):
        _check_taken(document)
    return True


def _route_of(document: object) -> str:
    """A document goes where most of its fields belong."""
    is_chat = isinstance(document, dict) and "messages" in document
    return "/v1/chat/completions" if is_chat else "/generate"


def _check_taken(document: Mapping[str, object]) -> None:
    """By rules that are written here a second time, of fields that reach the engine."""
    n, ids, top = (document.get(field) for field in ("n", "input_ids", "top_logprobs_num"))
    assert not isinstance(n, int) or 0 <= n <= 128
    assert not isinstance(top, int) or 0 <= top <= 100
    if isinstance(ids, list):
        assert not any(isinstance(each, str) for each in ids)
        assert all(0 <= each < 300 for each in ids if isinstance(each, int) and each is not True)
    assert document.get("lora_id") in (None, "", [], {})
    assert document.get("custom_logit_processor") in (None, "", [], {})


def adapter(data: bytes) -> bool:
    """An adapter folder: expert_cfg.json, then model.safetensors or its header and its tensors."""
    config, *rest = data.split(CUT, 2)
    folder = _folder("adapter")
    weights = folder / "model.safetensors"
    (folder / "expert_cfg.json").write_bytes(config)
    header = rest[0] if rest else b""
    prefix = len(header).to_bytes(8, "little") if len(rest) == 2 else b""
    weights.write_bytes(prefix + header + (rest[1] if len(rest) == 2 else b""))
    try:
        manifest = read_manifest(folder, SPEC)
    except UserError as error:
        _check_message(str(error))
        return False
    tensors = read_header(weights).tensors
    size = weights.stat().st_size
    assert set(manifest.experts) <= set(SPEC.moe_layer_ids)
    assert all(0 <= e < SPEC.num_experts for ids in manifest.experts.values() for e in ids)
    found = [*manifest.tensors.values(), *manifest.shared.values()]
    assert {location.name for location in found} == set(tensors)
    assert all(0 < t.start <= t.start + t.num_bytes <= size for t in tensors.values())
    assert manifest.num_bytes == sum(t.num_bytes for t in tensors.values()) <= size
    assert len(content_digest(folder)) == 32
    return True


def keys_file(data: bytes) -> bool:
    """A keys file. `SECRET` in it stands for a key that must not be told."""
    path = _folder("keys") / "keys.json"
    path.write_bytes(data.replace(b"SECRET", _SECRET.encode()))
    path.chmod(0o600)
    try:
        ring = KeyRing(keys.read_keys_file(path))
    except ConfigError as error:
        _check_message(str(error))
        return False
    assert len(ring) > 0
    assert _SECRET not in repr(ring)
    found = ring.find(_SECRET)
    assert found is None or _SECRET.encode() in path.read_bytes()
    assert ring.find("") is None
    return True


def _check_message(message: str) -> None:
    """Errors are for logs and answers: of a bounded length, without folders of this machine."""
    assert message
    assert _SECRET not in message
    assert len(message) < 4000, len(message)
    assert str(_folder("adapter").parent) not in message, message


@cache
def _folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / name
    folder.mkdir()
    return folder


TARGETS: Final[Mapping[str, Callable[[bytes], bool]]] = {
    "adapter": adapter,
    "body": body,
    "keys": keys_file,
}


def main(argv: Sequence[str]) -> None:
    """Does not return: libFuzzer ends the process, with 0 if it found nothing."""
    parser = argparse.ArgumentParser(description="Fuzz one reader of strangers' bytes.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("folders", nargs="*", help="new inputs are written into the first")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    options = parser.parse_args(argv)
    target = TARGETS[options.target]
    table.routes()  # imports SGLang, for longer than one input may take

    def run(data: bytes) -> None:
        target(data)

    flags = {
        "max_total_time": options.seconds,
        "seed": options.seed,
        "max_len": _MAX_INPUT_BYTES,
        "timeout": _SECONDS_PER_INPUT,
        "rss_limit_mb": 2048,
        "close_fd_mask": 0,
    }
    written = [f"-{name}={value}" for name, value in flags.items()]
    folders = [folder for folder in options.folders if Path(folder).is_dir()]
    if folders:
        written.append(f"-artifact_prefix={folders[0]}/")
    dictionary = Path(__file__).with_name("words.dict")
    with contextlib.suppress(KeyboardInterrupt):
        atheris.Setup([sys.argv[0], *written, f"-dict={dictionary}", *folders], run)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
