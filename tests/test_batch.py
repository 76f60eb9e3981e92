"""`TaskBatch`: what it holds, and what it refuses."""

import pytest
import torch

import nestedmaml as nm

M, S, K = 3, 5, 4


def parts(**changes):
    good = {
        "support_x": torch.rand(M, S, 2),
        "support_y": torch.rand(M, S, 1),
        "query_x": torch.rand(M, K, 2),
        "query_y": torch.rand(M, K, 1),
        "task_ids": torch.arange(M),
        "support_ids": torch.arange(M * S).view(M, S),
        "instance_ids": torch.arange(M * K).view(M, K),
    }
    return {**good, **changes}


def test_sizes():
    batch = nm.TaskBatch(**parts())
    assert (len(batch), batch.shots, batch.queries) == (M, S, K)
    assert nm.TaskBatch(*list(parts().values())[:4]).task_ids is None


def test_a_sequence_of_tasks_is_stacked():
    given = parts()
    lists = {name: list(value) if name[-1] in "xy" else value for name, value in given.items()}
    batch = nm.TaskBatch(**lists)
    for name, value in given.items():
        assert torch.equal(getattr(batch, name), value)


def test_tasks_of_different_sizes_are_refused_with_the_sizes():
    given = parts(query_x=[torch.rand(4, 2), torch.rand(6, 2), torch.rand(4, 2)])
    with pytest.raises(ValueError, match=r"different sizes.*query_x.*\(4, 2\).*\(6, 2\)"):
        nm.TaskBatch(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"support_y": torch.rand(M, S + 1, 1)}, r"support_x and support_y.*\(3, 5, 2\) and \(3, 6, 1\)"),
        ({"query_y": torch.rand(M, K - 1, 1)}, r"query_x and query_y.*\(3, 4, 2\) and \(3, 3, 1\)"),
        ({"query_x": torch.rand(2, K, 2), "query_y": torch.rand(2, K, 1)}, r"m = 3.*\(2, 4, 2\)"),
        ({"query_x": torch.rand(M, K, 3)}, r"one shape.*\(2,\) and \(3,\)"),
        ({"query_x": torch.rand(M, K)}, r"one shape.*\(2,\) and \(\)"),
        ({"support_y": torch.rand(M)}, r"\[m, n, \.\.\.\]"),
        ({"query_x": torch.rand(M, 0, 2), "query_y": torch.rand(M, 0, 1)}, r"n > 0.*\(3, 0, 2\)"),
        ({"support_x": torch.rand(M, 0, 2), "support_y": torch.rand(M, 0, 1)}, r"n > 0.*\(3, 0, 2\)"),
        ({"task_ids": torch.arange(M + 1)}, r"task_ids must be int64 \[3\].*\[4\]"),
        ({"task_ids": torch.arange(M).float()}, r"task_ids must be int64.*float32"),
        ({"support_ids": torch.arange(M)}, r"support_ids must be int64 \[3, 5\].*\[3\]"),
        (
            {"instance_ids": torch.zeros(M, S, dtype=torch.int64)},
            r"instance_ids must be int64 \[3, 4\].*\[3, 5\]",
        ),
    ],
)
def test_shapes_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        nm.TaskBatch(**parts(**changes))


def test_zero_tasks():
    empty = {name: value[:0] for name, value in parts().items()}
    with pytest.raises(ValueError, match="at least one task"):
        nm.TaskBatch(**empty)
    with pytest.raises(ValueError, match="at least one task"):
        nm.TaskBatch([], [], [], [])


def test_what_is_not_a_tensor_is_a_type_error():
    with pytest.raises(TypeError, match=r"support_x.*tensors.*list"):
        nm.TaskBatch(**parts(support_x=[[[1.0, 2.0]]] * M))


@pytest.mark.parametrize("name", ["support_x", "support_y", "query_x", "query_y"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_require_finite_names_the_part_and_the_tasks(name, value):
    given = parts()
    given[name][0, 1] = value
    given[name][2, 0] = value
    batch = nm.TaskBatch(**given)
    with pytest.raises(ValueError, match=rf"{name} must be finite, but tasks \[0, 2\]"):
        batch.require_finite()


def test_require_finite_passes_finite_and_integer_data():
    nm.TaskBatch(**parts()).require_finite()
    nm.TaskBatch(**parts(support_y=torch.zeros(M, S, 1, dtype=torch.int64))).require_finite()


def test_to_converts_real_numbers_alone():
    batch = nm.TaskBatch(**parts(query_y=torch.ones(M, K, 1, dtype=torch.int64), support_ids=None)).to(
        dtype=torch.float64
    )
    assert batch.support_x.dtype == batch.support_y.dtype == batch.query_x.dtype == torch.float64
    assert batch.query_y.dtype == batch.task_ids.dtype == batch.instance_ids.dtype == torch.int64
    assert batch.support_ids is None
    assert batch.to("cpu").support_x.dtype == torch.float64


@pytest.mark.parametrize("index", [torch.tensor([2, 0]), slice(1, 3), torch.tensor([True, False, True])])
def test_take(index):
    given = parts(support_ids=None)
    batch = nm.TaskBatch(**given).take(index)
    for name, value in given.items():
        if value is None:
            assert getattr(batch, name) is None
        else:
            assert torch.equal(getattr(batch, name), value[index])


def test_take_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one task"):
        nm.TaskBatch(**parts()).take(slice(0, 0))


def test_a_batch_does_not_change():
    batch = nm.TaskBatch(**parts())
    with pytest.raises(AttributeError):
        batch.support_x = torch.zeros(1)


def test_support_and_query_targets_of_different_widths_are_refused():
    with pytest.raises(ValueError, match=r"targets must have one shape, got \(1,\) and \(3,\)"):
        nm.TaskBatch(**parts(query_y=torch.ones(M, K, 3)))
