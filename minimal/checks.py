"""Checks of a script that was ported to DDP. Copy this file beside yours, and `import checks`.

Each check finds mistakes that raise no error, and raises an AssertionError on all ranks. Call it
on all ranks, never inside `if rank == 0`. Passing proves only that these mistakes are not there.
Rank 0 prints what was compared; a check that has printed nothing, but for same_weights, has
compared nothing.

Two checks compare runs. A run with one process records NAME.check.txt, and later runs compare
with it, call by call. (With more processes, nothing is recorded: a wrong port would be its own
reference.) Such runs need the same seeds and images, and float64: its rounding of 1e-16 is
magnified by a training, so rtol=1e-9 has room. Switch off dropout, random transforms, autocast,
GradScaler, torch.compile and torch.manual_seed(21 + rank). With float32, compare the first steps
with rtol=1e-3 (1e-2 on GPUs, which add numbers in any order).
"""

import json
import math
import os
import random
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

recorded, calls, orders = {}, {}, {}  # what a call leaves to the next ones


def same_weights(optimizer):
    """All ranks have rank 0's weights. Call this after each epoch, and leave it there.

    If not, some gradients were not averaged, or the ranks have taken different steps: see
    TROUBLESHOOTING.md. Weights should be equal bit by bit; the tolerance of 1e-5 is for GPUs of
    different kinds, which may round differently. Not seen: buffers, averages (EMA), weights that
    this optimizer does not train, gradients that are equally wrong on all ranks.
    """
    mistake = None
    weights = [weight.detach() for group in optimizer.param_groups for weight in group["params"]]
    for number, weight in enumerate(weights):
        of_rank_0 = weight.clone(memory_format=torch.contiguous_format)
        if dist.is_initialized():
            dist.broadcast(of_rank_0, src=0)  # overwrites the copy with rank 0's weight
        off, norm = (x.abs().double().norm() for x in (weight - of_rank_0, of_rank_0))
        if not weight.isfinite().all():
            mistake = f"weight {number} of the optimizer is NaN or infinite"
        elif not off <= 1e-5 * norm:
            mistake = f"the weights of the ranks differ (number {number} by {off / norm:.0e})"
    require(mistake is None, mistake)


def same_as_before(name, numbers, rtol=1e-9):
    """The numbers (a tensor, or a list or dict) are those of a recorded run (see above).

    Losses: call this in each step, in the old script and then in the port with one process, with
    shuffle=False. (With more, a rank's loss is that of its own images.) Metrics: call it after
    each validation, on any number of processes. The tolerance is relative to all numbers of a
    call, so give small ones a call and a name of their own.
    """
    found = {path: elements(torch.as_tensor(value)).tolist() for path, value in named(numbers)}
    file = Path(f"{name}.check.txt")
    if name not in calls:
        calls[name], recorded[name] = 0, file.read_text().splitlines() if file.exists() else None
        alone = len(of_all_ranks(None)) == 1
        require(alone or file.exists(), f"there is no {file}: record it by a run with one process")
        say(f"{file} has {len(recorded[name])} calls" if recorded[name] else f"recording {file}")
    calls[name] += 1
    call = f"{name}, call {calls[name]} (if the script has changed, delete {file})"
    finite = all(math.isfinite(number) for part in found.values() for number in part)
    require(finite, f"{call} is NaN or infinite, so nothing can be compared")
    if not recorded[name]:
        with file.open("a") as opened:
            print(json.dumps(found), file=opened)
        return
    require(calls[name] <= len(recorded[name]), f"{call}: the recorded run had fewer calls")
    before = json.loads(recorded[name][calls[name] - 1])
    sizes = [[(path, len(part)) for path, part in run.items()] for run in (found, before)]
    require(sizes[0] == sizes[1], f"{call}: the recorded run had other names or shapes")
    off = {path: math.dist(found[path], before[path]) for path in found}
    total, norm = math.hypot(*off.values()), math.hypot(*sum(before.values(), []))
    worst = max(off, key=off.get)
    values = f"{worst} was {before[worst][:3]} and is {found[worst][:3]}"
    require(total <= rtol * norm, f"{call} differs by {total / (norm or 1):.0e}: {values}")
    if calls[name] == len(recorded[name]):
        say(f"{name}: all {calls[name]} recorded calls were the same")


def same_gradient(model, name="gradient", rtol=1e-9):
    """The gradient is that of a recorded run (see above). Call this in each step of an epoch.

    Call it after the last backward() of a step, before gradients are clipped (which hides a wrong
    factor). Pass the model without DDP; several models need several names. Each step needs the
    images of the recorded one: divide the batch size by world_size. BatchNorm needs model.eval().
    If a loss draws random numbers, draw those of the whole batch on all ranks, and take the rank's
    part. The tolerance is relative to the whole gradient, of which three sums with random factors
    are compared for each weight. Not seen: weights outside of `model`, or with a gradient of 0.
    """
    sums, exact = {}, True
    for path, weight in model.named_parameters():
        if weight.requires_grad:
            gradient = torch.zeros(1) if weight.grad is None else elements(weight.grad)
            generator = torch.Generator().manual_seed(1)
            factors = torch.rand(3, len(gradient), dtype=torch.float64, generator=generator)
            sums[path] = (factors - 0.5) @ gradient
            exact = exact and weight.dtype == torch.float64
    zeros = [path for path in sums if not sums[path].any()]
    require(exact or rtol > 1e-7, f"{name}: the model is not float64: call model.double()")
    require(len(zeros) < len(sums), f"{name} is 0, so nothing is compared")
    if zeros and name not in calls:
        say(f"{name} is 0 in the first call, so nothing is compared, of {zeros}")
    same_as_before(name, sums, rtol)


