import csv
import math

import numpy as np
import pytest
import torch

import nestedmaml as nm
from nestedmaml.experiments import convergence
from nestedmaml.experiments.results import Results
from nestedmaml.experiments.ridge import BATCH, POOL, VAL_BATCH, VALIDATION, WIDTH, Problem, Reference, batches

EXACT = {"rtol": 0, "atol": 1e-10}


@pytest.fixture(scope="module")
def problem():
    return Problem.draw(3)


@pytest.fixture(scope="module")
def reference(problem):
    return Reference(problem)


@pytest.fixture(scope="module")
def points():
    return convergence.rows("smoke", 0) + convergence.rows("smoke", 1)


def at(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(WIDTH), rng.uniform(-0.5, 2, POOL)


def params(theta):
    return {"theta": torch.from_numpy(theta)}


def weight_gradient(reference, theta, weights, eta, train=None, val=None):
    return nm.functional.weight_gradient(
        reference.model,
        params(theta),
        train or reference.train,
        val or reference.val,
        torch.from_numpy(weights),
        loss=reference.loss,
        inner_lr=reference.alpha,
        inner_steps=1,
        meta_lr=eta,
    ).numpy()


def meta_gradient(reference, theta, batch, weights):
    return nm.functional.meta_gradient(
        reference.model, params(theta), batch, torch.from_numpy(weights),
        loss=reference.loss, lr=reference.alpha, steps=1,
    )["theta"].numpy()  # fmt: skip


def test_the_pool_holds_exactly_its_share_of_corrupt_tasks(problem):
    assert problem.corrupt.sum() == POOL // 2
    assert len(problem.val.support_x) == VALIDATION


@pytest.mark.parametrize("eta", [0.3, 1e-3])
def test_the_full_gradient_is_that_of_the_functional_core(problem, reference, eta):
    theta, weights = at(1)
    expected = weight_gradient(reference, theta, weights, eta) / eta
    np.testing.assert_allclose(problem.full_gradient(theta, weights, eta) / eta, expected, **EXACT)
    assert abs(expected).max() > 0.01


def test_a_mini_batch_has_the_gradients_of_the_functional_core(problem, reference):
    theta, weights = at(2)
    index, chosen = next(batches(np.random.default_rng(0), 1, 1))
    train, val = reference.train.take(torch.from_numpy(index[0])), reference.val.take(torch.from_numpy(chosen[0]))
    assert (len(train), len(val)) == (BATCH, VAL_BATCH)
    slope, grads = problem.weight_step(theta[None], weights[None], index, chosen, 0.2)
    np.testing.assert_allclose(slope[0], weight_gradient(reference, theta, weights[index[0]], 0.2, train, val), **EXACT)
    combined = (weights[index[0]][:, None] * grads[0]).mean(0)
    np.testing.assert_allclose(combined, meta_gradient(reference, theta, train, weights[index[0]]), **EXACT)


def test_the_validation_loss_is_that_of_the_functional_core(problem, reference):
    theta, _ = at(3)
    losses = nm.functional.query_losses(
        reference.model, params(theta), reference.val, loss=reference.loss, lr=reference.alpha, steps=1
    )
    assert problem.validation_loss(theta) == pytest.approx(losses.mean().item(), abs=1e-10)


def test_runs_are_those_of_a_loop_over_the_functional_core(problem, reference):
    steps, eta, gamma = 12, 0.25, 0.5
    trace = convergence.simulate(problem, np.array([eta, 0.1]), np.array([gamma, 0.2]), steps, runs=2, seed=5)
    theta, weights, squares = np.tile(problem.start, (2, 1)), np.ones((2, POOL)), np.zeros((2, steps + 1))
    drawn = [*batches(np.random.default_rng([5, 1, steps]), steps, 2), None]
    for t, draw in enumerate(drawn):
        for run in range(2):
            squares[run, t] = (weight_gradient(reference, theta[run], weights[run], eta) ** 2).sum()
            if draw is None:
                continue
            index, chosen = draw[0][run], draw[1][run]
            train, val = reference.train.take(torch.from_numpy(index)), reference.val.take(torch.from_numpy(chosen))
            weights[run, index] -= gamma * weight_gradient(reference, theta[run], weights[run, index], eta, train, val)
            theta[run] -= eta * meta_gradient(reference, theta[run], train, weights[run, index])
    np.testing.assert_allclose(trace.theta[0], theta, **EXACT)
    np.testing.assert_allclose(trace.weights[0], weights, **EXACT)
    np.testing.assert_allclose(trace.squares[0], squares.mean(0), **EXACT)
    np.testing.assert_allclose(trace.lowest[0], squares.min(1), **EXACT)
    assert trace.squares.shape == (2, steps + 1)


def test_batches_hold_no_task_twice_and_every_task_equally_often():
    drawn = [index for index, _ in batches(np.random.default_rng(0), 300, 8)]
    assert len(drawn) == 300
    assert all(len(set(row)) == BATCH for index in drawn for row in index)
    counts = np.bincount(np.ravel(drawn), minlength=POOL)
    assert abs(counts / counts.mean() - 1).max() < 0.15


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_constants_bound_every_hessian_and_gradient(seed):
    problem = Problem.draw(seed)
    reference = Reference(problem)
    rng = np.random.default_rng(seed)
    direction = rng.standard_normal(WIDTH)
    inside = torch.from_numpy(direction / np.linalg.norm(direction) * problem.radius)
    for batch in (reference.train, reference.val):
        for x, y in ((batch.support_x, batch.support_y), (batch.query_x, batch.query_y)):
            for i in range(len(batch)):

                def value(theta, x=x[i], y=y[i]):
                    return reference.loss(torch.func.functional_call(reference.model, {"theta": theta}, (x,)), y).mean()

                spectrum = torch.linalg.eigvalsh(torch.func.hessian(value)(inside))
                assert problem.convexity - 1e-12 <= spectrum.min()
                assert spectrum.max() <= problem.smoothness + 1e-12
                assert torch.func.grad(value)(inside).norm() <= problem.bound
    assert problem.alpha == 1 / (2 * problem.smoothness)
    assert problem.convexity > 0
    # Lemma online-meta-lipschitz: the meta-loss after one step is mu / 8 convex and 9 L / 8 smooth
    spectrum = np.linalg.eigvalsh(problem.train.gradient(problem.alpha)[0])
    assert problem.convexity / 8 <= spectrum.min()
    assert spectrum.max() <= 9 * problem.smoothness / 8


def test_sigma_is_a_deviation_per_unit_of_eta(problem):
    assert problem.deviation(1e-3) == pytest.approx(1e-3 * problem.sigma, rel=0.02)


def test_the_settings_are_the_theorems(problem):
    for horizon in (32, 128, 4096):
        eta, gamma = convergence.steps("theorem", problem, horizon)
        assert eta == min(1, convergence.TRAVEL / horizon)
        assert gamma == pytest.approx(math.sqrt(32 / horizon) / problem.smoothness)  # C / (sigma sqrt T), below 1 / L
        assert convergence.steps("fixed eta", problem, horizon) == (0.25, gamma)
        for own in ("theorem, own sigma", "eta as 1/sqrt(T), own sigma"):
            assert convergence.steps(own, problem, horizon)[1] == pytest.approx(1 / problem.smoothness)
    assert len({convergence.steps(setting, problem, 32)[0] for setting in convergence.SETTINGS}) == 1


def test_the_smoke_scale_shows_that_eta_alone_makes_the_norm_fall(points):
    found = {(slope.setting, slope.norm): slope for slope in convergence.slopes(points)}
    assert found["theorem", "plain"].value < -0.5
    assert found["theorem", "plain"].value == pytest.approx(found["theorem", "divided by eta^2"].value - 2)
    assert abs(found["theorem", "divided by eta^2"].value) < 0.2
    assert all(slope.ci95 >= 0 for slope in found.values())
    assert all(point["minimum"] <= point["bound"] and point["lowest"] <= point["minimum"] for point in points)


def test_slopes_of_a_power_law_are_its_exponent():
    points = [
        {"setting": s, "seed": seed, "T": t, "minimum": seed * t**-0.7, "normalised": t**0.1, "lowest": 1.0}
        for s in convergence.SETTINGS for seed in (1, 2, 3) for t in (32, 64, 128, 256)
    ]  # fmt: skip
    for slope in convergence.slopes(points, since=64):
        exponent = {"plain": -0.7, "divided by eta^2": 0.1}.get(slope.norm, 0.0)
        assert slope.value == pytest.approx(exponent)
        assert slope.ci95 == pytest.approx(0, abs=1e-12)
        assert slope.since == 64
    with pytest.raises(ValueError, match="at least two horizons"):
        convergence.slopes(points, since=256)


def test_a_seed_always_gives_the_same_points(points):
    assert convergence.rows("smoke", 1) == points[len(points) // 2 :]


def test_the_command_writes_slopes_points_and_figure(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--seeds", "0", "1", "--scale", "smoke"]
    assert convergence.main(arguments) == 0
    rows = Results(tmp_path).read()
    assert {row.metric for row in rows} == {"slope"}
    assert len({row.variant for row in rows}) == len(rows) == 2 * len(convergence.SETTINGS) * len(convergence.NORMS)
    with open(tmp_path / "points.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(convergence.SETTINGS) * 4
    assert (tmp_path / "convergence.svg").read_text().startswith("<svg")
    assert (tmp_path / "convergence.png").stat().st_size > 0
    assert "theorem, norm plain, T >= 32" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        convergence.main(arguments)
    assert stop.value.code == 2
    assert "already holds" in capsys.readouterr().err
    assert convergence.main(["--out", str(tmp_path), "--seeds", "2"]) == 0  # one seed: no interval
    assert Results(tmp_path).read()[-1].ci95 is None
