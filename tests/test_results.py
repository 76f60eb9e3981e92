"""The results file: whole rows or none, never one twice, whatever was killed in between."""

import dataclasses
import math
import multiprocessing

import pytest

from nestedmaml.experiments.results import COLUMNS, Results, Row, config_hash


def row(**changes):
    cell = {"experiment": "sinusoid", "method": "maml", "shots": 10, "ratio": 0.9, "seed": 0, "metric": "mse"}
    return Row(**{**cell, "value": 1 / 3, **changes})


def test_columns_are_those_of_the_contract():
    assert ",".join(COLUMNS) == (
        "experiment,scale,method,weighting,shots,ratio,source,ood_source,clusters,val_size,variant,iterations,"
        "seed,metric,value,ci95,seconds,config"
    )


def test_rows_come_back_to_the_last_digit(tmp_path):
    rows = [
        row(variant="noise=partner, image_size=32", ci95=0.1 + 0.2, seconds=2.5, config="abc"),
        row(method='a "quoted", name', value=math.inf, clusters=200, ratio=1),
    ]
    Results(tmp_path).append(rows)
    assert Results(tmp_path).read() == rows
    text = (tmp_path / "results.csv").read_text()
    assert text.startswith(",".join(COLUMNS) + "\n")
    assert "0.3333333333333333,0.30000000000000004,2.5,abc\n" in text


def test_the_key_is_all_but_what_was_measured():
    assert row().key == row(value=2.0, ci95=1.0, seconds=3.0).key
    for name in set(COLUMNS) - {"value", "ci95", "seconds"}:
        changed = {int: 7, float: 0.7}.get(type(getattr(row(clusters=1, val_size=1, iterations=1), name)), "other")
        assert dataclasses.replace(row(), **{name: changed}).key != row().key, name
    assert row(ratio=1).key == row(ratio=1.0).key


def test_a_key_is_never_written_twice(tmp_path):
    results = Results(tmp_path)
    assert not results.has(row())
    results.append([row()])
    assert results.has(row(value=5.0))
    assert results.has(row().key)
    before = results.path.read_bytes()
    with pytest.raises(FileExistsError, match=r"already holds the row .*method=maml.*seed=0"):
        results.append([row(seed=1), row(value=5.0)])
    with pytest.raises(FileExistsError, match="seed=2"):
        results.append([row(seed=2), row(seed=2)])
    assert results.path.read_bytes() == before


@pytest.mark.parametrize("lost", [1, 5, 30])
def test_a_kill_in_the_middle_of_a_row(tmp_path, lost):
    results = Results(tmp_path)
    results.append([row(), row(seed=1)])
    results.path.write_bytes(results.path.read_bytes()[:-lost])
    assert results.read() == [row()]
    assert not results.has(row(seed=1))
    results.append([row(seed=1)])
    assert Results(tmp_path).read() == [row(), row(seed=1)]


def test_a_kill_in_the_middle_of_the_header(tmp_path):
    results = Results(tmp_path)
    results.path.write_text(",".join(COLUMNS)[:20])
    assert results.read() == []
    results.append([row()])
    assert Results(tmp_path).read() == [row()]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: "a,b\n1,2\n", "header"),
        (lambda text: "hello", "header"),
        (lambda text: text.replace("0.3333333333333333", "a third"), "line 2: 'a third' is not a number"),
        (lambda text: text + "1,2,3\n", "line 3: 3 columns"),
        (lambda text: text + "\n", "line 3: 0 columns"),
        (lambda text: text + "\x00\n", "line 3"),
        (lambda text: text.replace("maml", "m\udcffml"), "utf-8"),
    ],
)
def test_a_damaged_or_foreign_file_is_named_and_left_alone(tmp_path, damage, said):
    results = Results(tmp_path)
    results.append([row()])
    results.path.write_bytes(damage(results.path.read_text()).encode(errors="surrogateescape"))
    before = results.path.read_bytes()
    for touch in (Results(tmp_path).read, lambda: Results(tmp_path).append([row(seed=1)])):
        with pytest.raises(ValueError, match="is not a results file of nestedmaml, or is damaged") as error:
            touch()
        assert str(results.path) in str(error.value)
        assert said in str(error.value)
    assert results.path.read_bytes() == before


def test_a_file_that_a_spreadsheet_saved(tmp_path):
    results = Results(tmp_path)
    results.append([row()])
    text = results.path.read_text().replace("\n", "\r\n")
    results.path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert results.read() == [row()]


def test_line_breaks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no line breaks"):
        Results(tmp_path).append([row(variant="a\nb")])
    assert not (tmp_path / "results.csv").exists()


def _append_many(folder, seed):
    for ratio in range(20):
        Results(folder).append([row(seed=seed, ratio=ratio / 20)])


def test_processes_append_side_by_side(tmp_path):
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=_append_many, args=(tmp_path, seed)) for seed in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * 4
    assert len({found.key for found in Results(tmp_path).read()}) == 80


def test_config_leaves_out_what_changes_no_number(tmp_path):
    options = {"meta_lr": 1e-3, "methods": ("maml", "nested")}
    elsewhere = {
        "out": "x",
        "data_root": tmp_path,
        "jobs": 2,
        "engine": "ray",
        "stack": True,
        "device": "cuda",
    }
    assert config_hash(options) == config_hash({**options, **elsewhere, "threads": 4})
    assert config_hash(options) != config_hash({**options, "meta_lr": 1e-4})
    name = Results(tmp_path).save_config({**options, **elsewhere})
    assert name == config_hash(options)
    assert (tmp_path / "configs" / f"{name}.json").read_text().count("\n") > 3
    with pytest.raises(TypeError, match="cannot be written"):
        config_hash({"loss": object()})
