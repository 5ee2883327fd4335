"""Fine-tuning of the received model before a client uses it."""

from pfl_jax.base import Method


def fine_tuned(method: Method, tuning: Method) -> Method:
    """Method whose clients fine-tune the received model before they use it.

    Training, messages and aggregation are as in `method`. Clients neither keep nor send fine-tuned parameters.

    Args:
      method: the method to derive from.
      tuning: method with the same server and client states, whose local training is the fine-tuning. Under the protocol
        `received`, clients deploy its result.
    """

    def personalize(key, server, client, data):
        return tuning.local(key, server, client, data).personal

    privacy = method.privacy
    if privacy is not None:
        privacy = None if tuning.privacy is None else privacy._replace(deployment=tuning.privacy.passes)
    return method._replace(personalize=personalize, privacy=privacy)
