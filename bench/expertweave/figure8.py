"""The paper's figure 8: what virtual expert memory costs a step, over padded.

    padded  <- virtual, padded again: woven servers, one adapter's requests

The servers, the turns and the layout of the rows: bench/expertweave/steps.py and
bench/common/sweep.py. The paper
(5.3) found under 3% for TTFT and under 1% for TPOT.
"""

from __future__ import annotations

from bench.common.sweep import Model, Plan, Sweep, Traffic, open_model, options_of, plan_of, report

PLAN = Plan(seconds=7.0)
GOALS = {"virtual over padded, TTFT": 1.03, "virtual over padded, TPOT": 1.01}
MEMORY = {"padded": "padded", "padded again": "padded", "virtual": "virtual"}


def traffic(model: Model) -> Traffic:
    """One adapter's requests to all."""
    return Traffic("adapter", "padded", {name: (name, model.adapter) for name in MEMORY})


def main() -> None:
    """Measure and write bench/results/expertweave_figure8.json."""
    options = options_of(__doc__.partition("\n")[0])
    with open_model(options.model) as model:
        sweep = Sweep(
            "expertweave_figure8",
            plan_of(options, PLAN),
            [traffic(model)],
            {
                "what": "TTFT and TPOT of virtual over padded expert memory",
                "model": model.name,
                "goals": GOALS,
            },
            options.out,
        )
        systems = [model.woven(name, "--expert-memory", kind) for name, kind in MEMORY.items()]
        report(sweep, sweep.run(systems))


if __name__ == "__main__":
    main()
