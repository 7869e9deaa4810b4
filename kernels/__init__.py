"""Rerouting kernels: from the router's expert ids to slots of the expert tensor.

    reroute_ref.py   the definition, in plain torch, as the paper's unfused chain

Installed as `sgl_esft_kernels`. Knows neither SGLang nor `sgl_esft`.
"""

from sgl_esft_kernels.reroute_ref import reroute_unfused

__all__ = ["reroute_unfused"]

# The model hub's package is called "kernels" too. Where the checkout's root is on the import path,
# transformers finds this folder under that name and asks for its version; a version below the
# hub package's first tells it that the hub package is absent.
__version__ = "0"
