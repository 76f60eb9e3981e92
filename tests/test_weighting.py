"""Weighting rules: where weights start, how hypergradients move them, what normalisations promise."""

import copy
import dataclasses

import pytest
import torch

import nestedmaml as nm
from helpers import Blobs, Secret, Waves, central_differences, generator, relative_error
from nestedmaml.weighting import Amortised, Cluster, Instance, Knowledge, Task, Uniform, paper

SHOTS, QUERIES = 5, 4
RULES = {
    "task": Task,
    "instance": Instance,
    "cluster": lambda **o: Cluster(6, **o),
    "cluster-instance": lambda **o: Cluster(6, level="instance", **o),
    "amortised": lambda **o: Amortised(width=8, **{"lr": 0.03, **o}),
    "amortised-instance": lambda **o: Amortised(width=8, level="instance", **{"lr": 0.03, **o}),
}
LEARNED = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(autouse=True)
def small_samples(monkeypatch):
    """Few places stand for the pool, so that tests are quick."""
    monkeypatch.setattr("nestedmaml.weighting.amortised.REFERENCE", 256)
    monkeypatch.setattr("nestedmaml.weighting.cluster.FIT_ON", 512)


def pool(size=20, ratio=0.5):
    return Waves(SHOTS, QUERIES, size=size, ratio=ratio, seed=1)


def start(rule, source=None):
    """The rule's first state, what it may know, and a batch of six tasks."""
    source = Secret(pool()) if source is None else source
    known = Knowledge(source, rule.level, seed=0)
    return rule.init(known, queries=QUERIES), known, source.draw(torch.tensor([3, 7, 1, 12, 5, 9]))


def hypergradient(rule, batch, seed=0):
    shape = (len(batch),) if rule.level == "task" else (len(batch), batch.queries)
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def moved(rule, steps=5, lr=0.3, source=None):
    """The state after some updates of one sign a task or instance, so that weights differ."""
    state, known, batch = start(rule, source)
    h = hypergradient(rule, batch)
    for _ in range(steps):
        state = rule.update(state, known, batch, h, lr=lr, norms=torch.ones(len(batch)))
    return state, known, batch


def unit(rule):
    return 1.0 if rule.level == "task" else 1 / QUERIES


# The start, the direction, the bounds ----------------------------------------------------------------------


@LEARNED
@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("normalize", ["none", "batch", "window", "pool"])
def test_all_weights_start_at_mamls_own(rule, form, normalize):
    rule = RULES[rule](form=form, normalize=normalize)
    if isinstance(rule, Amortised) and (form, normalize) == ("exp", "none"):
        pytest.skip("its logits start below the ceiling, and nothing scales them back")
    state, known, batch = start(rule)
    weights = rule.weights(state, known, batch)
    assert weights.shape == ((6,) if rule.level == "task" else (6, QUERIES))
    torch.testing.assert_close(weights, torch.full_like(weights, unit(rule)), rtol=1e-12, atol=0)


@LEARNED
def test_initial_is_where_weights_start(rule):
    rule = RULES[rule](initial=0.3)
    state, known, batch = start(rule)
    weights = rule.weights(state, known, batch)
    torch.testing.assert_close(weights, torch.full_like(weights, 0.3))


def test_uniform_is_maml_and_never_learns():
    for level, value in (("task", 1.0), ("instance", 1 / QUERIES)):
        rule = Uniform(level=level)
        state, known, batch = start(rule)
        state = rule.update(state, known, batch, hypergradient(rule, batch), lr=1.0)
        assert (rule.weights(state, known, batch) == value).all()
        assert (rule.at(state, known, torch.arange(4)) == value).all()


@LEARNED
@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("normalize", ["none", "batch", "window", "pool"])
@pytest.mark.parametrize("anchored", [True, False])
def test_hypergradients_move_weights_in_their_direction(rule, form, normalize, anchored):
    """Who hurts validation (a positive hypergradient) ends below who helps, and never below zero."""
    rule = RULES[rule](form=form, normalize=normalize, anchored=anchored, cosine=0.0)
    state, known, batch = start(rule)
    where = rule.locate(state, known, batch)
    hurts = torch.zeros((6,) if rule.level == "task" else (6, QUERIES), dtype=torch.bool)
    if isinstance(rule, Cluster):  # whole clusters
        hurts = where <= where.float().median()
    elif isinstance(rule, Amortised):  # what its features can tell
        line = where[..., 0]
        hurts = line > line.median()
    else:
        hurts[:3] = True
    h = torch.where(hurts, 0.1, -0.1).double()
    for _ in range(20):
        state = rule.update(state, known, batch, h, lr=0.3)
    weights = rule.weights(state, known, batch)
    assert weights[hurts].mean() < 0.8 * weights[~hurts].mean()
    assert (weights >= 0).all()
    assert weights.isfinite().all()


