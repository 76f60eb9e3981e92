"""The contract every method keeps, and what is particular to MAML, L2R and NestedMAML."""

import csv
import dataclasses
import logging
import math
from functools import cache

import pytest
import torch
from torch import nn

import nestedmaml as nm
from helpers import Blobs, Secret, Waves, relative_error
from nestedmaml.checkpoint import CheckpointError
from nestedmaml.functional import meta_gradient, query_losses, weight_gradient
from nestedmaml.methods.l2r import rectified
from nestedmaml.sampling import clean_batch, weighted_batch

W = nm.weighting
BOTH = ("regression", "classification")


@dataclasses.dataclass(frozen=True)
class Case:
    """A method with options, and the kinds of task it is defined for."""

    learner: str
    options: dict = dataclasses.field(default_factory=dict)
    kinds: tuple = BOTH

    @property
    def skyline(self):
        return self.options.get("remove") is not None


CASES = {
    "maml": Case("MAML"),
    "maml-first": Case("MAML", {"order": 1}),
    "maml-head": Case("MAML", {"inner": ["4"]}, ("regression",)),
    "skyline": Case("MAML", {"remove": "tasks"}),
    "skyline-refill": Case("MAML", {"remove": "tasks", "refill": True}),
    "skyline-query": Case("MAML", {"remove": "query"}, ("classification",)),
    "skyline-query-support": Case("MAML", {"remove": "query+support"}, ("classification",)),
    "l2r": Case("L2R"),
    "l2r-first": Case("L2R", {"order": "first"}, ("regression",)),
    "l2r-instance": Case("L2R", {"level": "instance"}),
    "nested": Case("NestedMAML", {"weighting": W.Cluster(8)}),
    "nested-first": Case("NestedMAML", {"weighting": W.Cluster(8), "order": "first"}),
    "nested-weighted": Case("NestedMAML", {"weighting": W.Cluster(8), "sampling": "weighted"}),
    "nested-paper": Case("NestedMAML", {"weighting": W.paper(W.Cluster, 8), "optimizer": "sgd"}),
    "nested-uniform": Case("NestedMAML", {"weighting": W.Uniform()}, ("classification",)),
    "nested-task": Case("NestedMAML", {"weighting": W.Task(), "val_average": 0.5, "val_share": 0.3}),
    "nested-amortised": Case("NestedMAML", {"weighting": W.Amortised(width=8)}),
    "nested-instance": Case("NestedMAML", {"weighting": W.Instance()}),
    "nested-instance-paper": Case(
        "NestedMAML", {"weighting": W.paper(W.Instance, initial=0.1), "weight_lr": 0.1}, ("classification",)
    ),
    "nested-instance-cluster": Case("NestedMAML", {"weighting": W.Cluster(8, level="instance")}, ("classification",)),
    "nested-instance-amortised": Case(
        "NestedMAML", {"weighting": W.Amortised(width=8, level="instance")}, ("regression",)
    ),
    "mmaml": Case("MMAML"),
    "btaml": Case("BTAML"),
    "transductive": Case("TransductiveFineTuning", {"finetune_steps": 5, "finetune_lr": 1e-3}, ("classification",)),
}

ADAPTING = [name for name, case in CASES.items() if case.learner != "TransductiveFineTuning"]
EACH = pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(n, k, id=f"{n}-{k}") for n, case in CASES.items() for k in case.kinds]
)
SMALL = {"batch": 8, "val_batch": 4, "every": 5, "compile": False}


@pytest.fixture(autouse=True)
def small_samples(monkeypatch):
    """Few places stand for the pool, so that tests are quick."""
    monkeypatch.setattr("nestedmaml.weighting.amortised.REFERENCE", 256)
    monkeypatch.setattr("nestedmaml.weighting.cluster.FIT_ON", 512)


def model(kind):
    return nm.models.mlp((1, 24, 24, 1) if kind == "regression" else (6, 16, 3), seed=1)


def source(kind, split="train", size=60, **dirt):
    return (Waves if kind == "regression" else Blobs)(shots=5, queries=4, size=size, split=split, **dirt)


def make(name, kind, **more):
    case = CASES[name]
    if kind == "regression":
        steps = {"loss": nm.losses.squared_error, "inner_lr": 0.01, "inner_steps": 1, "test_steps": 2, "meta_lr": 0.01}
    else:
        steps = {"loss": nm.losses.cross_entropy, "inner_lr": 0.2, "inner_steps": 1, "test_steps": 2, "meta_lr": 0.02}
    if case.options.get("optimizer") == "sgd":
        steps["meta_lr"] = 0.02 if kind == "regression" else 0.2
    return getattr(nm, case.learner)(model(kind), **{**steps, **case.options, **more})


def nested(kind="regression", **options):
    return make("nested", kind, **{"weighting": W.Task(), **options})


