"""Few-shot meta-learning from dirty tasks.

The whole public surface is here. A name is imported when it is first used, so that importing the package
loads nothing heavy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nestedmaml._version import __version__ as __version__

_SURFACE = {
    "": ("functional", "losses", "methods", "models", "tasks", "weighting"),  # modules of the package itself
    "learner": (
        "BTAML",
        "L2R",
        "MAML",
        "MMAML",
        "Learner",
        "NestedMAML",
        "Result",
        "TransductiveFineTuning",
        "Weights",
        "load",
    ),
    "tasks": ("TaskBatch",),
}

if TYPE_CHECKING:  # the same once more, for type checkers and editors; a test compares the two
    from nestedmaml import (
        functional as functional,
        losses as losses,
        methods as methods,
        models as models,
        tasks as tasks,
        weighting as weighting,
    )
    from nestedmaml.learner import (
        BTAML as BTAML,
        L2R as L2R,
        MAML as MAML,
        MMAML as MMAML,
        Learner as Learner,
        NestedMAML as NestedMAML,
        Result as Result,
        TransductiveFineTuning as TransductiveFineTuning,
        Weights as Weights,
        load as load,
    )
    from nestedmaml.tasks import TaskBatch as TaskBatch
else:  # out of the type checkers' sight, so that they report a name that does not exist
    _HOME = {name: module for module, names in _SURFACE.items() for name in names}
    __all__ = sorted(["__version__", *_HOME])

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _HOME[name]
        if module:
            value = getattr(import_module(f"{__name__}.{module}"), name)
        else:
            value = import_module(f"{__name__}.{name}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
