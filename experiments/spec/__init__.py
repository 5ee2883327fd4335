"""Runs as values: options with notes, presets, the user's own code, and the options that results depend on.

from experiments.spec.spec import Spec
"""

from experiments.spec.spec import Spec as Spec
