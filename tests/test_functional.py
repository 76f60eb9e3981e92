"""The functional core against finite differences and autograd through the unrolled loop; bad input."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import nestedmaml as nm
from helpers import (
    PROBLEMS,
    central_differences,
    generator,
    leaves,
    mlp_problem,
    random_weights,
    regression_batch,
    relative_error,
    seeded,
    unrolled_adapt,
    unrolled_lookahead,
    unrolled_losses,
    unrolled_meta_gradient,
    unrolled_validation_loss,
)
from nestedmaml.functional import adapt, meta_gradient, query_losses, weight_gradient

META_LR = 0.3
OPTIONS = ["plain", "head", "support weights", "rates"]
LEVELS = ["task", "instance"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These problems are tiny: on a busy machine, threads that wait for one another take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=list(PROBLEMS))
def problem(request):
    return PROBLEMS[request.param]()


def make_options(problem, name):
    """Options of the training adaptation, by the oracle's names."""
    options = {"lr": problem.lr}
    if name == "head":
        options["inner"] = [problem.head]
    elif name == "support weights":
        shape = problem.train.support_x.shape[:2]
        options["support_weights"] = 2 * torch.rand(shape, generator=generator(11), dtype=torch.float64)
    elif name == "rates":
        g = generator(12)
        options["lr"] = {
            n: problem.lr * torch.rand(p.shape, generator=g, dtype=torch.float64) if i % 2 else problem.lr / (1 + i)
            for i, (n, p) in enumerate(problem.params.items())
        }
    return options


def own_weight_gradient(problem, weights, *, lr, order="exact", **options):
    return weight_gradient(
        problem.model, problem.params, problem.train, problem.val, weights,
        loss=problem.loss, inner_lr=lr, meta_lr=META_LR, order=order, **options,
    )  # fmt: skip


def unrolled_weight_gradient(problem, weights, **options):
    weights = weights.clone().requires_grad_()
    value = unrolled_validation_loss(problem, problem.params, weights, meta_lr=META_LR, **options)
    return torch.autograd.grad(value, weights)[0]


# --- the derivative with respect to the weights -----------------------------------------------------------


@pytest.mark.parametrize("val_steps", [None, 1])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_weight_gradient_is_that_of_finite_differences_and_of_autograd(problem, steps, level, val_steps):
    weights = random_weights(problem.train, level)
    options = {"lr": problem.lr, "inner_steps": steps, "val_steps": val_steps}
    result = own_weight_gradient(problem, weights, **options)
    assert result.shape == weights.shape
    assert not result.requires_grad

    def validation(w):
        return unrolled_validation_loss(problem, problem.params, w, meta_lr=META_LR, **options)

    assert relative_error(result, central_differences(validation, weights)) < 1e-6
    assert relative_error(result, unrolled_weight_gradient(problem, weights, **options)) < 1e-10


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIONS[1:])
def test_weight_gradient_with_options(problem, name, level):
    weights = random_weights(problem.train, level)
    options = {"inner_steps": 2, "val_steps": 1, **make_options(problem, name)}
    result = own_weight_gradient(problem, weights, **options)

    def validation(w):
        return unrolled_validation_loss(problem, problem.params, w, meta_lr=META_LR, **options)

    assert relative_error(result, central_differences(validation, weights)) < 1e-6
    assert relative_error(result, unrolled_weight_gradient(problem, weights, **options)) < 1e-10
    plain = own_weight_gradient(problem, weights, inner_steps=2, val_steps=1, lr=problem.lr)
    assert relative_error(result, plain) > 1e-3, "the option changed nothing"


