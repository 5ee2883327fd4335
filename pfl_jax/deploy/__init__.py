"""Methods outside the simulation: a server and clients in separate processes.

`pfl_jax.deploy.deployment` computes the work of server and clients, whatever carries their messages.
Flower carries them in `pfl_jax.deploy.flower`.
"""

from pfl_jax.deploy.deployment import DeployedRound, Deployment, Request

__all__ = ["DeployedRound", "Deployment", "Request"]
