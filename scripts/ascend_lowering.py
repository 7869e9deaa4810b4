"""What Ascend's compiler makes of our kernels, as text; needs no NPU and no CANN.

Request -> [ascend_lowering] -> ascend_compiler.py in build/ascend-venv -> Linalg text
`python -m scripts.ascend_lowering --k 6 --num-adapters 20 --num-experts 64` prints reroute's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.ascend_env import make
from sgl_esft_kernels.reroute_triton_ascend import plan_blocks

ROOT = Path(__file__).resolve().parent.parent
COMPILER = ROOT / "scripts" / "ascend_compiler.py"
REROUTE = ROOT / "kernels" / "reroute_triton_ascend_kernel.py"
ID_TYPES = {"int32": "*i32", "int64": "*i64"}


class LoweringError(RuntimeError):
    """The compiler refused a kernel; its own words are in the message."""


@dataclass(frozen=True)
class Request:
    """One specialisation of a kernel.

    signature: Triton's type of each run-time argument, such as `*i32`.
    constants: the value of each compile-time argument.
    """

    source: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, int]


def reroute_request(id_dtype: str, k: int, num_adapters: int, num_experts: int) -> Request:
    """What the server asks for with a map of [num_adapters + 1, num_experts]."""
    num_rows = num_adapters + 1
    signature = {
        "topk_ids_ptr": ID_TYPES[id_dtype],
        "token_adapter_slots_ptr": "*i32",
        "expert_map_ptr": "*i32",
        "out_ptr": ID_TYPES[id_dtype],
        "num_tokens": "i32",
    }
    constants = plan_blocks(k, num_rows * num_experts).constants()
    constants |= {"NUM_ROWS": num_rows, "NUM_EXPERTS": num_experts}
    return Request(str(REROUTE), "reroute_kernel", signature, constants)


def lower(requests: list[Request]) -> list[str]:
    """Each kernel as Linalg text. Raises LoweringError, AscendEnvironmentError."""
    command = [str(make()), str(COMPILER)]
    asked = json.dumps([asdict(request) for request in requests])
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoweringError(done.stderr)
    texts: list[str] = json.loads(done.stdout)
    return texts


def main() -> None:
    """Print one specialisation of reroute."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--id-dtype", choices=ID_TYPES, default="int32")
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--num-adapters", type=int, default=20)
    parser.add_argument("--num-experts", type=int, default=64)
    asked = parser.parse_args()
    request = reroute_request(asked.id_dtype, asked.k, asked.num_adapters, asked.num_experts)
    print(lower([request])[0])


if __name__ == "__main__":
    main()