@pytest.mark.parametrize("val_steps", [0, 3])
def test_val_steps_count_the_validation_adaptation_alone(problem, val_steps):
    weights = random_weights(problem.train, "task")
    options = {"lr": problem.lr, "inner_steps": 2, "val_steps": val_steps}
    result = own_weight_gradient(problem, weights, **options)
    assert relative_error(result, unrolled_weight_gradient(problem, weights, **options)) < 1e-10


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("steps", [1, 3])
def test_first_order_is_eq_weight_update_appr(problem, steps, level):
    """Minus eta / (m n) sum_j <grad L_Vj at phi_j, grad_theta L_i>, phi_j adapted from theta_W."""
    weights = random_weights(problem.train, level)
    model, loss, train, val = problem.model, problem.loss, problem.train, problem.val
    lookahead = unrolled_lookahead(problem, problem.params, weights, lr=problem.lr, inner_steps=steps, meta_lr=META_LR)
    v = {n: torch.zeros_like(p) for n, p in lookahead.items()}
    for j in range(len(val)):
        theta = leaves(lookahead)
        phi = unrolled_adapt(model, theta, val.support_x[j], val.support_y[j], loss=loss, lr=problem.lr, steps=steps)
        phi = leaves(phi)
        value = loss(functional_call(model, phi, (val.query_x[j],)), val.query_y[j]).mean()
        for n, g in zip(phi, torch.autograd.grad(value, list(phi.values())), strict=True):
            v[n] += g / len(val)
    expected = torch.empty_like(weights)
    theta = leaves(problem.params)
    losses = unrolled_losses(model, theta, train, loss=loss, lr=problem.lr, steps=steps)
    parts = losses.mean(1) if level == "task" else losses
    for i in range(weights.numel()):
        g = torch.autograd.grad(parts.view(-1)[i], list(theta.values()), retain_graph=True)
        slope = sum((a * b).sum() for a, b in zip(g, v.values(), strict=True))
        expected.view(-1)[i] = -META_LR / len(train) * slope

    result = own_weight_gradient(problem, weights, lr=problem.lr, inner_steps=steps, order="first")
    assert relative_error(result, expected) < 1e-10
    exact = own_weight_gradient(problem, weights, lr=problem.lr, inner_steps=steps)
    assert relative_error(result, exact) > 1e-3


def test_task_weights_are_instance_weights_times_k(problem):
    weights = random_weights(problem.train, "task")
    k = problem.train.queries
    spread = (weights / k)[:, None].expand(-1, k)
    options = {"lr": problem.lr, "inner_steps": 2}
    by_task = own_weight_gradient(problem, weights, **options)
    by_instance = own_weight_gradient(problem, spread, **options)
    assert relative_error(by_instance.mean(1), by_task) < 1e-12


# --- the meta-gradient ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIONS)
def test_meta_gradient_is_that_of_autograd(problem, name, level, order):
    weights = random_weights(problem.train, level)
    options = {"loss": problem.loss, "steps": 2, "order": order, **make_options(problem, name)}
    result = meta_gradient(problem.model, problem.params, problem.train, weights, **options)
    expected = unrolled_meta_gradient(problem.model, leaves(problem.params), problem.train, weights, **options)
    assert relative_error(result, expected) < 1e-10


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_query_losses_and_their_gradient(problem, steps):
    options = {"loss": problem.loss, "lr": problem.lr, "steps": steps}
    params = leaves(problem.params)
    result = query_losses(problem.model, params, problem.train, **options)
    expected = unrolled_losses(problem.model, params, problem.train, **options)
    assert result.shape == (len(problem.train), problem.train.queries)
    assert relative_error(result, expected) < 1e-12
    grads = torch.autograd.grad(result.mean(), list(params.values()))
    ones = torch.ones(len(problem.train), dtype=torch.float64)
    own = meta_gradient(problem.model, params, problem.train, ones, **options)
    assert relative_error(dict(zip(params, grads, strict=True)), own) < 1e-10


def test_a_step_against_the_meta_gradient_lowers_the_meta_loss(problem):
    options = {"loss": problem.loss, "lr": problem.lr, "steps": 2}
    params, ones = problem.params, torch.ones(len(problem.train), dtype=torch.float64)
    gradient = meta_gradient(problem.model, params, problem.train, ones, **options)
    moved = {n: p - 1e-3 * gradient[n] for n, p in params.items()}
    before, after = (query_losses(problem.model, p, problem.train, **options).mean() for p in (params, moved))
    expected = 1e-3 * sum(g.square().sum() for g in gradient.values())
    assert before - after == pytest.approx(expected.item(), rel=0.05)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIONS)
