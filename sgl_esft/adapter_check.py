"""Everything that is checked of an adapter before it is read.

name, folder -> [check_loadable] -> AdapterManifest -> host_cache.py
"""

from __future__ import annotations

from collections.abc import Collection

from sgl_esft import adapter_format
from sgl_esft.adapter_format import AdapterManifest
from sgl_esft.config import EsftConfig
from sgl_esft.errors import AdapterExistsError
from sgl_esft.model_spec import MoeSpec


def check_loadable(
    name: str, folder: str, loaded: Collection[str], spec: MoeSpec, config: EsftConfig
) -> AdapterManifest:
    """Everything that is checked before an adapter is read; `loaded` are the names in use.

    Raises one of the Adapter* errors.
    """
    adapter_format.validate_adapter_name(name)
    if name in loaded:
        raise AdapterExistsError(
            f"adapter {name!r} is already loaded: unload it first, or choose another name"
        )
    path = adapter_format.resolve_adapter_path(folder, config.adapter_root_path)
    manifest = adapter_format.read_manifest(path, spec)
    adapter_format.check_fits(manifest, config.max_experts_per_adapter)
    return manifest
