"""Catalogue of the papers' figures with results, by paper and number."""

from experiments.figures import fedas, fedpac
from experiments.figures.plan import Plan

PLANS: dict[str, dict[str, Plan]] = {"fedpac": {}, "fedas": {}, "fedpac_replication": {}}
"""paper -> number of the figure, as users write it -> what it is. FedAS's Figures 1 and 2 are drawings."""

for _plan in (*fedpac.FIGURES, *fedas.FIGURES):
    PLANS[_plan.paper][str(_plan.number)] = _plan
