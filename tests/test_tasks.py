"""Random numbers by counter, pools of tasks, and the sinusoid."""

import numpy as np
import pytest
import torch

from nestedmaml.tasks import Pool, Sinusoid, TaskBatch
from nestedmaml.tasks.counter import Shuffle, bits, integers, uniform

PARTS = ["support_x", "support_y", "query_x", "query_y", "task_ids"]


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in PARTS)


# --- counter ----------------------------------------------------------------------------------------------


def test_numbers_do_not_depend_on_the_order_or_on_the_others():
    all_at_once = bits(3, "stream", np.arange(100))
    assert all_at_once.dtype == np.uint64
    one_by_one = [int(bits(3, "stream", i)) for i in reversed(range(100))]
    assert all_at_once.tolist() == one_by_one[::-1]
    picked = np.array([70, 2, 70, 31])
    uniform(3, "other", 5)
    assert np.array_equal(bits(3, "stream", picked), all_at_once[picked])
    grid = bits(3, "stream", np.arange(4)[:, None], np.arange(5))
    assert grid.shape == (4, 5)
    assert grid[2, 3] == bits(3, "stream", 2, 3)


def test_numbers_stay_the_same_from_version_to_version():
    """Results are named by their seed, so a change here changes results that were published."""
    assert int(bits(0, "a", 0)) == (0xFEDA72B07652E771)


def test_seed_stream_and_every_index_count():
    draws = [
        bits(0, "a", 0, 0), bits(1, "a", 0, 0), bits(-1, "a", 0, 0), bits(0, "b", 0, 0),
        bits(0, "a", 1, 0), bits(0, "a", 0, 1), bits(0, "a", 0), bits(0, "a"),
    ]  # fmt: skip
    assert len({int(d) for d in draws}) == len(draws)
    i = np.arange(50)
    assert len(np.unique(bits(0, "a", i[:, None], i))) == 50**2  # (i, j) is not (j, i)


@pytest.mark.parametrize("low_high", [(0.0, 1.0), (-5.0, 5.0)])
def test_uniform_is_uniform(low_high):
    low, high = low_high
    n, bins = 100_000, 50
    x = uniform(5, "u", np.arange(n), low=low, high=high)
    assert x.min() >= low
    assert x.max() < high
    counts, _ = np.histogram(x, bins=bins, range=(low, high))
    chi2 = ((counts - n / bins) ** 2 / (n / bins)).sum()
    assert 20 < chi2 < 95  # 49 degrees of freedom, beyond 1e-4 on either side
    z = (x - x.mean()) / x.std()
    for lag in (1, 2, 7):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / np.sqrt(n)


@pytest.mark.parametrize("which", ["streams", "seeds", "indices"])
def test_neighbours_are_independent(which):
    i = np.arange(50_000)
    a, b = {
        "streams": (uniform(0, "amplitude", i), uniform(0, "phase", i)),
        "seeds": (uniform(0, "a", i), uniform(1, "a", i)),
        "indices": (uniform(0, "a", i, 0), uniform(0, "a", i, 1)),
    }[which]
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(i))


@pytest.mark.parametrize("high", [1, 2, 7, 10_000])
def test_integers_cover_their_range(high):
    x = integers(2, "i", np.arange(30 * high + 100), high=high)
    assert x.dtype == np.int64
    assert x.min() == 0
    assert x.max() == high - 1
    assert len(np.unique(x)) > 0.99 * high


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 10, 1000, 4096, 4097])
def test_shuffle_is_a_permutation(size):
    shuffle = Shuffle(size, 1, "s")
    out = shuffle(np.arange(size))
    assert np.array_equal(np.sort(out), np.arange(size))
    picked = np.array([[size - 1, 0]])
    assert np.array_equal(shuffle(picked), out[picked])
    assert int(shuffle(size - 1)) == out[-1]
    if size >= 1000:
        assert not np.array_equal(out, Shuffle(size, 2, "s")(np.arange(size)))
        assert not np.array_equal(out, Shuffle(size, 1, "t")(np.arange(size)))
        assert abs(np.corrcoef(out, np.arange(size))[0, 1]) < 5 / np.sqrt(size)