@cache
def trained(name, kind):
    """A learner after 40 iterations on clean data, shared by the tests, which leave it as it is."""
    learner = make(name, kind)
    data = source(kind) if CASES[name].skyline else Secret(source(kind))
    return learner.fit(data, source(kind, "val", 20), 40, **SMALL)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def rows(history):
    """A history without what may differ from run to run."""
    return [{n: repr(v) for n, v in row.items() if n != "seconds"} for row in history]


def table(path):
    """A CSV file, likewise."""
    with path.open(encoding="utf-8") as file:
        return [{n: v for n, v in row.items() if n != "seconds"} for row in csv.DictReader(file)]


# The contract ----------------------------------------------------------------------------------------------


@EACH
def test_fits_without_the_truth_and_leaves_the_model_alone(name, kind):
    learner, before = trained(name, kind), dict(model(kind).named_parameters())
    assert learner.iteration == 40
    assert [row["iteration"] for row in learner.history] == list(range(5, 41, 5))
    assert all(math.isfinite(row["train_loss"]) and row["diverged"] == 0 for row in learner.history)
    assert all(p.isfinite().all() for p in learner.params.values())
    if before.keys() <= learner.params.keys():
        assert not same(learner.params, before)
    given = model(kind)
    getattr(nm, CASES[name].learner)(given, loss=learner.method.loss, **CASES[name].options)
    assert same(dict(given.named_parameters()), before)
    assert all(p.grad is None for p in given.parameters())


@EACH
def test_beats_an_untrained_network_on_clean_data(name, kind):
    test = source(kind, "test", None)
    before, after = make(name, kind).evaluate(test, 200), trained(name, kind).evaluate(test, 200)
    assert (after.n, after.values.shape) == (200, (200,))
    assert after.ci95 == pytest.approx(1.96 * after.values.std().item() / 200**0.5)
    assert after.metric == ("mse" if kind == "regression" else "accuracy")
    gain = (after.values - before.values) * (-1 if kind == "regression" else 1)  # on the same tasks
    assert gain.mean() > 2 * gain.std() / 200**0.5


@EACH
def test_adapts_and_predicts(name, kind):
    task = source(kind, "test", None).sample(0, 1)
    sx, sy, qx, qy = (part[0] for part in (task.support_x, task.support_y, task.query_x, task.query_y))
    adapted = trained(name, kind).adapt(sx, sy, query_x=qx)
    labels = adapted.predict(qx)
    assert labels.shape == qy.shape
    assert not labels.requires_grad
    if kind == "regression":
        with pytest.raises(ValueError, match="classification"):
            adapted.predict_proba(qx)
    else:
        p = adapted.predict_proba(qx)
        assert p.shape == (len(qx), 3)
        torch.testing.assert_close(p.sum(1), torch.ones(len(qx)))
        assert torch.equal(p.argmax(1), labels)


@EACH
def test_saves_and_loads_to_the_same_predictions(name, kind, tmp_path):
    learner, test = trained(name, kind), source(kind, "test", None)
    learner.save(tmp_path / "saved")
    loaded = nm.load(tmp_path / "saved")
    assert type(loaded) is type(learner)
    assert same(loaded.params, learner.params)
    assert rows(loaded.history) == rows(learner.history)
    assert torch.equal(loaded.evaluate(test, 20).values, learner.evaluate(test, 20).values)
    task = test.sample(3, 1)
    sx, sy, qx = task.support_x[0], task.support_y[0], task.query_x[0]
    one, two = (who.adapt(sx, sy, query_x=qx).predict(qx) for who in (learner, loaded))
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", CASES)
def test_the_same_seed_gives_the_same_bits_through_a_stop_and_a_resume(name, tmp_path):
    kind = CASES[name].kinds[-1]
    data, val = source(kind, size=40, ratio=0.25), source(kind, "val", 20)
    whole = make(name, kind).fit(data, val, 12, out=tmp_path / "whole", **SMALL)
    options = {**SMALL, "out": tmp_path / "parts", "save_every": 3}  # also between two rows of the history
    make(name, kind).fit(data, val, 5, **options)
    parts = make(name, kind).fit(data, val, 12, resume=True, **options)
    assert same(parts.params, whole.params)
    assert rows(parts.history) == rows(whole.history)
    for file in ("history.csv", "weights.csv"):
        one, two = (tmp_path / run / file for run in ("whole", "parts"))
        assert one.exists() == two.exists()
        if one.exists():
            assert table(one) == table(two)


@pytest.mark.parametrize("name", CASES)
def test_steps_in_a_loop_of_ones_own(name):
    kind = CASES[name].kinds[0]
    learner, data = make(name, kind), source(kind)
    if CASES[name].skyline:
        with pytest.raises(ValueError, match="corrupt"):
            learner.step(data.sample(0, 3))
    if learner.method.pretrains:
        learner.fit(data, iterations=1, **SMALL)
        figures = learner.step(data.labelled(1, 8))
    else:
        learner.prepare(data)
        learner.step(data.sample(0, 3), source(kind, "val").sample(0, 2))
        figures = learner.step(data.sample(1, 3), source(kind, "val").sample(1, 2))
    assert learner.iteration == 2
    assert all(isinstance(value, float) for value in figures.values())
    if learner.method.needs_val:
        with pytest.raises(ValueError, match="validation tasks"):
            learner.step(data.sample(0, 3))