@LEARNED
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("form", ["exp", "linear"])
def test_weights_are_bounded(rule, optimizer, form):
    rule = RULES[rule](form=form, bound=3.0, normalize="none", optimizer=optimizer, anchored=False, lr=1.0)
    state, known, batch = start(rule)
    h = 1e3 * hypergradient(rule, batch)
    if isinstance(rule, Cluster):
        where = rule.locate(state, known, batch)
        h = torch.where(where > where.min(), 1e3, -1e3)
    for _ in range(30):
        state = rule.update(state, known, batch, h, lr=1.0)
    weights = rule.weights(state, known, batch) / unit(rule)
    low, high = (torch.tensor(-3.0).exp().item(), 1.0) if form == "exp" else (0.0, 3.0)
    assert weights.min() >= low * (1 - 1e-9)
    assert weights.max() <= high * (1 + 1e-9)
    assert weights.min() < 0.5 * weights.max()


@LEARNED
def test_what_is_not_finite_does_not_reach_the_weights(rule):
    rule = RULES[rule]()
    state, known, batch = start(rule)
    h = hypergradient(rule, batch)
    h[1] = float("nan")
    h[2] = float("inf")
    norms = torch.ones(len(batch))
    norms[3] = 0
    state = rule.update(state, known, batch, h, lr=0.1, norms=norms)
    assert rule.weights(state, known, batch).isfinite().all()


def test_warmup_and_own_step_size():
    for rule, steps in ((Task(warmup=3), 3), (Task(lr=0.0), 5)):
        state, known, batch = moved(rule, steps)
        assert (rule.weights(state, known, batch) == 1).all()
    state, known, batch = moved(Task(warmup=3), 4)
    assert rule.weights(state, known, batch).std() > 0


def test_the_anchor_measures_help_against_the_mean():
    """Where all help alike no weight moves at margin 1; at margin 0 what helps is at its ceiling already."""
    for margin in (0.0, 0.5, 1.0):
        rule = Task(margin=margin, normalize="none", cosine=0.0, optimizer="sgd")
        state, known, batch = start(rule)
        for _ in range(3):
            state = rule.update(state, known, batch, torch.full((6,), -0.2), lr=0.1)
        torch.testing.assert_close(rule.weights(state, known, batch), torch.ones(6, dtype=torch.float64))
        # half as much help as the others is too little beyond a margin of a half
        h = torch.full((6,), -0.2)
        h[0] = -0.06
        state = rule.update(state, known, batch, h, lr=0.1)
        assert (rule.weights(state, known, batch)[0] < 1) == (margin > 0)


def test_cosine_takes_out_how_loud_a_task_is():
    loud = torch.tensor([1.0, 10.0, 100.0, 1.0, 10.0, 100.0])
    h = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.2, 0.2]) * loud
    rule = Task(anchored=False, optimizer="sgd", normalize="none", cosine=1.0)
    state, known, batch = start(rule)
    w = rule.weights(rule.update(state, known, batch, h, lr=1.0, norms=loud), known, batch).log()
    torch.testing.assert_close(w, -torch.tensor([0.1, 0.1, 0.1, 0.2, 0.2, 0.2], dtype=torch.float64))


# Normalisation ---------------------------------------------------------------------------------------------


@LEARNED
@pytest.mark.parametrize("form", ["exp", "linear"])
def test_batch_weights_have_mean_one(rule, form):
    rule = RULES[rule](form=form, normalize="batch")
    state, known, batch = moved(rule)
    weights = rule.weights(state, known, batch)
    assert weights.std() > 0
    torch.testing.assert_close(weights.mean().item(), unit(rule))


