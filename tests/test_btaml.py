"""Bayesian TAML: its pooling, its KL term, its three variables, and plain MAML where all three are off."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import nestedmaml as nm
from helpers import PROBLEMS, image_batch, relative_error
from nestedmaml.methods.btaml import PREFIX, class_weights, divergence, pooled
from nestedmaml.methods.method import trainable

OFF = {"use_z": False, "use_omega": False, "use_gamma": False}


def vectors(m, shots, queries, seed, ways=3, width=4):
    """Classification tasks on vectors; class 2 has one support instance."""
    g = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(m, ways, width, generator=g)
    labels = [torch.arange(n) % ways for n in (shots, queries)]
    labels[0] = torch.where(torch.arange(shots) == shots - 1, 2, torch.arange(shots) % 2)
    x, y = ([part.expand(m, -1) for part in labels], [part.expand(m, -1).clone() for part in labels])
    x = [torch.stack([c[row] for c, row in zip(centres, part, strict=True)]) for part in x]
    x = [part + 0.5 * torch.randn(part.shape, generator=g) for part in x]
    return nm.TaskBatch(x[0], y[0], x[1], y[1])


class Vectors:
    def sample(self, step, count):
        return vectors(count, 7, 6, seed=step)

    def corrupt(self, ids, level="task"):
        raise AssertionError("only a skyline may ask for the truth")


def classifier(**options):
    options = {"loss": nm.losses.cross_entropy, "inner_lr": 0.1, "inner_steps": 2, "meta_lr": 3e-3, **options}
    return nm.BTAML(nm.models.mlp((4, 16, 3), seed=1), **options)


def problem_learner(problem, **options):
    return nm.BTAML(problem.model, loss=problem.loss, inner_lr=problem.lr, inner_steps=2, **options)


def gradients(learner, batch, noise=None):
    method, state = learner.method, learner.state
    alg = method.adaptation(learner._module, state.params, order=method.order)
    if noise is None:
        noise = method.noise(len(batch), "train", 0, next(iter(alg.theta.values())))
    return method.gradients(alg, state.params, batch, noise)


def test_pooling_is_the_moments_by_hand():
    x = torch.tensor([[1.0], [2.0], [6.0], [5.0]], dtype=torch.float64)
    members = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.float64)
    three, one, none = pooled(x, members, eps=0.0)[0, 0], pooled(x, members)[1, 0], pooled(x, members)[2, 0]
    # mean 3; deviations -2, -1, 3: variance 14/3, third moment 18/3, fourth 98/3
    var = 14 / 3
    wanted = torch.tensor([3.0, var, 6 / var**1.5, 98 / 3 / var**2, torch.tensor(4.0).log()], dtype=torch.float64)
    assert torch.allclose(three, wanted, rtol=1e-6)
    assert torch.allclose(one, torch.tensor([5.0, 0, 0, 0, torch.tensor(2.0).log()], dtype=torch.float64))
    assert not none.any()


def test_pooling_does_not_know_the_order():
    x, order = torch.randn(6, 3, dtype=torch.float64), torch.tensor([3, 1, 5, 0, 2, 4])
    members = torch.eye(2, dtype=torch.float64)[torch.tensor([0, 1, 1, 0, 1, 0])].T
    assert torch.allclose(pooled(x, members), pooled(x[order], members[:, order]))


def test_kl_is_its_closed_form_and_its_monte_carlo_estimate():
    g = torch.Generator().manual_seed(0)
    q = {
        n: (torch.randn(k, generator=g).double(), torch.rand(k, generator=g).double() + 0.2)
        for n, k in (("z", 4), ("omega", 3))
    }
    normals = [Normal(*pair) for pair in q.values()]
    exact = sum(kl_divergence(n, Normal(torch.zeros(()).double(), 1.0)).sum() for n in normals)
    assert torch.allclose(divergence(q), exact, rtol=1e-6)
    noise = torch.randn(200_000, 7, generator=g, dtype=torch.float64).split([4, 3], 1)
    estimate = 0
    for n, e in zip(normals, noise, strict=True):
        drawn = n.mean + n.stddev * e
        estimate = estimate + (n.log_prob(drawn) - Normal(0.0, 1.0).log_prob(drawn)).sum(1)
    assert abs(divergence(q) - estimate.mean()) < 4 * estimate.std() / len(estimate) ** 0.5
    assert divergence({"z": (torch.zeros(3), torch.ones(3))}) == 0


def test_omega_sums_to_the_number_of_classes():
    omega = torch.tensor([0.3, -2.0, 1.0, 5.0], dtype=torch.float64)
    weights = class_weights(omega, torch.tensor([True, True, True, False]))
    assert torch.isclose(weights.sum(), torch.tensor(3.0, dtype=torch.float64))
    assert weights[3] == 0
    assert torch.allclose(class_weights(torch.zeros(4), torch.ones(4, dtype=torch.bool)), torch.ones(4))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("order", [1, 2])
def test_all_off_is_maml(name, order):
    problem = PROBLEMS[name]()
    learner = problem_learner(problem, order=order, **OFF)
    assert learner.params.keys() == problem.params.keys()
    _, grads = gradients(learner, problem.train)
    wanted = nm.functional.meta_gradient(
        problem.model, problem.params, problem.train, torch.ones(len(problem.train), dtype=torch.float64),
        loss=problem.loss, lr=problem.lr, steps=2, order=order,
    )  # fmt: skip
    assert relative_error({n: g.mean(0) for n, g in grads.items()}, wanted) < 1e-10
    maml = nm.MAML(problem.model, loss=problem.loss, inner_lr=problem.lr, inner_steps=2, order=order)
    for _ in range(3):
        figures = learner.step(problem.train), maml.step(problem.train)
        assert figures[0]["train_loss"] == pytest.approx(figures[1]["train_loss"], rel=1e-10)
    assert relative_error(learner.params, maml.params) < 1e-8


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradient_is_that_of_finite_differences(name):
    """Along one direction in all parameters, the encoder's too."""
    problem = PROBLEMS[name]()
    learner = problem_learner(problem, initial_sd=0.3, kl_weight=1.0)
    method, params = learner.method, learner.params
    alg = method.adaptation(learner._module, params)
    noise = method.noise(len(problem.train), "train", 0, next(iter(params.values())))
    _, grads = gradients(learner, problem.train, noise)
    g = torch.Generator().manual_seed(2)
    along = {n: torch.randn(p.shape, generator=g, dtype=p.dtype) for n, p in params.items()}

    def objective(h):
        (values, kl), _ = method.gradients(alg, {n: p + h * along[n] for n, p in params.items()}, problem.train, noise)
        return (values.mean() + kl.mean() / (problem.train.shots + problem.train.queries)).item()

    slope = sum((grads[n].mean(0) * along[n]).sum() for n in params).item()
    h = 1e-6
    assert slope == pytest.approx((objective(h) - objective(-h)) / (2 * h), rel=1e-4)
    assert all(grads[n].abs().max() > 0 for n in params if n.startswith(f"{PREFIX}heads"))