@pytest.mark.parametrize("name", CASES)
def test_refuses_bad_options(name):
    kind = CASES[name].kinds[0]
    for options, error, match in (
        ({"meta_lr": -1.0}, ValueError, "meta_lr must be a number > 0, got -1.0"),
        ({"meta_lr": math.nan}, ValueError, "meta_lr must be a number > 0"),
        ({"inner_steps": 1.5}, ValueError, "inner_steps must be an integer >= 0, got 1.5"),
        ({"test_steps": -1}, ValueError, "test_steps must be an integer >= 0"),
        ({"optimizer": "lbfgs"}, ValueError, "LBFGS does not work from dense gradients"),
        ({"optimizer": "adamm"}, ValueError, "name or class of a torch optimizer, got 'adamm'"),
        ({"loss": "mse"}, TypeError, "loss must be a function"),
        ({"meta_rate": 1.0}, TypeError, "has no option 'meta_rate'; it has .*meta_lr"),
    ):
        with pytest.raises(error, match=match):
            make(name, kind, **options)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        getattr(nm, CASES[name].learner)("mlp")


@pytest.mark.parametrize("name", ADAPTING)
def test_refuses_bad_options_of_the_adaptation(name):
    for options, match in (
        ({"inner_lr": -0.1}, "inner learning rate must be a number >= 0"),
        ({"inner": ["nowhere"]}, r"inner names '(model\.)?nowhere', which the model does not have"),
        ({"batching": "all"}, "batching must be"),
    ):
        with pytest.raises(ValueError, match=match):
            make(name, CASES[name].kinds[0], **options)


@pytest.mark.parametrize("name", CASES)
def test_refuses_bad_data_before_anything_is_trained(name, tmp_path):
    kind = CASES[name].kinds[0]
    learner, data, val = make(name, kind), source(kind), source(kind, "val")
    before = learner.params
    for options, match in (
        ({"iterations": 0}, "iterations must be an integer >= 1, got 0"),
        ({"batch": 0}, "batch must be an integer >= 1"),
        ({"val_batch": 2.5}, "val_batch must be an integer >= 1"),
        ({"compile": "yes"}, "compile must be True, False or 'auto'"),
    ):
        with pytest.raises(ValueError, match=match):
            learner.fit(data, val, **{**SMALL, **options})
    with pytest.raises(TypeError, match="a source has a method sample"):
        learner.fit(7, val)
    with pytest.raises(ValueError, match="at least one task, got zero"):
        nm.TaskBatch([], [], [], [])
    with pytest.raises(ValueError, match="at least one task, got 0"):
        learner.evaluate(val, 0)
    broken = data.sample(0, 3)
    broken.query_x[1, 0] = math.nan
    with pytest.raises(ValueError, match=r"query_x must be finite, but tasks \[1\]"):
        learner.step(broken, val.sample(0, 2))
    if learner.method.needs_val:
        with pytest.raises(ValueError, match="learns from clean validation tasks: pass a val_source"):
            learner.fit(data)
    assert same({n: learner.params[n] for n in before}, before)
    learner.fit(data, val, 1, out=tmp_path / "run", **SMALL)
    with pytest.raises(FileExistsError, match="holds a run already: pass resume=True"):
        make(name, kind).fit(data, val, 2, out=tmp_path / "run", **SMALL)
    with pytest.raises(ValueError, match=r"other options \(meta_lr\)"):
        make(name, kind, meta_lr=0.5).fit(data, val, 2, out=tmp_path / "run", resume=True, **SMALL)


# The learner -----------------------------------------------------------------------------------------------


def stop_at(iteration):
    def callback(learner, figures):
        if learner.iteration == iteration:
            raise KeyboardInterrupt

    return callback


def test_ctrl_c_keeps_what_was_learned_and_the_run_can_go_on(tmp_path, caplog):
    data, val = source("regression"), source("regression", "val")
    whole = nested().fit(data, val, 20, out=tmp_path / "whole", **SMALL)
    stopped = nested()
    with caplog.at_level(logging.WARNING, logger="nestedmaml"):
        stopped.fit(data, val, 20, out=tmp_path / "run", callbacks=[stop_at(7)], **SMALL)
    assert stopped.iteration == 7
    assert "stopped at iteration 7 of 20; what was learned is kept" in caplog.text
    assert same(nm.load(tmp_path / "run" / "checkpoint").params, stopped.params)
    # a stop between two rows of the history: the next row is the mean over all of its iterations all the same
    resumed = nested().fit(data, val, 20, out=tmp_path / "run", resume=True, **SMALL)
    assert same(resumed.params, whole.params)
    assert rows(resumed.history) == rows(whole.history)
    stopped.fit(data, val, 20, **SMALL)
    assert same(stopped.params, whole.params)


