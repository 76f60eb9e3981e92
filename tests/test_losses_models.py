"""Losses with one value per instance, and the models that come along."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nestedmaml as nm


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (6, 2, 4)])
def test_squared_error(shape):
    a, b = torch.randn(2, *shape, dtype=torch.float64)
    values = nm.losses.squared_error(a, b)
    assert values.shape == (6,)
    for i in range(6):
        torch.testing.assert_close(values[i], F.mse_loss(a[i], b[i]))


def test_squared_error_does_not_broadcast():
    with pytest.raises(ValueError, match=r"one shape.*\(6, 1\) and \(6,\)"):
        nm.losses.squared_error(torch.zeros(6, 1), torch.zeros(6))


def test_cross_entropy():
    logits, classes = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3, 0])
    values = nm.losses.cross_entropy(logits, classes)
    expected = -torch.log_softmax(logits, 1)[torch.arange(6), classes]
    torch.testing.assert_close(values, expected)


@pytest.mark.parametrize(
    ("logits", "classes"),
    [((6,), (6,)), ((6, 4), (5,)), ((6, 4), (6, 1)), ((6, 4, 2), (6,))],
)
def test_cross_entropy_wants_logits_and_classes(logits, classes):
    with pytest.raises(ValueError, match=r"logits \[n, ways\] and classes \[n\]"):
        nm.losses.cross_entropy(torch.zeros(logits), torch.zeros(classes, dtype=torch.int64))


def test_mlp_is_that_of_the_paper():
    shapes = [tuple(p.shape) for p in nm.models.mlp().parameters()]
    assert shapes == [(40, 1), (40,), (40, 40), (40,), (1, 40), (1,)]
    assert [type(layer) for layer in nm.models.mlp()] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert nm.models.mlp((2, 3))(torch.zeros(5, 2)).shape == (5, 3)


def test_mlp_depends_on_its_seed_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = nm.models.mlp(seed=1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"
    torch.manual_seed(6)
    other = nm.models.mlp(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one[0].weight, nm.models.mlp(seed=2)[0].weight)


@pytest.mark.parametrize("sizes", [(), (3,)])
def test_mlp_needs_two_sizes(sizes):
    with pytest.raises(ValueError, match="an input and an output size"):
        nm.models.mlp(sizes)


def stateful():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout2d(0.4),
        nn.Flatten(), nn.Linear(48, 2),
    )  # fmt: skip


@pytest.mark.parametrize("batch_norm", ["batch", "frozen"])
def test_prepare_makes_a_model_usable_and_leaves_the_given_one(batch_norm, caplog):
    model = stateful()
    model[1].running_mean += 1.0
    kept = {n: v.clone() for n, v in model.state_dict().items()}
    with caplog.at_level(logging.INFO, logger="nestedmaml"):
        ready = nm.models.prepare(model, batch_norm=batch_norm)
    assert "1 (BatchNorm2d)" in caplog.text
    assert "3 (Dropout2d): dropout of 0.4 switched off" in caplog.text
    assert all(torch.equal(v, kept[n]) for n, v in model.state_dict().items())
    assert model.training
    assert model[3].p == 0.4
    assert model[1].track_running_stats

    x, y = torch.randn(2, 4, 1, 4, 4), torch.tensor([[0, 1, 0, 1]] * 2)
    batch = nm.TaskBatch(x, y, x + 0.1, y)
    losses = nm.functional.query_losses(
        ready, dict(ready.named_parameters()), batch, loss=nm.losses.cross_entropy, lr=0.1, steps=1
    )
    assert losses.isfinite().all()
    hidden = model[0](x[0])
    if batch_norm == "batch":
        mean, var = hidden.mean((0, 2, 3)), hidden.var((0, 2, 3), unbiased=False)
    else:
        mean, var = model[1].running_mean, model[1].running_var
    expected = (hidden - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + 1e-5).sqrt()
    torch.testing.assert_close(ready[:2](x[0]), expected, rtol=1e-4, atol=1e-4)
    assert list(dict(ready.named_parameters())) == list(dict(model.named_parameters()))


def test_prepare_says_when_there_is_nothing_to_change(caplog):
    with caplog.at_level(logging.INFO, logger="nestedmaml"):
        nm.models.prepare(nm.models.mlp())
    assert "nothing to change" in caplog.text


def test_prepare_refuses_other_words():
    with pytest.raises(ValueError, match="'batch' or 'frozen', got 'eval'"):
        nm.models.prepare(nm.models.mlp(), batch_norm="eval")