def test_vmap_and_loop_agree(problem, name, level):
    weights = random_weights(problem.train, level)
    options = make_options(problem, name)
    for order in ("exact", "first"):
        vmapped, looped = (
            own_weight_gradient(problem, weights, inner_steps=2, order=order, batching=batching, **options)
            for batching in ("vmap", "loop")
        )
        assert relative_error(vmapped, looped) < 1e-12
    vmapped, looped = (
        meta_gradient(
            problem.model, problem.params, problem.train, weights,
            loss=problem.loss, steps=2, batching=batching, **options,
        )
        for batching in ("vmap", "loop")
    )  # fmt: skip
    assert relative_error(vmapped, looped) < 1e-12


def test_nothing_that_was_given_is_changed(problem):
    params = problem.params
    kept = {n: p.clone() for n, p in params.items()}
    own = {n: p.detach().clone() for n, p in problem.model.named_parameters()}
    weights = random_weights(problem.train, "instance")
    own_weight_gradient(problem, weights, lr=problem.lr, inner_steps=2)
    meta_gradient(problem.model, params, problem.train, weights, loss=problem.loss, lr=problem.lr, steps=2)
    assert all(torch.equal(params[n], kept[n]) for n in kept)
    for n, p in problem.model.named_parameters():
        assert torch.equal(p, own[n])
        assert p.grad is None


@pytest.mark.parametrize("steps", [1, 3])
def test_a_task_of_weight_zero_adds_nothing_even_where_it_diverges(steps):
    problem = mlp_problem()
    batch = problem.train
    x, y = batch.support_x.clone(), batch.support_y.clone()
    x[1], y[1] = 1e200, 1e200
    broken = nm.TaskBatch(x, y, batch.query_x, batch.query_y)
    options = {"loss": problem.loss, "lr": 10.0, "steps": steps}
    alone = meta_gradient(problem.model, problem.params, broken.take(slice(1, 2)), torch.ones(1), **options)
    assert not all(g.isfinite().all() for g in alone.values()), "the task was meant to diverge"

    weights = torch.tensor([0.7, 0.0, 1.2], dtype=torch.float64)
    result = meta_gradient(problem.model, problem.params, broken, weights, **options)
    rest = meta_gradient(problem.model, problem.params, batch.take(torch.tensor([0, 2])), weights[[0, 2]], **options)
    assert all(g.isfinite().all() for g in result.values())
    assert relative_error(result, {n: g * 2 / 3 for n, g in rest.items()}) < 1e-12


def test_weight_gradient_beside_a_diverging_task_of_weight_zero():
    problem = mlp_problem()
    weights = torch.tensor([0.7, 0.0, 1.2], dtype=torch.float64)
    expected = own_weight_gradient(problem, weights, lr=0.1, inner_steps=2)
    problem.train.support_x[1] = problem.train.support_y[1] = 1e200
    result = own_weight_gradient(problem, weights, lr=0.1, inner_steps=2)
    assert not result[1].isfinite()
    assert relative_error(result[[0, 2]], expected[[0, 2]]) < 1e-12


# --- adapt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_adapt_is_gradient_descent_on_the_support_loss(problem, name, order):
    options = {"loss": problem.loss, "steps": 3, "order": order, **make_options(problem, name)}
    if "support_weights" in options:
        options["support_weights"] = options["support_weights"][0]
    task = (problem.train.support_x[0], problem.train.support_y[0])
    params, same = leaves(problem.params), leaves(problem.params)
    result, expected = (
        adapt(problem.model, params, *task, **options),
        unrolled_adapt(problem.model, same, *task, **options),
    )
    assert list(result) == list(params)
    assert relative_error(result, expected) < 1e-12
    moved = {n for n in params if not torch.equal(result[n], params[n])}
    if name == "head":
        assert moved == {n for n in params if n.startswith(f"{problem.head}.")}
    else:
        assert len(moved) >= len(params) - 1  # a bias before batch normalisation has no gradient

    directions = [torch.randn(p.shape, generator=generator(21), dtype=torch.float64) for p in params.values()]
    grads = []
    for adapted, at in ((result, params), (expected, same)):
        value = sum((adapted[n] * d).sum() for n, d in zip(at, directions, strict=True))
        parts = torch.autograd.grad(value, list(at.values()), materialize_grads=True)
        grads.append(dict(zip(at, parts, strict=True)))
    assert relative_error(*grads) < 1e-10


