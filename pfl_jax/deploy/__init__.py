"""Methods outside the simulation: a server and clients that are processes of their own.

`pfl_jax.deploy.deployment` computes what server and clients do, whatever carries their messages; Flower does by
`pfl_jax.deploy.flower`.
"""

from pfl_jax.deploy.deployment import DeployedRound, Deployment, Request

__all__ = ["DeployedRound", "Deployment", "Request"]
