"""Checks of a script that was ported to DDP. Copy this file beside yours, and `import checks`.

Each check finds mistakes that raise no error, and raises an AssertionError on all ranks. Call
it on all, never inside `if rank == 0`. Passing proves only that its mistake is not there. Rank
0 prints what was compared: if nothing is printed, nothing was. (same_weights never prints.)

Two checks compare runs. A run with one process records NAME.check.txt, and later runs compare,
call by call. (Larger runs never record: a wrong port would be its own reference.) They need the
same seeds and images, and float64: it rounds at 1e-16, which training magnifies: 1e-9 has room.
Switch off dropout, random transforms, autocast, GradScaler and torch.compile. Of float32 runs,
compare the first steps, with rtol=1e-4 (1e-2 on GPUs, which may use TF32).
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
from torch.utils.data import DataLoader, Subset

recorded, calls, orders = {}, {}, {}  # what a call leaves to the next ones


def same_weights(optimizer):
    """All ranks have rank 0's weights. Call this after each epoch, and leave it there.

    If not, some gradients were not averaged, or ranks took other steps (TROUBLESHOOTING.md).
    They should be equal bit by bit; 1e-5 is for unlike GPUs, which may round differently.
    Not seen: buffers, averages (EMA), other optimizers, gradients that are wrong everywhere.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    weights = [weight.detach() for group in groups for weight in group]
    same_on_all_ranks([tuple(weight.shape) for weight in weights])
    mistake = None
    for number, weight in enumerate(weights):
        of_rank_0 = weight.clone(memory_format=torch.contiguous_format)
        if dist.is_initialized():
            dist.broadcast(of_rank_0, src=0)  # overwrites the copy with rank 0's weight
        off, norm = (x.abs().double().norm() for x in (weight - of_rank_0, of_rank_0))
        if not weight.isfinite().all():
            mistake = f"weight {number} of the optimizer is NaN or infinite"
        elif not off <= 1e-5 * norm:
            mistake = f"the weights of the ranks differ, number {number} by {off / norm:.0e}"
    require(mistake is None, mistake)


def same_as_before(name, numbers, rtol=1e-9):
    """The numbers (a tensor, or a list or dict) are those of a recorded run: see above.

    Losses: call this in each step of the old script, then of the port with one process, both
    with shuffle=False. (With more, a rank's loss is that of its own images.) Metrics: call it
    after each validation. rtol is relative to all numbers: give small ones a call and a name.
    """
    found, file = {}, Path(f"{name}.check.txt")
    for path, value in tree_flatten_with_path(numbers)[0]:
        for index, number in enumerate(torch.as_tensor(value).double().flatten().tolist()):
            found[f"{keystr(path)}[{index}]"] = number
    if name not in recorded:
        recorded[name] = file.read_text().splitlines() if file.exists() else []
        one = len(of_all_ranks(0)) == 1
        require(one or recorded[name], f"there is no {file}: record it with one process")
        found_calls = len(recorded[name])
        say(f"{file} has {found_calls} calls" if found_calls else f"recording {file}")
    calls[name] = calls.get(name, 0) + 1
    call = f"{name}, call {calls[name]} (after a change of the script, delete {file})"
    require(all(map(math.isfinite, found.values())), f"{call} is NaN or infinite")
    if not recorded[name]:
        with file.open("a") as opened:
            print(json.dumps(found), file=opened)
        return
    require(calls[name] <= len(recorded[name]), f"{call}: the recorded run had fewer calls")
    before = json.loads(recorded[name][calls[name] - 1])
    require(before.keys() == found.keys(), f"{call}: recorded were other names or shapes")
    off = {path: abs(found[path] - before[path]) for path in found}
    size, norm = math.hypot(*off.values()), math.hypot(*before.values())
    worst = max(off, key=off.get)
    values = f"{worst} was {before[worst]:.9g} and is {found[worst]:.9g}"
    require(size <= rtol * norm, f"{call} differs by {size / (norm or 1):.0e}: {values}")
    if calls[name] == len(recorded[name]):
        say(f"{name}: all {calls[name]} recorded calls were the same")


def same_gradient(model, name="gradient", rtol=1e-9):
    """The gradient is that of a recorded run: see above. Call this in each step of an epoch.

    Call it after the last backward() of a step, before gradients are clipped (which hides a
    factor). Pass the model without DDP; several need several names. Each step needs the images
    of the recorded one: divide the batch size by world_size. BatchNorm needs model.eval(). If a
    loss draws random numbers, draw those of the whole batch on all ranks, and use a part. Three
    sums with random factors stand for each gradient; rtol is relative to those of the model.
    Not seen: weights outside of `model`, or whose gradient is 0 (they are printed).
    """
    sums = {}
    for path, weight in model.named_parameters():
        exact = weight.dtype == torch.float64 or rtol > 1e-7
        require(exact, f"{name}: {path} is not float64: call model.double()")
        gradient = torch.zeros(1) if weight.grad is None else weight.grad.to_dense().flatten()
        generator = torch.Generator().manual_seed(1)
        factors = torch.rand(3, len(gradient), dtype=torch.float64, generator=generator)
        sums[path] = (factors - 0.5) @ gradient.double().cpu()
    zeros = [path for path in sums if not sums[path].any()]
    require(len(zeros) < len(sums), f"{name} is 0, so nothing is compared")
    if zeros and name not in recorded:
        say(f"{name} is 0 in the first call, so nothing is compared, of {zeros}")
    same_as_before(name, sums, rtol)


