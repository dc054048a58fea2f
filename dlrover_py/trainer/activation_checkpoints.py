"""One switch for activation checkpointing: chosen modules compute their activations again.

A module that is checkpointed keeps only its inputs for the backward pass, and computes the rest
again there. This needs less memory and about a third more computation. Outputs, gradients and
random numbers stay the same. It has nothing to do with checkpoints of the training's state.
"""

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from dlrover_py.protocol.errors import ConfigError


def checkpoint_activations(
    model: nn.Module, modules: type[nn.Module] | tuple[type[nn.Module], ...] | None = None
) -> int:
    """Let modules of a model compute their activations again in the backward pass.

    The order does not matter: call this before or after ``fully_shard``, DDP or a load. Names of
    parameters stay the same, so checkpoints fit with and without it. A module within a chosen one
    is left alone.

    Args:
        model: the model; it is changed in place.
        modules: the class of the modules to choose, or several classes. None: the entries of each
            ``nn.ModuleList``, which are the blocks of most transformers.

    Returns:
        How many modules were chosen.

    Raises:
        ConfigError: the model has no such module.
    """
    chosen = list(_outermost(model, modules))
    if not chosen:
        wanted = "an nn.ModuleList with entries" if modules is None else f"a module of {modules}"
        raise ConfigError(
            f"activations: the model, a {type(model).__name__}, has no such part: expected "
            f"{wanted}. Pass the class of the blocks that are to be computed again"
        )
    for module in chosen:
        if not _is_checkpointed(module):
            # A partial of the method, not a function around it: a deep copy of the model must call
            # its own modules. Hooks stay outside, so that FSDP2 gathers the parameters before it.
            forward = partial(checkpoint, module.forward, use_reentrant=False)
            module.forward = forward
    return len(chosen)


def _outermost(
    module: nn.Module, modules: type[nn.Module] | tuple[type[nn.Module], ...] | None
) -> Iterator[nn.Module]:
    """Yield the chosen modules within a model that are not within another chosen one.

    With None, the entries of each ``nn.ModuleList`` are chosen. The model itself never is.
    """
    for child in module.children():
        if modules is None:
            chosen = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        else:
            chosen = isinstance(child, modules)
        if chosen:
            yield child
        else:
            yield from _outermost(child, modules)


def _is_checkpointed(module: nn.Module) -> bool:
    """Return whether a module computes its activations again already."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint
