"""What a run is: its options with their notes, presets, own code and data, and what its results depend on.

from experiments.spec.spec import Spec
"""

from experiments.spec.spec import Spec as Spec
