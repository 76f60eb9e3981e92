"""The report: recovery against numbers made by hand, and a page that is whole, safe and alone."""

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from nestedmaml import report
from nestedmaml.experiments.results import Results, Row
from nestedmaml.report import figures, paper
from nestedmaml.report.cells import cells
from nestedmaml.report.contents import contents
from nestedmaml.report.page import Figure, Page, Section, render
from nestedmaml.report.recovery import recovery
from nestedmaml.report.tables import tables

METHODS = {"maml-ood-rm": 0.2, "maml-ood-rm-refill": 0.1, "maml": 2.2, "nested": 0.4, "nested-weighted": 0.31}


def rows(methods=METHODS, seeds=3, **changes):
    return [
        Row(
            **{
                "experiment": "sinusoid",
                "scale": "small",
                "method": method,
                "shots": 10,
                "ratio": 0.9,
                "iterations": 3000,
                "seed": seed,
                "metric": "mse",
                "value": value * (1 + 0.02 * (seed - 1)),
                "ci95": 0.02 * value,
                "seconds": 30.0,
                **changes,
            }
        )
        for method, value in methods.items()
        for seed in range(seeds)
    ]


def run_folder(folder, method="nested", steps=5, **more):
    run = folder / "runs" / f"{method}-{more.get('seed', 0)}"
    run.mkdir(parents=True)
    head = "iteration,train_loss,val_loss,test,weight_mean,weight_clean,weight_corrupt,"
    head += "weight_clean_sd,weight_corrupt_sd,diverged,seconds"
    lines = [f"{100 * i},3,2,{4 / (i + 1)},1,{1 + i},{1 / (1 + i)},0.5,0.1,0,{i}" for i in range(steps)]
    (run / "history.csv").write_text("\n".join([head, *lines, "500,3,2"]))  # cut by a kill
    weights = [
        f"{i},{i % 10 == 0},{int(i % 10 > 0)}".replace("True", "6.0").replace("False", "0.1") for i in range(100)
    ]
    (run / "weights.csv").write_text("\n".join(["id,weight,corrupt", *weights, ""]))
    x = np.linspace(-5, 5, 20)
    fit = {
        "x": x,
        "truth": np.sin(x),
        "before": 0 * x,
        "after": np.sin(x) + 0.1,
        "support_x": x[:5],
        "support_y": x[:5],
    }
    fit = {key: value.tolist() for key, value in fit.items()}
    cell = {"shots": 10, "ratio": 0.9}
    about = {"experiment": "sinusoid", "method": method, "seed": 0, "cell": cell, "fits": [fit]}
    (run / "run.json").write_text(json.dumps({**about, **more, "protocol": {"Device": "two <b>CPU</b> cores"}}))


class TestRecovery:
    def test_is_the_ratio_of_means_over_seeds(self):
        found = recovery([0.4, 0.6], [2.0, 3.0], [0.2, 0.3])
        assert found.value == pytest.approx((0.5 - 2.5) / (0.25 - 2.5))
        assert found.low <= found.value <= found.high
        assert (found.gap, found.difference) == pytest.approx((-2.25, -2.0))
        assert found.gap_error == pytest.approx(0.45)  # differences -1.8 and -2.7
        assert found.clear is True
        assert str(found).startswith("0.89 [")

    def test_does_not_depend_on_scale_or_direction(self):
        rng = np.random.default_rng(1)
        values = [rng.normal(mean, 0.3, (4, 50)) for mean in (1.2, 3.0, 1.0)]
        found = recovery(*values)
        assert recovery(*[7 - 10 * v for v in values]).value == pytest.approx(found.value)
        assert recovery(*values) == found  # the bootstrap has a seed

    def test_skyline_and_maml_are_one_and_zero(self):
        maml, skyline = [[2.0, 3.0], [2.5, 3.5]], [[1.0, 1.1], [0.9, 1.2]]
        assert recovery(skyline, maml, skyline).value == 1
        assert recovery(maml, maml, skyline).value == 0
        assert recovery(skyline, maml, skyline).low == pytest.approx(1)

    def test_a_gap_that_is_not_clear_gives_differences(self):
        found = recovery([1.0, 1.1, 0.9], [1.0, 1.2, 0.8], [1.1, 0.9, 1.0])
        assert found.clear is False
        assert "against MAML" in str(found)

    def test_one_seed_without_test_tasks_proves_nothing(self):
        found = recovery([0.5], [2.0], [0.2])
        assert found.value == pytest.approx(1.5 / 1.8)
        assert math.isnan(found.low)
        assert found.clear is False
        assert recovery([0.5], [2.0], [0.2], errors=([0.05], [0.1], [0.02])).clear is True

    def test_the_interval_covers(self):
        rng = np.random.default_rng(0)
        inside = 0
        for trial in range(60):
            values = [m + rng.normal(0, 0.1, (8, 1)) + rng.normal(0, 0.5, (8, 40)) for m in (1.5, 3.0, 1.0)]
            found = recovery(*values, rng_seed=trial, draws=500)
            inside += found.low <= 0.75 <= found.high
        assert inside >= 51

    def test_tasks_that_all_seeds_share_are_drawn_once(self):
        rng = np.random.default_rng(0)
        hard = rng.normal(0, 1, 30) ** 2
        values = [np.tile(level * hard, (5, 1)) + rng.normal(0, 0.01, (5, 30)) for level in (1.4, 3.0, 1.0)]
        assert recovery(*values, same_tasks=True).gap_error > 10 * recovery(*values).gap_error

    @pytest.mark.parametrize("maml", [[1.0], [], [[1.0, 2.0], [1.0]], [[1.0, 2.0], [1.0, 2.0]]])
    def test_seeds_and_tasks_that_do_not_match(self, maml):
        with pytest.raises(ValueError, match="the same seeds"):
            recovery([0.5, 0.6], maml, [0.2, 0.3])


