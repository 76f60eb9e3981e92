"""Transductive fine-tuning: pre-training on global classes, the imprinted head, the entropy of the query set."""

import pytest
import torch
from torch import nn

import nestedmaml as nm
from helpers import image_batch, seeded
from nestedmaml.methods.transductive import entropy

CLASSES, WAYS, WIDTH = 12, 3, 8


class Images:
    """Vectors around the centres of 12 global classes, as tasks of 3 of them or one by one."""

    classes = CLASSES

    def __init__(self, spread=0.7, offset=0):
        self.spread, self.offset = spread, offset
        self.centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))

    def labelled(self, step, count):
        g = torch.Generator().manual_seed(1_000 + step)
        y = torch.randint(CLASSES, (count,), generator=g)
        return self.centres[y] + self.spread * torch.randn(count, WIDTH, generator=g), y

    def sample(self, step, count):
        g = torch.Generator().manual_seed(self.offset + step)
        parts = []
        for _ in range(count):
            chosen = torch.randperm(CLASSES, generator=g)[:WAYS]
            y = [torch.arange(WAYS).repeat(2), torch.arange(WAYS).repeat(5)]
            x = [self.centres[chosen[k]] + self.spread * torch.randn(len(k), WIDTH, generator=g) for k in y]
            parts.append((x[0], y[0], x[1], y[1]))
        return nm.TaskBatch(*[list(part) for part in zip(*parts, strict=True)])

    def corrupt(self, ids, level="task"):
        raise AssertionError("only a skyline may ask for the truth")


def make(**options):
    options = {"loss": nm.losses.cross_entropy, "meta_lr": 1e-2, "finetune_lr": 1e-2, **options}
    return nm.TransductiveFineTuning(nm.models.mlp((WIDTH, 32, WAYS), seed=1), **options)


def terms(learner, batch, query=True):
    """Cross-entropy and entropy before each step."""
    seen = []
    learner.method.finetune(
        learner.state.params, batch.support_x, batch.support_y, batch.query_x if query else None,
        report=lambda known, unknown: seen.append(torch.stack([known, unknown])),
    )  # fmt: skip
    return torch.stack(seen)  # [steps, 2, m]


def test_entropy():
    assert torch.allclose(entropy(torch.zeros(2, 4)), torch.tensor(4.0).log())
    assert entropy(torch.tensor([[100.0, 0.0]])).item() == pytest.approx(0, abs=1e-6)


def test_pretraining_learns_the_global_classes():
    learner, source = make(), Images()
    learner.fit(source, iterations=150, batch=4)
    assert learner.params["global.weight"].shape == (CLASSES, 32)
    x, y = source.labelled(10**5, 500)
    logits = learner.method._network.logits(learner.params, x)
    assert (logits.argmax(1) == y).float().mean() > 0.7
    assert learner.history[-1]["train_loss"] < learner.history[0]["train_loss"]


@pytest.mark.parametrize("imprint", ["logits", "features"])
def test_head_is_imprinted_from_the_support_set(imprint):
    learner = make(finetune_steps=0, imprint=imprint, scale=4.0).fit(Images(), iterations=5)
    batch = Images(offset=10**6).sample(0, 1)
    params, model = learner.params, learner.model()
    x, y, q = batch.support_x[0], batch.support_y[0], batch.query_x[0]

    def seen(x):
        features = model[1](model[0](x))
        if imprint == "logits":
            features = (features @ params["global.weight"].T + params["global.bias"]).relu()
        return features / features.norm(dim=1, keepdim=True)

    means = torch.stack([seen(x)[y == c].mean(0) for c in range(WAYS)])
    cosines = seen(q) @ (means / means.norm(dim=1, keepdim=True)).T
    assert torch.allclose(learner.adapt(x, y, q).predict_proba(q), (4 * cosines).softmax(1), atol=1e-5)


def test_both_terms_fall_while_fine_tuning():
    learner = make().fit(Images(), iterations=100)
    batch = Images(offset=10**6).sample(0, 10)
    seen = terms(learner, batch)
    assert len(seen) == 25
    assert (seen[-1] < seen[0]).all()
    assert (seen[1:, 1].mean(1) < seen[:-1, 1].mean(1)).all()
    # the entropy falls because of its term: with weight zero the query predictions stay less sure
    learner.method.entropy_weight = 0.0
    assert terms(learner, batch)[-1, 1].mean() > seen[-1, 1].mean()


