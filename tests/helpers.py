"""Small problems in float64, and a plain unrolled MAML: the oracle of the functional core.

The oracle loops over tasks and keeps the whole graph with ``torch.autograd.grad(create_graph=True)``. It
shares no code with ``nestedmaml.functional``, and uses no ``vmap``: torch's third derivative of batch
normalisation through ``vmap`` is wrong in the third digit.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

import nestedmaml as nm
from nestedmaml.tasks.counter import integers, uniform


@dataclass
class Problem:
    model: nn.Module
    loss: object
    lr: float
    train: nm.TaskBatch
    val: nm.TaskBatch
    head: str

    @property
    def params(self):
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def seeded(build, seed=0):
    """A module built from a seed, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


def regression_batch(m, shots, queries, seed, width=1):
    g = generator(seed)
    x = 4 * torch.rand(m, shots + queries, width, generator=g, dtype=torch.float64) - 2
    phase = torch.rand(m, 1, 1, generator=g, dtype=torch.float64)
    y = torch.sin(2 * x.sum(2, keepdim=True) + 3 * phase)
    (sx, qx), (sy, qy) = (part.split([shots, queries], 1) for part in (x, y))
    return nm.TaskBatch(sx, sy, qx, qy)


def image_batch(m, shots, queries, ways, seed, size=6):
    g = generator(seed)
    n = shots + queries
    x = torch.randn(m, n, 1, size, size, generator=g, dtype=torch.float64)
    y = torch.stack([torch.randperm(n, generator=g) % ways for _ in range(m)])
    (sx, qx), (sy, qy) = (part.split([shots, queries], 1) for part in (x, y))
    return nm.TaskBatch(sx, sy, qx, qy)


def mlp_problem():
    model = nm.models.mlp((1, 8, 8, 1), seed=3).double()
    train, val = regression_batch(3, 5, 4, seed=1), regression_batch(2, 4, 3, seed=2)
    return Problem(model, nm.losses.squared_error, 0.1, train, val, head="4")


def conv_problem():
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.BatchNorm2d(3, track_running_stats=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(27, 3),
        )
    )
    train, val = image_batch(2, 6, 3, 3, seed=4), image_batch(2, 6, 3, 3, seed=5)
    return Problem(model, nm.losses.cross_entropy, 0.1, train, val, head="5")


PROBLEMS = {"mlp": mlp_problem, "conv": conv_problem}


def random_weights(batch, level, seed=7):
    """Weights around MAML's own, different for every task or instance."""
    shape = (len(batch),) if level == "task" else (len(batch), batch.queries)
    weights = 0.5 + torch.rand(shape, generator=generator(seed), dtype=torch.float64)
    return weights if level == "task" else weights / batch.queries


def unrolled_adapt(model, params, sx, sy, *, loss, lr, steps, order=2, inner=None, support_weights=None):
    """Gradient descent on the support loss, its graph kept."""
    names = [n for n in params if inner is None or any(n == i or n.startswith(f"{i}.") for i in inner)]
    phi = dict(params)
    for _ in range(steps):
        values = loss(functional_call(model, phi, (sx,)), sy)
        value = values.mean() if support_weights is None else (support_weights * values).sum() / len(values)
        grads = torch.autograd.grad(value, [phi[n] for n in names], create_graph=order == 2, materialize_grads=True)
        for n, g in zip(names, grads, strict=True):
            phi[n] = phi[n] - (lr[n] if isinstance(lr, dict) else lr) * g
    return phi


def unrolled_losses(model, params, batch, *, loss, support_weights=None, **options):
    """The query losses ``[m, K]``, task by task."""
    rows = []
    for i in range(len(batch)):
        own = None if support_weights is None else support_weights[i]
        phi = unrolled_adapt(
            model, params, batch.support_x[i], batch.support_y[i], loss=loss, support_weights=own, **options
        )
        rows.append(loss(functional_call(model, phi, (batch.query_x[i],)), batch.query_y[i]))
    return torch.stack(rows)


def meta_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """Eq. instance-weighting, with task or instance weights."""
    per_task = weights * losses.mean(1) if weights.ndim == 1 else (weights * losses).sum(1)
    return per_task.sum() / len(losses)


def leaves(params):
    return {n: p.detach().clone().requires_grad_() for n, p in params.items()}


def unrolled_meta_gradient(model, params, batch, weights, *, create_graph=False, **options):
    """The gradient at ``params`` (leaves), by autograd through the unrolled loop."""
    value = meta_loss(unrolled_losses(model, params, batch, **options), weights)
    grads = torch.autograd.grad(value, list(params.values()), create_graph=create_graph, materialize_grads=True)
    return dict(zip(params, grads, strict=True))


def unrolled_lookahead(problem, params, weights, *, inner_steps, meta_lr, lr, inner=None, support_weights=None):
    """theta_W of eq. online-equation, differentiable in ``weights`` where they ask for it."""
    theta = leaves(params)
    gradient = unrolled_meta_gradient(
        problem.model, theta, problem.train, weights, loss=problem.loss, lr=lr, steps=inner_steps,
        inner=inner, support_weights=support_weights, create_graph=weights.requires_grad,
    )  # fmt: skip
    return {n: p - meta_lr * gradient[n] for n, p in theta.items()}


