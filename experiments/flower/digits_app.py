"""Digits of three clients, trained by any method as an app of Flower: docs/deploy.md has the commands.

Every process makes the same federation from the run's seed, and a client reads only its own part of it. In your own
app, `load` reads the client's own files.
"""

import json
from pathlib import Path

import jax
import numpy as np

import pfl_jax
from pfl_jax import data
from pfl_jax.atomic_write import append_line
from pfl_jax.deploy import Deployment
from pfl_jax.deploy.flower import client_app, server_app
from pfl_jax.methods import METHODS


def federation(config):
    """Digits, spread over the clients by a Dirichlet distribution of their classes."""
    digits = data.load("digits")
    parts = data.partition.dirichlet(digits, num_clients=config["clients"], beta=0.5, min_size=5, seed=config["seed"])
    return data.federate(digits, parts)


def deploy(config):
    """Deployment that all processes agree on."""
    model = pfl_jax.models.mlp((8, 8, 1), 10)
    method = METHODS[config["method"]](model, pfl_jax.LocalTraining(lr=0.1, batch_size=20))
    settings = pfl_jax.Settings(rounds=config["rounds"], participation=config["participation"])
    example = data.client_data(federation(config), 0, "train")
    return Deployment(method, settings, jax.random.key(config["seed"]), config["clients"], example)


def load(config, client):
    """Examples of a client for training and for tests."""
    clients = federation(config)
    return data.client_data(clients, client, "train"), data.client_data(clients, client, "test")


def report(config, result):
    """Print a round, and append it to the run's history."""
    accuracy = np.nanmean(result.received["accuracy"])
    arrived = result.cohort[result.arrived].tolist()
    print(f"round {result.round}: from clients {arrived}, accuracy {accuracy:.3f}, {result.traffic}", flush=True)
    if config["history"]:
        scores = {name: np.asarray(values).tolist() for name, values in result.received.by_name.items()}
        line = {"round": result.round, "arrived": arrived, **result.traffic._asdict(), **scores}
        append_line(Path(config["history"]), json.dumps(line))


server = server_app(deploy, report)
client = client_app(deploy, load)
