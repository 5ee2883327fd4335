"""What every method must satisfy, of methods in wrappers and with private steps."""

import pytest
from test_server_state import counted_momentum

from pfl_jax.methods import METHODS
from pfl_jax.testing.conformance import CHECKS, Subject

PRIVATE, PRIVATE_CLIENTS = {"dp_clip": 0.5, "dp_noise": 0.1}, {"client_clip": 0.5, "client_noise": 0.1}
USUAL = ("structure", "resumption", "clients_outside")
MOST = (*USUAL, "one_trace", "chunks_and_padding", "devices", "vmap")

DEFAULT = [
    ("fedper", {"compress": "quantize:4", "server_mean": "median"}, USUAL),
    ("fedper", {"server_optimizer": "yogi", "server_lr": 0.05}, USUAL),
    (counted_momentum, {}, ("structure", "resumption", "chunks_and_padding")),
]

SLOW = [
    ("fedper", PRIVATE | PRIVATE_CLIENTS, MOST),
    ("fedpac", PRIVATE, MOST),
    ("fedpac", {"dp_clip": 0.5}, ("order_of_clients",)),
    ("ditto", PRIVATE, USUAL),
    *((name, PRIVATE_CLIENTS, (*USUAL, "chunks_and_padding")) for name in ("fedrod", "fedpac")),
    ("fedavg", PRIVATE_CLIENTS | {"server_optimizer": "adam"}, ("vmap", "devices")),
    *(
        (name, {"server_mean": mean}, MOST if "krum" in mean else (*MOST, "order_of_clients"))
        for name in ("scaffold", "fedper", "fedpac", "fedas", "fedem", "fedproto_g")
        for mean in ("median", "trimmed:0.2", "krum", "multi_krum:0.3", "geometric_median")
    ),
    # Two orders of a sum may round to different levels, or have another sign at zero.
    *(
        (name, {"compress": text, "server_mean": "trimmed:0.3"}, (*USUAL, "one_trace", "devices", "seeds"))
        for name in ("scaffold", "fedper", "fedpac", "fedas", "fedem", "fedproto_g", "ditto")
        for text in ("topk:0.2", "quantize:8", "sign")
    ),
    *(("fedper", {"compress": text}, ("learning",)) for text in ("topk:0.2", "quantize:8", "sign")),
]
"""(method, hyper-parameters, checks). Where two clients score alike, Krum's choice depends on their order."""


@pytest.mark.parametrize(
    ("method", "values", "checks"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_wrapped_method_conforms(method, values, checks):
    subject = Subject(METHODS.get(method, method), **values)
    for check in checks:
        CHECKS[check](subject)