def test_resume_starts_afresh_where_there_is_nothing(tmp_path):
    learner = make("maml", "regression").fit(
        source("regression"), iterations=2, out=tmp_path / "new", resume=True, **SMALL
    )
    assert learner.iteration == 2
    with pytest.raises(CheckpointError, match="holds a run of MAML, not of NestedMAML"):
        nested().fit(source("regression"), source("regression", "val"), 3, out=tmp_path / "new", resume=True)


def test_a_loaded_learner_goes_on_in_a_loop_of_ones_own_and_knows_its_weights(tmp_path):
    data, val = source("regression"), source("regression", "val")
    learner = nested().fit(data, val, 10, **SMALL)
    loaded = nm.load(learner.save(tmp_path / "saved"))
    assert torch.equal(loaded.weights.at(torch.arange(60)), learner.weights.values)
    for who in (learner, loaded):
        who.step(data.sample(10, 4), val.sample(10, 3))
    assert same(loaded.params, learner.params)
    clusters = nm.load(trained("nested", "regression").save(tmp_path / "clusters"))
    with pytest.raises(ValueError, match=r"prepare\(train_source\)"):
        clusters.weights.at(torch.arange(3))
    clusters.prepare(source("regression"))
    assert torch.equal(clusters.weights.values, trained("nested", "regression").weights.values)


def test_weights_at_ids_are_those_of_the_batch():
    learner = trained("nested", "regression")
    batch = source("regression").sample(5, 6)
    direct = learner.method.weighting.weights(learner.state.rule, learner._knowledge, batch)
    torch.testing.assert_close(learner.weights.at(batch.task_ids), direct, rtol=1e-12, atol=0)
    assert learner.weights.ids.tolist() == list(range(60))
    assert torch.equal(learner.weights.values, learner.weights.at(learner.weights.ids))
    assert learner.weights.level == "task"


def test_the_optimizer_may_be_any_class_that_works_from_gradients():
    for optimizer in ("sgd", torch.optim.RMSprop, "adamw"):
        learner = make("maml", "regression", optimizer=optimizer).fit(source("regression"), iterations=2, **SMALL)
        assert all(p.isfinite().all() for p in learner.params.values())


# MAML and its skylines -------------------------------------------------------------------------------------


def step_of(learner, gradient):
    return {n: p - learner.method.meta_lr * gradient[n] for n, p in learner.params.items()}


@pytest.mark.parametrize("remove", ["tasks", "query", "query+support"])
def test_skylines_give_weight_zero_to_what_is_corrupt(remove):
    data = Blobs(ratio=0.5, noise=0.4, size=20) if remove == "tasks" else Blobs(noise=0.4, size=20)
    learner = make("skyline", "classification", remove=remove, optimizer="sgd").prepare(data)
    batch = data.sample(0, 6)
    support = None
    if remove == "tasks":
        weights = (~data.corrupt(batch.task_ids)).float()
        assert 0 < weights.sum() < 6
    else:
        weights = (~data.corrupt(batch.instance_ids, "instance")).float() / batch.queries
    if remove == "query+support":
        support = (~data.corrupt(batch.support_ids, "instance")).float()
    gradient = meta_gradient(
        learner.model(), learner.params, batch, weights, loss=nm.losses.cross_entropy, lr=0.2, steps=1,
        support_weights=support,
    )  # fmt: skip
    expected = step_of(learner, gradient)
    learner.step(batch)
    assert relative_error(learner.params, expected) < 1e-6


def test_refill_gives_clean_tasks_alone():
    data = source("regression", size=200, ratio=0.9)
    for step in range(20):
        batch = clean_batch(data, step, 10, seed=3)
        assert len(batch) == 10
        assert not data.corrupt(batch.task_ids).any()
    seen = torch.cat([clean_batch(data, step, 10, seed=3).task_ids for step in range(40)])
    assert len(seen.unique()) == 20  # each of the clean ones, sooner or later
    with pytest.raises(ValueError, match="next to no clean tasks"):
        clean_batch(source("regression", size=20, ratio=1.0), 0, 5, seed=0)


def test_a_skyline_makes_no_step_where_nothing_is_clean():
    data = source("regression", size=20, ratio=1.0)
    learner = make("skyline", "regression")
    before = learner.params
    learner.fit(data, iterations=3, **SMALL)
    assert learner.iteration == 3
    assert same(learner.params, before)
    assert not learner.state.optimizer.state_dict()["state"]


def test_skylines_refuse_what_cannot_tell():
    with pytest.raises(ValueError, match=r"remove must be None, 'tasks', 'query' or 'query\+support', got 'labels'"):
        make("maml", "regression", remove="labels")
    with pytest.raises(ValueError, match="refill fills a batch with clean tasks: it needs remove='tasks'"):
        make("maml", "regression", refill=True)
    with pytest.raises(ValueError, match="order must be 1 or 2, got 3"):
        make("maml", "regression", order=3)
    blind = [source("regression").sample(0, 3)]
    with pytest.raises(ValueError, match=r"a source that knows what is corrupt, by corrupt\(ids, level=\)"):
        make("skyline", "regression").fit(blind, iterations=1)


