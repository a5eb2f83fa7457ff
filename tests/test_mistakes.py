"""TROUBLESHOOTING.md: two processes make each mistake that raises no error, and see that the result is wrong.

Where the page says in one line what to do, they do that, too, and see that the result is right.
"""

import re

from conftest import ROOT, in_group
from test_recipes import RIGHT_ON_TWO, SAME

PAGE = (ROOT / "TROUBLESHOOTING.md").read_text()
# Rows whose mistake is the ordinary code of a recipe: test_recipes.py sees that it is wrong on two processes.
IN_RECIPES = {
    "Each rank divides its loss by a number of its own.": "padding",
    "The loss compares images with each other (CLIP, SimCLR, triplets).": "SimCLR",
    "Each rank normalises its own advantages or rewards.": "reinforcement learning",
    "`forward` updates a buffer, such as a codebook.": "codebook",
}
IN_OTHER_TESTS = [
    "The training `DataLoader` has no sampler.",  # check 5 in test_readme.py
    "The call of `sampler.set_epoch(epoch)` is missing.",  # check 5
    "Functions are replaced in an imported script.",  # first_runs in test_training.py
]

FUNCTIONS = """
import copy, os, random, subprocess, sys
import numpy as np
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler, random_split
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
    "The sampler is `WeightedRandomSampler`.": """
torch.manual_seed(1)
of_rank_0, of_rank_1 = of_all(list(WeightedRandomSampler([1.0] * 12, 12)))
assert of_rank_0 == of_rank_1 and len(of_rank_0) == 12
""",
    "The dataset is an `IterableDataset`.": """
assert of_all(list(DataLoader(Stream(), None))) == [list(range(12))] * 2
workers = dict(num_workers=2, multiprocessing_context="fork")
assert sorted(DataLoader(Stream(), None, **workers)) == sorted([*range(12)] * 2)
""",
    "`random_split` is called after random numbers were drawn.": """
torch.manual_seed(21)
torch.rand(rank)
for generator, right in (None, False), (torch.Generator().manual_seed(21), True):
    of_rank_0, of_rank_1 = of_all(list(random_split(range(100), [90, 10], generator)[1].indices))
    assert (of_rank_0 == of_rank_1) == right
""",
    "Classes are numbered by `list(set(names))`.": """
os.environ["PYTHONHASHSEED"] = "random"  # Python's default
for function, right in ("list", False), ("sorted", True):
    python = [sys.executable, "-c", f"print({function}(set('abcdefghijklmnopqrst')))"]
    of_rank_0, of_rank_1 = of_all(subprocess.check_output(python))
    assert (of_rank_0 == of_rank_1) == right
""",
    "NumPy's or Python's random numbers have the same seed on all ranks.": """
random.seed(21), np.random.seed(21), torch.manual_seed(21 + rank)
assert different([random.random(), np.random.rand(), torch.rand(1).item()]) == 4
random.seed(21 + rank), np.random.seed(21 + rank)
assert different([random.random(), np.random.rand()]) == 4
""",
    "The seed is `21 + rank + epoch`.": """
assert different(21 + rank + epoch for epoch in range(3)) == 4
assert different(21 + rank + world_size * epoch for epoch in range(3)) == 6
""",
    "Each rank seeds several environments, beginning with `21 + rank`.": """
environments = 3
assert different(21 + rank + number for number in range(environments)) == 4
assert different(21 + rank * environments + number for number in range(environments)) == 6
""",
    "The dataset has a random generator of its own.": """
torch.manual_seed(21 + rank)
generator = np.random.default_rng(21)
assert different(generator.random() for _ in range(3)) == 3
assert different(np.random.default_rng(torch.randint(2**31, ()).item()).random() for _ in range(3)) == 6
""",
    "The loss is a sum over the images.": """
model = nn.Linear(6, 1).double()
right = torch.autograd.grad(model(images).sum(), model.weight)[0]
ddp_model = DDP(model)
ddp_model(images[rank::world_size]).sum().backward()
assert torch.allclose(model.weight.grad, right / world_size)
""",
    "A hidden state is carried over batches, and a sampler chooses the texts.": """
texts = torch.arange(48).view(16, 3)
for batches, right in (
    ([rows.T for rows in DataLoader(texts, 2, sampler=DistributedSampler(texts))], False),
    (texts.view(4, 12).T[:, rank::world_size].split(3), True),  # each has 3 tokens of 2 texts
):
    assert all((after[0] == before[-1] + 1).all() for before, after in zip(batches, batches[1:])) == right
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
    "`DistributedSampler` splits the validation set.": """
validated = sum(of_all(list(DistributedSampler(range(11), shuffle=False))), [])
assert sorted(validated) == [0, *range(11)]  # image 0 counts twice
""",
    "Validation draws random numbers, as with a VAE or a diffusion model.": """
torch.manual_seed(21 + rank)
noise = torch.randn(11, generator=torch.Generator().manual_seed(21))
for share, right in (torch.randn(len(noise[rank::world_size])), False), (noise[rank::world_size], True):
    assert (sorted(sum(of_all(share.tolist()), [])) == sorted(noise.tolist())) == right
""",
    "AUC, F1, mAP or recall@k is averaged over the ranks.": """
of_shares = of_all(binary_auroc(scores[rank::world_size], labels[rank::world_size]))
assert abs(sum(of_shares) / world_size - binary_auroc(scores, labels)) > 0.01
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
        try:
            wrong += torch.load("model.pt")[-1].item() != number
        except Exception:  # a part of the file, or none
            wrong += 1
    assert (sum(of_all(wrong)) == 0) == right
""",
}


def test_two_processes_make_each_mistake_of_the_page(tmp_path):
    section = PAGE.split("\n## Mistakes without an error")[1].split("\n## ")[0]
    rows = [" ".join(row.split()) for row in re.findall(r"^- \*\*(.*?)\*\*", section, re.M | re.S)]
    assert len(rows) > 20 and sorted(rows) == sorted([*MISTAKES, *IN_RECIPES, *IN_OTHER_TESTS])
    assert all(name in SAME and name not in RIGHT_ON_TWO for name in IN_RECIPES.values())
    in_group(2, tmp_path, "\n".join([FUNCTIONS, *MISTAKES.values()]))


def test_the_page_quotes_the_sentences_that_end_a_run():
    sentences = dict(ddp_launch_train="the weights of the processes differ")
    sentences["minimal/ddp"] = "the weights of the ranks differ"
    for script, sentence in sentences.items():
        assert sentence in (ROOT / f"{script}.py").read_text() and f"`{sentence}`" in PAGE
