"""What runs on a GPU gives what runs on the CPU."""

import pytest
import torch

import nestedmaml as nm
from nestedmaml.functional import weight_gradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch finds no CUDA device here"),
]


def problem(device, dtype=torch.float64):
    source = nm.tasks.Sinusoid(5, ratio=0.5, size=50, seed=1)
    model = nm.models.mlp((1, 16, 16, 1), seed=2).to(device, dtype)
    batches = []
    for step, count in ((0, 6), (1, 4)):
        b = source.sample(step, count)
        parts = [t.to(device, dtype) for t in (b.support_x, b.support_y, b.query_x, b.query_y)]
        batches.append(nm.TaskBatch(*parts))
    return model, dict(model.named_parameters()), *batches


@pytest.mark.parametrize("order", ["exact", "first"])
@pytest.mark.parametrize("level", ["task", "instance"])
def test_the_weight_gradient_is_the_cpus(order, level):
    found = {}
    for device in ("cpu", "cuda"):
        model, params, train, val = problem(device)
        shape = (len(train),) if level == "task" else (len(train), train.queries)
        weights = torch.linspace(0.2, 1.4, len(train) * (1 if level == "task" else train.queries), dtype=torch.float64)
        found[device] = weight_gradient(
            model, params, train, val, weights.reshape(shape).to(device), loss=nm.losses.squared_error,
            inner_lr=0.01, inner_steps=3, meta_lr=0.1, order=order,
        )  # fmt: skip
    assert found["cuda"].device.type == "cuda"
    difference = (found["cuda"].cpu() - found["cpu"]).abs().max()
    assert difference <= 1e-9 * found["cpu"].abs().max()


RULES = {
    "cluster": lambda: nm.weighting.Cluster(8),
    "task": lambda: nm.weighting.Task(),
    "amortised": lambda: nm.weighting.Amortised(),
}


@pytest.mark.parametrize("rule", RULES)
def test_fits(rule, tmp_path):
    train = nm.tasks.Sinusoid(5, ratio=0.5, size=100, seed=1)
    val = nm.tasks.Sinusoid(5, size=20, seed=1, split="val")
    learner = nm.NestedMAML(
        nm.models.mlp((1, 16, 16, 1), seed=2), loss=nm.losses.squared_error, inner_steps=2, weighting=RULES[rule]()
    )
    learner.fit(train, val, iterations=5, batch=8, val_batch=8, device="cuda", out=tmp_path)
    assert learner.iteration == 5
    assert all(p.device.type == "cuda" and p.isfinite().all() for p in learner.params.values())
    assert learner.weights.values.shape == (100,)
    assert learner.weights.values.isfinite().all()
    one = nm.tasks.Sinusoid(5, size=None, seed=3, split="test").sample(0, 1)
    assert learner.adapt(one.support_x[0], one.support_y[0]).predict(one.query_x[0]).isfinite().all()
    assert learner.evaluate(nm.tasks.Sinusoid(5, size=None, seed=3, split="test"), 10).n == 10
