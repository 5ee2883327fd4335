"""Local training of small clients, whose last batch has only their own rows, and where padding makes it whole."""

import jax.numpy as jnp

from experiments.host import jax_config
from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.jax_rounds import local_training
from experiments.lab.benchmark.workload import FULL
from pfl_jax import simulate

if __name__ == "__main__":
    jax_config.prepare_jax()
    mesh = simulate.client_mesh()
    for examples in (10, 60, 80, 90):
        data = workload.federation(FULL.clients, examples)
        full = ((0, 0), (0, -examples % FULL.batch_size))
        programs = {
            name: local_training(one, FULL, clients=FULL.clients, epochs=1, chunk=workload.usual_chunk(), mesh=mesh)
            for name, one in (("own", data), ("whole", data._replace(train_index=jnp.pad(data.train_index, full))))
        }
        for program in programs.values():
            program()
        print(examples, measure.medians(20, programs), {name: one.seconds for name, one in programs.items()})
