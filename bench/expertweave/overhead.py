"""What weaving costs requests that use no adapter: decode throughput, paired and alternating.

    two servers, the same SGLang and base: [weaving on, adapters loaded] and [weaving off]
    -> the same all-base batch to one, then to the other, many times -> ratio of each pair

The order within a pair alternates, so that drift of the machine cancels, and
runs are short and many, because a shared machine is noisy. The idle server
sleeps. Beside the wall clock the processor time of the server's processes is
taken: it is what weaving adds, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from dataclasses import dataclass

from bench.common.process_watch import cpu_seconds
from bench.common.record import spread, write_result
from sgl_esft import zoo
from sgl_esft.zoo import serving

GOAL = 0.97  # weaving may cost all-base traffic at most 3% of its decode throughput


@dataclass(frozen=True)
class Run:
    """One batch on one server: output tokens a second, by the wall clock and by processor time."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Target:
    """A server."""

    url: str

    def run(self, num_requests: int, num_tokens: int) -> Run:
        body = {
            "text": [f"request {i}: hello" for i in range(num_requests)],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": num_tokens,
                "ignore_eos": True,
            },
        }
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        cpu, wall = cpu_seconds(self.url), time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as response:
            response.read()
        wall, cpu = time.perf_counter() - wall, cpu_seconds(self.url) - cpu
        return Run(wall=num_requests * num_tokens / wall, cpu=num_requests * num_tokens / cpu)


def measure(
    woven: Target, plain: Target, num_pairs: int, num_requests: int, num_tokens: int
) -> dict[str, object]:
    """Throughput of both servers for each pair, and the spread of woven / plain."""
    pairs = []
    for pair in range(-2, num_pairs):  # two pairs warm up
        order = [woven, plain] if pair % 2 else [plain, woven]
        runs = {target: target.run(num_requests, num_tokens) for target in order}
        if pair >= 0:
            pairs.append((runs[woven], runs[plain]))
    return {
        "num_requests": num_requests,
        "num_tokens": num_tokens,
        "pairs": num_pairs,
        "woven_tokens_per_second": spread([w.wall for w, _ in pairs]),
        "plain_tokens_per_second": spread([p.wall for _, p in pairs]),
        "woven_over_plain": spread([w.wall / p.wall for w, p in pairs]),
        "woven_over_plain_cpu": spread([w.cpu / p.cpu for w, p in pairs]),
    }


def main() -> None:
    """Measure at several batch sizes and write bench/results/overhead.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=60, help="counted pairs of runs")
    parser.add_argument("--num-tokens", type=int, default=48)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    base, adapters = zoo.base_path(), zoo.adapter_paths()
    common = ["--max-total-tokens", "32768", "--log-level", "warning", "--disable-radix-cache"]
    rows = []
    with (
        serving.server([*serving.woven_arguments(base, adapters), *common]) as woven_url,
        serving.server([*serving.merged_arguments(base), *common]) as plain_url,
    ):
        for batch_size in options.batch_sizes:
            row = measure(
                Target(woven_url), Target(plain_url), options.pairs, batch_size, options.num_tokens
            )
            rows.append(row)
            print(
                f"batch {batch_size}: {row['woven_over_plain']} {row['woven_over_plain_cpu']}",
                flush=True,
            )
    path = write_result(
        "overhead",
        {
            "what": "all-base decode throughput, weaving on over weaving off",
            "goal": GOAL,
            "adapters_loaded": sorted(adapters),
            "rows": rows,
        },
    )
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
