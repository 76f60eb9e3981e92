"""A weight per cluster of tasks or instances: the paper's weight sharing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.weighting.features import Knowledge
from nestedmaml.weighting.rule import State
from nestedmaml.weighting.table import Table

__all__ = ["Cluster"]

FIT_ON = 20_000  # places of the pool that K-means sees; the others join the nearest centre when asked for


@dataclass(frozen=True)
class Cluster(Table):
    """K-means over features taken from the data, and a weight for each of the ``k`` clusters.

    ``k`` is cut to the number of places there are. The authors cluster on features that hold the true corruption
    flag; these never do.
    """

    k: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError(f"the number of clusters must be at least 1, got {self.k}")

    def create(self, knowledge: Knowledge, first: float, device: torch.device) -> State:
        """Fit the centres, and count each cluster's share of the pool."""
        from sklearn.cluster import MiniBatchKMeans

        features = knowledge.sample(FIT_ON).cpu().double()
        shift, scale = features.mean(0), features.std(0, correction=0)
        scale = torch.where(scale > 1e-8, scale, 1.0)
        z = ((features - shift) / scale).numpy()
        k = min(self.k, len(np.unique(z, axis=0)))
        fit = MiniBatchKMeans(k, n_init=1, batch_size=1024, random_state=knowledge.seed).fit(z)
        centres = torch.from_numpy(np.asarray(fit.cluster_centers_, dtype=np.float64)).to(device)
        fixed = {"shift": shift.to(device), "scale": scale.to(device), "centres": centres}
        state: State = {
            "learned": {"table": torch.full((k,), first, dtype=torch.float64, device=device)},
            "fixed": fixed,
        }
        where = self._nearest(state, features.to(device))
        fixed["shares"] = torch.bincount(where, minlength=k).to(torch.float64) / len(where)
        return state

    def locate(self, state: State, knowledge: Knowledge, batch: TaskBatch) -> Tensor:
        """The cluster of each task or instance."""
        return self._nearest(state, knowledge.of_batch(batch))

    def locate_ids(self, state: State, knowledge: Knowledge, ids: Tensor) -> Tensor:
        """The clusters of ids of the pool."""
        return self._nearest(state, knowledge.of_ids(ids))

    def pool(self, learned: dict[str, Tensor], state: State) -> tuple[Tensor, Tensor]:
        """All clusters, with their shares."""
        return learned["table"], state["fixed"]["shares"]

    @property
    def _through_pool(self) -> bool:
        return self.normalize == "pool" and not (self.form == "exp" and self.mirror)

    def _nearest(self, state: State, features: Tensor) -> Tensor:
        fixed = state["fixed"]
        z = (features.to(fixed["shift"]) - fixed["shift"]) / fixed["scale"]
        half = fixed["centres"].square().sum(1) / 2
        return torch.cat([(half - part @ fixed["centres"].T).argmin(-1) for part in z.split(4096)])
