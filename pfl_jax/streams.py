"""Numbers that `jax.random.fold_in` folds into a key to derive named random streams.

Each number folded into a key gives an independent stream. Rounds, clients, epochs and passes are numbered from 0; the
named streams are numbered down from 2**32 - 1, the largest number that `fold_in` accepts, so no counter reaches them.
Two uses of one key need different numbers; different keys may share a number. This module imports nothing, so all
other modules can import it.
"""

LARGEST = 2**32 - 1
"""Largest number that `jax.random.fold_in` accepts."""

COUNTER_LIMIT = 2**31
"""Upper bound on the numbers of rounds, clients, epochs and passes, which are int32."""

# Streams of a run's key, besides its rounds.
INITIALIZATION = LARGEST
COHORT = LARGEST - 1
EVALUATION = LARGEST - 2
STRAGGLERS = LARGEST - 3
DROPOUTS = LARGEST - 4
NEWCOMERS = LARGEST - 5
SURVEY = LARGEST - 8
ATTACKERS = LARGEST - 20
EVALUATED_CLIENTS = LARGEST - 9
SELECTION = LARGEST - 26

# Streams of the key of a client's local training, besides the epochs of `LocalTraining.fold`: Ditto's personal model,
# augmentation, FedALA's weights, rounding of compressed messages, an attacker's noise, the noise on clipped gradients,
# the keys of losses (dropout) in the steps of training and in the gradient over all of a client's examples, and FLoRA's
# new adapters.
#
# A step's loss gets the key fold_in(fold_in(fold_in(key, DROPOUT), epoch), step of the epoch), where `key` is the key
# given to `LocalTraining.fit` or `LocalTraining.fold`, which depends on the round and the client; a private step folds
# DROPOUT into the key of its noise. Part i of `mean_gradient` gets fold_in(fold_in(key, FULL_GRADIENT), i).
PERSONAL_MODEL = LARGEST
AUGMENTATION = LARGEST - 6
AGGREGATION_WEIGHTS = LARGEST - 7
COMPRESSION = LARGEST - 21
ATTACK = LARGEST - 22
EXAMPLE_NOISE = LARGEST - 9
DROPOUT = LARGEST - 23
FULL_GRADIENT = LARGEST - 24
NEW_ADAPTERS = LARGEST - 25

# Streams of the key of an aggregation: the noise on the sum of the clients' clipped updates.
CLIENT_NOISE = LARGEST - 10

# Streams of the key of the server's initialization: FedTGP's generator of prototypes, pFedFDA's class means, GPFL's
# category embeddings and valve, FedCP's policy, the seeds of Floco's points and of pFedHN's embeddings, FedGen's
# generator, PeFLL's embedding network, FedMRL's projector, Dis-PFL's masks, FedNH's prototypes.
PROTOTYPE_GENERATOR = LARGEST
CLASS_MEANS = LARGEST - 1
CATEGORY_EMBEDDINGS = LARGEST - 2
VALVE = LARGEST - 3
POLICY = LARGEST - 4
SIMPLEX_POINTS = LARGEST - 5
EMBEDDINGS = LARGEST - 6
GENERATOR = LARGEST - 7
DESCRIPTORS = LARGEST - 8
PROJECTOR = LARGEST - 9
MASKS = LARGEST - 10
CLASS_PROTOTYPES = LARGEST - 11