def test_fine_tuning_changes_the_whole_network():
    learner = make().fit(Images(), iterations=20)
    batch = Images().sample(0, 1)
    adapted = learner.adapt(batch.support_x[0], batch.support_y[0], batch.query_x[0]).params
    assert {"0.weight", "0.bias", "global.weight", "global.bias", "task.weight", "task.bias"} == set(adapted)
    assert all((adapted[n] != learner.params[n]).any() for n in ("0.weight", "0.bias", "global.weight"))


def test_predictions_are_transductive_and_agree_with_adapt():
    learner = make().fit(Images(), iterations=50)
    batch = Images(offset=10**6).sample(0, 3)
    stacked = learner.method.predictions(learner.state, learner._module, batch).softmax(-1)
    for i in range(3):
        x, y, q = batch.support_x[i], batch.support_y[i], batch.query_x[i]
        assert torch.allclose(learner.adapt(x, y, q).predict_proba(q), stacked[i], atol=1e-4)
        assert not torch.allclose(learner.adapt(x, y).predict_proba(q), stacked[i], atol=1e-3)  # inductive


def test_learns_and_loads_to_the_same_predictions(tmp_path):
    fresh, test = make(), Images(offset=10**6)
    learner = make().fit(Images(), iterations=150)
    assert learner.evaluate(test, tasks=100).mean > fresh.evaluate(test, tasks=100).mean + 3
    loaded = nm.load(learner.save(tmp_path / "run"))
    assert loaded.params.keys() == learner.params.keys()
    assert torch.equal(loaded.evaluate(test, tasks=20).values, learner.evaluate(test, tasks=20).values)
    assert torch.equal(nm.load(fresh.save(tmp_path / "fresh")).params["0.weight"], fresh.params["0.weight"])


def test_runs_repeat_and_resume_to_the_bit(tmp_path):
    whole, again = (make().fit(Images(), iterations=10) for _ in range(2))
    make().fit(Images(), iterations=5, out=tmp_path)
    parts = make().fit(Images(), iterations=10, out=tmp_path, resume=True)
    for n, p in whole.params.items():
        assert torch.equal(p, again.params[n])
        assert torch.equal(p, parts.params[n])


def test_convolutions_one_task_at_a_time():
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.Flatten(),
            nn.Linear(144, 3),
        )
    )  # fmt: skip
    learner = nm.TransductiveFineTuning(model, loss=nm.losses.cross_entropy, classes=5, finetune_steps=3)
    batch = image_batch(2, 6, 3, 3, seed=4)
    before = learner.params["0.weight"].clone()
    learner.step((batch.support_x[0], torch.arange(6) % 5))
    assert (learner.params["0.weight"] != before).any()
    assert learner.method.predictions(learner.state, learner._module, batch).shape == (2, 3, 3)


def test_frozen_parameters_stay():
    model = nm.models.mlp((WIDTH, 16, 16, WAYS), seed=1)
    model[0].weight.requires_grad_(False)
    learner = nm.TransductiveFineTuning(model, loss=nm.losses.cross_entropy, finetune_lr=1e-2)
    learner.fit(Images(), iterations=5)
    batch = Images().sample(0, 2)
    adapted = learner.adapt(batch.support_x[0], batch.support_y[0], batch.query_x[0])
    assert torch.equal(learner.params["0.weight"], model[0].weight)
    assert torch.equal(adapted.params["0.weight"], model[0].weight)
    assert learner.method.predictions(learner.state, learner._module, batch).isfinite().all()


def test_regression_is_refused_by_name():
    for loss in (nm.losses.squared_error, nn.MSELoss(reduction="none")):
        with pytest.raises(ValueError, match="TransductiveFineTuning is for classification only"):
            nm.TransductiveFineTuning(nm.models.mlp(), loss=loss)
    with pytest.raises(ValueError, match="TransductiveFineTuning is for classification only"):
        nm.TransductiveFineTuning(nm.models.mlp())
    with pytest.raises(ValueError, match="TransductiveFineTuning is for classification only"):
        make().adapt(torch.zeros(3, WIDTH), torch.zeros(3))


def test_a_source_without_labelled_images_is_refused():
    class Tasks:
        sample = Images().sample

    with pytest.raises(ValueError, match=r"labelled\(step, count\) and classes, which Tasks has not"):
        make().fit(Tasks(), iterations=1)
    with pytest.raises(ValueError, match=r"not on tasks: pass step a pair \(x, y\)"):
        make(classes=CLASSES).step(Images().sample(0, 2))


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="head must name a linear layer of the model, got '1'"):
        make(head="1")
    with pytest.raises(ValueError, match="imprint"):
        make(imprint="labels")
    with pytest.raises(ValueError, match="the global head is for 4 classes, the source has 12"):
        make(classes=4).fit(Images(), iterations=1)
