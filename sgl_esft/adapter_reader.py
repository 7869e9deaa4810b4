"""The bytes of a validated adapter, as CPU tensors.

    AdapterManifest -> [AdapterReader] -> host cache, expert tensor

The files are mapped, not read: a tensor costs memory only where it is touched. A file that is
cut short while it is mapped raises SIGBUS, as with every mapped checkpoint, so adapter folders
are replaced by rename and not rewritten in place.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sgl_esft.errors import AdapterFormatError, InvariantError
from sgl_esft.model_spec import Proj

if TYPE_CHECKING:
    import torch

    from sgl_esft.adapter_format import AdapterManifest


class AdapterReader:
    """Reads experts' tensors; a context manager that closes its files at the end.

    torch and safetensors are imported on entry and not before, so that `inspect` starts at once.
    Tensors that were handed out stay valid after the end: they keep their file mapped.
    """

    def __init__(self, manifest: AdapterManifest) -> None:
        self._manifest = manifest
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, layer_id: int, expert_id: int, proj: Proj) -> torch.Tensor:
        """The whole tensor, ``[I, H]`` for gate and up, ``[H, I]`` for down; do not write to it.

        Raises InvariantError for an expert that the adapter does not replace and
        AdapterFormatError if the file changed since it was validated.
        """
        from safetensors import SafetensorError

        location = self._manifest.tensors.get((layer_id, expert_id, proj))
        if location is None:
            raise InvariantError(
                f"asked for {proj} of expert {expert_id} in layer {layer_id}, "
                "which the adapter does not replace."
            )
        try:
            tensor: torch.Tensor = self._open(location.file).get_tensor(location.name)
        except (OSError, SafetensorError) as error:
            raise AdapterFormatError(
                f"{location.file.name} changed since it was validated: {error}."
            ) from error
        if tuple(tensor.shape) != location.shape or not _has_dtype(tensor, self._manifest.dtype):
            raise AdapterFormatError(
                f"tensor {location.name} changed since it was validated: it is now "
                f"{tensor.dtype} {list(tensor.shape)}."
            )
        return tensor

    def read_slice(
        self, layer_id: int, expert_id: int, proj: Proj, dim: int, start: int, stop: int
    ) -> torch.Tensor:
        """Rows (dim 0) or columns (dim 1) ``[start, stop)`` of the tensor: one TP rank's part.

        A view, so only these rows are paged in; columns are not contiguous. Raises InvariantError
        for a range outside the tensor, and as `read` does.
        """
        tensor = self.read(layer_id, expert_id, proj)
        if dim not in (0, 1) or not 0 <= start <= stop <= tensor.shape[dim]:
            raise InvariantError(
                f"asked for [{start}, {stop}) of dimension {dim} of a {list(tensor.shape)} tensor."
            )
        return tensor.narrow(dim, start, stop - start)

    def _open(self, path: Path) -> Any:
        handle = self._files.get(path)
        if handle is None:
            from safetensors import safe_open

            handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._files[path] = handle
        return handle


def _has_dtype(tensor: torch.Tensor, dtype: str) -> bool:
    return str(tensor.dtype) == f"torch.{dtype}"
