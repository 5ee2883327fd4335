"""Losses of a classifier that use each parameter once, in a layer of the library, and others that do not."""

import jax

from pfl_jax.primitives import cross_entropy


def losses(model, other):
    """Functions of (parameters, batch) by name; `other` are parameters of the model that are no leaves."""

    def plain(params, batch):
        return cross_entropy(model.apply(params, batch.x), batch.y, batch.mask)

    def head_alone(params, batch):
        return plain({"backbone": other["backbone"], "head": params["head"]}, batch)

    def twice(params, batch):
        return plain(params, batch) + plain(params, batch._replace(x=-batch.x))

    def copied(params, batch):
        return plain(jax.tree.map(lambda leaf: 1.5 * leaf, params), batch)

    # Of these transformations, only jit leaves the operations as they are.
    others = {"jitted": jax.jit(plain), "checkpointed": jax.checkpoint(plain)}
    return {one.__name__: one for one in (plain, head_alone, twice, copied)} | others
