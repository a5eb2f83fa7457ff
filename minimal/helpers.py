"""What RECIPES.md imports: copy this file beside your script.

gather_rows is for metrics, gather and sum_over_all are for losses, and the classes are for
data. All ranks must call a function equally often and in the same order, because each call
waits for all ranks.
"""

import itertools

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info


def gather_rows(rows):
    """Collect what step 6 of ddp.py computes for the images of each rank, in dataset order.
    `rows` is a list, or a tensor on the CPU, with a row for each image of this rank, in order.
    Ranks may have different numbers of images. Returns a list of all rows, on all ranks.

    If images have several predictions, give it a list with a tensor for each image. Begin with
    rows = [] and add the outputs of each batch, where counts[i] is the number of image i:
        rows += [item.clone() for item in outputs.cpu().split(counts)]
    After the loop, torch.cat(gather_rows(rows)) has all predictions in dataset order.
    """
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, rows)  # rank r has the images r, r + N, r + 2 N and so on
    rows, lengths = range(sum(map(len, shares))), [*map(len, shares)]
    if lengths != [len(rows[rank :: len(shares)]) for rank in range(len(shares))]:
        raise ValueError(f"the ranks have {lengths} rows, so these are not one for each image")
    return [shares[i % len(shares)][i // len(shares)] for i in rows]


class SumOverAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverAll.apply(gradient)


def sum_over_all(value):
    """Return the sum of a tensor over all ranks, for a loss that all ranks compute from it.
    The gradient is right with DDP: backward() adds up the equal gradients of N ranks, and DDP
    divides by N. (torch.distributed.nn.functional.all_reduce, now deprecated, did the same.)
    """
    return SumOverAll.apply(value)


def gather(rows):
    """Return the rows of all ranks as one tensor, rank by rank. Gradients: see sum_over_all.
    All ranks must have equally many rows. This sends about twice as many numbers as necessary.
    """
    of_all = rows.new_zeros(dist.get_world_size(), *rows.shape)
    of_all[dist.get_rank()] = rows  # zeros elsewhere, so the sum joins all rows
    return sum_over_all(of_all).flatten(0, 1)


class WeightedSampler(DistributedSampler):
    """Draws items with replacement, in proportion to `weights`, a tensor with one per item.
    All ranks draw the same items, and each yields its share of them.
    """

    def __init__(self, weights, seed):
        super().__init__(weights, seed=seed, drop_last=True)
        self.weights = weights

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.total_size, True, generator=generator)
        return iter(drawn[self.rank :: self.num_replicas].tolist())


class Buckets(DistributedSampler):
    """A batch_sampler whose batches have items of similar lengths, shared equally by the ranks.
    `lengths` has the length of each item, and `batch_size` counts the items of all ranks. To
    keep all batches full, a few items are left out of each epoch.
    """

    def __init__(self, lengths, batch_size, seed):
        super().__init__(lengths, seed=seed)
        self.lengths, self.batch_size = torch.tensor(lengths), batch_size
        ranks = self.num_replicas
        assert batch_size % ranks == 0, f"{batch_size} items cannot be shared by {ranks} ranks"

    def __len__(self):
        return len(self.lengths) // self.batch_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.randperm(len(self.lengths), generator=generator)
        drawn = drawn[: len(self) * self.batch_size]
        noise = 0.9 + 0.2 * torch.rand(len(drawn), generator=generator)  # new batches per epoch
        batches = drawn[(self.lengths[drawn] * noise).argsort()].view(len(self), -1)
        for batch in batches[torch.randperm(len(self), generator=generator)]:
            yield batch[self.rank :: self.num_replicas].tolist()


class Stream(IterableDataset):
    """Each worker of each rank reads the whole stream and yields its own share of the items.
    read(epoch) yields at least `items` items, in the same order in all workers. All shares are
    equal, so a few of these items may be left out. Set `epoch` before each epoch.
    """

    def __init__(self, read, items):
        self.read, self.items, self.epoch = read, items, 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        share, shares = self.rank * workers + worker, self.world_size * workers
        end = self.items // shares * shares  # so that all shares are equal
        return itertools.islice(self.read(self.epoch), share, end, shares)
