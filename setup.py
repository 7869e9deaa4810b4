"""What pyproject.toml cannot say: two folders are installed under longer names.

`kernels/` is `sgl_esft_kernels` and `launch/` is `sgl_esft_launch`. The folders keep their short
names for readers; as installed names those are too generic to own (a package called kernels is on
the public index, and SGLang knows it).
"""

from setuptools import find_packages, setup

RENAMED = {"sgl_esft_kernels": "kernels", "sgl_esft_launch": "launch"}

setup(
    packages=[
        *find_packages(include=["sgl_esft*", "sgl_elastic*"]),
        *RENAMED,
        *(f"{name}.{inner}" for name, folder in RENAMED.items() for inner in find_packages(folder)),
    ],
    package_dir=RENAMED,
)
