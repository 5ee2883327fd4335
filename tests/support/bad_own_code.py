"""Files with code of the user's own that commands refuse."""

from collections.abc import Iterator

from bad_input import Case, write

SOUND = "from pfl_jax import LocalTraining, methods\n\n\ndef mine(model, training=LocalTraining(), *, pull=0.5):\n"
"""Beginning of a file with a method."""


def cases() -> Iterator[Case]:
    """All of them."""

    def of(what: str, message: str, text: str, words: str = "--method mine.py:mine") -> Case:
        return Case(f"digits {words}", what, message, lambda here: write(here / "mine.py", text.encode()))

    whole = SOUND + "    return methods.fedavg(model, training)\n"
    yield of(
        "mine.py defines mine",
        "--method mine.py lacks the name of a function in the file: mine.py:NAME",
        whole,
        "--method mine.py",
    )
    yield of("mine.py defines mine", "did you mean mine?", whole, "--method mine.py:main")
    yield of(
        "mine.py defines mine",
        "has no argument training with a default recipe",
        whole,
        "--method mine.py:LocalTraining",
    )
    yield of(
        "mine.py defines mine(..., pull)",
        "--pull must be a number, not 'far'",
        whole,
        "--method mine.py:mine --pull far",
    )
    yield of("mine.py defines mine(..., pull)", "--lam is an option of feddyn", whole, "--method mine.py:mine --lam 1")
    yield of("mine has no argument training", "LocalTraining = LocalTraining()", "def mine(model, lr=0.1):\n    pass\n")
    yield of(
        "an option of mine has no default",
        "--method mine.py:mine: its option pull needs a default",
        whole.replace("=0.5", ""),
    )
    yield of("an option of mine is a dictionary", "or a union of these with None", whole.replace("=0.5", "={}"))
    yield of(
        "an option of mine is called rounds",
        "--method mine.py:mine: --rounds is an option of every",
        whole.replace("pull", "rounds"),
    )
    yield of(
        "mine takes the model alone",
        "--method mine.py:mine: mine has no argument training",
        "def mine(model):\n    pass\n",
    )
    yield of(
        "an option of mine is called lr", "lr is a field of the recipe of local training", whole.replace("pull", "lr")
    )
    yield of(
        "an option of mine has a type that is not there",
        "its annotations cannot be read",
        whole.replace("pull=", "pull: 'Nothing' = "),
    )
    yield of("mine refuses", "mine.py:mine refuses its options: no", SOUND + "    raise ValueError('no')\n")
    yield of("mine is a number", "is a int, not a function", "mine = 3\n")
    yield of("mine.py raises in its third line", "line 3: ZeroDivisionError", "\n\n1 / 0\n")
    yield of("mine.py exits", "line 1: SystemExit: 3", "raise SystemExit(3)\n")
    yield of(
        "mine returns a model's parameters",
        "--method mine.py:mine returns a dict, not a Method",
        SOUND + "    return {}\n",
    )
    net = "import flax.linen as nn\n\n\nclass Net(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n"
    net += "        x = x.reshape(x.shape[0], -1)\n        return {}\n\n\n"
    net += "def net(input_shape, num_classes):\n    return Net()\n"
    model = "--model mine.py:net"
    yield of("mine.py defines mine", "--model mine.py:net", whole, model)
    yield of(
        "net returns a text",
        "--model mine.py:net: 'mlp' is neither a Model nor a",
        "def net(input_shape, num_classes):\n    return 'mlp'\n",
        model,
    )
    yield of(
        "net raises",
        "--model mine.py:net fails for inputs of shape",
        "def net(input_shape, num_classes):\n    return num_classes / 0\n",
        model,
    )
    yield of(
        "net's module has no part head",
        "the module has no part head with parameters: name its head with head= (--head), one of Dense_0",
        net.format("nn.Dense(10)(x)"),
        model,
    )
    yield of(
        "net's module ends with a softmax",
        "the module does more after head",
        net.format('nn.softmax(nn.Dense(10, name="head")(x))'),
        model,
    )
    yield of(
        "net's module has other classes",
        "two inputs have logits float32 [2",
        net.format('nn.Dense(3, name="head")(x)'),
        model,
    )
    normalized = 'nn.Dense(10, name="head")(nn.BatchNorm(axis=0)(x))'
    yield of(
        "net's module normalizes examples", "BatchNorm with axis=0 is not supported", net.format(normalized), model
    )
