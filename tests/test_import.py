"""The public surface: complete, the same for type checkers as at run time, and free until it is used."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import nestedmaml as nm

HEAVY = ["torch", "numpy", "matplotlib", "sklearn", "scipy", "PIL", "jinja2", "tyro", "pooch", "safetensors"]


def loaded_by(statement):
    """The top-level modules that a statement loads in a fresh interpreter."""
    script = (
        "import json, sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_import_loads_nothing_heavy():
    loaded = loaded_by("import nestedmaml; nestedmaml.__version__; dir(nestedmaml)")
    assert "nestedmaml" in loaded
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize("name", nm.__all__)
def test_every_public_name_resolves(name):
    assert getattr(nm, name) is not None
    assert name in dir(nm)


def test_star_import_gives_the_public_names():
    scope = {}
    exec("from nestedmaml import *", scope)
    assert set(nm.__all__) <= set(scope)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'nestedmaml' has no attribute 'NestedMALM'"):
        nm.NestedMALM  # noqa: B018
    with pytest.raises(ImportError, match="NestedMALM"):
        exec("from nestedmaml import NestedMALM")


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(nm.__file__).read_text(encoding="utf-8"))
    [guard] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (statement.module.removeprefix("nestedmaml").removeprefix("."), alias.asname)
        for statement in guard.body
        for alias in statement.names
    }
    assert seen == {(module, name) for module, names in nm._SURFACE.items() for name in names}