def each_image_once(loader, epoch, allow=(), item=None):
    """All ranks together use each image once per epoch, in a new order, with other random numbers.

    In place of `in train_loader`, write `in each_image_once(train_loader, epoch)`, and train two
    epochs without `break`. It notes the indices that the loop draws. Each rank needs the whole
    dataset, and persistent_workers=False. Allow what you do on purpose: allow=["repeats"] (as in
    weighted sampling), "left out", "order" (one for all epochs), "random numbers" (equal ones on
    all ranks). To compare the datasets, each rank loads ten items with equal seeds, so random
    transforms do no harm. item(index) replaces dataset[index] if that has a generator of its own.
    Not seen: such generators, and a worker_init_fn that seeds by the worker's number.
    """
    images = len(loader.dataset)
    same_on_all_ranks(dict(images=images, batches=len(loader)))
    require(len(loader) > 0, "the loader has no batch: few images, and it drops the last batch")
    require(not loader.persistent_workers, "each_image_once needs persistent_workers=False")
    states, drawn = {name: get() for name, get, *_ in generators()}, []
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = vars(loader)[place]
    vars(loader)[place] = noted(sampler, drawn)  # the loader forbids setting its attribute
    batches = iter(loader)
    vars(loader)[place] = sampler
    yield from batches

    of_all = of_all_ranks((drawn, {name: str(texts_of(state)) for name, state in states.items()}))
    indices = [index for of_rank, _ in of_all for batch in of_rank for index in batch]
    different, ranks = list(dict.fromkeys(indices)), len(of_all)
    repeats, left_out = len(indices) - len(different), images - len(different)
    drops = ranks * (max(map(len, drawn)) if getattr(sampler, "drop_last", False) else 1)
    mistakes = {}
    if repeats >= ranks or (repeats and left_out >= drops):  # fewer fill up the last batch
        mistakes["repeats"] = f"{repeats} images come twice: the ranks do not share one order"
    if left_out >= drops:
        mistakes["left out"] = f"{left_out} of {images} images are missing"
    if orders.setdefault(tuple(indices), epoch) != epoch:
        mistakes["order"] = "an earlier epoch had this order: call sampler.set_epoch(epoch)"
    for name in states:
        if len({texts[name] for _, texts in of_all}) < ranks:
            mistakes["random numbers"] = f"several ranks draw the same random numbers from {name}"
    for kind, mistake in mistakes.items():
        require(kind in allow, f"{mistake} (if this is on purpose: allow={[kind]})")

    kept = [(put, get()) for _, get, put, _ in generators()]
    for *_, seed in generators():
        seed(1)
    load = item or loader.dataset.__getitem__
    same_on_all_ranks({f"item {index}": load(index) for index in different[:: images // 10 + 1]})
    for put, state in kept:
        put(state)
    say(f"epoch {epoch} has used {len(different)} of {images} images")


def noted(sampler, drawn):
    """Yield what a sampler yields, and add the indices of each batch to a list."""
    for batch in sampler:
        parts = tree_leaves(batch.tolist() if hasattr(batch, "tolist") else batch)
        drawn.append([part.item() if hasattr(part, "item") else part for part in parts])
        yield batch


def generators():
    """Return the names of the generators of random numbers, and how to get, put and seed them."""
    cpu = torch.default_generator
    found = [("random", random.getstate, random.setstate, random.seed)]
    found.append(("PyTorch", cpu.get_state, cpu.set_state, cpu.manual_seed))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        found.append(("NumPy", numpy.get_state, numpy.set_state, numpy.seed))
    return found


def same_on_all_ranks(value, saved=None):
    """All ranks have the same value: flags, sizes of datasets, class names, a search's result.

    Call it before training, for example with dict(vars(args), images=len(train_set), ranks=N).
    Save the dict in checkpoints, and pass it as `saved` when you resume: with other epochs or
    another world size, a schedule ends elsewhere. Not seen: what the repr of a value hides.
    """
    texts = texts_of(value)
    require_equal(texts, of_all_ranks(texts)[0], "on rank 0")
    require_equal(texts, texts if saved is None else texts_of(saved), "in the checkpoint")


def same_files(one, other, *left_out):
    """Two checkpoints are equal:   python checks.py one.pt other.pt [names to leave out]

    Train with one or two processes (three may add in another order), on the CPU or with
    torch.backends.cudnn.deterministic = True.
    """
    texts = [texts_of(torch.load(file, "cpu", weights_only=False)) for file in (one, other)]
    for name in left_out:
        texts = [{path: run[path] for path in run if f"['{name}']" not in path} for run in texts]
    require_equal(*texts, f"in {other}")
    print(f"{len(texts[0])} values are the same")


def elements(tensor):
    """Return the elements of a tensor in float64, on the CPU."""
    tensor = tensor.detach().to_dense().cpu()  # gradients of embeddings can be sparse
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


def named(value):
    """Return the values in nested dicts and lists, with their names."""
    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(value)[0]]


def texts_of(value):
    """Return the values in nested dicts and lists as short texts, which differ if they do."""
    texts = {}
    for path, leaf in named(value):
        leaf = leaf.tolist() if hasattr(leaf, "tolist") else leaf  # tensors and NumPy's arrays
        text = repr(leaf.tobytes() if hasattr(leaf, "tobytes") else leaf)  # PIL's images
        texts[path] = text if len(text) < 80 else f"{text[:40]}... #{zlib.crc32(text.encode())}"
    return texts


def require_equal(texts, expected, where):
    """Raise an error on all ranks, unless all texts are equal."""
    paths = [path for path in {**expected, **texts} if texts.get(path) != expected.get(path)]
    say = [f"{path} is {texts.get(path)}, but {expected.get(path)} {where}" for path in paths[:1]]
    require(not paths, *say or [None])


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
