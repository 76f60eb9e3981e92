"""Runs, one after the other or several at a time: what is done is skipped, what ends is written at once."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nestedmaml.experiments.results import Results, Row, atomic_write, config_hash

if TYPE_CHECKING:
    from nestedmaml.experiments.options import Options
    from nestedmaml.experiments.sinusoid import Run

__all__ = ["Runnable", "execute", "train_and_score"]

log = logging.getLogger("nestedmaml")


class Runnable(Protocol):
    """One run: what it is, before and after."""

    @property
    def options(self) -> Options:
        """The experiment's options."""
        ...

    @property
    def name(self) -> str:
        """The run's folder."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """All that can change its numbers."""
        ...

    @property
    def row(self) -> Row:
        """Its row, the value aside."""
        ...

    def __call__(self, folder: Path) -> list[Row]:
        """Run it."""
        ...


def execute(runs: Sequence[Runnable], out: Path, *, resume: bool, jobs: int) -> list[Row]:
    """Run all that is not in ``out``/results.csv yet; without ``resume``, a row that is there is an error."""
    from tqdm import tqdm

    for device in dict.fromkeys(run.options.device for run in runs):
        require(device)
    results = Results(out)
    hashes = [config_hash(run.config) for run in runs]
    rows = [dataclasses.replace(run.row, config=h) for run, h in zip(runs, hashes, strict=True)]
    done = [results.has(row) for row in rows]
    if any(done) and not resume:
        first = rows[done.index(True)]
        more = f", and {sum(done) - 1} more of these runs," if sum(done) > 1 else ""
        raise FileExistsError(
            f"{results.path} holds {first.method} with seed {first.seed}{more} already: "
            "pass --resume to skip what is there, or another --out"
        )
    for run in runs:
        results.save_config(run.config)
    todo = [(run, h) for run, h, there in zip(runs, hashes, done, strict=True) if not there]
    written: list[Row] = []
    bar = tqdm(total=len(runs), initial=sum(done), desc="runs", disable=not sys.stderr.isatty())
    with bar:
        for name, new in _outcomes(todo, out, jobs):
            results.append(new)
            written += new
            bar.update()
            said = next((r for r in new if r.metric in ("mse", "accuracy")), new[0])
            bar.write(f"{name}: {said.metric} {said.value:.4g}" + (f" ± {said.ci95:.2g}" if said.ci95 else ""))
    return written


def require(device: str) -> None:
    """Refuse a device that is not there, before anything is written."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from None


def _outcomes(todo: list[tuple[Any, str]], out: Path, jobs: int) -> Any:
    if jobs == 1 or len(todo) < 2:
        for run, config in todo:
            yield run.name, _one(run, out, config)
        return
    import multiprocessing

    # processes are kept, and runs are dealt out in order, so that each compiles a shape once
    with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_one, run, out, config): run.name for run, config in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _one(run: Any, out: Path, config: str) -> list[Row]:
    return [dataclasses.replace(row, config=config) for row in run(out / "runs" / run.name)]


def train_and_score(run: Run, folder: Path) -> list[Row]:
    """Train one learner, follow its test error, and write history, weights and what the page shows of it."""
    import torch

    from nestedmaml.experiments.presets import preset
    from nestedmaml.experiments.sinusoid import TEST_TASKS

    o = run.options
    torch.set_num_threads(o.threads)
    sources, learner = run.sources(), run.learner()
    pool = {"train": sources["train"], "val": sources["val"]}.get(preset(run.method).trains_on)
    if pool is None:
        from nestedmaml.tasks import Both

        pool = Both(sources["train"], sources["val"])
    every = max(1, run.iterations // 20)

    def follow(learner: Any, figures: dict[str, float]) -> None:
        if learner.iteration % every == 0:
            figures["test"] = learner.evaluate(sources["test"], min(200, TEST_TASKS[o.scale])).mean

    if folder.exists() and not (o.resume and (folder / "checkpoint").exists()):
        shutil.rmtree(folder)
    began = time.perf_counter()
    compile: Any = {"yes": True, "no": False}.get(o.compile, "auto")
    learner.fit(
        pool, sources["val"], iterations=run.iterations, batch=o.batch, val_batch=o.val_batch, device=o.device,
        out=folder, resume=o.resume, callbacks=[follow], every=every, decay=o.decay, compile=compile,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if learner.iteration < run.iterations:
        raise KeyboardInterrupt
    result = learner.evaluate(sources["test"], TEST_TASKS[o.scale])
    row = dataclasses.replace(run.row, value=result.mean, ci95=result.ci95, seconds=seconds)
    rows = [row]
    if (area := auroc(learner, sources["train"])) is not None and preset(run.method).nested:
        rows.append(dataclasses.replace(row, metric="auroc", value=area, ci95=None))
    about = {
        "experiment": row.experiment,
        "method": run.method,
        "weighting": run.weighting,
        "seed": run.seed,
        "cell": {"shots": run.shots, "ratio": run.ratio},
        "fits": [fit(learner, sources["test"], task) for task in range(3)],
        "parameters": sum(p.numel() for p in learner.params.values()),
        "protocol": {
            "Device": str(torch.device(o.device)),
            "Versions": f"torch {torch.__version__}, Python {platform.python_version()}",
            "Tasks": f"{o.pool} training, {o.val_size} validation, {TEST_TASKS[o.scale]} test tasks, "
            f"batches of {o.batch} and {o.val_batch}",
        },
    }
    atomic_write(folder / "run.json", json.dumps(about))
    return rows


def auroc(learner: Learner, source: Any) -> float | None:
    """How well the weights tell clean tasks from corrupt ones: the chance that a clean one weighs more."""
    if learner.state.rule is None or not hasattr(source, "corrupt"):
        return None
    from scipy.stats import rankdata

    ids = source.ids
    corrupt = source.corrupt(ids).numpy()
    clean, bad = int((~corrupt).sum()), int(corrupt.sum())
    if not clean or not bad:
        return None
    ranks = rankdata(learner.weights.at(ids).double().cpu().numpy())
    return float((ranks[~corrupt].sum() - clean * (clean + 1) / 2) / (clean * bad))


def fit(learner: Learner, source: Any, task: int) -> dict[str, list[float]]:
    """One test task as a picture: the function, the support points, the model before and after adaptation."""
    import numpy as np
    import torch

    ids = torch.tensor([task])
    one = source.draw(ids)
    x = np.linspace(-5, 5, 101)
    grid = torch.from_numpy(x.astype(np.float32))[:, None]
    adapted = learner.adapt(one.support_x[0], one.support_y[0])
    with torch.no_grad():
        before = learner.model()(grid.to(next(iter(learner.params.values())).device))
    curves = {
        "x": x,
        "truth": source.function(ids, x[None])[0],
        "before": before.cpu(),
        "after": adapted.predict(grid).cpu(),
        "support_x": one.support_x[0],
        "support_y": one.support_y[0],
    }
    return {name: [round(float(v), 5) for v in np.asarray(curve).reshape(-1)] for name, curve in curves.items()}


if TYPE_CHECKING:
    from nestedmaml.learner import Learner
