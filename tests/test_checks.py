"""minimal/checks.py: three right ports pass on 1, 2 and 3 processes, and each mistake ends a run on all ranks."""

import json
import re
import shutil
import sys

import pytest
from conftest import in_processes, run, train_minimal
from editing import ROOT, edited
from pages import line

START = """
import checks
rank, world_size, cross_entropy = dist.get_rank(), dist.get_world_size(), nn.functional.cross_entropy
torch.set_default_dtype(torch.float64)
torch.manual_seed(21)

class Items(list):
    def __getitem__(self, index):  # with a random transform, which does nothing
        item = dict(super().__getitem__(index))
        return dict(item, image=item["image"] + 0 * (torch.rand(()) + random.random() + np.random.rand()))

class Weighted(DistributedSampler):
    def __iter__(self):
        drawn = torch.randint(60, (60,), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        return iter(drawn[rank::world_size])

class Buckets:  # texts of similar lengths, in batches of 12, of which each rank takes its part
    def __len__(self):
        return 5
    def __iter__(self):
        for bucket in torch.randperm(5, generator=torch.Generator().manual_seed(21 + epoch)).tolist():
            yield list(range(12 * bucket, 12 * bucket + 12))[rank::world_size]

def padded(items):
    return dict(tokens=nn.utils.rnn.pad_sequence([item["tokens"] for item in items], batch_first=True))

def seed_each_rank():
    torch.manual_seed(21 + rank), random.seed(21 + rank), np.random.seed(21 + rank)

images, labels = torch.randn(61, 6), torch.arange(61) % 2
"""
IMAGES = """
data = Items(dict(image=image, label=label) for image, label in zip(images, labels))
sampler = DistributedSampler(data, seed=21, drop_last=True)
loader = DataLoader(data, 12 // world_size, sampler=sampler, drop_last=True)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
ddp_model = DDP(model)
seed_each_rank()
checks.same_on_all_ranks(dict(smoothing=0.1, rates=[0.01, 0.1]), saved=dict(smoothing=0.1, rates=[0.01, 0.1]))
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.eval()
    for batch in checks.each_image_once(loader, epoch):
        outputs = ddp_model(batch["image"])
        loss = cross_entropy(outputs, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        checks.same_gradient(model)
        optimizer.step()
        if world_size == 1:
            checks.same_as_before("loss", loss)
    checks.same_weights(optimizer)
    right = model(images).argmax(1) == labels
    correct = right[rank::world_size].sum()
    dist.all_reduce(correct)
    accuracy = correct / 61
    checks.same_as_before("metrics", dict(accuracy=accuracy, epoch=[epoch]))
"""
TEXTS = """
data = [dict(tokens=torch.randint(1, 9, (2 + i // 4,))) for i in range(60)]
loader = DataLoader(data, batch_sampler=Buckets(), collate_fn=padded)
model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Dropout(0.0), nn.Linear(8, 9))
nn.init.zeros_(model[2].weight)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ddp_model = DDP(model)
seed_each_rank()
for epoch in range(2):
    for batch in checks.each_image_once(loader, epoch):
        tokens = batch["tokens"]
        losses = cross_entropy(ddp_model(tokens).mT, tokens, reduction="none") * (tokens > 0)
        count = (tokens > 0).sum()
        dist.all_reduce(count)
        optimizer.zero_grad()
        (losses.sum() * world_size / count).backward()
        checks.same_gradient(model)
        optimizer.step()
    checks.same_weights(optimizer)
"""
GAN = """
data = Items(dict(image=image) for image in images[:60])
sampler = Weighted(data, seed=21)
loader = DataLoader(data, 12 // world_size, sampler=sampler)
models = [nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 1)]
optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
generator, discriminator = (DDP(model) for model in models)
seed_each_rank()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in checks.each_image_once(loader, epoch, allow=["repeats", "left out"]):
        real = batch["image"]
        fake = generator(real.flip(1))
        for number, loss in enumerate([
            lambda: nn.functional.softplus(models[1](fake)).mean(),
            lambda: nn.functional.softplus(discriminator(torch.cat([fake.detach(), -real]))).mean(),
        ]):
            models[number].zero_grad()
            loss().backward()
            checks.same_gradient(models[number], f"gradient {number}")
            optimizers[number].step()
    checks.same_weights(optimizers[0]), checks.same_weights(optimizers[1])
"""
PORTS = {"images": IMAGES, "texts": TEXTS, "gan": GAN}
PROGRAM = """
import json, os, random, shutil, sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

dist.init_process_group("gloo")
ends, here = {}, os.getcwd()
for case, (port, code) in json.load(open("cases.json")).items():
    sys.modules.pop("checks", None)  # each case is a run of its own
    os.chdir(f"{here}/{port}")
    torch.set_default_dtype(torch.float32)
    try:
        exec(code, dict(globals()))
        ends[case] = "well"
    except AssertionError as error:
        ends[case] = str(error)
json.dump(ends, open(f"{here}/ends{dist.get_rank()}.json", "w"))
dist.destroy_process_group()
"""


def ends_of(folder, nproc, cases):
    """Run programs, {name: (port, code)}, one after the other; return how they ended, the same on all ranks."""
    for port in PORTS:
        (folder / port).mkdir(exist_ok=True)
    shutil.copy(ROOT / "minimal" / "checks.py", folder)
    (folder / "cases.json").write_text(json.dumps(cases))
    (folder / "program.py").write_text(PROGRAM)
    finished = in_processes(nproc, folder, "program.py")
    assert finished.returncode == 0
    ends = [json.loads((folder / f"ends{rank}.json").read_text()) for rank in range(nproc)]
    assert ends == ends[:1] * nproc
    return ends[0], finished.stdout


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a folder with recordings of the right ports."""
    folder = tmp_path_factory.mktemp("ports")
    ends, _ = ends_of(folder, 1, {port: (port, START + code) for port, code in PORTS.items()})
    assert ends == dict.fromkeys(PORTS, "well")
    return folder


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_right_ports_pass(nproc, recorded):
    ends, output = ends_of(recorded, nproc, {port: (port, START + code) for port, code in PORTS.items()})
    assert ends == dict.fromkeys(PORTS, "well")
    assert output.count("all 10 recorded calls were the same") == (5 if nproc == 1 else 4)
