"""The adapter library of a server: made when it is first asked, answering its routes.

serve.py -> [LibraryHolder]: --adapter-root scanned and watched, engine of SGLang's TokenizerManager
              ├--> /v1/adapters and the routes of vLLM and SGLang
              └--> http_stack.py: known_names for the gate, ensure for AdapterNames
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from sgl_esft.config import EsftConfig
from sgl_esft.formats import manifest as adapter_format
from sgl_esft.formats.adapter_config import kind_of
from sgl_esft.formats.lora_manifest import AnyManifest, read_lora_manifest
from sgl_esft.http.adapter_names import KnownNames
from sgl_esft.lifecycle import compat
from sgl_esft.lifecycle.api import Backing
from sgl_esft.lifecycle.catalogue import Catalogue, Watcher
from sgl_esft.lifecycle.content import remember_at_launch
from sgl_esft.lifecycle.library import AdapterLibrary
from sgl_esft.lifecycle.listing import Lister
from sgl_esft_launch import plan
from sgl_esft_launch.plan import LaunchPlan


def base_names(manager: Any) -> frozenset[str]:
    """What SGLang's TokenizerManager calls the base model, and its path, which was its name."""
    return frozenset({manager.served_model_name, manager.model_path})


class LibraryHolder:
    """Where a server keeps its library. `manager` gives SGLang's TokenizerManager, once it runs."""

    def __init__(
        self, config: EsftConfig, catalogue: Catalogue, manager: Callable[[], Any]
    ) -> None:
        self._config = config
        self._catalogue = catalogue
        self._manager = manager

    @functools.cached_property
    def backing(self) -> Backing:
        """The library and what lists it."""
        from sgl_esft.lifecycle.sglang_engine import engine_of

        engine = engine_of(self._manager())
        library = AdapterLibrary(engine, self._catalogue)
        engine.load_by(library.ensure)
        lister = Lister(
            library,
            num_slots=self._config.max_adapters,
            host_budget_bytes=self._config.adapter_host_bytes,
            num_lora_slots=None if self._config.lora is None else self._config.lora.max_loras,
        )
        return Backing(library, lister)

    def known_names(self) -> KnownNames:
        """What requests may name now."""
        manager = self._manager()
        known = self.backing.library.known
        return KnownNames(
            adapters=known.usable,
            base_models=base_names(manager),
            kind_of=None if self._config.lora is None else known.kind_of,
        )

    async def ensure(self, names: Collection[str]) -> None:
        """Return once a request may use these. Raises EsftError."""
        await self.backing.library.ensure(names)

    def watch(self) -> None:
        """Look for changes below the root from now on."""
        if self._catalogue.root is not None:
            Watcher(self._catalogue.root, self._catalogue.refresh).start()


def install(
    app: Any, launch: LaunchPlan, config: EsftConfig, manager: Callable[[], Any]
) -> LibraryHolder:
    """Scan the root and add the routes, in place of SGLang's of the same path."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    check = _check_against(launch.model_path, config)
    remember_at_launch(launch.all_adapters.values(), check)
    catalogue = Catalogue(config.adapter_root_path, check, config.adapter_files)
    catalogue.refresh()
    holder = LibraryHolder(config, catalogue, manager)
    protect = auth_level(AuthLevel.ADMIN_OPTIONAL)
    compat.install(app, lambda: holder.backing, protect)
    return holder


def _check_against(model_path: str, config: EsftConfig) -> Callable[[Path], AnyManifest]:
    spec, targets = plan.base_spec(model_path), plan.base_targets(model_path, config)

    def check(folder: Path) -> AnyManifest:
        if config.lora is not None and kind_of(folder) == "lora":
            return read_lora_manifest(folder, targets, config.lora.max_rank)
        manifest = adapter_format.read_manifest(folder, spec)
        adapter_format.check_served(folder.name, manifest, config)
        return manifest

    return check
