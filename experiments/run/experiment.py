"""The parts of an experiment."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments.cli.request import Request
from experiments.folder.run_folder import Counts
from pfl_jax import simulate
from pfl_jax.base import Method, MethodSchedule
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.attacks import draw
from pfl_jax.engine.communication import Traffic, traffic
from pfl_jax.engine.store import Federation
from pfl_jax.privacy import Budget


@dataclass(frozen=True, eq=False)
class Experiment:
    """All parts of a run, built from a request.

    Attributes:
      request: the checked command line, with the smaller defaults on embedded data.
      dataset: the examples.
      data: federation of the clients that take part; in a distributed run with the devices that own them.
      method: method with its model and hyper-parameters.
      settings: settings of the simulation.
      newcomers: federation of the clients that never take part; None where all take part.
      privacy: budgets of differential privacy; empty without clipping.
    """

    request: Request
    dataset: Dataset
    data: Federation
    method: Method | MethodSchedule
    settings: simulate.Settings
    newcomers: Federation | None = None
    privacy: tuple[Budget, ...] = ()

    @property
    def counts(self) -> Counts:
        """Numbers of examples that the clients are scored on."""
        validation = self.data.validation_count
        return Counts(
            test=np.asarray(self.data.test_count),
            validation=None if validation is None else np.asarray(validation),
            newcomers=None if self.newcomers is None else np.asarray(self.newcomers.test_count),
            attackers=self._attackers(),
        )

    def _attackers(self) -> np.ndarray | None:
        """Attackers, bool [N]; None if nobody attacks."""
        settings, key = self.settings, jax.random.key(self.request.options.seed)
        found = draw(key, self.data.num_clients, settings.attack, settings.attackers, settings.attack_scale, 0)
        return None if found is None else np.asarray(found.clients)

    @functools.cached_property
    def traffic(self) -> Traffic:
        """Bytes that one client sends and receives in a round."""
        return traffic(self.method, self.data)

    def state_shapes(self) -> Any:
        """Shapes and types of the state's leaves."""
        engine = simulate.build(self.method, self.settings)
        return jax.eval_shape(engine.init, self.data, jax.random.key(0))
