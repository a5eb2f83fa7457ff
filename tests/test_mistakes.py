"""TROUBLESHOOTING.md: two processes make each mistake that raises no error, and see that the result is wrong.

Where the page says in one line what to do, they do that, too, and see that the result is right.
"""

import re

from conftest import in_group
from editing import ROOT

PAGE = (ROOT / "TROUBLESHOOTING.md").read_text()
IN_OTHER_TESTS = [
    "The ranks do not share the images.",  # CHECK_5 in test_readme.py
    "The metrics depend on the number of ranks.",  # CHECK_6 in test_readme.py
    "The loss is not a mean over images.",  # the ordinary losses in test_recipes.py
    "`forward` updates a buffer, such as the codes of a VQ-VAE.",  # the ordinary codebook in test_recipes.py
    "Functions are replaced in an imported script.",  # first_runs in test_training.py
]

FUNCTIONS = """
import contextlib, itertools, random
import numpy as np
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import BinaryAUROC
from torchmetrics.functional.classification import binary_auroc

def of_all(value):  # returns a list with the value of each rank
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values

def different(numbers):  # returns how many of the numbers of all ranks are different
    return len(set(sum(of_all(list(numbers)), [])))

class Stream(IterableDataset):
    def __iter__(self):
        yield from range(12)

images = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
scores, labels = torch.tensor([0.1, 0.9, 0.4, 0.8, 0.35, 0.7]), torch.tensor([0, 1, 1, 0, 0, 1])
"""
MISTAKES = {
    "The dataset is an `IterableDataset`.": """
assert of_all(list(DataLoader(Stream(), None))) == [list(range(12))] * 2
workers = dict(num_workers=2, multiprocessing_context="fork")
assert sorted(DataLoader(Stream(), None, **workers)) == sorted([*range(12)] * 2)
""",
    "The loop draws from `itertools.cycle(train_loader)`.": """
loader = DataLoader(range(12), shuffle=True)
drawn = [*itertools.islice(itertools.cycle(loader), 24)]
assert drawn[:12] == drawn[12:] and [*loader] != [*loader]
""",
    "Random numbers have the same seed on all ranks.": """
class Noise(list):
    def __getitem__(self, index):
        return super().__getitem__(index)()

draws = dict(numpy=np.random.rand, random=random.random, torch=lambda: torch.rand(1).item())
draws["own"] = np.random.default_rng(21).random

def drawn_by(name, **options):
    context = "fork" if options else None
    return DataLoader(Noise([draws[name]] * 8), None, multiprocessing_context=context, **options)

random.seed(21), np.random.seed(21), torch.manual_seed(21 + rank)
assert [different(drawn_by(name)) for name in ("numpy", "random", "own", "torch")] == [8, 8, 8, 16]
random.seed(21 + rank), np.random.seed(21 + rank)
assert [different(drawn_by(name)) for name in ("numpy", "random")] == [16, 16]
draws["own"] = lambda: np.random.default_rng(torch.randint(2**31, ()).item()).random()
assert different(drawn_by("own")) == 16
two, generator = dict(num_workers=2), torch.Generator().manual_seed(21)
assert different(drawn_by("torch", **two)) == 16 and different(drawn_by("torch", generator=generator, **two)) == 8
for seed, number in (int, 8), (lambda _: torch.randint(2**31, ()).item(), 16):
    seed_numpy = lambda worker: np.random.seed(seed(worker))
    assert different(drawn_by("numpy", worker_init_fn=seed_numpy, **two)) == number
""",
    "The seed is `21 + rank + epoch`.": """
assert different(21 + rank + epoch for epoch in range(3)) == 4
assert different(21 + rank + world_size * epoch for epoch in range(3)) == 6
""",
    "The loss is a sum over the images.": """
model = nn.Linear(6, 1).double()
right = torch.autograd.grad(model(images).sum(), model.weight)[0]
ddp_model = DDP(model)
ddp_model(images[rank::world_size]).sum().backward()
assert torch.allclose(model.weight.grad, right / world_size)
""",
    "The schedule counts the steps of one GPU.": """
for steps, low, high in (100, 0.1, 1), (100 // world_size, 0, 0.01):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(100 // world_size):
        optimizer.step()
        scheduler.step()
    assert low <= scheduler.get_last_lr()[0] < high
""",
    "The model has BatchNorm, and each GPU has few images.": """
norm = nn.BatchNorm1d(6).double()
assert not torch.allclose(norm(images[rank::world_size]), norm(images)[rank::world_size], rtol=0.01)
""",
    "`convert_sync_batchnorm` replaces a layer that does more than BatchNorm.": """
class BatchNormAct(nn.BatchNorm1d):  # as timm's BatchNormAct2d
    def forward(self, images):
        return super().forward(images).relu()

layer = BatchNormAct(6).double().eval()
converted = nn.SyncBatchNorm.convert_sync_batchnorm(layer)(images)
assert not torch.equal(converted, layer(images)) and torch.equal(converted.relu(), layer(images))
""",
    "The average of the weights (EMA) is validated.": """
model = nn.BatchNorm1d(6).double()
ema, ddp_model = AveragedModel(model, use_buffers=True), DDP(model)
ddp_model(images[rank::world_size])
ema.update_parameters(model)
for right in False, True:
    of_rank_0, of_rank_1 = of_all(ema.module.running_mean)
    assert torch.equal(of_rank_0, of_rank_1) == right
    for buffer in ema.module.buffers():
        dist.broadcast(buffer, src=0)
""",
    "Outputs gathered from all ranks are paired with file names.": """
n, shares = 11, of_all(list(range(11))[rank::world_size])
assert sum(shares, []) != list(range(n))
assert [shares[i % world_size][i // world_size] for i in range(n)] == list(range(n))
""",
    "The result of torchmetrics' `compute()` is all-reduced.": """
metric = BinaryAUROC()
metric.update(scores[rank::world_size], labels[rank::world_size])
value = metric.compute()
assert value == binary_auroc(scores, labels)
dist.all_reduce(value)
assert value == world_size * binary_auroc(scores, labels)
""",
    "All ranks load a file that rank 0 has just saved.": """
for wait, right in (lambda: None, False), (dist.barrier, True):
    wrong = 0
    for number in range(50):
        dist.barrier()
        if rank == 0:
            torch.save(torch.full((100_000,), number), "model.pt")
        wait()
        wrong += 1
        with contextlib.suppress(Exception):  # a part of the file, or none
            wrong -= torch.load("model.pt")[-1].item() == number
    assert (sum(of_all(wrong)) == 0) == right
""",
}


def test_two_processes_make_each_mistake_of_the_page(tmp_path):
    section = PAGE.split("\n## Mistakes without an error")[1].split("\n## ")[0]
    rows = [" ".join(row.split()) for row in re.findall(r"^- \*\*(.*?)\*\*", section, re.M | re.S)]
    assert len(rows) > 15 and sorted(rows) == sorted([*MISTAKES, *IN_OTHER_TESTS])
    in_group(2, tmp_path, "\n".join([FUNCTIONS, *MISTAKES.values()]))


def test_the_page_quotes_the_sentences_that_end_a_run():
    sentences = dict(ddp_launch_train="the weights of the processes differ")
    sentences["minimal/ddp"] = "the weights of the ranks differ"
    for script, sentence in sentences.items():
        assert sentence in (ROOT / f"{script}.py").read_text() and f"`{sentence}`" in PAGE
