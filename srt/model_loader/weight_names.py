"""One spelling for module and tensor names.

Wrapped checkpoints put the language model below a prefix, and not all put it below the same one:
`model.layers.0`, `language_model.model.layers.0` and `model.language_model.layers.0` are the same
module. Skip lists are written with either. Names lose these components here, so that the same thing
always has the same name: `layers.0`, `lm_head`.
"""

_WRAPPERS = ("model.", "language_model.")


def canonical_name(name: str) -> str:
    """`name` of a module or tensor without the prefixes of its wrappers."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def split_tensor_name(name: str) -> tuple[str, str]:
    """(module, parameter) of a tensor's name: `a.b.weight` gives `("a.b", "weight")`."""
    module, _, parameter = name.rpartition(".")
    return module, parameter
