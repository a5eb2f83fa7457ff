"""minimal/checks.py: three right ports pass on 1, 2 and 3 processes, and each mistake ends a run on all ranks."""

import ast
import json
import re
import shutil
from argparse import Namespace
from textwrap import indent

import pytest
import torch
from conftest import GROUP, in_processes
from editing import ROOT, edited
from pages import pieces

START = """
import checks
cross_entropy = nn.functional.cross_entropy
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
    __len__ = lambda self: 5
    def __iter__(self):
        random_numbers = torch.Generator().manual_seed(21 + epoch)
        for bucket in torch.randperm(5, generator=random_numbers).tolist():
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
data = [dict(tokens=torch.randint(1, 9, (2 + i // 3,))) for i in range(60)]
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
generator = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 6))
discriminator = nn.Linear(6, 1)
optimizer, optimizer_d = (torch.optim.Adam(model.parameters(), 0.01) for model in (generator, discriminator))
""" + pieces("GAN")[0] + """
seed_each_rank()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in checks.each_image_once(loader, epoch, allow=["repeats", "left out"]):
        images = batch["image"]
""" + indent(edited(
    "".join(pieces("GAN")[1:]).replace("torch.randn(len(images), 64, device=device)", "images.flip(1)"),
    ("optimizer_d.step()", "checks.same_gradient(discriminator, 'gradient of D')\noptimizer_d.step()"),
    ("optimizer.step()", "checks.same_gradient(generator)\noptimizer.step()"),
), " " * 8) + """
    checks.same_weights(optimizer), checks.same_weights(optimizer_d)
"""
PORTS = {"images": IMAGES, "texts": TEXTS, "gan": GAN}
RIGHT = {port: (port, START + code) for port, code in PORTS.items()}
PROGRAM = f"""{GROUP}
import json, random, sys
import numpy as np
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

ends, here = {{}}, os.getcwd()
for case, (port, code) in json.load(open("cases.json")).items():
    sys.modules.pop("checks", None)  # each case is a run of its own
    os.chdir(f"{{here}}/{{port}}")
    torch.set_default_dtype(torch.float32)
    try:
        exec(code, dict(globals()))
        ends[case] = "well"
    except AssertionError as error:
        ends[case] = str(error)
    rank or sys.modules["checks"].print_at_exit()
json.dump(ends, open(f"{{here}}/ends{{rank}}.json", "w"))
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
    ends, output = ends_of(folder, 1, RIGHT)
    assert ends == dict.fromkeys(PORTS, "well") and output.count(": 10 calls were recorded") == 5
    return folder


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_right_ports_pass(nproc, recorded):
    ends, output = ends_of(recorded, nproc, RIGHT)
    assert ends == dict.fromkeys(PORTS, "well")
    assert output.count(": 10 of 10 calls were compared") == (5 if nproc == 1 else 4)


SEED = "\nseed_each_rank()"
# Mistakes of two processes: what the run ends with, the port, and edits of it.
MISTAKES = {
    "model(images)": ("the weights of the ranks differ", IMAGES, ("= ddp_model(", "= model(")),
    "rates": ("the weights of the ranks differ", IMAGES, ("(), 0.01)", "(), 0.01 + rank)")),
    "their order": (".*torch.Size", IMAGES, ("(model.parameters()", "([*model.parameters()][::1 - 2 * rank]")),
    "NaN": (".*by nan", IMAGES, ("loss.backward()", "loss.backward(); model[0].weight.data *= torch.nan")),
    "class weights": ("gradient, call 1: .*close", IMAGES, ('"label"])', '"label"], torch.tensor([1.0, 5.0]))')),
    "a factor": ("gradient, call 1: .*: 0.(5|499)", IMAGES, ("loss.backward()", "(loss / world_size).backward()")),
    "BatchNorm": ("gradient, call 1: .*close", IMAGES, ("model.eval()", "model.train()")),
    "a memory bank": ("gradient, call 2: .*not close", IMAGES,
        ("seed_each_rank()\n", "bank = torch.zeros(8)\nseed_each_rank()\n"),
        ("loss.backward()", "features = model[:3](batch['image']).mean(0); (loss + bank @ features).backward()"),
        ("optimizer.step()", "optimizer.step(); bank = features.detach()")),
    "float32": ("gradient, call 1: .*causes: float32", IMAGES, ("0.01)\nddp", "0.01)\nmodel.float()\nddp"),
        ('ddp_model(batch["image"])', 'ddp_model(batch["image"].float()).double()')),
    "more steps": ("gradient, call 11: the recorded run had fewer calls", IMAGES, ("range(2)", "range(3)")),
    "no recording": ("there is no other gradient.check.txt", IMAGES,
        ("same_gradient(model", "same_gradient(model, 'other gradient'")),
    "before backward": ("gradient is 0", IMAGES, ("        checks.same_gradient(model)\n", ""),
        ("        loss.b", "        checks.same_gradient(model)\n        loss.b")),
    "a mean of means": ("gradient, call 1: .*close", TEXTS, ("dist.all_reduce(count)", "count *= world_size")),
    "the generator's own": ("gradient, call 1: .*not close", GAN, ("DDP(generator)", "generator")),
    "a mean accuracy": ("metrics, call 1: .*accuracy", IMAGES,
        ("accuracy = correct / 61", "accuracy = right[rank::world_size].double().mean()")),
    "a NaN metric": ("metrics, call 1: .*got inf", IMAGES, ("correct / 61", "correct / 0")),
    "another shape": ("metrics, call 1: The length", IMAGES, ("epoch=[epoch]", "epoch=[epoch, 1]")),
    "smoothing of a rank": (".*0.11, but", IMAGES, ("(dict(smoothing=0.1", "(dict(smoothing=0.1 + rank / 100")),
    "a resume with other rates": ("in 'rates', 0.1 but 0.2 saved", IMAGES, ("0.1]))", "0.2]))")),
    "no sampler": ("images come twice", IMAGES, ("sampler=sampler, drop_last=True", "shuffle=True")),
    "weighted draws": ("images come twice", IMAGES, ("=sampler,", "=WeightedRandomSampler([1.0] * 61, 61),")),
    "images left out": ("25 of 61 images", IMAGES, ("DistributedSampler(data", "DistributedSampler(range(40)")),
    "no set_epoch": ("this order is an earlier epoch's", IMAGES, ("sampler.set_epoch(epoch)", "pass")),
    "other images": ("in 'image', ", IMAGES, ("in zip(images, labels)", "in zip(images.roll(rank, 0), labels)")),
    "no step": ("the loader has no batch", IMAGES, ("12 // world_size", "62 // world_size")),
    "other sizes": ("in 'images', .images.: 60, but .images.: 61,", IMAGES, ("zip(images", "zip(images[rank:]")),
    "equal draws of random": ("same random numbers: seed random", TEXTS, (SEED, f"{SEED}; random.seed(21)")),
    "equal weighted draws": ("ranks have drawn the same images", GAN, ("drawn[rank::world_size]", "drawn[:30]")),
    "equal draws": ("same random numbers: seed PyTorch", GAN, (SEED, f"{SEED}; torch.manual_seed(21)")),
    "equal draws of NumPy": ("same random numbers: seed NumPy", TEXTS, (SEED, f"{SEED}; np.random.seed(21)")),
}


def test_mistakes_end_the_run_on_all_ranks(recorded):
    cases = {}
    for name, (sentence, port, *edits) in MISTAKES.items():
        [folder] = [kind for kind, code in PORTS.items() if code == port]
        port = port if "gradient" in sentence else re.sub(" *checks.same_gradient.*\n", "", port)  # sees it first
        cases[name] = folder, edited(START + port, *edits)
    ends, _ = ends_of(recorded, 2, cases)
    for name, end in ends.items():
        assert re.match(f"(?s)rank [01]: .*{MISTAKES[name][0]}", end), (name, end)


def run_checks(folder, program, *argv, **env):
    """Run a program beside checks.py in one process; return what it printed."""
    shutil.copy(ROOT / "minimal" / "checks.py", folder)
    (folder / "program.py").write_text(program)
    return in_processes(0, folder, "program.py", *argv, **env).stdout


def test_what_is_not_compared_is_said_at_exit(tmp_path):
    (tmp_path / "loss.check.txt").write_text('{"loss": [1.0]}\n{"loss": [2.0]}\n{"loss": [3.0]}\n')
    printed = run_checks(tmp_path, """
