"""RECIPES.md: each recipe is copied into one of our scripts, into minimal/ddp.py or into a small program, and run."""

import argparse
import ast
import itertools
import os
import re
import shutil
import sys
from textwrap import indent

import numpy as np
import pytest
import torch
from conftest import (
    FLOAT64,
    ROOT,
    SCRIPTS,
    SMALL,
    SMALL_MODEL,
    block,
    copy_script,
    edited,
    edits_of,
    in_group,
    in_processes,
    result,
    run,
    saved_by,
    train,
)
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import common

INDEX, *SECTIONS = (ROOT / "RECIPES.md").read_text().split("\n## ")
SECTIONS = {section.splitlines()[0]: section for section in SECTIONS}


def code(title, number=0):
    """Return a code block of a recipe."""
    return re.findall(r"```\w+\n(.*?)```", SECTIONS[title], re.S)[number]


def parts(title, number=0):
    """Return the parts of a code block. Each but the first begins with a comment, after an empty line."""
    return [part.rstrip() + "\n" for part in re.split(r"\n\n(?=#)", code(title, number))]


def inline(title, start):
    """Return the code in a paragraph of a recipe that starts with these words."""
    [paragraph] = [text for text in SECTIONS[title].split("\n\n") if text.startswith(start)]
    return re.findall("`(.*?)`", paragraph.replace("\n", " "))


def functions(*codes):
    """Return an edit that adds functions at the end of a script, where they replace others of the same name."""
    return "\nif __name__", "\n".join(["", *codes, "\nif __name__"])


def names_of(folder, script="ddp_launch_train"):
    """Return the names that a copied script defines."""
    scope = {}
    exec((folder / f"{script}.py").read_text(), scope)
    return scope


def anchor(title):
    """Return the anchor that GitHub gives to a title."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def test_the_index_links_to_each_recipe_and_names_scripts_that_its_diffs_fit(tmp_path):
    links, names = zip(*re.findall(r"\n\| \[.*?\]\(#(.*?)\) \|.*?\| ?(.*?) ?\|", INDEX))
    assert list(links) == [anchor(title) for title in SECTIONS]
    assert set(re.findall(r"\(#(.*?)\)", "".join(SECTIONS.values()))) <= set(links)
    fits = {"": [], "all": SCRIPTS, "DDP": SCRIPTS[1:], "launch, spawn": SCRIPTS[1:3], "apex": SCRIPTS[3:]}
    fits |= {"launch": SCRIPTS[1:2], "spawn": SCRIPTS[2:3]}
    ours = {function.name: function for function in ast.parse((ROOT / "dp_train.py").read_text()).body[-20:]}
    for title, scripts in zip(SECTIONS, names):
        diffs = re.findall(r"```diff\n(.*?)```", SECTIONS[title], re.S)
        assert fits[scripts] or not diffs
        for script, diff in itertools.product(fits[scripts], diffs):
            folder = copy_script(tmp_path, script, *edits_of(diff))
            compile((folder / f"{script}.py").read_text(), script, "exec")

PADDING, GANS, METRICS = "Padding, ignore_index and class weights", "GANs and several models", "AUC, mAP and other metrics of all outputs"

# ------------------------------------------------------------ Same weights on 1, 2 and 3 processes

DATA = """
IGNORED = 0  # labels below this
EPOCHS = 2

def data(n):
    random = torch.Generator().manual_seed(n)
    images = torch.randn(n, 3, 4, 4, generator=random, dtype=torch.float64)
    labels = torch.randint(10, (n,), generator=random)
    return torch.utils.data.TensorDataset(images, labels.masked_fill(labels < IGNORED, -100))

