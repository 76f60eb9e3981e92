"""MMAML: neutral modulation is MAML, the gradient is that of the unrolled loop, and the rest of the protocol."""

import pytest
import torch
from torch import nn

import helpers
import nestedmaml as nm
from nestedmaml.functional import task_gradients
from nestedmaml.methods.mmaml import OWN, blocks, encode

PROBLEMS = list(helpers.PROBLEMS)


def learners(problem, cls=nm.MMAML, **options):
    options = {"inner_lr": problem.lr, "inner_steps": 3, "loss": problem.loss} | options
    return cls(problem.model, **options)


def scramble(learner, seed=0):
    """Random numbers in place of the modulators' zeros."""
    g = helpers.generator(seed)
    for n, p in learner.state.params.items():
        if n.startswith(f"{OWN}modulator"):
            p.copy_(0.3 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return learner


def gradient_of_step(learner, batch, monkeypatch):
    """The gradient that one step gives to the optimizer."""
    seen = {}
    monkeypatch.setattr("nestedmaml.methods.mmaml.meta_step", lambda state, gradient: seen.update(gradient))
    learner.step(batch)
    return seen


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("order", [1, 2])
def test_neutral_film_is_maml(problem, order, monkeypatch):
    problem = helpers.PROBLEMS[problem]()
    maml, mmaml = learners(problem, nm.MAML, order=order), learners(problem, order=order)
    alg = maml.method.adaptation(maml._module, maml.state.params, order=order)
    _, grads = task_gradients(alg, alg.theta, problem.train)
    own = gradient_of_step(mmaml, problem.train, monkeypatch)
    expected = {n: g.mean(0) for n, g in grads.items()}
    assert helpers.relative_error({n: own[n] for n in expected}, expected) < 1e-12
    assert helpers.relative_error(
        mmaml.method.predictions(mmaml.state, mmaml._module, problem.val),
        maml.method.predictions(maml.state, maml._module, problem.val),
    ) < 1e-12  # fmt: skip


def modulated_forward(problem, theta, tau, x):
    """The models of ``helpers``, written out with FiLM or gates; ``tau`` holds (gamma, beta) of each block."""

    def film(h, block):
        gamma, beta = tau[block]
        shape = (1, -1, 1, 1)[: h.ndim]
        return h * gamma.view(shape) + beta.view(shape)

    if problem.head == "4":
        h = film(x @ theta["0.weight"].T + theta["0.bias"], 0).relu()
        h = film(h @ theta["2.weight"].T + theta["2.bias"], 1).relu()
        return h @ theta["4.weight"].T + theta["4.bias"]
    h = nn.functional.conv2d(x, theta["0.weight"], theta["0.bias"], padding=1)
    h = nn.functional.batch_norm(h, None, None, theta["1.weight"], theta["1.bias"], training=True)
    h = nn.functional.max_pool2d(film(h, 0).relu(), 2).flatten(1)
    return h @ theta["5.weight"].T + theta["5.bias"]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("modulation", ["film", "sigmoid"])
@pytest.mark.parametrize("order", [1, 2])
def test_gradient_is_that_of_the_unrolled_loop(problem, modulation, order, monkeypatch):
    problem = helpers.PROBLEMS[problem]()
    learner = scramble(learners(problem, modulation=modulation, order=order, hidden=5))
    leaves = helpers.leaves(learner.state.params)
    own = {n.removeprefix(OWN): p for n, p in leaves.items() if n.startswith(OWN)}
    batch, total = problem.train, 0.0
    for i in range(len(batch)):
        v = encode(own, batch.support_x[i : i + 1], batch.support_y[i : i + 1])[0]
        tau = []
        for b in range(len(blocks(problem.model))):
            raw = own[f"modulator.{b}.weight"] @ v + own[f"modulator.{b}.bias"]
            half = len(raw) // 2
            tau.append((1 + raw[:half], raw[half:]) if modulation == "film" else (raw.sigmoid(), torch.zeros_like(raw)))
        phi = {n: p for n, p in leaves.items() if not n.startswith(OWN)}
        for _ in range(3):
            value = problem.loss(modulated_forward(problem, phi, tau, batch.support_x[i]), batch.support_y[i]).mean()
            grads = torch.autograd.grad(value, list(phi.values()), create_graph=True)
            grads = [g.detach() for g in grads] if order == 1 else grads
            phi = {n: p - problem.lr * g for (n, p), g in zip(phi.items(), grads, strict=True)}
        total = total + problem.loss(modulated_forward(problem, phi, tau, batch.query_x[i]), batch.query_y[i]).mean()
    wanted = torch.autograd.grad(total / len(batch), list(leaves.values()))
    found = gradient_of_step(learner, batch, monkeypatch)
    for n, g in zip(leaves, wanted, strict=True):
        assert g.abs().max() > 1e-8 or n == "0.bias", n  # batch normalisation takes a convolution's bias away
        assert torch.allclose(found[n], g, rtol=1e-8, atol=1e-11), n


@pytest.mark.parametrize("problem", PROBLEMS)
def test_encoder_learns_and_a_saved_learner_predicts_the_same(problem, tmp_path):
    problem = helpers.PROBLEMS[problem]()
    learner = learners(problem, hidden=6, test_steps=2)
    before = {n: p.clone() for n, p in learner.params.items()}
    losses = [learner.step(problem.train)["train_loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    # a convolution's bias ahead of a batch normalisation has no gradient but rounding
    assert all((learner.params[n] - before[n]).abs().max() > 1e-4 for n in before if n.startswith(OWN))
    learner.save(tmp_path / "run")
    again = nm.load(tmp_path / "run", model=problem.model)
    first, second = (k.method.predictions(k.state, k._module, problem.val) for k in (learner, again))
    assert torch.equal(first, second)
    assert again.step(problem.train) == learner.step(problem.train)

    # one task at a time gives what the batch gives, in whatever order its support set comes
    one = learner.method.predictions(learner.state, learner._module, problem.val)[0]
    order = torch.arange(problem.val.shots).flip(0)
    adapted = learner.adapt(problem.val.support_x[0][order], problem.val.support_y[0][order])
    assert torch.allclose(adapted._predict(problem.val.query_x[0]), one, atol=1e-9)
    assert {n for n in adapted.params if not n.startswith("tau.")} == set(dict(problem.model.named_parameters()))


def test_model_is_left_as_it_was():
    problem = helpers.conv_problem()
    learner = learners(problem)
    assert not any(part._forward_hooks for part in (*problem.model.modules(), *learner._module.modules()))
    assert set(learner.model().state_dict()) == set(problem.model.state_dict())


def test_film_acts_behind_a_normalisation():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 5),
        nn.LayerNorm(5), nn.Linear(5, 2),
    )  # fmt: skip
    assert blocks(model) == [("1", 4, 1), ("2", 6, 1), ("6", 5, -1)]

    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
            self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            self.fc = nn.Linear(4, 2)

    assert sorted(name for name, *_ in blocks(Apart())) == ["bn1", "bn2"]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_batching_inner_and_rates_are_respected(problem, monkeypatch):
    problem = helpers.PROBLEMS[problem]()
    options = {"inner": [problem.head], "inner_lr": {f"{problem.head}.weight": 0.1, f"{problem.head}.bias": 0.2}}
    first, second = (
        gradient_of_step(scramble(learners(problem, batching=batching, **options)), problem.train, monkeypatch)
        for batching in ("vmap", "loop")
    )
    assert helpers.relative_error(first, second) < 1e-9
    learner = scramble(learners(problem, **options))
    adapted = learner.adapt(problem.val.support_x[0], problem.val.support_y[0]).params
    moved = {n for n, p in problem.model.named_parameters() if not torch.equal(adapted[n], p)}
    assert moved == {f"{problem.head}.weight", f"{problem.head}.bias"}


def test_diverging_task_is_left_out(monkeypatch):
    problem = helpers.mlp_problem()
    learner = scramble(learners(problem, inner_steps=8))
    clean = gradient_of_step(learner, problem.train.take(slice(1, 3)), monkeypatch)
    x, y = problem.train.support_x.clone(), problem.train.support_y.clone()
    y[0] = 1e200
    dirty = nm.TaskBatch(x, y, problem.train.query_x, problem.train.query_y)
    found = gradient_of_step(learner, dirty, monkeypatch)
    assert helpers.relative_error(found, {n: g * 2 / 3 for n, g in clean.items()}) < 1e-9


def test_seed_and_mistakes():
    problem = helpers.mlp_problem()
    a, b, c = (learners(problem, seed=seed).params[f"{OWN}encoder.weight_ih_l0"] for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    with pytest.raises(ValueError, match="modulation must be 'film' or 'sigmoid'"):
        learners(problem, modulation="softmax")
    with pytest.raises(ValueError, match="hidden must be an integer >= 1"):
        learners(problem, hidden=0)
    with pytest.raises(ValueError, match="before the last, and Linear has none"):
        nm.MMAML(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="must be Linear or Conv2d"):
        nm.MMAML(nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(2, 1)))
    two = helpers.regression_batch(2, 4, 3, seed=1, width=2)
    with pytest.raises((ValueError, RuntimeError)):
        learners(problem).step(two)
    images = helpers.conv_problem()
    wrong = nm.TaskBatch(images.train.support_x, images.train.support_y + 2, images.train.query_x, images.train.query_y)
    with pytest.raises(ValueError, match="classes must be"):
        learners(images).step(wrong)


def test_fits_sources_and_classification():
    learner = nm.MMAML(nm.models.mlp((1, 10, 10, 1)), meta_lr=1e-2)
    source, test = (nm.tasks.Sinusoid(5, ratio=0.5, size=500, split=split) for split in ("train", "test"))
    before = learner.evaluate(test, tasks=200).mean
    learner.fit(source, iterations=100, batch=10)
    assert learner.evaluate(test, tasks=200).mean < before
    problem = helpers.conv_problem()
    images = learners(problem)
    images.fit([problem.train, problem.val], iterations=4, batch=2)
    adapted = images.adapt(problem.val.support_x[0], problem.val.support_y[0])
    assert adapted.predict(problem.val.query_x[0]).dtype == torch.int64
    assert torch.allclose(
        adapted.predict_proba(problem.val.query_x[0]).sum(1), torch.ones(problem.val.queries).double()
    )
