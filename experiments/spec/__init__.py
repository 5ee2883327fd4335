"""Runs as values: their options with notes, presets, own code and data, and the options that results depend on.

from experiments.spec.spec import Spec
"""

from experiments.spec.spec import Spec as Spec