def each_image_once(loader, epoch, allow=(), item=None):
    """All ranks together use each image once per epoch, in a new order, with unlike seeds.

    In place of `in train_loader`, write `in each_image_once(train_loader, epoch)` (a call alone
    does nothing), and train two epochs without `break`. It notes the indices that are drawn.
    Each rank needs the whole dataset, no persistent_workers. Allow what is on purpose by
    allow=["repeats"] (for weighted sampling), "left out", "order" (one for all epochs), "seeds"
    (equal on all ranks). A worker of each rank loads the same ten items, with equal seeds for
    random transforms. item(index) replaces dataset[index] if that has a generator of its own.
    Not seen: such generators, worker_init_fn, other items, ranks that each draw a whole epoch.
    """
    images = len(loader.dataset)
    same_on_all_ranks(dict(images=images, batches=len(loader)))
    require(len(loader) > 0, "the loader has no batch: few images, and it drops the last one")
    require(not loader.persistent_workers, "each_image_once needs persistent_workers=False")
    seeds = {"PyTorch": torch.initial_seed(), "random": str(random.getstate())}
    if "numpy" in sys.modules:
        seeds["NumPy"] = str(sys.modules["numpy"].random.get_state())
    if loader.generator is not None and loader.num_workers:
        seeds["the loader's generator"] = loader.generator.initial_seed()
    kind = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler, drawn = vars(loader)[kind], []
    vars(loader)[kind] = noted(sampler, drawn)  # vars(), since the loader protects it
    batches = iter(loader)
    vars(loader)[kind] = sampler
    yield from batches

    of_all = of_all_ranks((tuple(sum(drawn, [])), seeds))
    shares, ranks = [share for share, _ in of_all], len(of_all)
    indices = sum(shares, ())
    different = list(dict.fromkeys(indices))
    repeats, left_out = len(indices) - len(different), images - len(different)
    last = ranks * (max(map(len, drawn)) if getattr(sampler, "drop_last", False) else 1)
    padded = repeats < ranks and left_out < last  # a few images fill up the last batch
    again = orders.setdefault(indices, epoch) != epoch
    equal = [name for name in seeds if len({seeds[name] for _, seeds in of_all}) < ranks]
    for kind, wrong, mistake in (
        ("repeats", repeats and not padded, f"{repeats} images come twice, as if not shared"),
        ("left out", left_out >= last, f"{left_out} of {images} images are missing"),
        ("order", again, "an earlier epoch had this order: call sampler.set_epoch(epoch)"),
        ("copies", len(set(shares)) < ranks, "several ranks have drawn the same images"),
        ("seeds", equal, f"several ranks draw the same random numbers: seed {equal} by rank"),
    ):
        require(not wrong or kind in allow, f"{mistake} (on purpose? Then allow=[{kind!r}])")
    chosen = Subset(loader.dataset, different[:: len(different) // 10 + 1])
    options = dict(generator=torch.Generator().manual_seed(1), multiprocessing_context="fork")
    items = DataLoader(chosen, None, num_workers=1, **options)
    same_on_all_ranks(dict(zip(chosen.indices, map(item, chosen.indices) if item else items)))
    say(f"epoch {epoch} has used {len(different)} of {images} images")


def noted(sampler, drawn):
    """Yield what a sampler yields, and note the indices of each batch."""
    for batch in sampler:
        parts = tree_leaves(batch.tolist() if hasattr(batch, "tolist") else batch)
        drawn.append([part.item() if hasattr(part, "item") else part for part in parts])
        yield batch


def same_on_all_ranks(value, saved=None, left_out=()):
    """All ranks have the same value: flags, sizes, class names, the result of a search.

    Call it before training, as with dict(vars(args), images=len(train_set), ranks=world_size).
    Save this dict in checkpoints, and pass it as `saved` when you resume: with other epochs or
    another world size, a schedule ends elsewhere. Not seen: what the repr of a value hides.
    """
    texts = texts_of(value, left_out)
    others = of_all_ranks(texts)[0] if saved is None else texts_of(saved, left_out)
    where, mistakes = "on rank 0" if saved is None else "saved", []
    for path in {**others, **texts}:
        if texts.get(path) != others.get(path):
            mistakes.append(f"{path} is {texts.get(path)}, but {others.get(path)} {where}")
    require(not mistakes, mistakes and mistakes[0])


def texts_of(value, left_out=()):
    """Return the values in nested dicts and lists as short texts, which differ if they do."""
    texts = {}
    for path, leaf in tree_flatten_with_path(value)[0]:
        leaf = leaf.tolist() if hasattr(leaf, "tolist") else leaf  # of PyTorch and NumPy
        leaf = getattr(leaf, "__qualname__", leaf)  # a function's repr has its address
        text = repr(leaf.tobytes() if hasattr(leaf, "tobytes") else leaf)  # PIL's images
        if not any(repr(name) in keystr(path) for name in left_out):
            short = len(text) < 80
            texts[keystr(path)] = text if short else f"{text[:60]} #{zlib.crc32(text.encode())}"
    return texts


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


if __name__ == "__main__":  # python checks.py uninterrupted.pt resumed.pt [names to leave out]
    files = (torch.load(file, "cpu", weights_only=False) for file in sys.argv[1:3])
    same_on_all_ranks(*files, left_out=sys.argv[3:])
    print("the files are the same")
