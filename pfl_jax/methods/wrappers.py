"""Methods made from methods: functions Method -> Method."""

from pfl_jax.base import Method


def fine_tuned(method: Method, tuning: Method) -> Method:
    """A method whose clients fine-tune what they received before they use it.

    Training, messages and aggregation stay the method's; nothing of the fine-tuning is kept or sent.

    Args:
      method: whose server and client states are those of `tuning` too.
      tuning: whose local training is the fine-tuning, and whose model right after it is deployed under the protocol
        `received`.
    """

    def personalize(key, server, client, data):
        return tuning.local(key, server, client, data).personal

    return method._replace(personalize=personalize)