def test_adapt_is_differentiable_in_the_rates():
    problem = mlp_problem()
    task = (problem.train.support_x[0], problem.train.support_y[0])
    grads = []
    for alg in (adapt, unrolled_adapt):
        rates = {n: torch.full_like(p, 0.05).requires_grad_() for n, p in problem.params.items()}
        phi = alg(problem.model, leaves(problem.params), *task, loss=problem.loss, lr=rates, steps=2)
        value = sum(p.square().sum() for p in phi.values())
        parts = torch.autograd.grad(value, list(rates.values()))
        grads.append(dict(zip(rates, parts, strict=True)))
    assert relative_error(*grads) < 1e-10


def test_zero_steps_change_nothing():
    problem = mlp_problem()
    params = problem.params
    task = (problem.train.support_x[0], problem.train.support_y[0])
    result = adapt(problem.model, params, *task, loss=problem.loss, lr=0.1, steps=0)
    assert all(torch.equal(result[n], params[n]) for n in params)


def test_inner_takes_modules_and_parameters_by_name():
    problem = mlp_problem()
    task = (problem.train.support_x[0], problem.train.support_y[0])
    options = {"loss": problem.loss, "lr": 0.1, "steps": 2}
    by_module = adapt(problem.model, problem.params, *task, inner=["4"], **options)
    by_name = adapt(problem.model, problem.params, *task, inner=["4.weight", "4.bias"], **options)
    assert all(torch.equal(by_module[n], by_name[n]) for n in problem.params)
    bias = adapt(problem.model, problem.params, *task, inner=["4.bias"], **options)
    assert [n for n, p in problem.params.items() if not torch.equal(p, bias[n])] == ["4.bias"]


# --- frozen, unused, flags --------------------------------------------------------------------------------


class Odd(nn.Module):
    """A network with a parameter that it does not use, and one without dimensions."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(1, 6), nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.head(torch.tanh(self.scale * self.body(x)))


def odd_problem():
    problem = mlp_problem()
    problem.model, problem.head = seeded(Odd), "head"
    return problem


@pytest.mark.parametrize("batching", ["vmap", "loop"])
@pytest.mark.parametrize("level", LEVELS)
def test_unused_parameters_get_zeros_and_scalar_parameters_work(level, batching):
    problem = odd_problem()
    weights = random_weights(problem.train, level)
    options = {"loss": problem.loss, "lr": 0.1, "steps": 2}
    result = meta_gradient(problem.model, problem.params, problem.train, weights, batching=batching, **options)
    expected = unrolled_meta_gradient(problem.model, leaves(problem.params), problem.train, weights, **options)
    assert set(result) == set(problem.params)
    assert torch.equal(result["unused"], torch.zeros(2, dtype=torch.float64))
    assert result["scale"].shape == ()
    assert relative_error(result, expected) < 1e-10
    options = {"lr": 0.1, "inner_steps": 2}
    own = own_weight_gradient(problem, weights, batching=batching, **options)
    assert relative_error(own, unrolled_weight_gradient(problem, weights, **options)) < 1e-10


@pytest.mark.parametrize("how", ["flag", "absent"])
def test_frozen_parameters(problem, how):
    frozen = {n for n in problem.params if not n.startswith(f"{problem.head}.")}
    trained = {n: p for n, p in problem.params.items() if n not in frozen}
    weights = random_weights(problem.train, "task")
    inner_options = {"loss": problem.loss, "lr": problem.lr, "steps": 2}
    expected = unrolled_meta_gradient(problem.model, leaves(trained), problem.train, weights, **inner_options)
    outer = {"lr": problem.lr, "inner_steps": 2, "meta_lr": META_LR}
    w = weights.clone().requires_grad_()
    expected_slopes = torch.autograd.grad(unrolled_validation_loss(problem, trained, w, **outer), w)[0]

    if how == "flag":
        params = leaves(problem.params)  # their flags say the opposite, and are ignored
        for n in frozen:
            problem.model.get_parameter(n).requires_grad_(False)
    else:
        params = trained
    result = meta_gradient(problem.model, params, problem.train, weights, **inner_options)
    assert set(result) == set(params)
    for n in frozen & set(result):
        assert torch.equal(result[n], torch.zeros_like(params[n]))
    assert relative_error({n: result[n] for n in trained}, expected) < 1e-10
    slopes = weight_gradient(
        problem.model, params, problem.train, problem.val, weights,
        loss=problem.loss, inner_lr=problem.lr, inner_steps=2, meta_lr=META_LR,
    )  # fmt: skip
    assert relative_error(slopes, expected_slopes) < 1e-10
    adapted = adapt(problem.model, params, problem.train.support_x[0], problem.train.support_y[0], **inner_options)
    assert set(adapted) == set(params)
    assert {n for n in params if not torch.equal(adapted[n], params[n])} == set(trained)


def test_frozen_values_come_from_params():
    """A frozen parameter that is given takes the given value, not the module's."""
    problem = mlp_problem()
    problem.model.get_parameter("0.weight").requires_grad_(False)
    params = problem.params
    options = {"loss": problem.loss, "lr": 0.1, "steps": 1}
    one = query_losses(problem.model, params, problem.train, **options)
    params["0.weight"] = 2 * params["0.weight"]
    other = query_losses(problem.model, params, problem.train, **options)
    assert not torch.allclose(one, other)