def test_shuffle_refuses_what_is_outside():
    with pytest.raises(IndexError, match=r"10 is outside of 0 \.\.\. 9"):
        Shuffle(10, 0, "s")([3, 10])
    with pytest.raises((IndexError, OverflowError)):
        Shuffle(10, 0, "s")(np.array([-1]))


# --- pools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize("ratio", [0, 0.3, 0.55, 0.9, 1])
def test_a_pool_holds_exactly_the_ratio_of_corrupt_tasks(size, ratio):
    pool = Sinusoid(size=size, ratio=ratio)
    truth = pool.corrupt(pool.ids)
    assert truth.dtype == torch.bool
    assert int(truth.sum()) == round(ratio * size)
    some = torch.tensor([size - 1, 0])
    assert torch.equal(pool.corrupt(some), truth[some])


def test_corrupt_tasks_are_scattered_and_depend_on_the_seed():
    truth = Sinusoid(size=10_000, ratio=0.5).corrupt(torch.arange(10_000))
    assert 0.4 < truth[:1000].float().mean() < 0.6
    assert 0.4 < truth[::2].float().mean() < 0.6
    other = Sinusoid(size=10_000, ratio=0.5, seed=1).corrupt(torch.arange(10_000))
    assert 0.4 < (truth == other).float().mean() < 0.6


def test_batches_are_drawn_uniformly_with_replacement():
    pool = Sinusoid(size=50, ratio=0.9)
    ids = torch.cat([pool.sample_ids(step, 25) for step in range(400)])
    counts = torch.bincount(ids, minlength=50)
    assert counts.min() > 130
    assert counts.max() < 270
    shares = torch.stack([pool.corrupt(pool.sample_ids(step, 25)).float().mean() for step in range(400)])
    assert shares.std() > 0.03, "a batch's share of corrupt tasks varies"


def test_sample_is_a_pure_function_of_the_step():
    pool, again = Sinusoid(ratio=0.5), Sinusoid(ratio=0.5)
    later = pool.sample(7, 4)
    for step in (0, 3):
        again.sample(step, 9)
    assert isinstance(later, TaskBatch)
    assert same(later, again.sample(7, 4))
    assert same(later, again.draw(later.task_ids))
    assert not same(later, pool.sample(8, 4))
    assert not same(later, Sinusoid(ratio=0.5, seed=1).sample(7, 4))


def test_the_bare_pool_and_other_levels():
    pool = Pool(4, 0.5, 0, "bare")
    with pytest.raises(NotImplementedError):
        pool.sample(0, 2)
    with pytest.raises(ValueError, match="instance"):
        pool.corrupt(pool.ids, level="instance")
    assert pool.ids.tolist() == [0, 1, 2, 3]


def test_a_pool_without_end_never_repeats():
    pool = Sinusoid(size=None, split="test")
    ids = torch.cat([pool.sample(step, 8).task_ids for step in range(20)])
    assert len(ids.unique()) == len(ids) == 160
    assert not pool.corrupt(ids).any()
    x = torch.cat([pool.sample(step, 8).query_x for step in range(20)])
    assert len(x.unique()) == x.numel()
    with pytest.raises(ValueError, match="without end"):
        pool.ids  # noqa: B018


# --- the sinusoid -----------------------------------------------------------------------------------------


def points(batch):
    """All points of each task, as float64 arrays ``[m, S + K]``."""
    x, y = (torch.cat([getattr(batch, f"{part}_{axis}") for part in ("support", "query")], 1) for axis in "xy")
    return x.squeeze(-1).double().numpy(), y.squeeze(-1).double().numpy()


def fit(y, columns):
    """Least squares of one task: coefficients, and the largest residual."""
    design = np.stack(columns, 1)
    coefficients = np.linalg.lstsq(design, y, rcond=None)[0]
    return coefficients, np.abs(design @ coefficients - y).max()


