"""Attribute access of modules without `nn.Module.__getattr__`.

A module keeps its submodules and parameters in dictionaries of their own, which Python asks only
after it has not found the name. A decode step of a small model looks up a thousand of them, and
that is near half of what Python costs it.
"""

from torch import nn


def flatten_attributes(model: nn.Module) -> None:
    """Makes submodules, parameters and buffers of a loaded model ordinary attributes, too.

    Assigning to one later works as before, and makes that one slow again. Not for models that
    torch.compile traces, which treats the two kinds differently.
    """
    for module in model.modules():
        for owned in (module._modules, module._parameters, module._buffers):
            module.__dict__.update(owned)