def main():"""
NET = "nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 10))"
# Edits to run minimal/ddp.py on the CPU, in float64, with small generated images.
MINIMAL = [
    ("def main():", DATA),
    ('torch.device("cuda", local_rank)', 'torch.device("cpu")'),
    ("    torch.cuda.set_device(device)\n", ""),
    ('"nccl", device_id=device', '"gloo"'),
    ('datasets.CIFAR10("data", train=True, download=True, transform=transforms.ToTensor())', "data(60)"),
    ('datasets.CIFAR10("data", train=False, transform=transforms.ToTensor())', "data(61)"),
    ("batch_size=512, sampler=sampler, num_workers=8", "batch_size=12 // world_size, sampler=sampler"),
    ("batch_size=512, num_workers=8", "batch_size=12"),
    ("models.resnet50(num_classes=10)", f"{NET}.double()"),
    ("    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)  # for small images\n", ""),
    ("    model.maxpool = nn.Identity()\n", ""),
    ("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), 0.1, 0.9)"),  # AdamW ignores a wrong factor
    ("range(10)", "range(EPOCHS)"),
]
MINIMAL_DDP = (ROOT / "minimal" / "ddp.py").read_text()


def line(pattern, lines=1, text=MINIMAL_DDP):
    """Return the line of a script that has a pattern, and those after it."""
    [found] = re.findall(rf"(?m)^.*{pattern}.*\n" + ".*\n" * (lines - 1), text)
    return found


def at(place, *codes):
    """Return an edit that puts code in place of a line, with its indentation."""
    return place, indent("".join(codes), re.match(" *", place)[0])


def before(place, *codes):
    return place, at(place, *codes)[1] + place


def after(place, *codes):
    return place, place + at(place, *codes)[1]


def define(*codes):
    """Return an edit of minimal/ddp.py that defines functions."""
    return "def main():", "\n".join([*codes, "def main():"])


LOOP, LOSS, STEP = line("in train_loader", 2), line("loss = nn"), line("optimizer.zero_grad", 3)
SAMPLER, OUR_SAMPLER = line("= DistributedSampler"), line("= DistributedSampler", 1, (ROOT / "ddp_launch_train.py").read_text())
WRAP, WRAPPED, SAVE = line("# 5. Wrap"), line("= DDP"), line("torch.save")
NO_ACCURACY = at(line("correct \\+="), "pass\n")

mean_over_all, mean_of_labels = parts(PADDING)
mean_of_weights = mean_of_labels.replace("labels, reduction", "labels, class_weights, reduction")
mean_of_weights = mean_of_weights.replace("(labels != -100).sum()", "class_weights[labels].sum()")
CLASS_WEIGHTS = "class_weights = torch.arange(1, 11).double()\n"
MASKED = after(line("images, labels = "), "labels = labels.masked_fill(labels < 4, -100)\n")
OUR_MASKED = after(line("tensor.to\\(device", 1, (ROOT / "ddp_launch_train.py").read_text()), "labels[labels < 4] = -100\n")

gather, simclr = parts("Contrastive losses")
VIEWS = "view_1, view_2 = images, images.flip(1)\n"
CLIP = """class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(48, 8), nn.Linear(48, 8)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, images):
        return self.image(images.flatten(1)), self.text(images.flip(1).flatten(1)), self.temperature
"""
CLIP_LOSS = """first, second, temperature = ddp_model(images)
scores = gather(first) @ gather(second).T * temperature
loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
"""
NO_GATHER = "def gather(rows):\n    return rows\n"

sampler, use_of_sampler = parts("Weighted sampling")
groups = code("Gradient accumulation")
group_of_padded = groups.replace("    optimizer.zero_grad()\n", """    optimizer.zero_grad()
    count = sum((labels != -100).sum() for _, labels in group)
    dist.all_reduce(count)
""")
group_of_padded = group_of_padded.replace("labels.to(device))\n", 'labels, reduction="sum")\n')
group_of_padded = group_of_padded.replace("(loss / len(group))", f"({inline('Gradient accumulation', 'With [padding]')[0].replace('loss_sum', 'loss')})")
LARGE = ("batch_size=12 //", "batch_size=48 //")

wrap, gan = parts(GANS)
gan = gan.replace("torch.randn(len(images), 64, device=device)", "nn.functional.pad(images.flatten(1), (0, 16))")
TWO_MODELS = [
    (NET, """nn.ModuleDict(dict(
        generator=nn.Sequential(nn.Linear(64, 48), nn.Unflatten(1, (3, 4, 4))),
        discriminator=nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 1))))"""),
    after(line("optimizer = "), "generator, discriminator = model['generator'], model['discriminator']\n"
          "optimizer_d = torch.optim.SGD(discriminator.parameters(), 0.1)\n"),
    at(line("weights = \\["), "weights = list(model.parameters())\n"),
    at(STEP, ""),
    NO_ACCURACY,
]
penalty = f"""mixed = (images + fakes.detach()).requires_grad_()
(gradient,) = {inline(GANS, "**A gradient penalty**")[0]}
loss_d = loss_d + 10 * (gradient.flatten(1).norm(dim=1) - 1).square().mean()
optimizer_d.zero_grad()"""
gan_with_penalty = edited(gan, ("optimizer_d.zero_grad()", penalty))
alone = wrap.replace("DDP(", "(")

_, forward, value, call = inline(GANS, "**Methods other than forward**")
METHODS = f"""class Model(nn.Sequential):
    def {forward}:
        return {value}

    def training_loss(self, images):
        return super().forward(images).square().mean()
