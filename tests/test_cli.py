"""The command line: what it says, what it writes, and what it leaves alone."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nestedmaml as nm
from nestedmaml import report
from nestedmaml.cli import main
from nestedmaml.experiments import demo, sinusoid
from nestedmaml.experiments.presets import PRESETS
from nestedmaml.experiments.results import COLUMNS

SMOKE = ["--scale", "smoke", "--iterations", "3", "--pool", "300", "--clusters", "10", "--shots", "5"]
CELL = [*SMOKE, "--ratio", "0.5"]


def call(*argv):
    """The exit code, as the shell sees it."""
    try:
        return main([str(a) for a in argv])
    except SystemExit as end:
        return end.code or 0


def sinusoids(*argv):
    return call("reproduce", "sinusoid", *argv)


def rows(folder):
    with open(Path(folder) / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def values(folder):
    """Rows by all but what was measured in seconds, in order."""
    return sorted(tuple(v for k, v in row.items() if k != "seconds") for row in rows(folder))


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Defaults like --out runs lead to a folder of the test's own; processes find the package all the same."""
    paths = [str(Path(nm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in paths if p))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pageless(monkeypatch):
    """Drawing takes longer than these runs do."""
    monkeypatch.setattr(report, "build", lambda folder: Path(folder) / "report.html")


class TestHelp:
    @pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
    def test_overview(self, argv, capsys):
        assert call(*argv) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in ("demo", "reproduce", "report", "sinusoid", "convergence", "--version"))

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            ("demo", ["--iterations INT", "(default: 2000)", "--out PATH"]),
            ("reproduce", ["sinusoid, convergence"]),
            ("report", ["usage: nestedmaml report DIR"]),
            ("reproduce convergence", ["--out", "--scale", "nestedmaml reproduce convergence"]),
            ("reproduce sinusoid", ["--ratio FLOAT ...", "(default: 10000)", "(default: 0 1 2)", "(default: small)"]),
        ],
    )
    def test_of_a_command(self, argv, words, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "200")
        assert call(*argv.split(), "--help") == 0
        out = capsys.readouterr().out
        assert [word for word in words if word not in out] == []
        assert "None" not in out

    def test_version(self, capsys):
        assert call("--version") == 0
        assert capsys.readouterr().out == f"nestedmaml {nm.__version__}\n"

    @pytest.mark.parametrize("argv", ["--help", "--version", "reproduce sinusoid --help", "demo --help"])
    def test_loads_nothing_heavy(self, argv):
        code = (
            "import sys\nfrom nestedmaml.cli import main\n"
            f"try: main({argv.split()!r})\nexcept SystemExit: pass\n"
            "print([m for m in ('torch', 'numpy', 'matplotlib', 'sklearn', 'scipy', 'PIL') if m in sys.modules])"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out.endswith("\n[]\n")


class TestMistakes:
    """Exit code 2, one sentence, and nothing written."""

    def refused(self, capsys, *argv):
        before = files(".")
        assert call(*argv) == 2
        said = capsys.readouterr()
        assert said.err.startswith("nestedmaml: ")
        assert said.err.count("\n") == 1
        assert files(".") == before
        assert not Path("runs").exists()
        return said.err

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            ("nonsense", ["'nonsense'", "demo, reproduce, report"]),
            ("reproduce", ["sinusoid, convergence"]),
            ("reproduce nonsense", ["'nonsense'", "sinusoid, convergence"]),
            ("reproduce sinusoid --methods maml nonsense", ["'nonsense'", ", ".join(PRESETS)]),
            ("reproduce sinusoid --weighting nonsense", ["'nonsense'", "task, cluster, amortised"]),
            ("reproduce sinusoid --scale huge", ["'huge'", "smoke", "paper"]),
            ("reproduce sinusoid --ratio 1.5", ["--ratio", "[0, 1)", "1.5"]),
            ("reproduce sinusoid --ratio 0.3 -0.1", ["--ratio", "-0.1"]),
            ("reproduce sinusoid --ratio much", ["--ratio", "'much'"]),
            ("reproduce sinusoid --shots 0", ["--shots must be at least 1, got 0"]),
            ("reproduce sinusoid --shots", ["--shots needs at least one value"]),
            ("reproduce sinusoid --seeds", ["--seeds needs at least one value"]),
            ("reproduce sinusoid --seeds 1 x", ["--seeds", "'x'"]),
            ("reproduce sinusoid --meta-lr -0.1", ["--meta-lr", "above 0", "-0.1"]),
            ("reproduce sinusoid --inner-lr nan", ["--inner-lr", "above 0", "nan"]),
            ("reproduce sinusoid --weight-lr 0", ["--weight-lr", "above 0"]),
            ("reproduce sinusoid --meta-lr", ["--meta-lr"]),
            ("reproduce sinusoid --val-size 0", ["--val-size must be at least 1, got 0"]),
            ("reproduce sinusoid --val-share 2", ["--val-share must be in [0, 1]"]),
            ("reproduce sinusoid --inner-steps -1", ["--inner-steps must be at least 0, got -1"]),
            ("reproduce sinusoid --iterations 0", ["--iterations must be at least 1, got 0"]),
            ("reproduce sinusoid --iterations many", ["--iterations", "'many'"]),
            ("reproduce sinusoid --jobs 0", ["--jobs"]),
            ("reproduce sinusoid --device nonsense", ["--device nonsense cannot be used here"]),
            ("reproduce sinusoid --nonsense 3", ["--nonsense", "nestedmaml reproduce sinusoid --help"]),
            ("reproduce sinusoid --config missing.toml", ["no configuration file missing.toml"]),
            ("demo --iterations 0", ["--iterations must be at least 1, got 0"]),
            ("demo --ratio 2", ["--ratio", "[0, 1)"]),
            ("demo --iterations many", ["--iterations", "'many'", "nestedmaml demo --help"]),
            ("report missing", ["nothing to report", "results.csv is missing"]),
        ],
    )
    def test_options(self, argv, words, capsys):
        said = self.refused(capsys, *argv.split())
        assert [word for word in words if word not in said] == []

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("shots = [", ["not TOML"]),
            ("\xff", ["not TOML"]),
            ("nonsense = 3", ["'nonsense'", "known are scale, iterations"]),
            ("ratio = [0.3, 1.5]", ["--ratio", "1.5"]),
            ('seeds = [1, "x"]', ["--seeds", "'x'"]),
            ("seeds = []", ["--seeds needs at least one value"]),
            ("seeds = [0.5]", ["--seeds", "0.5"]),
            ('scale = "huge"', ["'huge'"]),
            ('resume = "yes"', ["resume must be true or false, got 'yes'"]),
            ("jobs = true", ["jobs must be a value, not true"]),
        ],
    )
    def test_configuration(self, text, words, capsys):
        Path("options.toml").write_bytes(text.encode("latin-1"))
        said = self.refused(capsys, "reproduce", "sinusoid", "--config", "options.toml")
        assert [word for word in ["options.toml", *words] if word not in said] == []

    def test_report_of_an_empty_folder(self, tmp_path, capsys):
        (tmp_path / "empty").mkdir()
        assert "nothing to report" in self.refused(capsys, "report", "empty")
        assert call("report") == 2
        assert capsys.readouterr().err == "usage: nestedmaml report DIR\n"

    @pytest.mark.parametrize("text", ["", "a,b\n", ",".join(COLUMNS) + "\nsinusoid,smoke\n"])
    def test_damaged_results(self, text, capsys):
        Path("D").mkdir()
        Path("D/results.csv").write_text(text)
        if text:  # an empty file is one that nothing was written to yet
            said = self.refused(capsys, "reproduce", "sinusoid", *CELL, "--methods", "maml", "--resume", "--out", "D")
            assert "D/results.csv" in said
        assert "D/results.csv" in self.refused(capsys, "report", "D")

    def test_convergence(self, capsys):
        assert call("reproduce", "convergence", "--out", "D", "--scale", "huge") == 2
        assert "invalid choice: 'huge'" in capsys.readouterr().err
        assert not Path("D").exists()

    def test_a_process_says_it_as_well(self):
        argv = [sys.executable, "-m", "nestedmaml", "reproduce", "sinusoid", "--ratio", "1.5"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert "--ratio must be in [0, 1), got 1.5" in done.stderr


class TestSinusoid:
    def test_rows_files_and_resuming(self, capsys):
        again = [*CELL, "--methods", "maml", "nested", "--out", "D", "--seeds"]
        assert sinusoids(*again, 3) == 0
        assert "Mean squared error" in capsys.readouterr().out
        found = rows("D")
        assert list(found[0]) == list(COLUMNS)
        assert [(r["method"], r["metric"], r["weighting"]) for r in found] == [
            ("maml", "mse", ""),
            ("nested", "mse", "cluster"),
            ("nested", "auroc", "cluster"),
        ]
        for row in found:
            assert (row["experiment"], row["scale"], row["shots"], row["ratio"]) == ("sinusoid", "smoke", "5", "0.5")
            assert (row["iterations"], row["seed"], row["val_size"]) == ("3", "3", "100")
            assert (row["source"], row["ood_source"], row["variant"]) == ("sinusoid", "lines", "pool=300")
            assert float(row["value"]) >= 0
            assert float(row["seconds"]) > 0
            config = json.loads(Path(f"D/configs/{row['config']}.json").read_text())
            assert (config["method"], config["seed"], config["iterations"]) == (row["method"], 3, 3)
            assert not {"out", "jobs", "device", "threads"} & set(config)
        runs = sorted(Path("D/runs").iterdir())
        assert len(runs) == 2
        for run in runs:
            with open(run / "history.csv", newline="") as file:
                history = list(csv.DictReader(file))
            assert [row["iteration"] for row in history] == ["1", "2", "3"]
            assert all(float(row["seconds"]) > 0 and float(row["test"]) > 0 for row in history)
            about = json.loads((run / "run.json").read_text())
            assert about["parameters"] == 1 * 40 + 40 + 40 * 40 + 40 + 40 + 1
        with open(runs[1] / "weights.csv", newline="") as file:
            weights = list(csv.DictReader(file))
        assert list(weights[0]) == ["id", "weight", "corrupt"]
        assert len(weights) == 300
        assert sum(float(row["corrupt"]) for row in weights) == 150
        assert "What each method costs" in Path("D/report.html").read_text()

        before = files("D")
        assert sinusoids(*again, 3) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "maml with seed 3, and 1 more of these runs, already: pass --resume" in said
        assert sinusoids(*again, 4, 3) == 2  # some there, some not: nothing of it is run
        assert files("D") == before
        assert sinusoids(*again, 3, "--resume") == 0
        after = files("D")
        assert {p for p in before if before[p] != after[p]} <= {Path("report.html")}
        assert sinusoids(*CELL, "--methods", "maml", "--out", "D", "--seeds", 4, 4, "--jobs", 1) == 0
        assert rows("D")[:3] == found
        assert [(r["method"], r["seed"]) for r in rows("D")[3:]] == [("maml", "4")]
        with open("D/results.csv", "a") as file:
            file.write("sinusoid,smoke,maml,,5")  # cut by a kill
        assert sinusoids(*again, 5, 3, "--resume") == 0
        assert [(r["method"], r["seed"]) for r in rows("D")[4:]] == [("maml", "5"), ("nested", "5"), ("nested", "5")]
        capsys.readouterr()
        assert call("report", "D") == 0
        assert capsys.readouterr().out == f"{Path('D/report.html')}\n"

    def test_weightings(self, pageless):
        assert sinusoids(*CELL, "--methods", "nested", "maml", "--weighting", "task", "amortised", "--seeds", 0) == 0
        found = [(r["method"], r["weighting"], r["metric"]) for r in rows("runs")]
        assert found == [
            ("nested", "task", "mse"),
            ("nested", "task", "auroc"),
            ("nested", "amortised", "mse"),
            ("nested", "amortised", "auroc"),
            ("maml", "", "mse"),
        ]
        assert all(r["clusters"] == "" for r in rows("runs"))

    def test_the_command_line_goes_before_the_file(self, pageless):
        text = 'scale = "smoke"\npool = 200\niterations = 2\nshots = 5\nratio = [0.5]\nseeds = [7]\n'
        Path("options.toml").write_text(text + 'methods = ["maml"]\ninner-lr = 0.02\nval_size = 30\nout = "E"\n')
        assert sinusoids("--config", "options.toml", "--shots", 8, "--seeds=9", "--val-size", 40) == 0
        [row] = rows("E")
        assert (row["shots"], row["seed"], row["val_size"]) == ("8", "9", "40")
        assert (row["ratio"], row["iterations"], row["variant"]) == ("0.5", "2", "pool=200, inner_lr=0.02")

    def test_jobs_change_no_value(self, pageless):
        again = [*CELL, "--methods", "maml", "nested", "--weighting", "task", "--seeds", 3]
        assert sinusoids(*again, "--out", "one") == 0
        assert sinusoids(*again, "--out", "two", "--jobs", 2) == 0
        assert values("one") == values("two")
        weights = "runs/nested-task-k5-r0.5-s3-pool300/weights.csv"
        assert Path("one", weights).read_bytes() == Path("two", weights).read_bytes()

    def test_tuning(self, pageless):
        argv = [*SMOKE, "--ratio", "0.8", "--methods", "maml", "nested", "--seeds", 1, "--tune", "--iterations", 1]
        assert sinusoids(*argv) == 0
        scored = [r for r in rows("runs") if r["metric"] == "mse"]
        assert {r["experiment"] for r in scored} == {"sinusoid-tune"}
        trials = {m: {r["config"] for r in scored if r["method"] == m} for m in ("maml", "nested")}
        assert {m: len(configs) for m, configs in trials.items()} == {"maml": 16, "nested": 16}
        tried = [json.loads(Path(f"runs/configs/{r['config']}.json").read_text()) for r in scored]
        assert {(c["inner_lr"], c["meta_lr"]) for c in tried} == {(a, e) for a in sinusoid.GRID for e in sinusoid.GRID}

    def test_only_skylines_are_told(self, pageless, monkeypatch, capsys):
        methods = [m for m in PRESETS if m not in ("maml-ood-rm", "maml-ood-rm-refill")]
        again = [*CELL, "--iterations", 2, "--seeds", 3, "--methods"]
        assert sinusoids(*again, *methods, "--out", "told") == 0

        class Untold:
            """A source of which nobody can ask which tasks are corrupt."""

            def __init__(self, source):
                self._source = source

            def __getattr__(self, name):
                if name == "corrupt" or name.startswith("__"):
                    raise AttributeError(name)
                return getattr(self._source, name)

        open_sources = sinusoid.Run.sources
        monkeypatch.setattr(
            sinusoid.Run,
            "sources",
            lambda run: {k: Untold(v) if k == "train" else v for k, v in open_sources(run).items()},
        )
        assert sinusoids(*again, *methods, "--out", "untold") == 0
        assert {r["metric"] for r in rows("untold")} == {"mse"}
        assert len(rows("untold")) == len(methods)
        assert values("untold") == [v for v in values("told") if "mse" in v]
        for method in ("maml-ood-rm", "maml-ood-rm-refill"):
            capsys.readouterr()
            assert sinusoids(*again, method, "--out", "skyline") == 2
            assert "a skyline needs a source that knows what is corrupt" in capsys.readouterr().err


def test_demo(capsys):
    assert call("demo", "--iterations", 4) == 0
    out = capsys.readouterr().out
    assert [m for m in demo.METHODS if m not in out] == []
    page = Path("runs/demo/report.html")
    assert out.endswith(f"The report: {page}\n")
    assert "<svg" in page.read_text()
    assert {r["method"] for r in rows("runs/demo")} == set(demo.METHODS)
    before = rows("runs/demo")
    assert call("demo", "--iterations", 4) == 0  # what is there is not run again
    assert rows("runs/demo") == before
