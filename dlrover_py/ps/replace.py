"""Puts the large embeddings of a model onto the servers."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps.client import PsClient, default_client
from dlrover_py.ps.embedding import Embedding, EmbeddingBag, TableOptions
from dlrover_py.ps.specs import Formats, InitSpec, Keep, OptimizerSpec


def replace_embeddings(
    model: nn.Module,
    *,
    min_rows: int,
    optimizer: OptimizerSpec | None = None,
    init: InitSpec | None = None,
    keep: Keep | None = None,
    formats: Formats | None = None,
    client: PsClient | None = None,
) -> nn.Module:
    """Replace each large ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model by a table on servers.

    A table's name is the path of its module in the model, such as ``tower.user``. Call this before
    the optimizer is made and before the model is wrapped, in each worker.

    The weights are not sent to the servers: rows begin with the values of ``init``. So a module may
    be on the device ``meta``, where it needs no memory. Ids may be larger than the module allowed.
    The option ``sparse`` needs nothing: a push has only the rows of a batch.

    Args:
        model: The model, which is changed.
        min_rows: A module with fewer rows stays as it is.
        optimizer: How the servers change rows. None: Adagrad with a learning rate of 0.01.
        init: First values of rows. None: normal, as in ``nn.Embedding``.
        keep: Which rows get memory, and keep it. None: all.
        formats: Formats of rows and gradients in messages. None: float32.
        client: The connection. None: that of this process.

    Returns:
        The same model.

    Raises:
        ConfigError: A module does what a table on servers cannot do, no module has so many rows, or
            a table exists with other properties. The model is unchanged then.
    """
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("expected the model before DistributedDataParallel wraps it")
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.num_embeddings >= min_rows
    }
    if not found:
        raise ConfigError(f"expected an embedding with {min_rows} rows or more: there is none")
    weights = [id(weight) for one in model.modules() for weight in one._parameters.values()]
    for name, module in found.items():
        words = _obstacle(name, module, shared=weights.count(id(module.weight)) > 1)
        if words:
            raise ConfigError(f"{name or 'the model'} cannot be a table on the servers: {words}")
    client = client or default_client()
    tables: dict[nn.Module, nn.Module] = {}
    for name, module in found.items():
        options: TableOptions = {
            "optimizer": optimizer, "init": init, "keep": keep, "formats": formats,
            "padding_idx": module.padding_idx, "client": client,
        }  # fmt: skip
        table: Embedding | EmbeddingBag
        if isinstance(module, nn.EmbeddingBag):
            table = EmbeddingBag(
                name, module.embedding_dim, mode=module.mode,
                include_last_offset=module.include_last_offset, **options,
            )  # fmt: skip
        else:
            table = Embedding(name, module.embedding_dim, **options)
        tables[module] = table.train(module.training)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child in tables:
                setattr(parent, key, tables[child])
    return model


def _obstacle(name: str, module: nn.Embedding | nn.EmbeddingBag, *, shared: bool) -> str:
    """Return why a module cannot be a table on the servers; empty if it can.

    Args:
        name: Its path in the model.
        module: The module.
        shared: Whether another module has the same weight.
    """
    if not name:
        return "it has no path that could be the table's name; put it into another module"
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        return f"its class {type(module).__name__} may compute something else; use ps.Embedding"
    if module.max_norm is not None:
        return "the servers do not shorten rows to max_norm"
    if module.scale_grad_by_freq:
        return "the servers do not know how often an id is in a batch (scale_grad_by_freq)"
    if not module.weight.requires_grad:
        return "its weight is frozen, and the rows on servers are trained"
    if shared:
        return "another module has the same weight, which would not be shared any more"
    if module.weight.dtype != torch.float32:
        return (
            f"its weight is {module.weight.dtype}, and rows are float32; ps.formats is for messages"
        )
    return ""
