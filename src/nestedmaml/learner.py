"""What every method gets: fit, step, adapt, evaluate, weights, save, load.

A learner owns a copy of the model, a method (its options, and the pair of init and step), and the method's state.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from nestedmaml import checkpoint, losses, methods, models, weighting
from nestedmaml.adaptation import Params
from nestedmaml.methods import Method, State
from nestedmaml.outcome import Adapted, Result, Weights
from nestedmaml.sampling import require_pool
from nestedmaml.storage import from_json, to_json
from nestedmaml.tasks import TaskBatch, as_source, first_tasks
from nestedmaml.train import append_row, train
from nestedmaml.weighting import Knowledge

__all__ = [
    "BTAML", "L2R", "MAML", "MMAML", "Adapted", "Learner", "NestedMAML", "Result", "TransductiveFineTuning", "Weights",
    "load",
]  # fmt: skip

log = logging.getLogger("nestedmaml")

CACHED_POOL = 65_536  # pools up to this size have their features looked at once
COMPILE_FROM = 2_000  # iterations from which compiling pays for its half minute


class Learner:
    """A model and a method that meta-trains it. The model given is left untouched; parameters are in ``params``.

    Keyword options are those of the method, ``help(nestedmaml.methods.<method>)``.
    """

    kind: ClassVar[type[Method]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        options = list(inspect.signature(cls.kind).parameters.values())
        model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=nn.Module)
        cls.__signature__ = inspect.Signature([model, *options])  # type: ignore[attr-defined]

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        known = inspect.signature(self.kind).parameters
        for name in options:
            if name not in known:
                raise TypeError(f"{self.name} has no option {name!r}; it has {', '.join(known)}")
        options.setdefault("loss", losses.squared_error)
        self.method = self.kind(**options)
        self._module = copy.deepcopy(model)
        params = {n: p.detach().clone() for n, p in self._module.named_parameters()}
        self.state: State = self.method.init(self._module, params)
        self.history: list[dict[str, float]] = []
        self._pending: list[dict[str, float]] = []  # figures since the last row of the history
        self._knowledge: Knowledge | None = None
        self._truth: Callable[[Tensor, str], Tensor] | None = None
        self._source: Any = None
        self._places: Tensor | None = None
        self._fits = False
        self._classes = self.method.loss is losses.cross_entropy

    @property
    def name(self) -> str:
        """The method's name."""
        return type(self).__name__

    @property
    def iteration(self) -> int:
        """Iterations done so far."""
        return self.state.step

    @property
    def params(self) -> Params:
        """The meta-parameters theta."""
        return {n: p.detach() for n, p in self.state.params.items()}

    def model(self) -> nn.Module:
        """A copy of the model that has the meta-parameters."""
        model = copy.deepcopy(self._module)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(self.state.params[n])
        return model

    # Training ----------------------------------------------------------------------------------------------

    def fit(
        self,
        train_source: Any,
        val_source: Any = None,
        iterations: int = 1000,
        batch: int = 10,
        val_batch: int = 10,
        device: torch.device | str | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        callbacks: Iterable[Callable[[Learner, dict[str, float]], Any]] = (),
        every: int = 50,
        save_every: int = 1000,
        decay: bool = False,
        compile: bool | Literal["auto"] = "auto",
    ) -> Learner:
        """Train until ``iterations`` are done in all, going on from where the learner is.

        Args:
            train_source: a source, a list of TaskBatch, or an iterable of (support_x, support_y, query_x, query_y).
            val_source: clean validation tasks, for the methods that use them.
            iterations: the total, those done before included.
            batch: training tasks an iteration, m.
            val_batch: validation tasks an iteration, n.
            device: where to train; None is where the learner is.
            out: a folder for history.csv, weights.csv and the checkpoint.
            resume: go on from the checkpoint in ``out``; start afresh where there is none.
            callbacks: called after each iteration with the learner and the iteration's figures.
            every: iterations from one row of the history to the next.
            save_every: iterations from one checkpoint to the next.
            decay: let the step size of the meta-optimizer fall from ``meta_lr`` to zero, as a cosine.
            compile: compile the gradients with torch.compile; "auto" does for vectorised runs that are long enough
                to gain from it, on a machine that has a compiler.
        """
        for what, value in (
            ("iterations", iterations),
            ("batch", batch),
            ("val_batch", val_batch),
            ("every", every),
            ("save_every", save_every),
        ):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{what} must be an integer >= 1, got {value!r}")
        if compile not in (True, False, "auto"):
            raise ValueError(f"compile must be True, False or 'auto', got {compile!r}")
        source = as_source(train_source)
        val = None if val_source is None else as_source(val_source)
        if self.method.needs_val and val is None:
            raise ValueError(f"{self.name} learns from clean validation tasks: pass a val_source")
        if self.method.needs_truth and not hasattr(source, "corrupt"):
            raise ValueError("a skyline needs a source that knows what is corrupt, by corrupt(ids, level=)")
        if getattr(self.method, "refill", False) or getattr(self.method, "sampling", "") == "weighted":
            require_pool(source, "this way of sampling")
        self.state = self.method.meet(self.state, self._module, source)
        folder = None if out is None else Path(out)
        if folder is not None:
            self._open(folder, resume)
        if device is not None:
            self._move(torch.device(device))
        self._prepare(source)
        self._check(first_tasks(source, batch))
        if val is not None and self.method.needs_val:
            self._check(first_tasks(val, val_batch))
        self._compile(compile, iterations - self.iteration)
        savers: list[Callable[..., Any]] = []
        if folder is not None:

            def save(learner: Learner, figures: dict[str, float]) -> None:
                if learner.iteration % save_every == 0 and learner.iteration < iterations:
                    learner.save(folder / "checkpoint")

            savers = [save]
        train(
            self, source, val, iterations=iterations, batch=batch, val_batch=val_batch, out=folder,
            callbacks=[*callbacks, *savers], every=every, score=folder is not None,
            decay=decay,
        )  # fmt: skip
        if folder is not None:
            self.save(folder / "checkpoint")
            self._write_weights(folder / "weights.csv")
        return self

    def step(self, train_batch: TaskBatch, val_batch: TaskBatch | None = None) -> dict[str, float]:
        """One iteration, for a loop of one's own; a rule that needs to know the pool takes this batch for it."""
        if not self.method.pretrains and not self._fits:
            self._check(train_batch)
        if self._knowledge is None and self.method.weighting is not None:
            self._know(Knowledge(self._source, self.method.weighting.level, self.method.seed, train_batch), train_batch)
        return self._iterate(train_batch, val_batch, None)

    def prepare(self, train_source: Any) -> Learner:
        """Let rules see the pool before a loop of one's own: K-means for clusters, ids for tables."""
        self._prepare(as_source(train_source))
        return self

    def _prepare(self, source: Any) -> None:
        self._source, self._places = source, None
        if self.method.needs_truth:
            self._truth = lambda ids, level: source.corrupt(ids, level=level)
        rule = self.method.weighting
        if rule is not None:
            knowledge = Knowledge(source, rule.level, self.method.seed)
            self._know(knowledge, None if self.state.rule is not None else first_tasks(source, 1))

    def _know(self, knowledge: Knowledge, example: TaskBatch | None) -> None:
        self._knowledge = knowledge
        if self.state.rule is None and example is not None:
            assert self.method.weighting is not None
            device = next(iter(self.state.params.values())).device
            self.state.rule = self.method.weighting.init(knowledge, queries=example.queries, device=device)

    def _iterate(self, tasks: Any, val: TaskBatch | None, correction: Tensor | None) -> dict[str, float]:
        like = next(iter(self.state.params.values()))
        if self.method.pretrains and not isinstance(tasks, TaskBatch):
            return self.method.step(self.state, self._module, tuple(part.to(like.device) for part in tasks), None)  # type: ignore[arg-type]
        for part in (tasks, val):
            if part is not None and part.query_x.device.type == "cpu":
                part.require_finite()
        return self.method.step(
            self.state, self._module, tasks.to(like.device, like.dtype),
            None if val is None else val.to(like.device, like.dtype),
            knowledge=self._knowledge, correction=correction, truth=self._truth,
        )  # fmt: skip

    def _check(self, batch: TaskBatch) -> None:
        """Run the model once on a task, for an error that says what does not fit before anything is trained."""
        batch.require_finite()
        like = next(iter(self.state.params.values()))
        one = batch.take(slice(0, 1)).to(like.device, like.dtype)
        with torch.no_grad():
            self.method.predictions(self.state, self._module, one)
        self._fits = True

    def _compile(self, wanted: bool | Literal["auto"], iterations: int) -> None:
        if not wanted or (wanted == "auto" and iterations < COMPILE_FROM):
            return
        self.method.use_compiler(self._module, self.state.params, forced=wanted is True)

    def _move(self, device: torch.device) -> None:
        if next(iter(self.state.params.values())).device == device:
            return
        tensors, meta = self._pack()
        self._module.to(device)
        self.method.forget()
        self.state = self.method.init(self._module, {n: p.to(device) for n, p in self.params.items()})
        self._unpack({n: t.to(device) if t.ndim else t for n, t in tensors.items()}, meta)

    # Use ---------------------------------------------------------------------------------------------------

    def adapt(self, support_x: Tensor, support_y: Tensor, query_x: Tensor | None = None) -> Adapted:
        """The model adapted to one task; ``query_x`` is used by transductive methods alone."""
        like = next(iter(self.state.params.values()))
        support_x, support_y = (_like(part, like) for part in (support_x, support_y))
        query_x = None if query_x is None else _like(query_x, like)
        predict, params = self.method.adapt(self.state, self._module, support_x, support_y, query_x)
        return Adapted(lambda x: predict(_like(x, like)), self._classes or not support_y.is_floating_point(), params)

    @torch.no_grad()
    def evaluate(self, test_source: Any, tasks: int = 600) -> Result:
        """The score over ``tasks`` test tasks: percent correct for classes, mean squared error for values."""
        if tasks < 1:
            raise ValueError(f"an evaluation needs at least one task, got {tasks}")
        source, like = as_source(test_source), next(iter(self.state.params.values()))
        tasks = min(tasks, getattr(source, "total", tasks))  # ready batches are scored once each
        values: list[Tensor] = []
        done = step = 0
        while done < tasks:
            batch = source.sample(step, min(100, tasks)).take(slice(0, tasks - done)).to(like.device, like.dtype)
            batch.require_finite()
            out = self.method.predictions(self.state, self._module, batch)
            if batch.query_y.is_floating_point():
                if out.numel() != batch.query_y.numel():
                    raise ValueError(
                        f"the model's outputs {list(out.shape)} do not fit the targets {list(batch.query_y.shape)}"
                    )
                out = out.reshape(batch.query_y.shape)
                values.append((out - batch.query_y).square().flatten(1).mean(1))
            else:
                values.append((out.argmax(-1) == batch.query_y).to(like.dtype).mean(1) * 100)
            done, step = done + len(batch), step + 1
        scores = torch.cat(values).double().cpu()
        spread = scores.std().item() if len(scores) > 1 else float("nan")
        metric = "mse" if batch.query_y.is_floating_point() else "accuracy"
        return Result(scores.mean().item(), 1.96 * spread / math.sqrt(len(scores)), len(scores), scores, metric)

    @property
    def weights(self) -> Weights:
        """The learned weights; MAML's are all equal."""
        rule = self.method.weighting
        level = "task" if rule is None else rule.level

        def ids() -> Tensor:
            size = getattr(self._source, "size" if level == "task" else "instances", None)
            if size is None:
                raise ValueError("the pool's ids are not known: fit on a source with a size, or ask at(ids)")
            return torch.arange(size)

        return Weights(level, ids, self._weights_at)

    def _weights_at(self, ids: Tensor) -> Tensor:
        rule, state, known = self.method.weighting, self.state.rule, self._knowledge
        if rule is None:
            return torch.ones(ids.shape, dtype=torch.float64)
        if state is None:
            raise ValueError("there are no weights yet: fit first")
        if known is None:  # loaded: weights kept by id need no source, others their features
            known = Knowledge(None, rule.level, self.method.seed)
        if isinstance(rule, weighting.Uniform) or (known.size or CACHED_POOL + 1) > CACHED_POOL:
            return rule.at(state, known, ids)
        if self._places is None:
            assert known.size is not None
            self._places = rule.locate_ids(state, known, torch.arange(known.size))
        with torch.no_grad():
            return rule.shape(state["learned"], state, self._places[ids.to(self._places.device)])

    def _warn_about_weights(self) -> None:
        rule, known = self.method.weighting, self._knowledge
        if rule is None or self.state.rule is None or self.iteration < 200 or isinstance(rule, weighting.Uniform):
            return
        if known is None or not rule.knows(known) or getattr(self, "_warned", False):
            return
        assert known.size is not None
        ids = torch.randperm(known.size, generator=torch.Generator().manual_seed(0))[:2000]
        w = self._weights_at(ids).double()
        share = float(w.sum() ** 2 / (len(w) * w.square().sum()).clamp_min(1e-300))
        if share < 0.005:
            log.warning("the weights have collapsed onto %.2g %% of the pool: lower weight_lr", 100 * share)
            self._warned = True
        elif float(w.max() - w.min()) < 1e-3 * float(w.mean()):
            log.warning("the weights are still uniform: raise weight_lr, or train longer")
            self._warned = True

    # Storage -----------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write parameters, weights, optimizer and options to a folder that `load` reads."""
        return checkpoint.write(folder, *self._pack())

    def _pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        optimizer = self.state.optimizer.state_dict()
        tree = {
            "params": self.params,
            "rule": self.state.rule or {},
            "average": self.state.average or {},
            "optimizer": {str(i): part for i, part in optimizer["state"].items()},
        }
        options, tensors = to_json(self.method)
        numbers = {
            str(i): {k: v for k, v in part.items() if not isinstance(v, Tensor)}
            for i, part in optimizer["state"].items()
        }
        meta = {
            "learner": self.name,
            "options": options,
            "model": getattr(self._module, "spec", None),
            "step": self.state.step,
            "loudness": self.state.loudness,
            "optimizer": {"groups": optimizer["param_groups"], "numbers": numbers},
            "history": self.history,
            "pending": self._pending,
            "torch": torch.__version__,
        }
        return {**checkpoint.flatten(tree), **tensors}, meta

    def _unpack(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        params = checkpoint.unflatten(tensors, "params")
        for n, p in self.state.params.items():
            if n not in params or params[n].shape != p.shape:
                found = list(params[n].shape) if n in params else "nothing"
                raise checkpoint.CheckpointError(f"the checkpoint has {found} for {n}, the model {list(p.shape)}")
        if extra := [n for n in params if n not in self.state.params]:
            raise checkpoint.CheckpointError(f"the checkpoint has parameters the model has not: {extra}")
        with torch.no_grad():
            for n, p in self.state.params.items():
                p.copy_(params[n])
        moments = {int(i): part for i, part in checkpoint.unflatten(tensors, "optimizer").items()}
        for i, part in meta["optimizer"]["numbers"].items():
            moments.setdefault(int(i), {}).update(part)
        self.state.optimizer.load_state_dict({"state": moments, "param_groups": meta["optimizer"]["groups"]})
        self.state.rule = checkpoint.unflatten(tensors, "rule") or None
        if self.state.rule is not None:
            for group in ("learned", "moments", "fixed", "running"):
                self.state.rule.setdefault(group, {})
        self.state.average = checkpoint.unflatten(tensors, "average") or None
        self.state.step, self.state.loudness = int(meta["step"]), float(meta["loudness"])
        self.history, self._pending = list(meta["history"]), list(meta.get("pending", []))

    def _open(self, folder: Path, resume: bool) -> None:
        """Make a run's folder, or take up the run that is in it."""
        found = (folder / "checkpoint").exists() or (folder / "checkpoint.old").exists()
        if resume and found:
            tensors, meta = checkpoint.read(folder / "checkpoint")
            if meta.get("learner") != self.name:
                raise checkpoint.CheckpointError(f"{folder} holds a run of {meta.get('learner')}, not of {self.name}")
            if meta.get("options") != (mine := to_json(self.method)[0]):
                changed = sorted(k for k in mine if mine[k] != meta["options"].get(k))
                raise ValueError(f"{folder} holds a run with other options ({', '.join(changed)}); use another folder")
            self._unpack(tensors, meta)
        elif not resume and ((folder / "history.csv").exists() or found):
            raise FileExistsError(f"{folder} holds a run already: pass resume=True to go on, or another folder")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "history.csv").unlink(missing_ok=True)
        for row in self.history:
            append_row(folder / "history.csv", row)

    def _write_weights(self, path: Path) -> None:
        rule = self.method.weighting
        if rule is None or self._knowledge is None or not rule.knows(self._knowledge):
            return
        assert self._knowledge.size is not None
        ids = torch.arange(self._knowledge.size)
        columns = [ids.tolist(), self._weights_at(ids).double().cpu().tolist()]
        known = hasattr(self._source, "corrupt")
        columns.append(self._source.corrupt(ids, level=rule.level).int().tolist() if known else [""] * len(ids))
        lines = ["id,weight,corrupt", *(f"{i},{w!r},{c}" for i, w, c in zip(*columns, strict=True))]
        path.write_text("\n".join(lines) + "\n", "utf-8")


