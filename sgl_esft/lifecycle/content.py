"""What an adapter folder holds, as one value: validated, counted and digested.

folder --check_loadable, content_digest--> [AdapterContent] -> sglang_engine.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sgl_esft.config import current_config
from sgl_esft.errors import AdapterFormatError, InvariantError
from sgl_esft.formats.adapter_config import AdapterKind
from sgl_esft.formats.lora_manifest import AnyManifest, LoraManifest
from sgl_esft.formats.manifest import content_digest, stamp_digest

_digests: dict[str, str] = {}  # folder -> digest, of what was read at launch
_at_launch: dict[str, AdapterContent] = {}  # by folder


@dataclass(frozen=True)
class AdapterContent:
    """One version of an adapter folder."""

    folder: Path
    digest: str
    num_experts: int  # replaced, over all layers; of a LoRA adapter 0
    num_bytes: int  # of tensors
    stamps: tuple[tuple[str, int, int], ...]  # each file: name, size, time of change in ns
    kind: AdapterKind = "esft"


def digest_of(folder: Path) -> str:
    """The digest of a folder's content; where experts are in tiers, of its files' stamps.

    There no weight is read before it is routed to, and a file that changes later fails its reads.
    """
    config = current_config()
    is_tiered = config is not None and config.tiers is not None
    return stamp_digest(folder) if is_tiered else content_digest(folder)


def read_content(manifest: AnyManifest) -> AdapterContent:
    """Digest a validated folder; reads all of it. Raises AdapterFormatError if it changes."""
    stamps = stamps_of(manifest)
    content = _content(manifest, digest_of(manifest.path), stamps)
    check_unchanged(manifest, content)
    return content


def remember_digest(folder: str, digest: str) -> None:
    """The digest that an id was made of at launch: it need not be read a second time."""
    _digests[folder] = digest


def remember_at_launch(folders: Iterable[Path], check: Callable[[Path], AnyManifest]) -> None:
    """Describe the first adapters while their folders are surely there.

    check: a folder -> what it holds.
    """
    for folder in folders:
        manifest = check(folder)
        digest = _digests.get(str(folder)) or digest_of(folder)
        _at_launch[str(folder)] = _content(manifest, digest, stamps_of(manifest))


def content_at_launch(folder: str) -> AdapterContent:
    """What `remember_at_launch` found. Raises InvariantError for another folder."""
    found = _at_launch.get(folder)
    if found is None:
        raise InvariantError(f"adapter folder {folder} was not described at launch")
    return found


def stamps_of(manifest: AnyManifest) -> tuple[tuple[str, int, int], ...]:
    """Cheap marks of the files' state. Raises AdapterFormatError when one is gone."""
    try:
        found = [(file.name, file.stat()) for file in manifest.files]
    except OSError as error:
        raise AdapterFormatError(f"{manifest.path} changed while it was read: {error}") from error
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def check_unchanged(manifest: AnyManifest, content: AdapterContent) -> None:
    """Raises AdapterFormatError when the folder is not what was digested."""
    if stamps_of(manifest) != content.stamps:
        raise AdapterFormatError(
            f"{manifest.path} changed while it was loaded: replace adapter folders by rename, "
            "then load again"
        )


def _content(
    manifest: AnyManifest, digest: str, stamps: tuple[tuple[str, int, int], ...]
) -> AdapterContent:
    return AdapterContent(
        folder=manifest.path,
        digest=digest,
        num_experts=manifest.num_experts,
        num_bytes=manifest.num_bytes,
        stamps=stamps,
        kind="lora" if isinstance(manifest, LoraManifest) else "esft",
    )
