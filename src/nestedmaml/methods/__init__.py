"""The methods, one paper a file: each an (init, step) pair over an explicit state."""

from nestedmaml.methods.btaml import BTAML
from nestedmaml.methods.l2r import L2R
from nestedmaml.methods.maml import MAML
from nestedmaml.methods.method import Method, State
from nestedmaml.methods.mmaml import MMAML
from nestedmaml.methods.nested import NestedMAML
from nestedmaml.methods.transductive import TransductiveFineTuning

__all__ = ["BTAML", "L2R", "MAML", "MMAML", "Method", "NestedMAML", "State", "TransductiveFineTuning"]
