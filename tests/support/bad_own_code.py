"""Files with code of the user's own that commands refuse."""

from collections.abc import Iterator

from bad_input import Case, write

SOUND = "from pfl_jax import LocalTraining, methods\n\n\ndef mine(model, training=LocalTraining(), *, pull=0.5):\n"
"""Beginning of a file with a method."""

WHOLE = SOUND + "    return methods.fedavg(model, training)\n"

METHODS = [
    ("it takes the model alone", "has no argument training with a", "def mine(model):\n    pass\n"),
    ("an option has no default", "its option pull needs a default", WHOLE.replace("=0.5", "")),
    ("an option is a dictionary", "or a union of these with None", WHOLE.replace("=0.5", "={}")),
    ("an option is called rounds", "--rounds is an option of every", WHOLE.replace("pull", "rounds")),
    ("an option is called lr", "lr is a field of the recipe of local training", WHOLE.replace("pull", "lr")),
    ("an unknown annotation", "its annotations cannot be read", WHOLE.replace("pull=", "pull: 'Nothing' = ")),
    ("it refuses", "mine.py:mine refuses its options: no", SOUND + "    raise ValueError('no')\n"),
    ("it is a number", "is a int, not a function", "mine = 3\n"),
    ("the third line raises", "line 3: ZeroDivisionError", "\n\n1 / 0\n"),
    ("it returns parameters", "mine.py:mine returns a dict, not a Method", SOUND + "    return {}\n"),
]
"""What mine.py:mine is in words, part of the message, and the file."""

NET = "import flax.linen as nn\n\n\nclass Net(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n"
NET += "        x = x.reshape(x.shape[0], -1)\n        return {}\n\n\n"
NET += "def net(input_shape, num_classes):\n    return Net()\n"
FUNCTION = "def net(input_shape, num_classes):\n    return {}\n"

MODELS = [
    ("there is none", "--model mine.py:net", WHOLE),
    ("it returns a text", "--model mine.py:net: 'mlp' is neither a Model nor a", FUNCTION.format("'mlp'")),
    ("it raises", "--model mine.py:net fails for inputs of shape", FUNCTION.format("num_classes / 0")),
    ("no part head", "name its head with head= (--head), one of Dense_0", NET.format("nn.Dense(10)(x)")),
    ("other classes", "two inputs have logits float32 [2", NET.format('nn.Dense(3, name="head")(x)')),
]
"""The same of mine.py:net."""


def cases() -> Iterator[Case]:
    """All of them."""

    def of(words: str, what: str, message: str, text: str) -> Case:
        return Case(f"digits {words}", what, message, lambda here: write(here / "mine.py", text.encode()))

    yield of("--method mine.py", "", "mine.py lacks the name of a function in the file: mine.py:NAME", WHOLE)
    yield of("--method mine.py:main", "", "did you mean mine?", WHOLE)
    yield of("--method mine.py:mine --pull far", "", "--pull must be a number, not 'far'", WHOLE)
    yield of("--method mine.py:mine --lam 1", "", "--lam is an option of feddyn", WHOLE)
    for words, table in (("--method mine.py:mine", METHODS), ("--model mine.py:net", MODELS)):
        for row in table:
            yield of(words, *row)