import atexit, checks, torch
checks.each_image_once(torch.utils.data.DataLoader(range(12)), 0)  # a loop was meant
checks.same_as_before("loss", 1), checks.same_as_before("loss", [2.0])
atexit._run_exitfuncs()  # which multiprocessing does not
checks.same_as_before("other", torch.nan)
""")
    assert "epoch 0: NOT COMPARED" in printed and "loss: 2 of 3 calls were compared" in printed
    assert "not JSON compliant" in printed and not (tmp_path / "other.check.txt").read_text()


def test_a_script_that_does_not_connect_and_python_O(tmp_path):
    assert "not connected" in run_checks(tmp_path, "import checks; checks.same_as_before('m', 1)", WORLD_SIZE="2")
    printed = run_checks(tmp_path, "import checks; checks.print_at_exit()")
    assert printed == "checks: no weights, images or numbers were compared\n"
    nodes = ast.walk(ast.parse((tmp_path / "checks.py").read_text()))
    assert not any(isinstance(node, ast.Assert) for node in nodes) and not list(tmp_path.glob("*.txt"))


def test_two_files_are_compared(tmp_path):
    for name, last in ("a", 2.0), ("b", 2.0), ("c", 3.0):
        torch.save(dict(w=torch.tensor([torch.nan] * 99 + [last]), f=Namespace(speed=[name, 1])), tmp_path / name)
    program = (ROOT / "minimal" / "checks.py").read_text() + "    print_at_exit()\n"
    assert "checks: the files are the same" in run_checks(tmp_path, program, "a", "b", "speed")
    assert "in 'speed', \"a\", but \"b\", saved" in run_checks(tmp_path, program, "a", "b")
    assert "in 'w', \"w\": \"array([nan, nan, " in run_checks(tmp_path, program, "a", "c")
