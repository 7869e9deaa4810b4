"""Make ``import torchvision`` work next to a CPU build of torch.

The public x86 wheel of torchvision is a CUDA build. Its C++ part does not load
beside a CPU torch, so the operators it registers fakes for do not exist and the
import fails. transformers imports torchvision for image processors that no text
model uses. Declaring the two schemas, with no implementation behind them, is
enough; calling one still fails, with torch's own message.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# torch drops a Library's registrations with the object, so it lives as long as the process.
_library: object | None = None


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Runs `define_missing_schemas` when somebody first looks for torchvision.

    Lazy, so that tools which need no torch do not pay for importing it.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            define_missing_schemas()
        return None


def install() -> None:
    """Arrange for the schemas to be there by the time torchvision is imported."""
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _BeforeTorchvision())


def define_missing_schemas() -> bool:
    """Declare torchvision's operators if its C++ part cannot.

    Returns True when something was declared. Does nothing where torch is a GPU
    build, where torchvision is absent, or where its operators exist already.
    """
    global _library
    if _library is not None or not _is_needed():
        return False
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _library = library
    return True


def _is_needed() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or importlib.util.find_spec("torch") is None:
        return False
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return False
    if hasattr(torch.ops.torchvision, "nms"):
        return False
    return not _loads_natively(Path(spec.origin).parent)


def _loads_natively(package_dir: Path) -> bool:
    import torch

    for library in package_dir.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
        return True
    return False