# NestedMAML ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["exact", "first"])
@pytest.mark.parametrize("level", ["task", "instance"])
def test_the_papers_form_is_the_papers_equations(level, order):
    """Eqs. online-equation, online-equation-weight and model-update, by hand for three steps in float64."""
    eta, gamma, alpha = 0.05, 3.0, 0.02
    data, val = source("regression", size=6), source("regression", "val", 6)
    rule = W.paper(W.Task if level == "task" else W.Instance)
    learner = nm.NestedMAML(
        model("regression").double(), inner_lr=alpha, inner_steps=2, val_steps=1, meta_lr=eta, optimizer="sgd",
        weighting=rule, weight_lr=gamma, order=order, guard=1e9,
    ).prepare(data)  # fmt: skip
    theta, net = learner.params, learner.model()
    table = torch.full((6,) if level == "task" else (6 * 9,), 1.0 if level == "task" else 0.005, dtype=torch.float64)
    options = {"loss": nm.losses.squared_error}
    for step in range(3):
        ids = torch.arange(6).roll(step)[:4]
        train = data.draw(ids).to(dtype=torch.float64)
        valid = val.sample(step, 3).to(dtype=torch.float64)
        rows = ids if level == "task" else train.instance_ids
        h = weight_gradient(
            net, theta, train, valid, table[rows], inner_lr=alpha, inner_steps=2, meta_lr=eta, val_steps=1,
            order=order, **options,
        )  # fmt: skip
        table[rows] = (table[rows] - gamma * h).clamp_min(0)
        g = meta_gradient(net, theta, train, table[rows], lr=alpha, steps=2, **options)
        theta = {n: p - eta * g[n] for n, p in theta.items()}
        learner.step(train, valid)
        every = torch.arange(len(table))
        torch.testing.assert_close(learner.weights.at(every), table, rtol=1e-9, atol=1e-12)
        assert relative_error(learner.params, theta) < 1e-9
    assert table.std() > 0


def test_the_learned_weights_tell_corrupt_tasks_from_clean():
    data, val = source("classification", size=40, ratio=0.5), source("classification", "val", 20)
    learner = nested("classification").fit(data, val, 80, **{**SMALL, "batch": 10})
    weights, corrupt = learner.weights.values, data.corrupt(torch.arange(40))
    assert weights[corrupt].mean() < 0.7 * weights[~corrupt].mean()
    torch.testing.assert_close(weights.mean().item(), 1.0, rtol=1e-6, atol=0)


def test_weighted_sampling_is_unbiased():
    data = source("regression", size=50)
    weights = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    weights[:5] = 0
    f = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
    estimates, drawn = [], []
    for step in range(1000):
        batch, c = weighted_batch(data, lambda ids: weights[ids], step, 10, explore=0.2, seed=4)
        estimates.append((c * f[batch.task_ids]).mean())
        drawn.append(batch.task_ids)
    estimates = torch.stack(estimates)
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - f.mean()) < 4 * error
    assert error < 0.05
    frequency = torch.bincount(torch.cat(drawn), minlength=50) / 10_000
    q = 0.8 * weights / weights.sum() + 0.2 / 50
    torch.testing.assert_close(frequency.double(), q, rtol=0.5, atol=0.002)


def test_weighted_sampling_from_a_large_pool_is_unbiased_too():
    data = source("regression", size=5000)
    weights = torch.linspace(0, 2, 5000, dtype=torch.float64)
    f = torch.linspace(-1, 3, 5000, dtype=torch.float64)
    estimates = []
    for step in range(400):
        batch, c = weighted_batch(data, lambda ids: weights[ids], step, 10, explore=0.2, seed=4)
        estimates.append((c * f[batch.task_ids]).mean())
    estimates = torch.stack(estimates)
    assert abs(estimates.mean() - f.mean()) < 4 * estimates.std() / 20


def test_the_correction_enters_the_meta_step():
    data, val = source("regression", size=6), source("regression", "val", 6)
    learner = nm.NestedMAML(
        model("regression").double(), inner_lr=0.02, inner_steps=1, meta_lr=0.05, optimizer="sgd",
        weighting=W.Uniform(), sampling="weighted",
    ).prepare(data)  # fmt: skip
    train, valid = (part.sample(0, 4).to(dtype=torch.float64) for part in (data, val))
    c = torch.tensor([0.5, 2.0, 1.0, 0.1], dtype=torch.float64)
    gradient = meta_gradient(learner.model(), learner.params, train, c, loss=learner.method.loss, lr=0.02, steps=1)
    expected = step_of(learner, gradient)
    learner._iterate(train, valid, c)
    assert relative_error(learner.params, expected) < 1e-12