class TestTables:
    def test_each_method_against_its_own_skyline(self):
        [cell] = cells(rows())
        assert cell.line("nested").recovery.value == pytest.approx(1.8 / 2.0)
        assert cell.line("nested-weighted").recovery.value == pytest.approx(1.89 / 2.1)
        assert cell.line("nested").multiple == pytest.approx(2.0)
        assert cell.line("nested-weighted").multiple == pytest.approx(3.1)
        assert cell.line("maml").recovery is None
        assert cell.line("nested").ci95 == pytest.approx(4.303 * 0.4 * 0.02 / math.sqrt(3), rel=1e-3)

    def test_only_seeds_that_all_three_have(self):
        found = rows(seeds=3)
        [cell] = cells([row for row in found if row.method != "maml" or row.seed != 2])
        assert cell.line("nested").recovery.value == pytest.approx(1.8 / 2.0)
        assert len(cell.line("maml").seeds) == 2

    def test_without_baselines_there_is_no_recovery(self):
        [cell] = cells(rows({"nested": 0.4}))
        assert cell.line("nested").recovery is None
        assert "Recovery" not in report.table_text(rows({"nested": 0.4}))

    def test_weightings_stand_apart(self):
        found = rows() + rows({"nested": 0.9}, weighting="cluster", clusters=200)
        [cell] = cells(found)
        assert [line.detail for line in cell.lines if line.method == "nested"] == ["", "200 clusters"]
        assert "200 clusters" in report.table_text(found)

    def test_the_paper_beside_ours(self):
        [cell] = cells(rows())
        assert cell.line("nested").paper == 0.0743
        [table] = tables([cell])
        assert "0.0400" in {entry.text for line in table.rows for entry in line}  # 0.4 / K
        recovered = [paper.sinusoid_recovery(k, r, "nested") for k in (5, 10, 20) for r in (0.3, 0.5, 0.8, 0.9)]
        assert (round(min(recovered), 2), round(max(recovered), 2)) == (0.60, 0.96)

    def test_text_is_aligned(self):
        text = report.table_text(rows() + rows(shots=5) + rows({"nested": 0.99}, metric="auroc"))
        assert "maml-ood-rm-refill" in text
        rules = [line for line in text.split("\n") if line and not line.strip("-")]
        assert len(rules) == 7
        assert "0.90 [" in text
        assert "paper" in text


class TestFigures:
    x = np.arange(5)
    svgs = (
        lambda s: figures.learning_curves(
            {"maml": [(s.x, 3 + s.x)], "<b>$x$": [(s.x, 1 + s.x)] * 2}, "a & b", log=True
        ),
        lambda s: figures.weight_trend([(s.x, s.x)], [(s.x, 1 / (1 + s.x))], [(s.x, s.x)], [(s.x, s.x)], "t"),
        lambda s: figures.weight_trend([(s.x, s.x * np.nan)], [(s.x, 1 / (1 + s.x))]),
        lambda s: figures.weight_histogram([1.0, 2.0], [0.0]),
        lambda s: figures.weight_histogram([1.0, 1.0], []),
        lambda s: figures.sine(dict.fromkeys(("x", "truth", "before", "after", "support_x", "support_y"), s.x), "K"),
    )

    @pytest.mark.parametrize("draw", svgs)
    def test_is_xml_that_points_nowhere_and_is_the_same_twice(self, draw):
        svg = draw(self)
        root = ET.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert set(root.attrib) == {"viewBox"}
        assert svg.count("http") == 1  # the namespace
        assert "currentColor" in svg
        assert "DejaVu" not in svg
        assert draw(self) == svg

    def test_names_are_text(self):
        assert "&lt;b&gt;$x$" in type(self).svgs[0](self)


