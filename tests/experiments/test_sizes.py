"""`python -m experiments.sizes`: bytes from shapes."""

import jax

from experiments.sizes import in_words, main, sizes
from pfl_jax.networks.models import MODELS
from pfl_jax.primitives.tree import byte_count


def test_sizes_are_those_of_the_models():
    model = MODELS["mlp"]((8, 8, 1), 10)
    whole = jax.eval_shape(model.init, jax.random.key(0))
    everything, head = byte_count(whole), byte_count(whole["head"])
    # FedAvg keeps nothing; FedPer keeps the head and sends the rest.
    assert sizes("digits", "fedavg", 1000, 50) == (0, everything, everything, everything)
    found = sizes("digits", "fedper", 1000, 50)
    assert (found.client, found.up) == (head, everything - head)


def test_amounts_in_words():
    assert [in_words(amount) for amount in (0, 1023, 1024, 1536, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "3 TiB",
    ]


def test_the_table(capsys):
    assert main(["--dataset", "digits", "--method", "fedper", "--num-clients", "1000000", "--cohort", "300"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "1,000,000 states" in printed[0]
    assert printed[2].startswith("| `fedper` |")