def test_variables_do_what_the_paper_says():
    learner = classifier()
    encoder, alg = learner.method.encoder, learner.method.adaptation(learner._module, learner.params)
    theta, y = trainable(alg, learner.params), torch.tensor([0, 0, 1, 2])
    drawn = {"z": torch.full((32,), 0.5), "omega": torch.tensor([0.0, 1.0, 2.0]), "gamma": torch.tensor([0.0, 1.0])}
    moved, rates, weights = encoder.balance(theta, alg.lr, drawn, y)
    assert torch.allclose(moved["0.weight"], 1.5 * theta["0.weight"])
    assert torch.allclose(moved["0.bias"], theta["0.bias"] + 0.5)
    assert moved["2.weight"] is theta["2.weight"]  # a classifier's last layer has rows of no class in particular
    assert float(rates["0.weight"]) == pytest.approx(0.1)
    assert float(rates["2.bias"]) == pytest.approx(0.1 * torch.tensor(1.0).exp().item())
    assert torch.allclose(weights, 3 * torch.tensor([0.0, 1.0, 2.0]).softmax(0)[y])


def test_regression_has_one_class_and_moves_every_layer():
    learner = nm.BTAML(nm.models.mlp(), inner_lr=0.01)
    assert learner.method.encoder.sizes == {"z": 2 * 40 + 2 * 40 + 2, "gamma": 3}


def test_posterior_does_not_know_the_order_of_classes():
    learner = classifier()
    encoder, batch = learner.method.encoder, vectors(1, 7, 6, seed=0)
    x, y, to = batch.support_x[0], batch.support_y[0], torch.tensor([2, 0, 1])
    q, renamed = encoder(x, y), encoder(x, to[y])
    for name in ("z", "gamma"):
        assert torch.allclose(q[name][0], renamed[name][0], atol=1e-5)
    assert torch.allclose(q["omega"][0], renamed["omega"][0][to], atol=1e-5)


