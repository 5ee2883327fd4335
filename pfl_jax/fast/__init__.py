"""Convolution and pooling that are fast for federated simulation, and the rewrite of programs to them."""
