"""Checks of a script that was ported to DDP. Copy this file beside yours, and `import checks`.

Many mistakes raise no error: the training runs, and its result is a little worse. Each check
finds some of them, and raises an AssertionError on all ranks. Call it on all ranks, never inside
`if rank == 0`. Passing proves only that these mistakes are not there. Rank 0 prints what was
compared: a check that has printed nothing has compared nothing (only same_weights is silent).
"""

import json
import math
import os
import random
import sys
import zlib

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

lines_of, calls, orders = {}, {}, {}  # what the calls of a check remember


def same_weights(optimizer):
    """All ranks have rank 0's weights. Call this after each epoch, and leave it there.

    If not, some gradients were not averaged, or the ranks have taken different steps: see
    TROUBLESHOOTING.md. Weights should be equal bit by bit. The tolerance, 1e-5 of the norm, is for
    GPUs of different kinds, which may round differently. Not seen: buffers, averages (EMA),
    weights that this optimizer does not train, gradients that are equally wrong on all ranks.
    """
    mistake = ""
    weights = [
        weight.detach() for group in optimizer.param_groups for weight in group["params"]
    ]
    for number, weight in enumerate(weights):
        of_rank_0 = weight.clone(memory_format=torch.contiguous_format)
        if dist.is_initialized():
            dist.broadcast(of_rank_0, src=0)  # overwrites the copy with rank 0's weight
        off, norm = (x.abs().double().norm().item() for x in (weight - of_rank_0, of_rank_0))
        if not weight.isfinite().all():
            mistake = f"weight {number} of the optimizer is NaN or infinite"
        elif not off <= 1e-5 * norm:
            mistake = (
                f"the weights of the ranks differ: number {number} by {off:.0e} of {norm:.0e}"
            )
    require(not mistake, mistake)


def same_as_before(name, numbers, rtol=1e-9):
    """The numbers (of a tensor, or a list or dict) are those of a recorded run.

    A run with one process records NAME.check.txt. Later ones compare with it, call by call. (With
    more processes, nothing is recorded: a wrong port would be its own reference.) Call this with
    the loss in each step, in the old script and in the port with one process; with more, each rank
    has other images. Call it with the metrics after each validation, on any number of processes.
    Use the same seeds, and shuffle=False. Switch off dropout and random transforms.

    rtol is relative to all numbers of a call: give small ones their own. Float64 rounds at 1e-16,
    and a training magnifies it, so 1e-9 has room. With float32, use 1e-5 on the CPU, and 1e-2 on
    GPUs, where sums are added in any order, for the first steps.
    """
    values = [(keystr(path), value) for path, value in tree_flatten_with_path(numbers)[0]]
    found = {path: torch.as_tensor(value).double().flatten().tolist() for path, value in values}
    if name not in calls:
        file = open(f"{name}.check.txt") if os.path.exists(f"{name}.check.txt") else None
        lines_of[name], calls[name] = file and file.readlines(), 0
        many = len(of_all_ranks(None)) > 1
        require(
            file or not many, f"{name}.check.txt is missing: record it with one process first"
        )
        say(
            f"{name} has {len(lines_of[name])} recorded calls"
            if file
            else f"{name} is recorded"
        )
    calls[name] += 1
    if lines_of[name] is None:
        with open(f"{name}.check.txt", "a") as file:
            print(json.dumps(found), file=file)
        return
    call = f"{name}, call {calls[name]} (to record again, delete {name}.check.txt)"
    require(calls[name] <= len(lines_of[name]), f"{call}: the recorded run had fewer calls")
    before = json.loads(lines_of[name][calls[name] - 1])
    sizes = [{path: len(run[path]) for path in run} for run in (found, before)]
    require(sizes[0] == sizes[1], f"{call}: the recorded run had other names or shapes")
    off = {path: math.dist(found[path], before[path]) for path in found}
    total, norm = math.hypot(*off.values()), math.hypot(*sum(before.values(), []))
    worst = max(off, key=off.get)
    values = f"{worst} was {before[worst][:3]} and is {found[worst][:3]}"
    require(total <= rtol * norm, f"{call}: it differs by {total:.0e} of {norm:.0e}: {values}")
    if calls[name] == len(lines_of[name]):
        say(f"{name}: all {calls[name]} recorded calls were the same")