@pytest.mark.parametrize(
    "rule",
    [W.Task(), W.paper(W.Task), W.Instance(), W.paper(W.Instance, initial=0.25)],
    ids=lambda r: f"{r.level}-{r.form}",
)
@pytest.mark.parametrize("size", [100.0, 1e30])
def test_a_diverging_task_is_counted_and_left_out(rule, size):
    """Both where the gradient is not finite, and where it is finite and absurd."""
    data, val = source("regression", size=8), source("regression", "val", 8)
    learner = nested(weighting=rule, optimizer="sgd").prepare(data)  # Adam would hide how long a step is
    learner.step(data.draw(torch.arange(4)), val.sample(0, 3))  # what a usual gradient's length is
    before = learner.params
    bad = data.draw(torch.tensor([4, 5, 6, 7]))
    bad.support_y[1] *= size
    bad.query_y[1] *= size
    figures = learner.step(bad, val.sample(1, 3))
    assert figures["diverged"] == 1
    assert math.isfinite(figures["train_loss"])
    assert all((p - before[n]).abs().max() < 0.05 for n, p in learner.params.items())
    every = torch.arange(8 if rule.level == "task" else 72)
    assert learner.weights.at(every).isfinite().all()


def test_a_diverging_task_does_not_poison_maml_or_l2r():
    data, val = source("regression", size=8), source("regression", "val", 8)
    for name in ("maml", "l2r", "l2r-instance"):
        learner = make(name, "regression", inner_steps=3)
        bad = data.sample(0, 4)
        bad.support_y[2] *= 1e30
        figures = learner.step(bad, val.sample(0, 3))
        assert figures["diverged"] == 1
        assert all(p.isfinite().all() for p in learner.params.values())
        assert torch.isfinite(learner.evaluate(val, 8).values).all()


def test_diverging_validation_tasks_are_left_out():
    data, val = source("regression", size=8), source("regression", "val", 8)
    bad = val.sample(0, 3)
    bad.support_y[:] *= 1e30
    for name in ("nested", "l2r"):
        learner = make(name, "regression").prepare(data)
        assert learner.step(data.sample(0, 4), bad)["diverged"] == 3
        # nothing to compare the training tasks with yet: they are not all taken for diverging
        assert learner.step(data.sample(1, 4), val.sample(1, 3))["diverged"] == 0
        assert all(p.isfinite().all() for p in learner.params.values())


def test_a_batch_whose_weights_are_all_zero_makes_no_step():
    data, val = source("regression", size=8), source("regression", "val", 8)
    learner = nested(weighting=W.paper(W.Task), optimizer="adam").prepare(data)
    learner.step(data.sample(0, 4), val.sample(0, 3))
    learner.state.rule["learned"]["table"].zero_()
    learner.method.weight_lr = 1e-12
    learner.method.weighting = dataclasses.replace(learner.method.weighting, warmup=100)
    before = learner.params
    before = {n: p.clone() for n, p in before.items()}
    figures = learner.step(data.sample(1, 4), val.sample(1, 3))
    assert figures["weight_mean"] == 0
    assert same(learner.params, before)  # Adam's momentum would have moved them
    assert learner.iteration == 2


def test_val_share_mixes_the_validation_gradient_into_the_meta_step():
    data, val = source("regression", size=8), source("regression", "val", 8)
    learner = nm.NestedMAML(
        model("regression").double(), inner_lr=0.02, inner_steps=2, val_steps=1, meta_lr=0.05, optimizer="sgd",
        weighting=W.Uniform(), val_share=0.25,
    ).prepare(data)  # fmt: skip
    train, valid = (part.sample(0, 4).to(dtype=torch.float64) for part in (data, val))
    ones, net, theta = torch.ones(4, dtype=torch.float64), learner.model(), learner.params
    g = meta_gradient(net, theta, train, ones, loss=learner.method.loss, lr=0.02, steps=2)
    v = meta_gradient(net, step_of(learner, g), valid, ones, loss=learner.method.loss, lr=0.02, steps=1)
    expected = step_of(learner, {n: 0.75 * g[n] + 0.25 * v[n] for n in g})
    learner.step(train, valid)
    assert relative_error(learner.params, expected) < 1e-12


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"order": 2}, "order must be 'exact' or 'first', got 2"),
        ({"sampling": "greedy"}, "sampling must be 'uniform' or 'weighted'"),
        ({"sampling": "weighted", "weighting": W.Instance()}, "needs weights at task level"),
        ({"sampling": "weighted", "explore": 0.0}, "needs explore > 0"),
        ({"weight_lr": 0}, "weight_lr must be a number > 0"),
        ({"lookahead_lr": -1.0}, "lookahead_lr must be a number > 0"),
        ({"val_steps": -1}, "val_steps must be an integer >= 0"),
        ({"val_average": 1.5}, "val_average must be between 0 and 1"),
        ({"val_share": -0.1}, "val_share must be between 0 and 1"),
    ],
)
def test_nestedmaml_refuses_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        nested(**options)