@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("name", ["instance", "cluster-instance", "amortised-instance"])
def test_task_weights_sum_to_one_within_each_task(name, form):
    rule = RULES[name](form=form, normalize="task")
    state, known, batch = moved(rule, steps=2, lr=0.05)
    weights = rule.weights(state, known, batch)
    assert weights.std() > 0
    torch.testing.assert_close(weights.sum(1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("name", ["task", "instance", "cluster", "amortised"])
def test_pool_weights_have_mean_one_over_the_pool(name, form):
    rule = RULES[name](form=form, normalize="pool")
    source = pool(200)  # all of it is what clusters and the network's reference are made from
    state, known, _ = start(rule, source)
    for step in range(10):
        batch = source.sample(step, 12)
        state = rule.update(state, known, batch, hypergradient(rule, batch, step), lr=0.3)
    ids = torch.arange(source.size if rule.level == "task" else source.instances)
    weights = rule.at(state, known, ids)
    assert weights.std() > 1e-3 * unit(rule)
    torch.testing.assert_close(weights.mean().item(), unit(rule), rtol=1e-9, atol=0)


def test_window_weights_have_mean_one_over_the_window():
    rule = Task(normalize="window", form="linear", cosine=0.0)
    state, known, batch = start(rule)
    mean = 1.0
    for _ in range(5):
        table = state["learned"]["table"][batch.task_ids].clamp_min(0)
        mean = 0.95 * mean + 0.05 * table.mean()
        state = rule.update(state, known, batch, hypergradient(rule, batch).abs(), lr=0.1)
    expected = state["learned"]["table"][batch.task_ids] / mean
    torch.testing.assert_close(rule.weights(state, known, batch), expected)


@LEARNED
@pytest.mark.parametrize("normalize", ["batch", "pool", "task", "none", "window"])
@pytest.mark.parametrize("form", [("linear", True), ("exp", False)], ids=["linear", "exp"])
def test_the_update_goes_through_the_normalisation(rule, normalize, form):
    """Plain gradient descent on the weights' learned numbers, against finite differences of `shape`."""
    name, form = rule, {"form": form[0], "mirror": form[1]}
    if normalize == "task" and "instance" not in name:
        pytest.skip("a normalisation of instances")
    common = {"bound": 8.0, "anchored": False, "cosine": 0.0, **form}
    rule = RULES[name](normalize=normalize, optimizer="sgd", **common, **({"lr": None} if "amort" in name else {}))
    state, known, batch = start(rule)
    where = rule.locate(state, known, batch)
    g = generator(5)
    for n, t in state["learned"].items():  # inside of the bounds, different everywhere
        noise = torch.rand(t.shape, generator=g, dtype=torch.float64)
        state["learned"][n] = t + 0.3 * noise if name.startswith("amortised") else (
            -0.5 - noise if form["form"] == "exp" else (0.5 + noise) * unit(rule)
        )  # fmt: skip
    if normalize == "window":
        state["running"]["updates"] = torch.tensor(1.0, dtype=torch.float64)
        state["running"]["mean"] = torch.tensor(0.7, dtype=torch.float64)
    h = hypergradient(rule, batch)
    before = copy.deepcopy(state)
    lr = 1e-3
    after = rule.update(state, known, batch, h, lr=lr)
    at = {**before, "running": after["running"]}  # the window's mean counts as a constant, as it is now
    for n, t in before["learned"].items():

        def aim(value, n=n):
            return (h * rule.shape({**before["learned"], n: value.reshape(t.shape)}, at, where)).sum()  # noqa: B023

        expected = central_differences(aim, t.clone())
        taken = (t - after["learned"][n]) / lr
        assert taken.abs().max() > 0
        assert relative_error(taken, expected) < 1e-5, n


def test_mirror_descent_does_not_die_with_the_weight():
    for mirror, alive in ((True, True), (False, False)):
        rule = Task(normalize="none", anchored=False, cosine=0.0, optimizer="sgd", mirror=mirror)
        state, known, batch = start(rule)
        state["learned"]["table"].fill_(-9.0)
        state = rule.update(state, known, batch, torch.full((6,), -1.0), lr=1.0)
        assert (state["learned"]["table"][batch.task_ids] > -8.5).all() == alive


# Tables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["task", "instance"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
def test_an_update_touches_only_the_rows_of_the_batch(name, optimizer):
    rule = RULES[name](optimizer=optimizer)
    state, known, batch = start(rule)
    rows = known.ids(batch).flatten()
    others = torch.ones(len(state["learned"]["table"]), dtype=torch.bool)
    others[rows] = False
    before = copy.deepcopy(state)
    state = rule.update(state, known, batch, hypergradient(rule, batch), lr=0.1)
    for group in ("learned", "moments"):
        for n, value in state[group].items():
            assert torch.equal(value[others], before[group][n][others])
    assert not torch.equal(state["learned"]["table"][rows], before["learned"]["table"][rows])


def test_a_task_drawn_twice_in_a_batch_moves_by_both():
    rule = Task(optimizer="sgd", normalize="none", anchored=False, cosine=0.0)
    state, known, _ = start(rule)
    batch = pool().draw(torch.tensor([4, 4, 8]))
    state = rule.update(state, known, batch, torch.tensor([0.1, 0.3, 0.2]), lr=1.0)
    torch.testing.assert_close(
        state["learned"]["table"][[4, 8]], torch.tensor([-0.4, -0.2], dtype=torch.float64), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("name", ["task", "instance"])
@pytest.mark.parametrize("form", ["exp", "linear"])
def test_the_pools_mean_kept_by_difference_is_the_mean(name, form):
    rule = RULES[name](form=form, normalize="pool")
    source = pool(60)
    state, known, _ = start(rule, source)
    for step in range(30):
        batch = source.sample(step, 8)
        state = rule.update(state, known, batch, hypergradient(rule, batch, step), lr=0.5)
    raw, share = rule.pool(state["learned"], state)
    kept = (rule._positive(raw, state) * share).sum()
    torch.testing.assert_close(kept, rule._positive(state["learned"]["table"], state).mean(), rtol=1e-10, atol=0)


def test_a_table_grows_where_the_size_is_not_known():
    rule = Task(optimizer="adam")
    batches = [dataclasses.replace(pool().sample(0, 3), task_ids=torch.tensor(ids)) for ids in ([0, 2, 1], [9, 2, 4])]
    known = Knowledge(None, "task", 0, batches[0])
    assert known.size is None
    state = rule.init(known, queries=QUERIES)
    for batch, length in zip(batches, (3, 10), strict=True):
        assert (rule.weights(state, known, batch) > 0).all()
        state = rule.update(state, known, batch, hypergradient(rule, batch), lr=0.3)
        assert len(state["learned"]["table"]) == length
        assert all(len(moment) == length for moment in state["moments"].values())
    raw, _ = rule.pool(state["learned"], state)
    torch.testing.assert_close(raw.exp()[0], state["learned"]["table"].exp().mean())
    assert (state["learned"]["table"][[3, 5, 6, 7, 8]] == 0).all()


def test_rules_by_id_need_ids():
    source = pool()
    for rule, what in ((Task(), "task_ids"), (Instance(), "instance_ids")):
        state, known, batch = start(rule, source)
        plain = dataclasses.replace(batch, **{what: None})
        with pytest.raises(ValueError, match=f"keeps a weight by id, but the batch has no {what}"):
            rule.weights(state, known, plain)


# Features --------------------------------------------------------------------------------------------------


def test_clusters_are_pure_without_the_truth(monkeypatch):
    monkeypatch.setattr("nestedmaml.weighting.cluster.FIT_ON", 20_000)
    source = nm.tasks.Sinusoid(10, ratio=0.5, size=2000, seed=3)
    rule = Cluster(200)
    known = Knowledge(Secret(source), "task", 0)
    state = rule.init(known, queries=10)
    where = rule.locate_ids(state, known, torch.arange(2000))
    corrupt = source.corrupt(torch.arange(2000)).double()
    share = torch.zeros(200, dtype=torch.float64).index_add_(0, where, corrupt) / torch.bincount(where, minlength=200)
    pure = torch.maximum(share, 1 - share)[where].mean()
    assert pure >= 0.97
    assert len(where.unique()) > 100
    torch.testing.assert_close(state["fixed"]["shares"].sum().item(), 1.0)


@pytest.mark.parametrize("name", ["task", "instance", "cluster", "amortised"])
def test_weights_at_ids_are_those_of_the_drawn_batch(name):
    rule = RULES[name]()
    state, known, batch = moved(rule)
    direct = rule.weights(state, known, batch)
    torch.testing.assert_close(rule.at(state, known, known.ids(batch)), direct, rtol=1e-10, atol=0)
    assert direct.std() > 0


def test_a_source_may_bring_its_own_features():
    class Featured(Blobs):
        def features(self, ids, level="task"):
            return torch.stack([ids % 2, ids % 3], -1).double()

    source = Secret(Featured(shots=2, queries=1, size=30))
    for level, ids in (("task", torch.arange(30)), ("instance", torch.arange(40))):
        rule = Cluster(6, level=level)
        known = Knowledge(source, level, 0)
        state = rule.init(known, queries=3)
        groups = rule.locate_ids(state, known, ids)
        assert len(set(zip(groups.tolist(), (ids % 6).tolist(), strict=True))) == 6
        batch = source.draw(torch.arange(5))
        assert torch.equal(rule.locate(state, known, batch), rule.locate_ids(state, known, known.ids(batch)))


def test_what_cannot_be_looked_up_by_id_says_so():
    source = pool()
    rule = Cluster(4, level="instance")
    state, known, batch = start(rule, source)
    assert not rule.knows(known)
    assert rule.weights(state, known, batch).shape == (6, QUERIES)
    with pytest.raises(ValueError, match=r"an ability features\(ids, level=\)"):
        rule.at(state, known, torch.arange(3))
    assert Instance().knows(known)
    with pytest.raises(ValueError, match="needs a source, or a first batch"):
        Cluster(4).init(Knowledge(None, "task", 0), queries=QUERIES)


# The paper's form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Task, Instance, Cluster])
def test_the_papers_form(kind):
    """w <- max(0, w - gamma h), whatever the tasks' norms; 1 at task level and .005 at instance level to start with."""
    rule = paper(kind)
    assert not isinstance(rule, Cluster) or rule.k == 200
    state, known, batch = start(rule)
    where = rule.locate(state, known, batch)
    first = 1.0 if rule.level == "task" else 0.005
    expected = torch.full((len(state["learned"]["table"]),), first, dtype=torch.float64)
    for step in range(4):
        h = hypergradient(rule, batch, step)
        moved = torch.zeros_like(expected).index_add_(0, where.flatten(), h.flatten())
        expected = (expected - 0.8 * first * moved).clamp_min(0)
        state = rule.update(state, known, batch, h, lr=0.8 * first, norms=torch.rand(6) * 50)
        torch.testing.assert_close(rule.weights(state, known, batch), expected[where], rtol=1e-12, atol=1e-12)
    assert (expected == 0).any()
    assert (expected > first).any()


def test_the_papers_form_of_instance_clusters_and_of_the_network():
    assert paper(level="instance").initial == 0.005
    assert paper().initial == 1.0
    rule = paper(Amortised, width=4, lr=0.1)
    state, known, batch = moved(rule)
    assert (rule.weights(state, known, batch) >= 0).all()
    assert rule.weights(state, known, batch).std() > 0


# Bad options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Task(level="instance"), "Task weighs tasks; for single instances use Instance"),
        (lambda: Instance(level="task"), "Instance weighs instances; for whole tasks use Task"),
        (lambda: Cluster(0), "number of clusters must be at least 1, got 0"),
        (lambda: Cluster(level="image"), "level must be one of task, instance, got 'image'"),
        (lambda: Task(form="log"), "form must be one of exp, linear"),
        (lambda: Task(normalize="mean"), "normalize must be one of none, batch, window, pool, task"),
        (lambda: Task(normalize="task"), "it needs level='instance'"),
        (lambda: Task(optimizer="lion"), "optimizer must be one of sgd, adam, adagrad"),
        (lambda: Task(initial=-1.0), "initial must be a number > 0, got -1.0"),
        (lambda: Task(initial=0.0), "initial must be a number > 0, got 0.0"),
        (lambda: Task(lr=-1.0), "lr must be a number >= 0"),
        (lambda: Task(bound=0.0), "bound must be a number > 0, got 0.0"),
        (lambda: Amortised(bound=float("inf")), "bound must be a number > 0, got inf"),
    ],
)
def test_bad_options_are_refused(build, match):
    with pytest.raises(ValueError, match=match):
        build()
