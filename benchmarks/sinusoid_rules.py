"""What was tried on the way to the default rule: K = 10, 90 % lines, 5,000 iterations of 25 + 25 tasks.

    python benchmarks/sinusoid_rules.py --out docs/results/sinusoid-rules.csv --jobs 2 --seeds 0 1

Each line changes one thing in the default (`nested`), which comes first; rows that are there are not run again.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

CHECKPOINTS = (1_250, 2_500, 5_000)
BASE = {"val_share": 0.75, "val_steps": 5}


def variants() -> dict[str, tuple[str, dict, dict]]:
    """By name: the rule's kind, its options, the learner's options."""
    out: dict[str, tuple[str, dict, dict]] = {"default": ("Cluster", {}, BASE)}
    alone = {**BASE, "val_share": 0.0}  # the validation gradient moves the weights alone, as in the paper
    for share in (0.0, 0.25, 0.5, 0.9):
        out[f"val_share={share}"] = ("Cluster", {}, {**BASE, "val_share": share})
    out["val_steps=1"] = ("Cluster", {}, {**BASE, "val_steps": 1})
    out["val_steps=1, val_share=0"] = ("Cluster", {}, {**alone, "val_steps": 1})
    for kind in ("Task", "Amortised"):
        out[f"{kind}"] = (kind, {}, BASE)
        out[f"{kind}, val_share=0"] = (kind, {}, alone)
    changes = {
        "margin": (0.0, 0.25, 0.75, 1.0),
        "cosine": (0.0, 0.5),
        "optimizer": ("adam", "sgd"),
        "lr": (0.1, 0.3, 3.0),
        "bound": (3.0, 5.0, 20.0),
        "normalize": ("none", "batch", "window"),
        "mirror": (False,),
        "anchored": (False,),
        "k": (20, 50, 1000),
        "warmup": (500,),
    }
    for name, values in changes.items():
        for value in values:
            rule = {name: value}
            if value == "adam":
                rule["lr"] = 0.3
            if value == "sgd":
                rule["lr"] = 100.0
            out[f"{name}={value}, val_share=0"] = ("Cluster", rule, alone)
    out["no guard, val_share=0"] = ("Cluster", {}, {**alone, "guard": 1e30})
    out["order=first, val_share=0"] = ("Cluster", {}, {**alone, "order": "first"})
    out["val_average=0.9, val_share=0"] = ("Cluster", {}, {**alone, "val_average": 0.9})
    for explore in (0.05, 0.1, 0.3):
        weighted = {"sampling": "weighted", "explore": explore}
        out[f"weighted sampling, explore={explore}, val_share=0.5"] = (
            "Cluster", {}, {**BASE, **weighted, "val_share": 0.5},
        )  # fmt: skip
    out["weighted sampling, val_share=0"] = ("Cluster", {}, {**alone, "sampling": "weighted"})
    out["weighted sampling, Amortised, val_share=0.5"] = (
        "Amortised", {}, {**BASE, "sampling": "weighted", "val_share": 0.5},
    )  # fmt: skip
    for kind in ("Cluster", "Task", "Amortised"):
        for gamma in (0.1, 10.0, 100.0):
            if kind != "Amortised" or gamma == 0.1:
                own = {"val_steps": 1, "weight_lr": gamma}
                out[f"paper's form, {kind}, gamma={gamma:g}"] = (f"paper {kind}", {}, own)
    return out


def run(name: str, seed: int) -> list[dict]:
    import torch

    import nestedmaml as nm
    from nestedmaml.experiments.execute import auroc

    torch.set_num_threads(1)
    kind, options, learner_options = variants()[name]
    paper = kind.startswith("paper ")
    cls = getattr(nm.weighting, kind.removeprefix("paper "))
    rule = nm.weighting.paper(cls) if paper else cls(**options)
    learner = nm.NestedMAML(
        nm.models.mlp((1, 40, 40, 1), seed=seed), loss=nm.losses.squared_error, test_steps=10, seed=seed,
        weighting=rule, **learner_options,
    )  # fmt: skip
    train, val = nm.tasks.Sinusoid(10, ratio=0.9, seed=seed), nm.tasks.Sinusoid(10, size=100, seed=seed, split="val")
    test = nm.tasks.Sinusoid(10, size=None, seed=2**20, split="test")
    rows = []
    for iterations in CHECKPOINTS:
        began = time.perf_counter()
        learner.fit(train, val, iterations=iterations, batch=25, val_batch=25, every=250, compile=True)
        seconds = time.perf_counter() - began
        result, weights = learner.evaluate(test, 1000), learner.weights
        corrupt, values = train.corrupt(weights.ids), weights.values.double().cpu()
        rows.append({
            "variant": name, "seed": seed, "iterations": iterations, "mse": result.mean, "ci95": result.ci95,
            "auroc": auroc(learner, train), "weight_clean": values[~corrupt].mean().item(),
            "weight_corrupt": values[corrupt].mean().item(),
            "effective_share_of_clean": (values[~corrupt].sum() ** 2 / values[~corrupt].square().sum()).item() / 1000,
            "diverged": sum(row["diverged"] for row in learner.history), "seconds": seconds,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sinusoid-rules.csv"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    done = set()
    if args.out.exists():
        done = {(r["variant"], int(r["seed"])) for r in csv.DictReader(args.out.open())}
    todo = [(n, s) for s in args.seeds for n in variants() if (n, s) not in done]
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, *job) for job in todo]):
            rows = future.result()
            new = not args.out.exists()
            with args.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                if new:
                    writer.writeheader()
                writer.writerows(rows)
            print(rows[-1]["variant"], rows[-1]["seed"], round(rows[-1]["mse"], 3), flush=True)


if __name__ == "__main__":
    main()