class Structure(HTMLParser):
    """Tags, and every attribute that could load something."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "srcset", "action", "data", "poster")]


class TestPage:
    evil = "<script>alert(1)</script>"

    def test_every_string_is_escaped(self, tmp_path):
        table = tables(cells(rows({self.evil: 1.0, "maml": 2.0})))
        svg = figures.weight_histogram([1.0], [0.0], title=self.evil)
        section = Section(self.evil, self.evil, table, [Figure(svg, self.evil, [(self.evil, "red")])])
        html = render(Page(self.evil, self.evil, [section], {self.evil: self.evil}))
        assert self.evil not in html
        assert html.count("&lt;script&gt;") >= 9
        assert Structure(html).tags.count("script") == 1

    def test_build_from_everything(self, tmp_path):
        results = Results(tmp_path)
        config = results.save_config({"meta_lr": 0.001, "device": "cpu"})
        results.append(rows(config=config))
        run_folder(tmp_path)
        run_folder(tmp_path, method=self.evil.replace("/", "|"))
        path = report.build(tmp_path)
        assert path == tmp_path / "report.html"
        html = path.read_text(encoding="utf-8")
        seen = Structure(html)
        assert "NestedMAML recovers 0.90 [" in html
        assert "With 90% of the training tasks corrupt" in html
        assert "two &lt;b&gt;CPU&lt;/b&gt; cores" in html
        assert "<dd>0.001</dd>" in html
        assert seen.tags.count("svg") == 1 + 2 + 2 + 2
        assert seen.tags.count("script") == 1
        assert all(a.startswith(("#", "data:")) for a in seen.addresses), seen.addresses
        assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)
        ids = re.findall(r'\sid="([^"]*)"', html)
        assert {a[1:] for a in seen.addresses if a.startswith("#")} <= set(ids)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["configs", "report.html", "results.csv", "runs"]

    def test_what_each_method_costs(self, tmp_path):
        def timed(method, seconds, **more):
            run_folder(tmp_path, method, **more)
            path = tmp_path / "runs" / f"{method}-{more.get('seed', 0)}" / "history.csv"
            path.write_text("iteration,seconds\n" + "".join(f"{i},{s}\n" for i, s in enumerate(seconds)))

        timed("maml", [9.0, 0.002, 0.002], parameters=1761)  # the first row compiles
        timed("nested", [9.0, 0.004, 0.006], parameters=1761, weighting="cluster")
        timed("nested", [9.0, 0.004, 0.006], parameters=1761, weighting="task", seed=1)
        timed("mmaml", [0.5, 0.5, 0.5], parameters=20_000, cell={"shots": 5, "ratio": 0.9})
        timed("btaml", [], parameters=5_000)
        run_folder(tmp_path, "l2r")  # a run that does not say
        [section] = contents(tmp_path).sections[:1]
        [table] = [table for table in section.tables if table.title == "What each method costs"]
        assert [[f"{entry.text} {entry.small}".strip() for entry in row] for row in table.rows] == [
            ["MAML", "1,761", "2.00", "1.00"],
            ["MMAML", "20,000", "500", ""],  # MAML was not run in its setting
            ["B-TAML", "5,000", "", ""],
            ["NestedMAML cluster", "1,761", "6.00", "3.00"],
            ["NestedMAML task", "1,761", "6.00", "3.00"],
        ]
        html = report.build(tmp_path).read_text()
        assert "What each method costs" in html

    def test_what_is_missing_is_left_out(self, tmp_path):
        Results(tmp_path).append(rows())
        assert "<svg" not in report.build(tmp_path).read_text()
        run_folder(tmp_path / "only-runs")
        for name in ("run.json", "weights.csv"):
            (tmp_path / "only-runs" / "runs" / "nested-0" / name).unlink()
        html = report.build(tmp_path / "only-runs").read_text()
        assert "<svg" in html
        assert "<table" not in html

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("results.csv", ""),
            ("results.csv", "a,b\n"),
            ("runs/nested-0/run.json", "{"),
            ("runs/nested-0/run.json", "[]"),
            ("runs/nested-0/run.json", '{"experiment": "", "method": "", "seed": 0, "parameters": "many"}'),
            ("runs/nested-0/history.csv", "a,b\n1,2\n"),
            ("runs/nested-0/history.csv", "iteration,test\n1,two\n"),
            ("runs/nested-0/weights.csv", "id,weight,corrupt\n1,2\n"),
        ],
    )
    def test_damage_is_named_and_nothing_overwritten(self, tmp_path, name, text):
        run_folder(tmp_path)
        (tmp_path / "report.html").write_text("the one before")
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name.rpartition("/")[2]):
            report.build(tmp_path)
        assert (tmp_path / "report.html").read_text() == "the one before"

    def test_nothing_to_report(self, tmp_path):
        with pytest.raises(ValueError, match="nothing to report"):
            report.build(tmp_path)
