"""The methods, one paper a file: each an (init, step) pair over an explicit state."""

from nestedmaml.methods.maml import MAML
from nestedmaml.methods.method import Method, State
from nestedmaml.methods.nested import NestedMAML

__all__ = ["MAML", "Method", "NestedMAML", "State"]
