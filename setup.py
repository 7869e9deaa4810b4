"""What pyproject.toml cannot say: the folder `kernels/` is installed as `sgl_esft_kernels`.

The folder keeps its short name for readers; `kernels` is too generic to own as an installed name
(a package of that name is on the public index, and SGLang knows it).
"""

from setuptools import find_packages, setup

KERNELS = "sgl_esft_kernels"

setup(
    packages=[
        *find_packages(include=["sgl_esft*", "sgl_elastic*"]),
        KERNELS,
        *(f"{KERNELS}.{name}" for name in find_packages(where="kernels")),
    ],
    package_dir={KERNELS: "kernels"},
)
