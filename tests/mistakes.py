"""Each function makes mistakes of TROUBLESHOOTING.md that raise no error, and sees that the result is wrong.

Where the page says in one line what to do, the function does that, too, and sees that the result is right. Its
docstring names its rows of the page. test_mistakes.py runs this file in two processes on the CPU.
"""

import copy
import inspect
import multiprocessing
import os
import random
import subprocess
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils import data
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchmetrics.classification import BinaryAUROC
from torchmetrics.functional.classification import binary_auroc

import common
import ddp_launch_train

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IMAGES = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 3] * 3)
FORK = dict(num_workers=1, multiprocessing_context="fork")


def of_all(value):
    """Return a list with the value of each rank."""
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def mine(items):
    """Return the share of this rank."""
    return items[rank::world_size]


class Stream(data.IterableDataset):
    def __iter__(self):
        yield from range(12)


def samplers():
    """The training `DataLoader` has no sampler.
    The call of `sampler.set_epoch(epoch)` is missing.
    The sampler is `WeightedRandomSampler`.
    The dataset is an `IterableDataset`.
    `DistributedSampler` splits the validation set.
    """
    sampler = DistributedSampler(range(12), seed=21)
    assert len(DataLoader(range(12), 2, shuffle=True)) == 2 * len(DataLoader(range(12), 2, sampler=sampler))
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    torch.manual_seed(1)
    drawn = of_all(list(data.WeightedRandomSampler([1.0] * 12, 12)))
    assert drawn[0] == drawn[1] and len(drawn[0]) == 12
    assert of_all(list(DataLoader(Stream(), None))) == [list(range(12))] * 2
    assert sorted(DataLoader(Stream(), None, **FORK | dict(num_workers=2))) == sorted([*range(12)] * 2)
    validated = sum(of_all(list(DistributedSampler(range(11), shuffle=False))), [])
    assert sorted(validated) == [0, *range(11)]  # image 0 counts twice
    assert sorted(sum(of_all(list(Subset(range(11), range(rank, 11, world_size)))), [])) == [*range(11)]