"""
OF_METHODS = define(METHODS), (NET, NET.replace("nn.Sequential", "Model")), NO_ACCURACY

codebook = code("Buffers of your own")
CODEBOOK = """class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 8))
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, vectors):
{}        return outputs
"""
OF_CODES = (NET, NET.replace("nn.Tanh()", "Codebook()"))

START = """
torch.manual_seed(1)
device = "cpu"
model = Model().double()
ddp_model, optimizer = DDP(model), torch.optim.SGD(model.parameters(), 0.1, 0.9)
"""
SAVE_WEIGHTS = """
if rank == 0:
    torch.save(model.state_dict(), "weights.pt")
"""
recurrent = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(9, 8), nn.GRU(8, 8), nn.Linear(8, 9)

    def forward(self, tokens, hidden):
        outputs, hidden = self.rnn(self.embedding(tokens), hidden)
        return self.head(outputs), hidden
{START}
tokens = torch.randint(9, (60 * 80 + 7,))
{code("Recurrent models").replace("range(10)", "range(2)")}{SAVE_WEIGHTS}"""
of_columns = line("columns = tokens", 2, recurrent)
each_text = "columns = torch.stack([tokens[80 * i : 80 * (i + 1)] for i in range(60)], 1)\n"

normalise, seeds, stop = parts("Reinforcement learning")
ppo = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)
        self.register_buffer("stops", torch.zeros(6))

    def forward(self, states):
        return self.actor(states).log_softmax(-1), self.critic(states)[..., 0]
{START}
{normalise}
{seeds}
target_kl = 0.02
generators = [torch.Generator().manual_seed(seed) for seed in seeds]
for iteration in range(6):
    draws = torch.stack([torch.rand(5, 6, generator=one, dtype=torch.float64) for one in generators])
    states, chances, rewards = draws[..., :4], draws[..., 4], draws[..., 5]
    with torch.no_grad():
        logs, values = model(states)
        actions = (chances > logs[..., 0].exp()).long()[..., None]
        old = logs.gather(-1, actions)
        rewards = rewards + actions[..., 0] * states.sum(-1)
        advantages = normalise(rewards - values)[..., None]
    for update in range(20):
        logs, values = ddp_model(states)
        new = logs.gather(-1, actions)
        approx_kl = (old - new).detach().mean()
{indent(stop, " " * 8)}
        ratio = (new - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss = loss + (values - rewards).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.stops[iteration] = update
assert 0 < model.stops.min() < 19
{SAVE_WEIGHTS}"""
on_its_own = "def normalise(values):\n    return (values - values.mean()) / (values.std() + 1e-8)\n\n"
alone_ppo = edited(ppo, (normalise, on_its_own), (line("dist.all_reduce\\(approx_kl", 1, ppo), ""))
EMA = parts("EMA")
PER_RANK_STREAM = """
def read(epoch):
    order = torch.randperm(60, generator=torch.Generator().manual_seed(epoch))
    yield from (data(60)[i] for i in order)
"""

# Name: script, edits of ordinary code for one process (None: none is known), edits of the recipe.
SAME = {
    "padding": ("minimal", [MASKED], [MASKED, define(mean_over_all), at(LOSS, mean_of_labels)]),
    "class weights": (
        "minimal",
        [define(CLASS_WEIGHTS), ("(ddp_model(images), labels)", "(ddp_model(images), labels, class_weights)")],
        [define(CLASS_WEIGHTS, mean_over_all), at(LOSS, mean_of_weights)],
    ),
    "padding in our scripts": (
        "ddp_launch_train", [OUR_MASKED], [OUR_MASKED, functions(mean_over_all), *edits_of(code(PADDING, 1))]
    ),
    "SimCLR": (
        "minimal",
        [define(NO_GATHER), at(LOSS, VIEWS, simclr)],
        [define(gather), at(LOSS, VIEWS, simclr)],
    ),
    "CLIP": (
        "minimal",
        [define(NO_GATHER, CLIP), at(LOSS, CLIP_LOSS), (NET, "Clip()"), NO_ACCURACY],
        [define(gather, CLIP), at(LOSS, CLIP_LOSS), (NET, "Clip()"), NO_ACCURACY],
    ),
    "weighted sampling": ("minimal", None, [define(sampler), at(SAMPLER, use_of_sampler)]),
    "weighted sampling in our scripts": (
        "ddp_launch_train", None, [functions(sampler), at(OUR_SAMPLER, use_of_sampler)]
    ),
    "IterableDataset": (
        "minimal",
        None,
        [
            define(code("IterableDataset"), PER_RANK_STREAM),
            at(SAMPLER, "train_set = Stream(read, 60)\n"),
            ("// world_size, sampler=sampler", "// world_size, drop_last=True"),
            ("sampler.set_epoch(epoch)", "train_set.set_epoch(epoch)"),
        ],
    ),
    "shorter epochs": (
        "minimal",
        None,
        [define(code("Shorter epochs").replace("= 4", "= 2")), (SAMPLER, SAMPLER.replace("Distributed", "Part"))],
    ),
    "shorter epochs in our scripts": (
        "ddp_launch_train",
        None,
        [
            functions(code("Shorter epochs").replace("= 4", "= 2")),
            (OUR_SAMPLER, OUR_SAMPLER.replace("Distributed", "Part")),
            ("sampler.set_epoch(epoch)", inline("Shorter epochs", "For a run that")[-1]),
        ],
    ),
    "recurrent model": ("program", edited(recurrent, (of_columns, " " * 0 + each_text)), recurrent),
    "PPO": ("program", alone_ppo, ppo),
    "GAN": ("minimal", [*TWO_MODELS, at(WRAPPED, alone), at(LOSS, gan)], [*TWO_MODELS, at(WRAPPED, wrap), at(LOSS, gan)]),
    "GAN with a penalty": (
        "minimal",
        [*TWO_MODELS, at(WRAPPED, alone), at(LOSS, gan_with_penalty)],
        [*TWO_MODELS, at(WRAPPED, wrap), at(LOSS, gan_with_penalty)],
    ),
    "methods": (
        "minimal",
        [*OF_METHODS, at(LOSS, "loss = model.training_loss(images)\n")],
        [*OF_METHODS, at(LOSS, f"loss = {call}\n")],
    ),
    "codebook": (
        "minimal",
        [define(CODEBOOK.format(indent(re.sub(".*all_reduce.*\n", "", codebook), " " * 8))), OF_CODES],
        [define(CODEBOOK.format(indent(codebook, " " * 8))), OF_CODES],
    ),
    "EMA": (
        "minimal",
        None,
        [
            define(EMA[0].replace("0.999", "0.9")),
            before(WRAP, EMA[1].replace("0.999", "0.9")),
            after(line("optimizer.step"), EMA[2]),
            before(line("model.eval"), EMA[3]),
            (SAVE, SAVE.replace("model.state", "ema.module.state")),
        ],
    ),
    "groups of batches": ("minimal", [LARGE], [(LOOP + LOSS + STEP, at(LOOP, groups)[1])]),
    "groups of padded batches": (
        "minimal",
        [LARGE, ("IGNORED = 0", "IGNORED = 4")],
        [("IGNORED = 0", "IGNORED = 4"), (LOOP + LOSS + STEP, at(LOOP, group_of_padded)[1])],
    ),
    "parts of a batch in our scripts": ("ddp_launch_train", [], edits_of(code("Gradient accumulation", 1))),
    "plateau": (
        "minimal",
        None,
        [
            ("EPOCHS = 2", "EPOCHS = 6"),
            before(WRAP, "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, 'max', patience=0)\n"),
            before(line("# 9. Only"), inline("Schedules per epoch", "`ReduceLROnPlateau` must")[1] + "\n"),
        ],
    ),
}
RIGHT_ON_TWO = ["groups of batches", "parts of a batch in our scripts"]  # whose ordinary code is, too


def train_on(nproc, folder, script, edits, *flags):
    """Train an edited script from new. Return what it printed, and its weights (None if it failed)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if script == "program":
        return in_group(nproc, folder, edits), torch.load(folder / "weights.pt")
    if script == "minimal":
        (folder / "ddp.py").write_text(edited(MINIMAL_DDP, *MINIMAL, *edits))
        finished = in_processes(nproc, folder, "ddp.py")
        return finished, None if finished.returncode else torch.load(folder / "model.pt")
    copy_script(folder, script, *FLOAT64, *edits)
    finished = train(folder, nproc, "--batch-size", "12", *flags)
    return finished, None if finished.returncode else torch.load(folder / "run.pt")["model"]


def equal(weights, expected):
    """Return whether weights are the same but for rounding, in float64."""
    assert weights.keys() == expected.keys()
    return all(torch.allclose(weights[name], expected[name], rtol=1e-12, atol=1e-12) for name in weights)


@pytest.mark.parametrize("name", SAME)
def test_1_2_and_3_processes_end_with_the_same_weights(name, tmp_path):
    script, ordinary, recipe = SAME[name]
    _, expected = train_on(1, tmp_path, script, recipe if ordinary is None else ordinary)
    for nproc in (1, 2, 3) if ordinary is not None else (2, 3):
        assert equal(train_on(nproc, tmp_path, script, recipe)[1], expected), nproc
    if ordinary is not None and name not in RIGHT_ON_TWO:  # the recipe is needed
        _, weights = train_on(2, tmp_path, script, ordinary)
        assert weights is None or not equal(weights, expected)
