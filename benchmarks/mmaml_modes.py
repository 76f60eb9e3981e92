"""MMAML against MAML where tasks have two modes: half sines, half lines, all of them clean.

    python benchmarks/mmaml_modes.py [--iterations 3000] [--out docs/results/mmaml_modes.csv]

Every run has the network 1-40-40-1, 10 shots, 10 queries, 25 tasks an iteration, 5 inner steps of 0.01, and Adam. A
seed draws the pool of 10,000 training tasks and the initial network. Each method takes the meta step size of the grid
that has the lowest error on 1,000 validation tasks, averaged over seeds; the test tasks, 2,000, are the same for all
runs. Rows: each run, then each method's choice, then the paired difference, with its interval over seeds and tasks.
"""

import argparse
import csv
import time
from pathlib import Path

import torch

import nestedmaml as nm

METHODS = {
    "maml": lambda **options: nm.MAML(**options),
    "mmaml": lambda **options: nm.MMAML(**options),
    "mmaml-sigmoid": lambda **options: nm.MMAML(modulation="sigmoid", **options),
}
GRID = (1e-3, 3e-3, 1e-2)
COLUMNS = ("row", "method", "meta_lr", "seed", "iterations", "parameters", "val_mse", "test_mse", "sines", "lines",
           "ci95", "seconds_per_iteration")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("docs/results/mmaml_modes.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)

    val, test = (nm.tasks.Sinusoid(10, ratio=0.5, size=10_000, seed=1, split=split) for split in ("val", "test"))
    lines = torch.cat([test.corrupt(test.sample_ids(step, 100)) for step in range(20)])
    rows, scores = [], {}
    for name, build in METHODS.items():
        for meta_lr in GRID:
            for seed in options.seeds:
                learner = build(model=nm.models.mlp(seed=seed), meta_lr=meta_lr, seed=seed)
                source = nm.tasks.Sinusoid(10, ratio=0.5, seed=seed)
                learner.fit(source, iterations=min(5, options.iterations), batch=25, compile=options.iterations >= 2000)
                began = time.perf_counter()
                learner.fit(source, iterations=options.iterations, batch=25, compile=False)
                seconds = (time.perf_counter() - began) / max(options.iterations - 5, 1)
                result = learner.evaluate(test, tasks=2000)
                scores[name, meta_lr, seed] = result.values
                row = {
                    "row": "run", "method": name, "meta_lr": meta_lr, "seed": seed, "iterations": options.iterations,
                    "parameters": sum(p.numel() for p in learner.params.values()),
                    "val_mse": learner.evaluate(val, tasks=1000).mean, "test_mse": result.mean,
                    "sines": result.values[~lines].mean().item(), "lines": result.values[lines].mean().item(),
                    "ci95": result.ci95, "seconds_per_iteration": seconds,
                }  # fmt: skip
                rows.append(row)
                print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)

    chosen = {}
    for name in METHODS:
        best = min(GRID, key=lambda lr: sum(r["val_mse"] for r in rows if (r["method"], r["meta_lr"]) == (name, lr)))
        chosen[name] = torch.stack([scores[name, best, seed] for seed in options.seeds])
        rows.append(summary("chosen", name, chosen[name], lines, meta_lr=best, iterations=options.iterations))
    for name in ("mmaml", "mmaml-sigmoid"):
        rows.append(summary("difference", f"{name} - maml", chosen[name] - chosen["maml"], lines))
    for row in rows[-len(METHODS) - 2 :]:
        print(row)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def summary(row, method, values, lines, **more):
    """The mean of ``values [seeds, tasks]``, and its bootstrap interval over seeds and tasks."""
    generator = torch.Generator().manual_seed(0)
    seeds, tasks = values.shape
    means = [
        values[torch.randint(seeds, (seeds,), generator=generator)]
        .mean(0)[torch.randint(tasks, (tasks,), generator=generator)]
        .mean()
        for _ in range(2000)
    ]
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return {
        "row": row, "method": method, "test_mse": values.mean().item(), "sines": values[:, ~lines].mean().item(),
        "lines": values[:, lines].mean().item(), "ci95": (high - low) / 2, **more,
    }  # fmt: skip


if __name__ == "__main__":
    main()