def test_flags_of_the_given_params_are_ignored(problem):
    weights = random_weights(problem.train, "task")
    options = {"loss": problem.loss, "lr": problem.lr, "steps": 2}
    results = [
        meta_gradient(problem.model, params, problem.train, weights, **options)
        for params in (problem.params, leaves(problem.params), dict(problem.model.named_parameters()))
    ]
    for result in results[1:]:
        assert all(torch.equal(result[n], results[0][n]) for n in result)
    assert not any(g.requires_grad for g in results[1].values())


# --- integer inputs, batch normalisation, dropout, buffers ------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_integer_inputs_keep_the_precision_of_the_parameters(level):
    problem = mlp_problem()
    problem.model = seeded(lambda: nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 1)))

    def batch(m, s, k, seed):
        g = generator(seed)
        parts = []
        for n in (s, k):
            parts.append(torch.randint(5, (m, n), generator=g))
            parts.append(torch.randn(m, n, 1, generator=g, dtype=torch.float64))
        return nm.TaskBatch(*parts)

    problem.train, problem.val = batch(3, 5, 3, 1), batch(2, 3, 3, 2)
    weights = random_weights(problem.train, level)
    options = {"loss": problem.loss, "lr": 0.1, "steps": 2}
    result = meta_gradient(problem.model, problem.params, problem.train, weights, **options)
    expected = unrolled_meta_gradient(problem.model, leaves(problem.params), problem.train, weights, **options)
    assert relative_error(result, expected) < 1e-10
    options = {"lr": 0.1, "inner_steps": 2}
    own = own_weight_gradient(problem, weights, **options)
    assert relative_error(own, unrolled_weight_gradient(problem, weights, **options)) < 1e-10


def norm_and_dropout(track=True, p=0.5):
    return nn.Sequential(
        nn.Linear(1, 6),
        nn.BatchNorm1d(6, track_running_stats=track),
        nn.Tanh(),
        nn.Dropout(p),
        nn.Linear(6, 1),
    )


