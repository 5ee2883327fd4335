"""Building blocks of methods, each usable without the engine, as `pfl_jax.primitives.head_weights`.

docs/primitives.md shows all of them, with formulas and examples.
"""

import types

from optax.projections import projection_simplex as projection_simplex

from pfl_jax.outputs import cross_entropy as cross_entropy
from pfl_jax.outputs import macro_auc as macro_auc
from pfl_jax.outputs import macro_f1 as macro_f1
from pfl_jax.outputs import masked_mean as masked_mean
from pfl_jax.outputs import mean_auc as mean_auc
from pfl_jax.primitives.aggregation import follow_mixture as follow_mixture
from pfl_jax.primitives.aggregation import mean_by_class as mean_by_class
from pfl_jax.primitives.aggregation import mean_by_size as mean_by_size
from pfl_jax.primitives.aggregation import mix as mix
from pfl_jax.primitives.aggregation import normalize_weights as normalize_weights
from pfl_jax.primitives.aggregation import size_weights as size_weights
from pfl_jax.primitives.aggregation import weighted_mean as weighted_mean
from pfl_jax.primitives.compressors import Compressor as Compressor
from pfl_jax.primitives.compressors import quantizing_compressor as quantizing_compressor
from pfl_jax.primitives.compressors import sign_compressor as sign_compressor
from pfl_jax.primitives.compressors import top_k_compressor as top_k_compressor
from pfl_jax.primitives.ensembles import example_losses as example_losses
from pfl_jax.primitives.ensembles import init_models as init_models
from pfl_jax.primitives.examples import map_examples as map_examples
from pfl_jax.primitives.feature_statistics import class_centroids as class_centroids
from pfl_jax.primitives.feature_statistics import class_counts as class_counts
from pfl_jax.primitives.feature_statistics import label_feature_statistics as label_feature_statistics
from pfl_jax.primitives.feature_statistics import merge_centroids as merge_centroids
from pfl_jax.primitives.feature_statistics import second_moment as second_moment
from pfl_jax.primitives.features import extract_features as extract_features
from pfl_jax.primitives.features import fit_head as fit_head
from pfl_jax.primitives.fingerprints import example_fingerprints as example_fingerprints
from pfl_jax.primitives.fingerprints import fingerprint as fingerprint
from pfl_jax.primitives.fingerprints import fingerprint_key as fingerprint_key
from pfl_jax.primitives.fingerprints import order_by_fingerprint as order_by_fingerprint
from pfl_jax.primitives.fingerprints import same_fingerprint as same_fingerprint
from pfl_jax.primitives.fisher import batch_fisher_trace as batch_fisher_trace
from pfl_jax.primitives.fisher import diagonal_fisher as diagonal_fisher
from pfl_jax.primitives.fisher import fisher_trace as fisher_trace
from pfl_jax.primitives.fisher import squared_gradient_norms as squared_gradient_norms
from pfl_jax.primitives.fisher import trace_weights as trace_weights
from pfl_jax.primitives.float64 import in_float64 as in_float64
from pfl_jax.primitives.head_combination import head_weights as head_weights
from pfl_jax.primitives.head_combination import solve_head_weights as solve_head_weights
from pfl_jax.primitives.holdout import fixed_subset as fixed_subset
from pfl_jax.primitives.holdout import stratified_folds as stratified_folds
from pfl_jax.primitives.local_training import LocalTraining as LocalTraining
from pfl_jax.primitives.losses import balanced_softmax as balanced_softmax
from pfl_jax.primitives.losses import classwise_alignment as classwise_alignment
from pfl_jax.primitives.losses import deployed_loss as deployed_loss
from pfl_jax.primitives.losses import feature_alignment as feature_alignment
from pfl_jax.primitives.losses import loss_of_features as loss_of_features
from pfl_jax.primitives.losses import negative_log_likelihood as negative_log_likelihood
from pfl_jax.primitives.losses import proximal as proximal
from pfl_jax.primitives.losses import supervised_loss as supervised_loss
from pfl_jax.primitives.low_rank import adapter_product as adapter_product
from pfl_jax.primitives.low_rank import adapter_squared_norm as adapter_squared_norm
from pfl_jax.primitives.low_rank import draw_rank as draw_rank
from pfl_jax.primitives.low_rank import find_adapters as find_adapters
from pfl_jax.primitives.low_rank import is_adapter as is_adapter
from pfl_jax.primitives.low_rank import keep_ranks as keep_ranks
from pfl_jax.primitives.low_rank import map_adapters as map_adapters
from pfl_jax.primitives.low_rank import mean_product as mean_product
from pfl_jax.primitives.low_rank import mix_adapters as mix_adapters
from pfl_jax.primitives.low_rank import within_ranks as within_ranks
from pfl_jax.primitives.metrics import Summary as Summary
from pfl_jax.primitives.metrics import Transfer as Transfer
from pfl_jax.primitives.metrics import before_aggregation as before_aggregation
from pfl_jax.primitives.metrics import no_scores as no_scores
from pfl_jax.primitives.metrics import pooled as pooled
from pfl_jax.primitives.metrics import score as score
from pfl_jax.primitives.metrics import summarize as summarize
from pfl_jax.primitives.metrics import transfer as transfer
from pfl_jax.primitives.mini_batches import epoch_order as epoch_order
from pfl_jax.primitives.mini_batches import first_in_fixed_order as first_in_fixed_order
from pfl_jax.primitives.mini_batches import fold_batches as fold_batches
from pfl_jax.primitives.mini_batches import num_steps as num_steps
from pfl_jax.primitives.optimizers import add_weight_decay as add_weight_decay
from pfl_jax.primitives.optimizers import descend as descend
from pfl_jax.primitives.optimizers import initial_state as initial_state
from pfl_jax.primitives.optimizers import sgd as sgd
from pfl_jax.primitives.private_gradients import clipped_gradient_sum as clipped_gradient_sum
from pfl_jax.primitives.private_gradients import private_gradient as private_gradient
from pfl_jax.primitives.robust_means import coordinate_median as coordinate_median
from pfl_jax.primitives.robust_means import geometric_median as geometric_median
from pfl_jax.primitives.robust_means import krum as krum
from pfl_jax.primitives.robust_means import robust_mean as robust_mean
from pfl_jax.primitives.robust_means import trimmed_mean as trimmed_mean
from pfl_jax.primitives.simplex import mirror_descent as mirror_descent
from pfl_jax.primitives.simplex_qp import SimplexSolution as SimplexSolution
from pfl_jax.primitives.simplex_qp import map_simplex_qp as map_simplex_qp
from pfl_jax.primitives.simplex_qp import solve_simplex_qp as solve_simplex_qp
from pfl_jax.primitives.topology import consensus_distance as consensus_distance
from pfl_jax.primitives.topology import graph_links as graph_links
from pfl_jax.primitives.topology import is_connected as is_connected
from pfl_jax.primitives.topology import metropolis_weights as metropolis_weights
from pfl_jax.primitives.topology import push_weights as push_weights
from pfl_jax.primitives.tree import add_trailing_axes as add_trailing_axes
from pfl_jax.primitives.tree import all_finite as all_finite
from pfl_jax.primitives.tree import byte_count as byte_count
from pfl_jax.primitives.tree import choose as choose
from pfl_jax.primitives.tree import gather as gather
from pfl_jax.primitives.tree import interpolate as interpolate
from pfl_jax.primitives.tree import map_statistics as map_statistics
from pfl_jax.primitives.tree import merge as merge
from pfl_jax.primitives.tree import running_statistics as running_statistics
from pfl_jax.primitives.tree import scatter as scatter
from pfl_jax.primitives.tree import split as split
from pfl_jax.primitives.tree import with_statistics as with_statistics

# Type checkers use names that are imported as themselves.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, thing in vars().items() if name[0] != "_" and not isinstance(thing, types.ModuleType)
]