def unrolled_validation_loss(problem, params, weights, *, lr, inner_steps, val_steps=None, inner=None, **options):
    """The validation meta-loss at theta_W: the function of the weights whose derivative is wanted."""
    lookahead = unrolled_lookahead(problem, params, weights, lr=lr, inner_steps=inner_steps, inner=inner, **options)
    steps = inner_steps if val_steps is None else val_steps
    losses = unrolled_losses(problem.model, lookahead, problem.val, loss=problem.loss, lr=lr, steps=steps, inner=inner)
    return losses.mean()


def central_differences(f, at, h=1e-5):
    """The gradient of ``f`` by central differences, at a point where no kink lies within ``h``.

    A ReLU or a max-pooling that switches makes a jump in the adapted parameters, so that the two one-sided
    differences disagree by far more than the curvature explains.
    """
    centre = f(at).item()
    right, left = torch.empty_like(at), torch.empty_like(at)
    for i in range(at.numel()):
        step = torch.zeros_like(at)
        step.view(-1)[i] = h
        right.view(-1)[i] = (f(at + step).item() - centre) / h
        left.view(-1)[i] = (centre - f(at - step).item()) / h
    result = (right + left) / 2
    assert relative_error(right, left) < 2e-3, "a kink lies within the step: choose another seed"
    return result


def relative_error(a, b):
    """The largest deviation, relative to the largest value of ``b``; of tensors or of dicts of tensors."""
    if isinstance(b, dict):
        assert a.keys() == b.keys()
        a, b = (torch.cat([d[n].flatten() for n in b]) for d in (a, b))
    assert a.shape == b.shape
    return ((a - b).abs().max() / b.abs().max()).item()


# Sources ---------------------------------------------------------------------------------------------------


class Waves(nm.tasks.Sinusoid):
    """The sinusoid with ids of its points, all of a line's corrupt."""

    @property
    def instances(self):
        return None if self.size is None else self.size * (self.shots + self.queries)

    def draw(self, ids):
        return with_ids(super().draw(ids))

    def corrupt(self, ids, level="task"):
        return super().corrupt(ids if level == "task" else ids // (self.shots + self.queries))


class Blobs(nm.tasks.Pool):
    """Classification of points around ``ways`` of ``classes`` centres, in an order of each task's own.

    Half of their coordinates are loud and say nothing, which takes meta-training to see.
    ``ratio`` of the tasks have labels that mean nothing; ``noise`` of the instances are labelled as the next class.
    """

    def __init__(self, ways=3, shots=5, queries=4, *, ratio=0.0, noise=0.0, size=200, seed=0, split="train"):
        super().__init__(size, ratio, seed, f"blobs/{split}")
        self.ways, self.shots, self.queries, self.noise, self.classes = ways, shots, queries, noise, 12
        self.centres = 2 * torch.randn(self.classes, 6, generator=generator(99)) * torch.tensor([1, 1, 1, 0, 0, 0])

    @property
    def instances(self):
        return None if self.size is None else self.size * self.ways * (self.shots + self.queries)

    def draw(self, ids):
        i, n = ids.numpy()[:, None], self.ways * (self.shots + self.queries)
        chosen = torch.from_numpy(uniform(self.seed, f"{self.stream}/classes", i, range(self.classes)))
        chosen = chosen.argsort(1)[:, : self.ways]
        y = (torch.arange(n) % self.ways).expand(len(ids), n)
        x = self.centres[chosen.gather(1, y)] + self._noise(i[..., None], n)
        instances = ids[:, None] * n + torch.arange(n)
        junk = torch.from_numpy(integers(self.seed, f"{self.stream}/junk", i, range(n), high=self.ways))
        y = torch.where(self._flipped(instances), (y + 1) % self.ways, y)
        y = torch.where(super().corrupt(ids)[:, None], junk, y)
        s = self.ways * self.shots
        return with_ids(nm.TaskBatch(x[:, :s], y[:, :s], x[:, s:], y[:, s:], task_ids=ids))

    def corrupt(self, ids, level="task"):
        return super().corrupt(ids) if level == "task" else self._flipped(ids)

    def labelled(self, step, count):
        """Points with their global classes."""
        i = torch.arange(step * count, (step + 1) * count).numpy()
        y = torch.from_numpy(integers(self.seed, "labelled", i, high=self.classes))
        return self.centres[y] + self._noise(i[:, None, None], 1)[:, 0], y

    def _flipped(self, instances):
        return torch.from_numpy(uniform(self.seed, f"{self.stream}/flip", instances.numpy())) < self.noise

    def _noise(self, i, n):
        index = (i, torch.arange(n).numpy()[:, None], range(6))
        noise = torch.from_numpy(sum(uniform(self.seed, f"noise/{k}", *index) for k in range(3)) - 1.5).float()
        return noise * torch.tensor([1.0, 1.0, 1.0, 4.0, 4.0, 4.0])


class Secret:
    """A source that fails a test which asks for the truth."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    def corrupt(self, ids, level="task"):
        raise AssertionError("a method asked which tasks are corrupt")


def with_ids(batch):
    """Ids for the instances of a batch, each of one task."""
    n = batch.shots + batch.queries
    ids = batch.task_ids[:, None] * n + torch.arange(n)
    return dataclasses.replace(batch, support_ids=ids[:, : batch.shots], instance_ids=ids[:, batch.shots :])
