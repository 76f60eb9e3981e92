"""MMAML against MAML where tasks have two modes: half sines, half lines, all of them clean.

    python benchmarks/mmaml_modes.py [--iterations 3000] [--jobs 3] [--out docs/results/mmaml_modes.csv]

Every run has the network 1-40-40-1, 10 shots, 10 queries, 25 tasks an iteration, 5 inner steps of 0.01, and Adam. A
seed draws the pool of 10,000 training tasks and the initial network. Each method takes the meta step size of the grid
that has the lowest error on 1,000 validation tasks, averaged over seeds; the test tasks, 2,000, are the same for all
runs. Rows: each run, then each method's choice, then the paired difference, with its interval over seeds and tasks.
"""

import argparse
import csv
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

import nestedmaml as nm

METHODS = {
    "maml": (nm.MAML, {}),
    "mmaml": (nm.MMAML, {"modulation": "film"}),
    "mmaml-sigmoid": (nm.MMAML, {"modulation": "sigmoid"}),
}
GRID = (3e-4, 1e-3, 3e-3)
COLUMNS = ("row", "method", "meta_lr", "seed", "iterations", "parameters", "val_mse", "test_mse", "sines", "lines",
           "ci95", "seconds_per_iteration")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="methods that run at once")
    parser.add_argument("--out", type=Path, default=Path("docs/results/mmaml_modes.csv"))
    options = parser.parse_args()

    test = pool("test")
    lines = torch.cat([test.corrupt(test.sample_ids(step, 100)) for step in range(20)])
    rows, scores = [], {}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as executor:
        tasks = [executor.submit(runs, name, options.seeds, options.iterations, lines) for name in METHODS]
        for task in tasks:
            rows += task.result()[0]
            scores |= task.result()[1]

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


def pool(split):
    return nm.tasks.Sinusoid(10, ratio=0.5, size=10_000, seed=1, split=split)


def runs(name, seeds, iterations, lines):
    """All runs of one method, which share what is compiled: rows, and the error on each test task."""
    torch.set_num_threads(1)
    kind, extra = METHODS[name]
    rows, scores = [], {}
    for meta_lr in GRID:
        for seed in seeds:
            learner = kind(nm.models.mlp(seed=seed), meta_lr=meta_lr, seed=seed, **extra)
            source = nm.tasks.Sinusoid(10, ratio=0.5, seed=seed)
            learner.fit(source, iterations=min(5, iterations), batch=25, compile=iterations >= 2000)
            began = time.perf_counter()
            learner.fit(source, iterations=iterations, batch=25, compile=False)
            seconds = (time.perf_counter() - began) / max(iterations - 5, 1)
            values = learner.evaluate(pool("test"), tasks=2000).values
            scores[name, meta_lr, seed] = values
            row = {
                "row": "run", "method": name, "meta_lr": meta_lr, "seed": seed, "iterations": iterations,
                "parameters": sum(p.numel() for p in learner.params.values()),
                "val_mse": learner.evaluate(pool("val"), tasks=1000).mean, "test_mse": values.mean().item(),
                "sines": values[~lines].mean().item(), "lines": values[lines].mean().item(),
                "ci95": 1.96 * values.std().item() / len(values) ** 0.5, "seconds_per_iteration": seconds,
            }  # fmt: skip
            rows.append(row)
            print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows, scores


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
