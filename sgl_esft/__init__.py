"""Many ESFT adapters on one base model, through unmodified SGLang.

Importing this package is cheap and must come before SGLang: Python's ``spawn``
re-imports the main module in every child process, so what stands here runs in
each of them before any SGLang code does.
"""

from sgl_esft.observe.console import begin as _begin_console
from sgl_esft.platform.torchvision_schemas import install as _install_torchvision_schemas

__version__ = "0.1.0"

_begin_console()
_install_torchvision_schemas()