@pytest.mark.parametrize(("shots", "queries"), [(10, None), (5, 15)])
def test_shapes(shots, queries):
    batch = Sinusoid(shots, queries).sample(0, 6)
    k = shots if queries is None else queries
    assert batch.support_x.shape == batch.support_y.shape == (6, shots, 1)
    assert batch.query_x.shape == batch.query_y.shape == (6, k, 1)
    assert batch.support_x.dtype == batch.query_y.dtype == torch.float32
    batch.require_finite()


def test_clean_tasks_are_sines():
    x, y = points(Sinusoid(20, size=300).draw(torch.arange(300)))
    assert -5 <= x.min() < -4.9
    assert 4.9 < x.max() <= 5
    amplitudes, phases = [], []
    for xi, yi in zip(x, y, strict=True):
        (s, c), residual = fit(yi, [np.sin(xi), np.cos(xi)])  # a sin(x - b) = a cos b sin x - a sin b cos x
        assert residual < 1e-5
        amplitudes.append(np.hypot(s, c))
        phases.append(np.arctan2(-c, s))
    tolerance = 1e-4
    assert 0.1 - tolerance < min(amplitudes) < 0.3
    assert 4.8 < max(amplitudes) < 5 + tolerance
    assert -tolerance < min(phases) < 0.1
    assert np.pi - 0.1 < max(phases) < np.pi + tolerance
    assert abs(np.corrcoef(amplitudes, phases)[0, 1]) < 0.3


def test_corrupt_tasks_are_lines():
    pool = Sinusoid(20, size=600, ratio=0.5, slope=2.0, intercept=1.0)
    x, y = points(pool.draw(pool.ids))
    lines = []
    for xi, yi, corrupt in zip(x, y, pool.corrupt(pool.ids), strict=True):
        coefficients, residual = fit(yi, [xi, np.ones_like(xi)])
        if corrupt:
            assert residual < 1e-5
            lines.append(coefficients)
        else:
            assert residual > 1e-3
    slope, intercept = np.abs(np.array(lines)).max(0)
    assert 1.9 < slope < 2 + 1e-4
    assert 0.95 < intercept < 1 + 1e-4


def test_a_task_stays_the_same_whatever_the_ratio_and_the_neighbours():
    clean, mixed = Sinusoid(size=100), Sinusoid(size=100, ratio=0.5)
    ids = torch.arange(100)
    good = ids[~mixed.corrupt(ids)]
    assert same(clean.draw(good), mixed.draw(good))
    assert same(mixed.draw(ids).take(torch.tensor([40])), mixed.draw(torch.tensor([40])))


def test_splits_differ():
    batches = [Sinusoid(size=50, split=split).draw(torch.arange(50)) for split in ("train", "val", "test")]
    for part in ("support_x", "support_y"):
        values = torch.cat([getattr(batch, part).flatten() for batch in batches])
        assert len(values.unique()) > 0.99 * len(values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": -0.1}, r"ratio.*\[0, 1\].*-0\.1"),
        ({"ratio": 1.01}, r"ratio.*\[0, 1\].*1\.01"),
        ({"ratio": 90}, r"ratio.*\[0, 1\].*90"),
        ({"ratio": float("nan")}, r"ratio.*\[0, 1\].*nan"),
        ({"ratio": 0.5, "size": None}, r"without end.*0\.5"),
        ({"size": 0}, r"at least one task.*0"),
        ({"size": -3}, r"at least one task.*-3"),
        ({"shots": 0}, r"at least one support.*0"),
        ({"queries": 0}, r"at least one .*query.*0"),
        ({"shots": -1, "queries": 5}, r"at least one support.*-1"),
        ({"split": "training"}, r"'train', 'val' or 'test'.*'training'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Sinusoid(**options)


def test_ratios_of_numpy_are_numbers():
    pool = Sinusoid(size=10, ratio=np.float32(0.5))
    assert int(pool.corrupt(pool.ids).sum()) == 5


def test_bad_draws():
    pool = Sinusoid(size=10, ratio=0.5)
    with pytest.raises(ValueError, match="at least one task"):
        pool.sample(0, 0)
    with pytest.raises(IndexError, match="10 is outside"):
        pool.draw(torch.tensor([10]))