def ranks_that_number_differently():
    """`random_split` is called after random numbers were drawn.
    Classes are numbered by `list(set(names))`.
    Outputs gathered from all ranks are paired with file names.
    """
    torch.manual_seed(21)
    torch.rand(rank)
    for generator, equal in (None, False), (torch.Generator().manual_seed(21), True):
        of_rank_0, of_rank_1 = of_all(list(data.random_split(range(100), [90, 10], generator)[1].indices))
        assert (of_rank_0 == of_rank_1) == equal
    for function, equal in ("list", False), ("sorted", True):
        python = [sys.executable, "-c", f"print({function}(set('abcdefghijklmnopqrst')))"]
        environment = os.environ | dict(PYTHONHASHSEED="random")  # Python's default
        of_rank_0, of_rank_1 = of_all(subprocess.check_output(python, env=environment))
        assert (of_rank_0 == of_rank_1) == equal
    shares, n = of_all(mine(list(range(11)))), 11
    assert sum(shares, []) != list(range(n))
    assert [shares[i % world_size][i // world_size] for i in range(n)] == list(range(n))


def seeds():
    """NumPy's or Python's random numbers have the same seed on all ranks.
    The seed is `21 + rank + epoch`.
    Each rank seeds several environments, beginning with `21 + rank`.
    """

    def different(numbers):
        """Return how many of the numbers of all ranks are different."""
        return len(set(sum(of_all(list(numbers)), [])))

    random.seed(21), np.random.seed(21), torch.manual_seed(21 + rank)
    assert different([random.random(), np.random.rand(), torch.rand(1).item()]) == 4
    random.seed(21 + rank), np.random.seed(21 + rank)
    assert different([random.random(), np.random.rand()]) == 4
    assert different(21 + rank + epoch for epoch in range(3)) == 4
    assert different(21 + rank + world_size * epoch for epoch in range(3)) == 6
    numbers = []
    for epoch in range(3):
        random.seed(21), np.random.seed(21), torch.manual_seed(21)
        common.seed_everything(21, epoch, rank)
        numbers += [random.random(), np.random.rand(), torch.rand(1).item()]
    assert different(numbers) == 18
    environments = 3
    assert different(21 + rank + number for number in range(environments)) == 4
    assert different(21 + rank * environments + number for number in range(environments)) == 6


class Items(data.Dataset):
    """Returns function(index)."""

    def __init__(self, function, number):
        self.function, self.number = function, number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return self.function(index)


def a_generator_in_the_dataset():
    """The dataset has a random generator of its own."""

    def epochs(draw, **options):
        """Return a list for each rank: the random numbers of the first and of the second epoch."""
        numbers = []
        for epoch in 1, 2:
            common.seed_everything(21, epoch, rank)
            numbers.append([item.item() for item in DataLoader(Items(draw, 2), **options)])
        return of_all(numbers)

    for options, equal in ({}, False), (FORK, True):
        generator = np.random.default_rng(21)
        (first, second), of_rank_1 = epochs(lambda index: generator.random(), **options)  # noqa: B023
        assert (first == second) == equal and of_rank_1 == [first, second]
        right = epochs(lambda index: np.random.default_rng(torch.randint(2**31, ()).item()).random(), **options)
        assert len(set(sum(sum(right, []), []))) == 8


def workers():
    """A file is opened before the workers start.
    The loader has `persistent_workers=True`.
    """
    path, both_are_here = f"numbers{rank}", multiprocessing.get_context("fork").Barrier(2)
    with open(path, "w") as file:
        file.write("".join(f"{number:8}" for number in range(10)))
    shared = open(path, "rb", buffering=0)  # noqa: SIM115

    def read(file, index):
        file.seek(8 * index)
        both_are_here.wait()  # until the other worker has called seek(), too
        return int(file.read(8))

    for get, right in (lambda: shared, False), (lambda: open(path, "rb", buffering=0), True):  # noqa: SIM115
        items = Items(lambda index, get=get: read(get(), index), 10)
        found = list(DataLoader(items, None, sampler=[0, 5], **FORK | dict(num_workers=2)))
        assert (found == [0, 5]) == right
    for options, expected in (dict(persistent_workers=True), [1, 1]), ({}, [1, 2]):
        dataset = Items(lambda index: dataset.epoch, 1)  # noqa: B023
        loader, found = DataLoader(dataset, **FORK, **options), []
        for dataset.epoch in 1, 2:
            found += [item.item() for item in loader]
        assert found == expected


def gradient_error(loss, *layers):
    """Return how far the gradient of two processes with DDP is from that of one process, relative to it."""
    torch.manual_seed(1)
    model = nn.Sequential(*layers, nn.Linear(6, 4)).double()
    alone, ddp_model = copy.deepcopy(model), DDP(model)
    loss(alone(IMAGES), LABELS).backward()
    loss(ddp_model(mine(IMAGES)), mine(LABELS)).backward()
    right, averaged = (torch.cat([w.grad.flatten() for w in m.parameters()]) for m in (alone, model))
    return ((averaged - right).norm() / right.norm()).item()


def losses():
    """Each rank divides its loss by a number of its own.
    The loss compares images with each other (CLIP, SimCLR, triplets).
    Each rank normalises its own advantages or rewards.
    The model has BatchNorm, and each GPU has few images.
    """

    def weighted(outputs, labels):
        return cross_entropy(outputs, labels, torch.tensor([1, 2, 5, 1], dtype=torch.float64))

    def padded(outputs, labels):
        return cross_entropy(outputs, labels, ignore_index=2)

    def of_boxes(outputs, labels):
        return outputs.square().sum() / (labels == 3).sum().clamp(min=1)

    def compared(outputs, _):
        return (normalize(outputs) @ normalize(outputs).T).logsumexp(1).mean()

    def normalised(values):
        return (values - values.mean(0)) / values.std(0)

    assert min(gradient_error(loss) for loss in (weighted, padded, of_boxes, compared)) > 1e-3
    assert not torch.allclose(normalised(mine(IMAGES)), mine(normalised(IMAGES)), rtol=0.01)
    assert gradient_error(cross_entropy, nn.BatchNorm1d(6)) > 1e-3
    assert gradient_error(cross_entropy, nn.GroupNorm(2, 6)) < 1e-14


def a_state_that_another_text_continues():
    """A hidden state is carried over batches, and a sampler chooses the texts."""
    tokens = torch.arange(48)

    def continued(batches):  # each is (tokens, rows)
        return all((after[0] == before[-1] + 1).all() for before, after in zip(batches, batches[1:]))

    texts = tokens.view(16, 3)
    assert not continued([rows.T for rows in DataLoader(texts, 2, sampler=DistributedSampler(texts, seed=21))])
    assert continued(tokens.view(4, 12).T[:, rank::world_size].split(3))


def a_schedule_for_the_steps_of_one_gpu():
    """The schedule counts the steps of one GPU."""
    for total_steps, low, high in (100, 0.5, 1), (100 // world_size, 0, 0.01):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = ddp_launch_train.build_scheduler(None, optimizer, total_steps)
        for _ in range(100 // world_size):
            optimizer.step()
            scheduler.step()
        assert low < scheduler.get_last_lr()[0] < high


class Codebook(nn.Module):
    """Adds up all images. When it is built, it decides whether it adds up those of all ranks."""

    def __init__(self):
        super().__init__()
        self.layer, self.synchronises = nn.Linear(6, 4).double(), dist.is_initialized()
        self.register_buffer("total", torch.zeros(6, dtype=torch.float64))

    def forward(self, images):
        update = images.sum(0)
        if self.synchronises:
            dist.all_reduce(update)
        self.total += update
        return self.layer(images)


BUILT_BEFORE_STEP_3 = Codebook()
dist.init_process_group("gloo")


def buffers():
    """`forward` updates a buffer, such as a codebook.
    The model is built before `init_process_group`.
    """
    for model, right in (BUILT_BEFORE_STEP_3, False), (Codebook(), True):
        ddp_model = DDP(model)
        for _ in range(2):
            ddp_model(mine(IMAGES)).sum().backward()
        assert torch.allclose(model.total, 2 * IMAGES.sum(0)) == right
        of_rank_0 = of_all(mine(IMAGES).sum(0))[0]
        assert torch.allclose(model.total, of_rank_0 + mine(IMAGES).sum(0)) != right  # rank 0's, and its last one


def an_average_of_weights():
    """The average of the weights (EMA) is validated."""
    model = nn.BatchNorm1d(6).double()
    ema, ddp_model = AveragedModel(model, use_buffers=True), DDP(model)
    ddp_model(mine(IMAGES))
    ema.update_parameters(model)
    for equal in False, True:
        of_rank_0, of_rank_1 = of_all(ema.module.running_mean)
        assert torch.equal(of_rank_0, of_rank_1) == equal
        for buffer in ema.module.buffers():
            dist.broadcast(buffer, src=0)


def metrics_that_are_no_means():
    """AUC, F1, mAP or recall@k is averaged over the ranks.
    The result of torchmetrics' `compute()` is all-reduced.
    """
    scores = torch.tensor([0.1, 0.9, 0.4, 0.8, 0.35, 0.7, 0.2, 0.3])
    labels = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0])
    metric, right = BinaryAUROC(), binary_auroc(scores, labels)
    assert abs(sum(of_all(binary_auroc(mine(scores), mine(labels)))) / world_size - right) > 0.01
    metric.update(mine(scores), mine(labels))
    value = metric.compute()
    assert value == right
    dist.all_reduce(value)
    assert value == world_size * right


def what_rank_0_has_just_saved():
    """All ranks load a file that rank 0 has just saved."""
    for wait, right in (lambda: None, False), (dist.barrier, True):
        wrong = 0
        for number in range(50):
            dist.barrier()
            if rank == 0:
                torch.save(torch.full((100_000,), number), "model.pt")
            wait()
            try:
                wrong += torch.load("model.pt")[-1].item() != number
            except Exception:  # a part of the file, or none
                wrong += 1
        assert (sum(of_all(wrong)) == 0) == right


if __name__ == "__main__":
    for function in list(globals().values()):
        own = inspect.isfunction(function) and function.__module__ == "__main__" and function.__doc__
        if own and not inspect.signature(function).parameters:
            function()
            os.write(1, f"seen {function.__name__}\n".encode())  # in one piece
    dist.destroy_process_group()