def _like(x: Tensor, like: Tensor) -> Tensor:
    """``x`` where the parameters are, and real numbers in their precision."""
    return x.to(like.device, like.dtype if x.is_floating_point() else None)


class MAML(Learner):  # noqa: D101
    __doc__ = methods.MAML.__doc__
    kind = methods.MAML


class L2R(Learner):  # noqa: D101
    __doc__ = methods.L2R.__doc__
    kind = methods.L2R


class MMAML(Learner):  # noqa: D101
    __doc__ = methods.MMAML.__doc__
    kind = methods.MMAML


class NestedMAML(Learner):  # noqa: D101
    __doc__ = methods.NestedMAML.__doc__
    kind = methods.NestedMAML


class BTAML(Learner):  # noqa: D101
    __doc__ = methods.BTAML.__doc__
    kind = methods.BTAML


class TransductiveFineTuning(Learner):  # noqa: D101
    __doc__ = methods.TransductiveFineTuning.__doc__
    kind = methods.TransductiveFineTuning


LEARNERS: dict[str, type[Learner]] = {
    cls.__name__: cls for cls in (BTAML, L2R, MAML, MMAML, NestedMAML, TransductiveFineTuning)
}


def load(folder: str | Path, model: nn.Module | None = None, loss: Callable[..., Any] | None = None) -> Learner:
    """A learner as it was saved; ``model`` and ``loss`` are needed unless they are built in."""
    tensors, meta = checkpoint.read(folder)
    try:
        cls = LEARNERS[meta["learner"]]
        options = from_json(cls.kind, meta["options"], tensors, loss)
        if model is None:
            if not meta["model"]:
                raise ValueError(f"{folder} holds a model that is not built in: pass it as model=")
            model = models.build(meta["model"])
        learner = cls(model, **options)
        learner._unpack(tensors, meta)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise checkpoint.CheckpointError(f"{folder} is damaged or of another version: {error!r}") from None
    return learner