def test_nestedmaml_refuses_what_its_options_cannot_work_with():
    with pytest.raises(TypeError, match="weighting must be a rule such as"):
        nested(weighting="cluster")
    batches = [source("regression").sample(0, 3)]
    with pytest.raises(ValueError, match=r"needs a source with a size and draw\(ids\)"):
        nested(sampling="weighted").fit(batches, batches, 1)
    plain = dataclasses.replace(batches[0], task_ids=None, instance_ids=None)
    with pytest.raises(ValueError, match="Task keeps a weight by id, but the batch has no task_ids"):
        nested().fit([plain], batches, 1, compile=False)
    with pytest.raises(ValueError, match="fit first"):
        nested().weights.at(torch.arange(3))


# L2R -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (5, 4)])
def test_l2r_weights_sum_to_m_or_are_all_zero(shape):
    for seed in range(20):
        slopes = 1e-6 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        slopes.view(-1)[-1] = 1e-6
        weights = rectified(slopes)
        assert (weights >= 0).all()
        assert ((weights > 0) == (slopes > 0)).all()
        torch.testing.assert_close(weights.sum().item(), 5.0)
    assert (rectified(-slopes.abs()) == 0).all()
    broken = slopes.clone()
    broken.view(-1)[0] = math.nan
    torch.testing.assert_close(rectified(broken).sum().item(), 5.0)


@pytest.mark.parametrize("order", ["exact", "first"])
@pytest.mark.parametrize("level", ["task", "instance"])
def test_l2r_is_one_look_ahead_step_from_weights_of_zero(level, order):
    data, val = source("regression", size=12, ratio=0.5), source("regression", "val", 6)
    learner = nm.L2R(
        model("regression").double(), inner_lr=0.02, inner_steps=2, meta_lr=0.05, optimizer="sgd",
        level=level, order=order,
    )  # fmt: skip
    for step in range(2):
        train, valid = data.sample(step, 5).to(dtype=torch.float64), val.sample(step, 3).to(dtype=torch.float64)
        zeros = torch.zeros((5,) if level == "task" else (5, 4), dtype=torch.float64)
        h = weight_gradient(
            learner.model(), learner.params, train, valid, zeros, loss=learner.method.loss, inner_lr=0.02,
            inner_steps=2, meta_lr=0.7, val_steps=1, order=order,
        )  # fmt: skip
        w = (-h).clamp_min(0)
        assert 0 < (w > 0).sum() <= w.numel()
        w = 5 * w / w.sum()
        g = meta_gradient(learner.model(), learner.params, train, w, loss=learner.method.loss, lr=0.02, steps=2)
        expected = step_of(learner, g)
        figures = learner.step(train, valid)
        assert figures["weight_mean"] == pytest.approx(1.0 if level == "task" else 0.25)
        assert relative_error(learner.params, expected) < 1e-9


@pytest.mark.parametrize("level", ["task", "instance"])
def test_l2r_makes_no_step_where_no_task_helps(level):
    class Away(nn.Module):
        """One number; tasks pull it up, validation tasks pull it down."""

        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.a.expand(len(x), 1)

    x, y = torch.zeros(3, 2, 1), torch.ones(3, 2, 1)
    learner = nm.L2R(Away(), inner_lr=0.1, inner_steps=1, level=level)
    learner.step(nm.TaskBatch(x, y, x, y), nm.TaskBatch(x, y, x, y))
    before = {n: p.clone() for n, p in learner.params.items()}
    figures = learner.step(nm.TaskBatch(x, y, x, y), nm.TaskBatch(x, -y, x, -y))
    assert figures["weight_mean"] == 0
    assert same(learner.params, before)
    assert learner.iteration == 2


@pytest.mark.parametrize("level", ["task", "instance"])
def test_l2r_prefers_what_is_clean(level, monkeypatch):
    dirt = {"ratio": 0.5} if level == "task" else {"noise": 0.3}
    data, val = source("classification", size=40, **dirt), source("classification", "val", 20)
    found = []
    monkeypatch.setattr("nestedmaml.methods.l2r.rectified", lambda slopes: found.append(rectified(slopes)) or found[-1])
    make("l2r", "classification", level=level).fit(data, val, 30, **{**SMALL, "batch": 8, "val_batch": 8})
    batches = [data.sample(step, 8) for step in range(30)]
    ids = torch.stack([batch.task_ids if level == "task" else batch.instance_ids for batch in batches])
    weights, corrupt = torch.stack(found), data.corrupt(ids, level)
    assert weights[corrupt].mean() < (0.7 if level == "task" else 0.9) * weights[~corrupt].mean()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"level": "cluster"}, "level must be 'task' or 'instance', got 'cluster'"),
        ({"order": 1}, "order must be 'exact' or 'first', got 1"),
        ({"val_steps": 0.5}, "val_steps must be an integer >= 0"),
        ({"guard": 0}, "guard must be a number > 0"),
    ],
)
def test_l2r_refuses_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        make("l2r", "regression", **options)


