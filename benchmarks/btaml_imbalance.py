"""What B-TAML's z, omega and gamma add on class-imbalanced classification tasks.

    python benchmarks/btaml_imbalance.py --tune    # the step sizes, for MAML and for B-TAML with all three on
    python benchmarks/btaml_imbalance.py

Tasks have 5 classes, Gaussian around prototypes in 16 dimensions, each class with its own spread, and each task with
its own distance between prototypes. A support set holds 30 instances, split over the classes at random, 1 to 15 each;
a query set holds 10 of every class. Every variant gets the same tasks, network and iterations. Step sizes are tuned by
the same grid on a seed of its own. Rows go to docs/results; differences are over the same test tasks, paired.
"""

import argparse
import csv
import itertools
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import nestedmaml as nm
from nestedmaml.tasks.counter import bits

WAYS, DIM, SUPPORT, MOST, QUERIES = 5, 16, 30, 15, 10
VARIANTS = {
    "MAML": None,
    "B-TAML, all off": (),
    "B-TAML, z": ("z",),
    "B-TAML, omega": ("omega",),
    "B-TAML, gamma": ("gamma",),
    "B-TAML, no z": ("omega", "gamma"),
    "B-TAML, all on": ("z", "omega", "gamma"),
}


class Imbalanced:
    """Tasks without end, a pure function of seed, split and step."""

    def __init__(self, seed, split):
        self.seed, self.split = seed, split

    def sample(self, step, count):
        parts = [self.task(step * count + i) for i in range(count)]
        return nm.TaskBatch(*[[torch.from_numpy(part) for part in column] for column in zip(*parts, strict=True)])

    def task(self, i):
        rng = np.random.default_rng(int(bits(self.seed, f"imbalanced/{self.split}", i)))
        prototypes = rng.normal(size=(WAYS, DIM)) * rng.uniform(0.3, 1.5)
        spread = rng.uniform(0.3, 1.5, size=WAYS)
        counts = self.counts(rng)
        labels = [np.repeat(np.arange(WAYS), counts), np.repeat(np.arange(WAYS), QUERIES)]
        xs = [prototypes[y] + spread[y, None] * rng.normal(size=(len(y), DIM)) for y in labels]
        (sx, qx), (sy, qy) = [x.astype(np.float32) for x in xs], labels
        return sx, sy, qx, qy

    @staticmethod
    def counts(rng):
        """Class sizes of 1 to MOST with the sum SUPPORT: random shares, drawn again until they fit."""
        while True:
            counts = 1 + rng.multinomial(SUPPORT - WAYS, rng.dirichlet(np.full(WAYS, 0.7)))
            if counts.max() <= MOST:
                return counts


def learner(variant, seed, options):
    model = nm.models.mlp((DIM, 64, 64, WAYS), seed=seed)
    common = {
        "loss": nm.losses.cross_entropy, "inner_lr": options.inner_lr, "inner_steps": options.inner_steps,
        "meta_lr": options.meta_lr, "seed": seed,
    }  # fmt: skip
    on = VARIANTS[variant]
    if on is None:
        return nm.MAML(model, **common)
    use = {f"use_{name}": name in on for name in ("z", "omega", "gamma")}
    return nm.BTAML(model, **use, kl_weight=options.kl_weight, initial_sd=options.initial_sd, **common)


def run(variant, seed, options, split="test"):
    began = time.perf_counter()
    trained = learner(variant, seed, options)
    trained.fit(Imbalanced(seed, "train"), iterations=options.iterations, batch=options.batch, compile=False)
    seconds = time.perf_counter() - began
    result = trained.evaluate(Imbalanced(seed, split), tasks=options.tasks)
    row = {
        "variant": variant, "seed": seed, "split": split, "accuracy": result.mean, "ci95": result.ci95,
        "parameters": sum(p.numel() for p in trained.params.values()), "iterations": options.iterations,
        "batch": options.batch, "inner_lr": options.inner_lr, "inner_steps": options.inner_steps,
        "meta_lr": options.meta_lr, "kl_weight": options.kl_weight, "seconds": round(seconds, 1),
    }  # fmt: skip
    diverged = sum(row["diverged"] for row in trained.history)
    settings = f"inner_lr {options.inner_lr:g} meta_lr {options.meta_lr:g}"
    print(f"seed {seed}  {variant:16s} {settings}  {result}  {seconds:.0f} s  diverged {diverged:.0f}", flush=True)
    return row, result.values


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def summarise(rows):
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        line = f"{variant:16s} {statistics.mean(float(row['accuracy']) for row in own):6.2f}"
        if "over_maml" in own[0] and variant != "MAML":
            # over test tasks, paired, and over seeds: the wider of the two
            gaps = [float(row["over_maml"]) for row in own]
            within = math.hypot(*(float(row["standard_error"]) for row in own)) / len(own)
            between = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
            line += f"  {statistics.mean(gaps):+.2f} over MAML, standard error {max(within, between):.2f}"
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try a grid of step sizes on seed 100")
    parser.add_argument("--iterations", type=int, help="1000, or 500 with --tune")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=600, help="tasks of an evaluation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--inner-lr", type=float, default=0.1)
    parser.add_argument("--inner-steps", type=int, default=3)
    parser.add_argument("--meta-lr", type=float, default=1e-3)
    parser.add_argument("--kl-weight", type=float, default=1.0)
    parser.add_argument("--initial-sd", type=float, default=0.1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.iterations = options.iterations or (500 if options.tune else 1000)
    results = Path("docs/results")
    if options.tune:
        rows = []
        for variant in options.variants or ["MAML", "B-TAML, all on"]:
            for options.inner_lr, options.meta_lr in itertools.product((0.03, 0.1, 0.3), (1e-3, 3e-3, 1e-2)):
                rows.append(run(variant, 100, options, "val")[0])
        write(options.out or results / "btaml_imbalance_tuning.csv", rows)
        return
    options.variants = options.variants or list(VARIANTS)
    rows, values = [], {}
    for seed in options.seeds:
        for variant in options.variants:
            row, values[variant, seed] = run(variant, seed, options)
            if "MAML" in options.variants:
                gap = values[variant, seed] - values["MAML", seed]
                row |= {"over_maml": gap.mean().item(), "standard_error": gap.std().item() / math.sqrt(len(gap))}
            rows.append(row)
    write(options.out or results / "btaml_imbalance.csv", rows)
    summarise(rows)


if __name__ == "__main__":
    main()