@pytest.mark.parametrize(
    ("build", "ready"),
    [
        (lambda: norm_and_dropout(track=True, p=0.5), nn.Module.eval),
        (lambda: norm_and_dropout(track=False, p=0.5), nn.Module.eval),
        (lambda: norm_and_dropout(track=False, p=0.0), nn.Module.train),
        (lambda: norm_and_dropout(track=True, p=0.5), nm.models.prepare),
        (
            lambda: norm_and_dropout(track=True, p=0.5),
            lambda model: nm.models.prepare(model, batch_norm="frozen"),
        ),
    ],
    ids=["eval", "eval, batch statistics", "p=0", "prepared", "prepared, frozen"],
)
def test_normalisation_and_dropout_that_hold_still(build, ready):
    problem = mlp_problem()
    problem.model = ready(seeded(build))
    for layer in problem.model.modules():
        if getattr(layer, "running_mean", None) is not None:
            layer.running_mean += 0.3
            layer.running_var *= 2
    buffers = {n: b.clone() for n, b in problem.model.named_buffers()}
    weights = random_weights(problem.train, "instance")
    options = {"loss": problem.loss, "lr": 0.1, "steps": 2}
    result = meta_gradient(problem.model, problem.params, problem.train, weights, **options)
    expected = unrolled_meta_gradient(problem.model, leaves(problem.params), problem.train, weights, **options)
    assert relative_error(result, expected) < 1e-10
    own = own_weight_gradient(problem, weights, lr=0.1, inner_steps=2)
    assert relative_error(own, unrolled_weight_gradient(problem, weights, lr=0.1, inner_steps=2)) < 1e-10
    assert all(torch.equal(b, buffers[n]) for n, b in problem.model.named_buffers())


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x


CALLS = {
    "adapt": lambda p, **o: adapt(p.model, p.params, p.train.support_x[0], p.train.support_y[0], **o),
    "query_losses": lambda p, **o: query_losses(p.model, p.params, p.train, **o),
    "meta_gradient": lambda p, **o: meta_gradient(p.model, p.params, p.train, torch.ones(3).double(), **o),
    "weight_gradient": lambda p, *, lr, steps, **o: weight_gradient(
        p.model, p.params, p.train, p.val, torch.ones(3).double(),
        inner_lr=lr, inner_steps=steps, meta_lr=0.1, **o,
    ),
}  # fmt: skip


@pytest.fixture(params=list(CALLS))
def call(request):
    return CALLS[request.param]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.BatchNorm1d(8), r"'1' \(BatchNorm1d\).*running statistics.*prepare"),
        (lambda: nn.Dropout(0.2), r"'1' \(Dropout\).*random.*eval"),
        (lambda: nn.AlphaDropout(0.2), r"'1' \(AlphaDropout\).*random.*eval"),
        (Counter, r"'1' \(Counter\).*buffer '1.calls'.*eval"),
    ],
    ids=["running statistics", "dropout", "alpha dropout", "own buffer"],
)
def test_a_layer_that_changes_itself_is_refused_by_name_and_with_a_cure(call, layer, message):
    problem = mlp_problem()
    problem.model = seeded(lambda: nn.Sequential(nn.Linear(1, 8), layer(), nn.Linear(8, 1)))
    buffers = {n: b.clone() for n, b in problem.model.named_buffers()}
    with pytest.raises(ValueError, match=message):
        call(problem, loss=problem.loss, lr=0.1, steps=1)
    assert all(torch.equal(b, buffers[n]) for n, b in problem.model.named_buffers())
    problem.model.eval()
    call(problem, loss=problem.loss, lr=0.1, steps=1)  # one of the cures
    problem.model.train()
    with pytest.raises(ValueError, match=message):
        call(problem, loss=problem.loss, lr=0.1, steps=1)