def test_convolutions_with_normalisation():
    problem = PROBLEMS["conv"]()
    learner = problem_learner(problem, mc_samples=2)
    assert set(learner.method.encoder.moved) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    before = {n: p.clone() for n, p in learner.params.items()}
    learner.step(problem.train)
    assert all((learner.params[n] != before[n]).any() for n in ("0.weight", "1.weight", f"{PREFIX}instance.0.weight"))
    batch = image_batch(2, 6, 3, 3, seed=9)
    assert learner.adapt(batch.support_x[0], batch.support_y[0]).predict(batch.query_x[0]).shape == (3,)


@pytest.mark.parametrize("mc_samples", [0, 3])
def test_predictions_average_draws_and_agree_with_adapt(mc_samples):
    learner, batch = classifier(mc_samples=mc_samples, initial_sd=0.5), vectors(3, 7, 6, seed=3)
    stacked = learner.method.predictions(learner.state, learner._module, batch).softmax(-1)
    for i in range(3):
        adapted = learner.adapt(batch.support_x[i], batch.support_y[i])
        assert torch.allclose(adapted.predict_proba(batch.query_x[i]), stacked[i], atol=1e-5)
    noise = learner.method.test_noise(learner.params["0.weight"])
    alg = learner.method.adaptation(learner._module, learner.params)
    each = []
    for draw in noise:
        phi, _, _ = learner.method.adapted(alg, learner.params, batch.support_x[0], batch.support_y[0], draw)
        each.append(torch.func.functional_call(learner._module, phi, (batch.query_x[0],)).softmax(-1))
    assert torch.allclose(torch.stack(each).mean(0), stacked[0], atol=1e-5)


def test_learns_without_the_truth_and_loads_to_the_same_predictions(tmp_path):
    learner, fresh, batch = classifier(), classifier(), vectors(50, 7, 6, seed=10**6)
    learner.fit(Vectors(), iterations=60, batch=4)
    assert learner.evaluate([batch], tasks=50).mean > fresh.evaluate([batch], tasks=50).mean + 5
    loaded = nm.load(learner.save(tmp_path / "run"))
    assert loaded.params.keys() == learner.params.keys()
    assert torch.equal(loaded.evaluate([batch], tasks=50).values, learner.evaluate([batch], tasks=50).values)


def test_runs_repeat_and_resume_to_the_bit(tmp_path):
    whole = classifier().fit(Vectors(), iterations=6, batch=2)
    again = classifier().fit(Vectors(), iterations=6, batch=2)
    classifier().fit(Vectors(), iterations=3, batch=2, out=tmp_path)
    parts = classifier().fit(Vectors(), iterations=6, batch=2, out=tmp_path, resume=True)
    other = classifier(seed=1).fit(Vectors(), iterations=6, batch=2)
    for n, p in whole.params.items():
        assert torch.equal(p, again.params[n])
        assert torch.equal(p, parts.params[n])
    assert not torch.equal(whole.params["0.weight"], other.params["0.weight"])


def test_a_task_that_diverges_is_left_out():
    learner, batch = classifier(), vectors(2, 7, 6, seed=0)
    batch.support_x[0] *= 1e20
    figures = learner.step(batch)
    assert figures["diverged"] == 1
    assert all(p.isfinite().all() for p in learner.params.values())


@pytest.mark.parametrize(
    ("options", "match"),
    [({"kl_weight": -1.0}, "kl_weight"), ({"order": 3}, "order"), ({"mc_samples": -1}, "mc_samples")],
)
def test_bad_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        classifier(**options)


def test_a_model_without_layers_is_refused():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x + self.b

    with pytest.raises(ValueError, match="BTAML needs a model of linear layers or convolutions"):
        nm.BTAML(Shift())


def test_a_draw_that_diverges_does_not_count():
    method = nm.BTAML(nm.models.mlp(), loss=nm.losses.squared_error).method
    outputs = torch.tensor([[[1.0], [1.0]], [[3.0], [torch.inf]], [[1e9], [5.0]]])  # draws, tasks, instances
    sound = torch.tensor([[True, True], [True, False], [False, True]])
    assert method.average(outputs, sound).tolist() == [[2.0], [3.0]]
    learner = nm.BTAML(nm.models.mlp(seed=1), inner_lr=0.02, initial_sd=2.0, use_z=False, mc_samples=50)
    assert learner.evaluate(nm.tasks.Sinusoid(size=None), tasks=20).mean < 10
