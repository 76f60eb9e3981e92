"""Tasks: `TaskBatch`, and the sources that yield them."""

from nestedmaml.tasks.adapters import as_source, first_tasks
from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.tasks.pool import Both, Pool
from nestedmaml.tasks.sinusoid import Sinusoid

__all__ = ["Both", "Pool", "Sinusoid", "TaskBatch", "as_source", "first_tasks"]