class Moving(nn.Module):
    """Replaces its buffer by a new tensor in every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean


def test_a_layer_that_replaces_its_buffer_is_refused(call):
    problem = mlp_problem()
    problem.model = seeded(lambda: nn.Sequential(nn.Linear(1, 8), Moving(), nn.Linear(8, 1)))
    with pytest.raises(ValueError, match=r"'1' \(Moving\).*buffer '1.mean'"):
        call(problem, loss=problem.loss, lr=0.1, steps=1)


@pytest.mark.parametrize("batching", ["vmap", "loop"])
def test_tied_parameters(batching):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b, self.last = (
                nn.Linear(1, 5),
                nn.Linear(5, 5),
                nn.Linear(5, 5),
                nn.Linear(5, 1),
            )
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.last(torch.tanh(self.b(torch.tanh(self.a(torch.tanh(self.first(x)))))))

    problem = mlp_problem()
    problem.model = seeded(Tied)
    weights = random_weights(problem.train, "instance")
    own = own_weight_gradient(problem, weights, lr=0.1, inner_steps=2, batching=batching)
    assert relative_error(own, unrolled_weight_gradient(problem, weights, lr=0.1, inner_steps=2)) < 1e-10


def test_buffers_that_are_only_read_work():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.5]))

        def forward(self, x):
            return x - self.mean

    problem = mlp_problem()
    problem.model = seeded(lambda: nn.Sequential(Centred(), nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    weights = random_weights(problem.train, "task")
    own = own_weight_gradient(problem, weights, lr=0.1, inner_steps=2)
    assert relative_error(own, unrolled_weight_gradient(problem, weights, lr=0.1, inner_steps=2)) < 1e-10


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, r"inner steps.*>= 0.*-1"),
        ({"steps": 1.5}, r"inner steps.*integer.*1\.5"),
        ({"lr": -0.1}, r"learning rate.*>= 0.*-0\.1"),
        ({"lr": float("nan")}, r"learning rate.*nan"),
        ({"lr": {"0.weight": 0.1}}, r"no rate for .*0\.bias"),
        ({"inner": ["nose"]}, r"inner names 'nose'.*0\.weight"),
        ({"loss": nn.functional.mse_loss}, r"one value per instance.*\[\].*reduction='none'"),
        ({"loss": lambda p, y: (p - y) ** 2}, r"one value per instance.*, 1\].*reduction='none'"),
    ],
)
def test_bad_options(call, options, message):
    problem = mlp_problem()
    with pytest.raises(ValueError, match=message):
        call(problem, **{"loss": problem.loss, "lr": 0.1, "steps": 1, **options})


@pytest.mark.parametrize("name", ["adapt", "query_losses", "meta_gradient"])
def test_bad_order(name):
    problem = mlp_problem()
    with pytest.raises(ValueError, match=r"order must be 1 or 2.*3"):
        CALLS[name](problem, loss=problem.loss, lr=0.1, steps=1, order=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 2}, r"order must be 'exact' or 'first'.*2"),
        ({"meta_lr": -1.0}, r"meta_lr.*>= 0.*-1"),
        ({"meta_lr": float("inf")}, r"meta_lr.*inf"),
        ({"val_steps": -2}, r"inner steps.*>= 0.*-2"),
        ({"batching": "map"}, r"batching.*'map'"),
    ],
)
def test_bad_options_of_weight_gradient(options, message):
    p = mlp_problem()
    given = {"loss": p.loss, "inner_lr": 0.1, "inner_steps": 1, "meta_lr": 0.1, **options}
    with pytest.raises(ValueError, match=message):
        weight_gradient(p.model, p.params, p.train, p.val, torch.ones(3), **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: {}, "params must name parameters.*none.*0.weight"),
        (
            lambda params: {**params, "7.weight": torch.ones(1)},
            r"params must name parameters.*\['7\.weight'\]",
        ),
        (lambda params: {**params, "4.bias": torch.ones(3)}, r"4\.bias must be \[1\], got \[3\]"),
    ],
    ids=["none", "unknown", "shape"],
)
def test_bad_params(change, message):
    problem = mlp_problem()
    with pytest.raises(ValueError, match=message):
        query_losses(problem.model, change(problem.params), problem.train, loss=problem.loss, lr=0.1, steps=1)


def test_all_frozen():
    problem = mlp_problem()
    problem.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no parameter can be trained.*requires_grad=False"):
        query_losses(problem.model, problem.params, problem.train, loss=problem.loss, lr=0.1, steps=1)


@pytest.mark.parametrize("shape", [(), (2,), (4,), (3, 5), (4, 3), (3, 4, 1), (1,), (3, 1)])
def test_weights_of_a_wrong_shape(shape):
    p = mlp_problem()
    weights = torch.ones(shape, dtype=torch.float64)
    message = r"weights must be \[m\] = \[3\] or \[m, K\] = \[3, 4\], got"
    with pytest.raises(ValueError, match=message):
        meta_gradient(p.model, p.params, p.train, weights, loss=p.loss, lr=0.1, steps=1)
    with pytest.raises(ValueError, match=message):
        own_weight_gradient(p, weights, lr=0.1, inner_steps=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value):
    p = mlp_problem()
    weights = torch.tensor([1.0, value, 1.0], dtype=torch.float64)
    with pytest.raises(ValueError, match="weights must be finite"):
        meta_gradient(p.model, p.params, p.train, weights, loss=p.loss, lr=0.1, steps=1)
    with pytest.raises(ValueError, match="weights must be finite"):
        own_weight_gradient(p, weights, lr=0.1, inner_steps=1)


def test_weights_that_are_not_real_numbers():
    """A result "like weights" would be cut to whole numbers, that is to zero."""
    p = mlp_problem()
    with pytest.raises((TypeError, ValueError), match=r"weights must be .*int64"):
        own_weight_gradient(p, torch.ones(3, dtype=torch.int64), lr=0.1, inner_steps=1)


def test_inner_that_leaves_nothing_to_adapt(call):
    problem = mlp_problem()
    options = {"loss": problem.loss, "lr": 0.1, "steps": 1}
    with pytest.raises(ValueError, match="inner"):
        call(problem, inner=[], **options)
    problem.model.get_parameter("4.bias").requires_grad_(False)
    with pytest.raises(ValueError, match=r"inner.*4\.bias"):
        call(problem, inner=["4.bias"], **options)


@pytest.mark.parametrize("name", ["query_losses", "meta_gradient", "weight_gradient"])
@pytest.mark.parametrize("part", ["support_x", "support_y", "query_x", "query_y"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_data_that_is_not_finite(name, part, value):
    problem = mlp_problem()
    getattr(problem.train, part)[1, 2] = value
    with pytest.raises(ValueError, match=rf"{part} must be finite, but tasks \[1\]"):
        CALLS[name](problem, loss=problem.loss, lr=0.1, steps=1)


@pytest.mark.parametrize("part", ["support_x", "support_y"])
def test_adapt_to_data_that_is_not_finite(part):
    problem = mlp_problem()
    getattr(problem.train, part)[0, 2] = float("nan")
    with pytest.raises(ValueError, match=f"{part}.*finite"):
        CALLS["adapt"](problem, loss=problem.loss, lr=0.1, steps=1)


def test_validation_data_that_is_not_finite():
    problem = mlp_problem()
    problem.val.query_y[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"query_y must be finite, but tasks \[0\]"):
        own_weight_gradient(problem, torch.ones(3), lr=0.1, inner_steps=1)


def test_adapt_wants_as_many_targets_as_inputs():
    p = mlp_problem()
    x, y = p.train.support_x[0], p.train.support_y[0]
    with pytest.raises(ValueError, match=r"same number of instances.*\[5, 1\] and \[4, 1\]"):
        adapt(p.model, p.params, x, y[:4], loss=p.loss, lr=0.1, steps=1)
    with pytest.raises(ValueError, match="at least one"):
        adapt(p.model, p.params, x[:0], y[:0], loss=p.loss, lr=0.1, steps=1)


def test_support_weights_of_a_wrong_shape():
    p = mlp_problem()
    options = {"loss": p.loss, "lr": 0.1, "steps": 1}
    with pytest.raises(ValueError, match=r"support_weights must be \[5\], got \[4\]"):
        adapt(
            p.model,
            p.params,
            p.train.support_x[0],
            p.train.support_y[0],
            support_weights=torch.ones(4),
            **options,
        )
    with pytest.raises(ValueError, match=r"support_weights must be \[3, 5\], got \[5\]"):
        query_losses(p.model, p.params, p.train, support_weights=torch.ones(5), **options)


def test_tasks_wider_than_the_model():
    p = mlp_problem()
    wide = regression_batch(3, 5, 4, seed=1, width=2)
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        query_losses(p.model, p.params, wide, loss=p.loss, lr=0.1, steps=1)
