"""Checks of a script that was ported to DDP. Copy this file beside yours, and `import checks`.

Many mistakes raise no error: the training runs, and its result is a little worse. Each check finds
some of them. Call it on all ranks, never inside `if rank == 0`. If one rank finds a mistake, all
raise an AssertionError. Passing proves only that this mistake is not there.

same_as_before and same_gradient compare two runs, call by call. A run with one process records
NAME.check.txt, and later runs compare with it. (Runs with several processes never record, or a
wrong port would be its own reference.) After a change, delete the file, and record again.

At its end, rank 0 prints how often each check has passed. What is not there was never called.
"""

import atexit
import hashlib
import json
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


def same_weights(optimizer):
    """All ranks have rank 0's weights. Call this after each epoch, and leave it there.

    If not, some gradients were not averaged, or the ranks have taken different steps: see
    TROUBLESHOOTING.md. Weights should be equal bit by bit. The tolerance is 1e-5 of a weight's
    norm, because different kinds of GPUs may round differently.
    Not seen: buffers, averages (EMA), weights that this optimizer does not train, and gradients
    that are wrong in the same way on all ranks. With one process, it finds NaN only.
    """
    weights = [weight.detach() for group in optimizer.param_groups for weight in group["params"]]
    shapes = {f"weight {i}": [str(w.dtype), list(w.shape)] for i, w in enumerate(weights)}
    raise_on_all_ranks(difference(shapes, of_all_ranks(shapes)[0], "on rank 0"))
    mistakes = []
    for number, weight in enumerate(weights):
        of_rank_0 = weight.clone(memory_format=torch.contiguous_format)
        if dist.is_initialized():
            dist.broadcast(of_rank_0, src=0)  # overwrites the copy with rank 0's weight
        off, norm = norm_of(weight - of_rank_0), norm_of(of_rank_0)
        this = f"weight {number} of the optimizer, {list(weight.shape)},"
        if not math.isfinite(norm_of(weight)):
            mistakes.append(f"{this} is NaN or infinite: the training has diverged")
        elif not off <= 1e-5 * norm:
            mistakes.append(f"the weights of the ranks differ: {this} by {off:.0e} of {norm:.0e}")
    raise_on_all_ranks(mistakes[0] if mistakes else None)
    count("same_weights")


def same_as_before(name, numbers, rtol=1e-9):
    """The recorded run had these numbers at this call. They may be tensors, lists or dicts.

    A loss: call this in each step, in the old script, then in the port with one process, both
    with shuffle=False and seeds at the same places. (With more processes, each rank has the loss
    of its own images.) Metrics: after each validation, with any number of processes. Each rank's
    are compared. Switch off dropout and random transforms, and BatchNorm (use model.eval()).

    rtol: float64 rounds at 1e-16, and a training magnifies this, so 1e-9 leaves it room. Use 1e-5
    for metrics in float32, and 1e-2 for losses of the first steps in float32 or on GPUs with TF32.
    Not seen: differences below 1e-12, and what the numbers do not depend on.
    """
    found = {path: flat(torch.as_tensor(value)).tolist() for path, value in leaves(numbers)}
    expected = recorded(name, found)
    mistake = None
    if [len(part) for part in found.values()] != [len(part) for part in expected.values()]:
        mistake = "the recorded run had another number of numbers"
    for path in found if not mistake else []:
        for number, before in zip(found[path], expected[path]):
            if not math.isfinite(number):
                mistake = f"{path} is {number}, with which nothing can be compared"
            elif not abs(number - before) <= rtol * abs(before) + 1e-12:
                mistake = f"{path} is {number}, but was {before} in the recorded run"
    raise_on_all_ranks(mistake and f"{name}, call {calls[name]}: {mistake}. {AGAIN}")
    count(name)


def same_gradient(model, name="gradient", rtol=1e-9):
    """The gradient is that of the recorded run. Call this in each step, for one epoch or more.

    Call it after the last backward() of a step, before gradients are clipped (this would hide a
    wrong factor). Several models need several names. Both runs need the same images in a step:
    divide the batch size by world_size, and let it be a multiple of all numbers of processes. Use
    float64 for model and inputs. Switch off dropout (set it to 0), BatchNorm (model.eval()),
    random transforms, autocast, GradScaler and torch.compile, and leave out
    torch.manual_seed(21 + rank). If the loss draws random numbers, let each rank draw those of
    the whole batch, and take its part. Use the loss weights of late training: a term of 0 is not compared.

    rtol is relative to the norm of the whole gradient. 
    """