def same_gradient(model, name="gradient", rtol=1e-9):
    """The gradient is that of a recorded run (see same_as_before). Call this in each step.

    Call it for an epoch or more, after the last backward() of a step, before gradients are clipped
    (which hides a wrong factor). Pass the model without DDP; several models need several names.
    Each step needs the images of the recorded one: divide the batch size by world_size. Make model
    and inputs float64. Switch off dropout, random transforms, autocast, GradScaler, torch.compile,
    torch.manual_seed(21 + rank), and BatchNorm (by model.eval()). If a loss draws random numbers,
    draw those of the whole batch on all ranks, and use the rank's part. With a float32 model, use
    rtol=1e-3 and the first steps. Not seen: weights outside of `model`, or with a gradient of 0.
    """
    weights = {
        path: weight for path, weight in model.named_parameters() if weight.requires_grad
    }
    exact = all(weight.dtype == torch.float64 for weight in weights.values())
    require(exact or rtol > 1e-7, "the model is not float64: call model.double()")
    sums = {path: random_sums(weight.grad) for path, weight in weights.items()}
    zeros = [path for path in sums if not any(sums[path])]
    require(len(zeros) < len(sums), f"{name}: all gradients are 0, so nothing is compared")
    if zeros and name not in calls:
        say(f"{name} is 0 in the first call, so nothing is compared of {zeros}")
    same_as_before(name, sums, rtol)


def random_sums(gradient):
    """Return three sums of the elements with fixed random factors, which take little space."""
    if gradient is None:
        return [0.0, 0.0, 0.0]
    values = gradient.detach().to_dense().cpu().flatten()
    values = torch.view_as_real(values).flatten() if values.is_complex() else values
    generator = torch.Generator().manual_seed(1)
    factors = [
        torch.rand(len(values), dtype=torch.float32, generator=generator) for _ in range(3)
    ]
    return [((2 * part.double() - 1) @ values.double()).item() for part in factors]


