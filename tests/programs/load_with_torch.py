"""Loads a checkpoint directory with torch alone, into state dictionaries that it saves.

    python load_with_torch.py FOLDER SHAPES

SHAPES is JSON: the shape and the type of each tensor by its key. FOLDER.loaded has the tensors as
torch.distributed.checkpoint loads them, FOLDER.pt what dcp_to_torch_save makes of the folder.
"""

import json
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    where, shapes = sys.argv[1], json.loads(sys.argv[2])
    types = {key: getattr(torch, dtype) for key, (_, dtype) in shapes.items()}
    state = {key: torch.empty(shape, dtype=types[key]) for key, (shape, _) in shapes.items()}
    dcp.load(state, checkpoint_id=where)
    dcp_to_torch_save(where, where + ".pt")
    torch.save(state, where + ".loaded")