def test_predictions_are_those_of_the_adapted_model():
    learner, test = trained("maml", "regression"), source("regression", "test", None)
    batch = test.sample(0, 10)
    losses = query_losses(learner.model(), learner.params, batch, loss=learner.method.loss, lr=0.01, steps=2)
    torch.testing.assert_close(learner.evaluate(test, 10).values.float(), losses.mean(1).detach())


def test_a_decaying_step_ends_at_zero_and_leaves_the_optimizer_as_it_was():
    learner = nm.MAML(nm.models.mlp((1, 8, 1)), meta_lr=0.01)
    rates = []
    learner.fit(
        nm.tasks.Sinusoid(5, size=20), iterations=4, batch=2, decay=True, compile=False,
        callbacks=[lambda at, _: rates.append(at.state.optimizer.param_groups[0]["lr"])],
    )  # fmt: skip
    assert rates == pytest.approx([0.01, 0.01 * (1 + 2**0.5 / 2) / 2, 0.005, 0.01 * (1 - 2**0.5 / 2) / 2])
    assert learner.state.optimizer.param_groups[0]["lr"] == 0.01


def test_a_model_of_another_precision_takes_tasks_as_they_come():
    source = nm.tasks.Sinusoid(5, size=50)
    learner = nm.NestedMAML(nm.models.mlp((1, 8, 1)).double(), weighting=nm.weighting.Cluster(4))
    learner.fit(source, nm.tasks.Sinusoid(5, size=5, split="val"), iterations=2, batch=4, val_batch=2)
    task = source.sample(0, 1)
    assert learner.adapt(task.support_x[0], task.support_y[0]).predict(task.query_x[0]).dtype == torch.float64
    assert learner.evaluate(source, 3).n == 3


@pytest.mark.parametrize("cls", [nm.MAML, nm.NestedMAML])
def test_one_absurd_task_in_the_first_batch_does_not_fill_the_optimizers_moments(cls):
    source, val = nm.tasks.Sinusoid(5, size=50), nm.tasks.Sinusoid(5, size=8, split="val")
    batch = source.sample(0, 4)
    batch.support_x[1] *= 1000
    options = {"weighting": nm.weighting.Task()} if cls is nm.NestedMAML else {}
    learner = cls(nm.models.mlp((1, 8, 1)), inner_steps=1, **options)
    figures = learner.step(batch, val.sample(0, 4))
    assert figures["diverged"] == 1
    assert max(part["exp_avg_sq"].max() for part in learner.state.optimizer.state.values()) < 1e3


def test_evaluation_fits_outputs_to_targets_or_says_that_they_do_not():
    source = nm.tasks.Sinusoid(6, size=50)
    task = source.sample(0, 6)
    flat = dataclasses.replace(task, support_y=task.support_y.squeeze(-1), query_y=task.query_y.squeeze(-1))
    learner = nm.MAML(nm.models.mlp((1, 8, 1)), loss=lambda p, t: (p.reshape(t.shape) - t) ** 2, test_steps=0)
    assert learner.evaluate([flat]).mean == pytest.approx(learner.evaluate([task]).mean)
    wide = dataclasses.replace(task, support_y=task.support_y.expand(-1, -1, 2), query_y=task.query_y.expand(-1, -1, 2))
    with pytest.raises(ValueError, match="do not fit the targets"):
        learner.evaluate([wide])


def test_ready_batches_are_scored_once_each():
    assert nm.MAML(nm.models.mlp((1, 8, 1))).evaluate([nm.tasks.Sinusoid(5, size=50).sample(0, 7)]).n == 7


@pytest.mark.parametrize("cls", [nm.MAML, nm.NestedMAML])
def test_a_generator_loses_no_task_before_training(cls):
    batch = nm.tasks.Sinusoid(5, size=50).sample(0, 6)
    tasks = ((batch.support_x[i], batch.support_y[i], batch.query_x[i], batch.query_y[i]) for i in range(6))
    learner = cls(nm.models.mlp((1, 8, 1)), seed=0)
    learner.fit(tasks, nm.tasks.Sinusoid(5, size=8, split="val"), iterations=3, batch=2, val_batch=2)
    assert learner.iteration == 3


def test_two_pools_as_one_know_the_truth_of_both():
    train, val = nm.tasks.Sinusoid(5, size=50, ratio=0.9), nm.tasks.Sinusoid(5, size=10, split="val")
    both = nm.tasks.pool.Both(train, val)
    assert torch.equal(both.corrupt(both.ids), torch.cat([train.corrupt(train.ids), val.corrupt(val.ids)]))
    assert torch.equal(
        both.draw(torch.tensor([55, 3])).query_x,
        torch.cat([val.draw(torch.tensor([5])).query_x, train.draw(torch.tensor([3])).query_x]),
    )