def each_image_once(loader, epoch, allow=(), item=None):
    """All ranks together use each image once per epoch, in a new order, with other random numbers.

    In place of `in train_loader`, write `in each_image_once(train_loader, epoch)`, and train two
    epochs. It notes the indices that the loop draws, and compares them when the loop ends (without
    `break`). Each rank needs the whole dataset, and persistent_workers=False.

    Allow what you do on purpose: allow=["repeats"] (as in weighted sampling), "left out", "order"
    (one for all epochs), "random numbers" (equal on all ranks). To compare datasets, each rank
    loads ten items with equal seeds, so random transforms do no harm. item(index) replaces
    dataset[index] if that has a generator of its own. Not seen: such generators, worker_init_fn.
    """
    same_on_all_ranks(dict(images=len(loader.dataset), batches=len(loader)))
    require(len(loader) > 0, "the loader has no batch: few images, and it drops the last batch")
    require(not loader.persistent_workers, "each_image_once needs persistent_workers=False")
    drawn, states = [], random_states()
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = vars(loader)[place]
    vars(loader)[place] = noted(sampler, drawn)  # loader.batch_sampler = ... is forbidden
    batches = iter(loader)
    vars(loader)[place] = sampler
    yield from batches

    of_all = of_all_ranks((drawn, states))
    ranks, images = len(of_all), len(loader.dataset)
    indices = [index for of_rank, _ in of_all for batch in of_rank for index in batch]
    different = list(dict.fromkeys(indices))
    repeats, left_out = len(indices) - len(different), images - len(different)
    drops = ranks * (max(map(len, drawn)) if getattr(sampler, "drop_last", False) else 1)
    mistakes = {}
    if left_out >= drops:
        mistakes["left out"] = f"{left_out} of {images} images are missing"
    if repeats >= ranks or (repeats and left_out >= drops):  # fewer fill up the last batch
        mistakes["repeats"] = f"{repeats} images come twice"
    if orders.setdefault(tuple(indices), epoch) != epoch:
        mistakes["order"] = "an earlier epoch had the same order: call sampler.set_epoch(epoch)"
    for name in states:
        if len({of_rank[name] for _, of_rank in of_all}) < ranks:
            mistakes["random numbers"] = (
                f"several ranks have the same random numbers from {name}"
            )
    for kind, mistake in mistakes.items():
        require(kind in allow, f"{mistake} (if this is on purpose, allow={[kind]})")
    np, chosen = sys.modules.get("numpy"), different[:: images // 10 + 1]
    kept = random.getstate(), torch.get_rng_state(), np and np.random.get_state()
    random.seed(1)
    torch.default_generator.manual_seed(1)
    if np:
        np.random.seed(1)
    same_on_all_ranks({index: (item or loader.dataset.__getitem__)(index) for index in chosen})
    random.setstate(kept[0])
    torch.set_rng_state(kept[1])
    if np:
        np.random.set_state(kept[2])
    say(f"each_image_once: epoch {epoch} has drawn {len(different)} of {images} images")


def noted(sampler, drawn):
    """Yield what a sampler yields, and add the indices of each batch to a list."""
    for batch in sampler:
        parts = tree_leaves(batch.tolist() if hasattr(batch, "tolist") else batch)
        drawn.append([part.item() if hasattr(part, "item") else part for part in parts])
        yield batch


def random_states():
    """Return what the generators of random numbers will draw in this process."""
    states = {"random": str(random.getstate()), "PyTorch": torch.initial_seed()}
    if "numpy" in sys.modules:
        states["NumPy"] = str(sys.modules["numpy"].random.get_state())
    return states


def same_on_all_ranks(value, saved=None):
    """All ranks have the same value: flags, sizes of datasets, class names, a search's result.

    Call it before training, for example with dict(vars(args), images=len(train_set), ranks=N).
    Save the dict in checkpoints, and pass it as `saved` when you resume: with other epochs or
    another world size, a schedule would end elsewhere. Not seen: what repr(value) does not show.
    """
    texts = texts_of(value)
    require(*equal(texts, of_all_ranks(texts)[0], "on rank 0"))
    if saved is not None:
        require(*equal(texts, texts_of(saved), "in the checkpoint"))


def same_files(one, other, *left_out):
    """Two checkpoints are equal:  python checks.py uninterrupted.pt resumed.pt [names to leave out]

    Train with one or two processes (three may add in another order), on the CPU or with
    torch.backends.cudnn.deterministic = True.
    """
    texts = [texts_of(torch.load(file, "cpu", weights_only=False)) for file in (one, other)]
    for name in left_out:
        texts = [{path: run[path] for path in run if f"'{name}'" not in path} for run in texts]
    require(*equal(*texts, f"in {other}"))
    print(f"{len(texts[0])} values are the same")


def texts_of(value):
    """Return the values in nested dicts and lists as texts, which are short, but differ."""
    texts = {}
    for path, leaf in tree_flatten_with_path(value)[0]:
        leaf = leaf.tolist() if hasattr(leaf, "tolist") else leaf  # of PyTorch and NumPy
        text = repr(leaf.tobytes() if hasattr(leaf, "tobytes") else leaf)  # images of PIL
        texts[keystr(path)] = (
            text if len(text) < 99 else f"{text[:60]}... #{zlib.crc32(text.encode())}"
        )
    return texts


def equal(texts, expected, where):
    """Return whether texts are equal, and a sentence about the first that differs."""
    for path in [*expected, *texts]:
        one, other = (run.get(path, "missing") for run in (texts, expected))
        if one != other:
            return False, f"{path} is {one}, but {other} {where}"
    return True, ""


def of_all_ranks(value):
    """Return the values of all ranks, as a list."""
    connected = dist.get_world_size() if dist.is_initialized() else 1
    if connected < int(os.environ.get("WORLD_SIZE", 1)):
        raise AssertionError("the processes are not connected: call init_process_group first")
    values = [value] * connected
    if connected > 1:
        dist.all_gather_object(values, value)
    return values


def require(right, mistake):
    """Raise an error on all ranks, unless something is right on each of them."""
    for rank, of_rank in enumerate(of_all_ranks(None if right else mistake)):
        if of_rank is not None:
            raise AssertionError(f"rank {rank}: {of_rank}")


def say(text):
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"checks: {text}", flush=True)


if __name__ == "__main__":
    same_files(*sys.argv[1:])
