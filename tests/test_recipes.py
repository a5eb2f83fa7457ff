"""RECIPES.md: each recipe runs in one of our scripts, in minimal/ddp.py or in a small program."""

import ast
import itertools
import os
import re
import shutil
import sys
from argparse import Namespace
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

import common

INDEX, *SECTIONS = (ROOT / "RECIPES.md").read_text().split("\n## ")
SECTIONS = {section.splitlines()[0]: section for section in SECTIONS}
MINIMAL, LAUNCH = ((ROOT / path).read_text() for path in ("minimal/ddp.py", "ddp_launch_train.py"))


def section(start):
    """Return the recipe whose title starts so."""
    [found] = [text for title, text in SECTIONS.items() if title.startswith(start)]
    return found


def code(title, number=0):
    """Return a code block of a recipe."""
    return re.findall(r"```\w+\n(.*?)```", section(title), re.S)[number]


def parts(title):
    """Return the parts of a recipe's first code block that begin with a comment."""
    return [part.rstrip("\n") + "\n" for part in re.split(r"\n\n(?=#)", code(title))]


def inline(title, start):
    """Return the pieces of code in a paragraph of a recipe that starts with these words."""
    [paragraph] = [text for text in section(title).split("\n\n") if text.startswith(start)]
    return re.findall("`(.*?)`", paragraph.split("```")[0].replace("\n", " "))


def line(pattern, lines=1, text=MINIMAL):
    """Return the line of a script that has a pattern, and the lines after it."""
    [found] = re.findall(rf"(?m)^.*{pattern}.*\n" + ".*\n" * (lines - 1), text)
    return found


def ours(pattern):
    """Return the line of ddp_launch_train.py that has a pattern."""
    return line(pattern, 1, LAUNCH)


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


def functions(*codes):
    """Return an edit that adds functions at the end of a script, where they replace those of the same name."""
    return "\nif __name__", "\n".join(["", *codes, "\nif __name__"])


def launch_with(folder, *edits):
    """Copy and edit ddp_launch_train.py. Return its folder, and the names that it defines."""
    scope = {}
    exec((copy_script(folder, "ddp_launch_train", *edits) / "ddp_launch_train.py").read_text(), scope)
    return folder, scope


def test_the_index_links_to_each_recipe_and_names_scripts_that_its_diffs_fit(tmp_path):
    links, names = zip(*re.findall(r"\n\| \[.*?\]\(#(.*?)\) \|.*?\| ?(.*?) ?\|", INDEX))
    assert list(links) == [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in SECTIONS]
    assert set(re.findall(r"\(#(.*?)\)", "".join(SECTIONS.values()))) <= set(links)
    fits = {"": [], "all": SCRIPTS, "DDP": SCRIPTS[1:], "launch, spawn": SCRIPTS[1:3], "launch": SCRIPTS[1:2]}
    fits |= {"spawn": SCRIPTS[2:3], "apex": SCRIPTS[3:]}
    for recipe, scripts in zip(SECTIONS.values(), names):
        diffs = re.findall(r"```diff\n(.*?)```", recipe, re.S)
        assert fits[scripts] or not diffs
        for script, diff in itertools.product(fits[scripts], diffs):
            folder = copy_script(tmp_path, script, *edits_of(diff))
            compile((folder / f"{script}.py").read_text(), script, "exec")


# ------------------------------------------------------------ Same weights on 1, 2 and 3 processes

NET = "nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 10))"
SGD = "    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)\n"
DATA = """
FIRST, EPOCHS = 0, 2  # the first label that counts

def data(n):
    random = torch.Generator().manual_seed(n)
    images = torch.randn(n, 3, 4, 4, generator=random, dtype=torch.float64)
    labels = torch.randint(10, (n,), generator=random)
    return torch.utils.data.TensorDataset(images, labels.where(labels >= FIRST, -100))
"""
# Edits to run minimal/ddp.py on the CPU, in float64, with small generated images.
SMALL_MINIMAL = [
    ("range(10)", "range(EPOCHS)"),
    define(DATA),
    ('torch.device("cuda", local_rank)', 'torch.device("cpu")'),
    ("    torch.cuda.set_device(device)\n", ""),
    ('"nccl", device_id=device', '"gloo"'),
    at(line("    train_set ="), "train_set = data(60)\n"),
    at(line("    val_set ="), "val_set = data(61)\n"),
    ("batch_size=512, sampler=sampler, num_workers=8", "batch_size=12 // world_size, sampler=sampler"),
    ("batch_size=512, num_workers=8", "batch_size=12"),
    at(line("model = models", 3), f"model = {NET}.double()\n"),
    (line("optimizer = "), SGD),  # AdamW would not see a wrong factor
]
LOOP, LOSS, STEP = line("in train_loader", 2), line("loss = nn"), line("optimizer.zero_grad", 3)
SAMPLER, OUR_SAMPLER = line("= DistributedSampler"), ours("= DistributedSampler")
WRAPPED, WEIGHTS = line("= DDP"), line(r"weights = \[")
NO_ACCURACY = at(line(r"correct \+="), "pass\n")

mean_over_all, mean_of_labels, mean_of_weights = parts("Padding")
SOME_LABELLED = ("FIRST, EPOCHS = 0", "FIRST, EPOCHS = 4")
OF_CLASSES = [SOME_LABELLED, define("class_weights = torch.arange(1, 11).double()\n", mean_over_all)]
ordinary_weights = at(LOSS, LOSS.strip().replace("labels)", "labels, class_weights)\n"))
OURS_LABELLED = after(ours(r"tensor.to\(device"), "labels[labels < 4] = -100\n")

gather, simclr = parts("Contrastive losses")
simclr = "view_1, view_2 = images, images.flip(1)\n" + simclr.replace("/ 0.1", "* model.scale")
ordinary_simclr = """outputs = ddp_model(torch.cat([images, images.flip(1)]))
first, second = nn.functional.normalize(outputs).chunk(2)
scores = first @ second.T * model.scale
loss = -(scores.log_softmax(0) + scores.log_softmax(1)).diagonal().mean()
"""
SCALE = before(SGD, "model.scale = nn.Parameter(torch.ones((), device=device).double())\n")

sampler, use_of_sampler = parts("Weighted sampling")
read = """
def read(epoch):
    yield from (data(60)[i] for i in torch.randperm(60, generator=torch.Generator().manual_seed(epoch)))
"""
OF_STREAM = [
    define(code("IterableDataset"), read),
    at(SAMPLER, "train_set = Stream(read, 60)\n"),
    ("world_size, sampler=sampler", "world_size, drop_last=True"),
    ("sampler.set_epoch(epoch)", inline("IterableDataset", "In step 4")[-4]),
]
two_parts = code("Shorter epochs").replace("= 4", "= 2")
OUR_PARTS = (OUR_SAMPLER, OUR_SAMPLER.replace("Distributed", "Part"))
COUNT_FROM_0 = ("sampler.set_epoch(epoch)", inline("Shorter epochs", "For a job")[-1])

groups = code("Gradient accumulation")
count = "\n    count = sum((labels != -100).sum() for _, labels in group).to(device)"
count += "\n    dist.all_reduce(count)"
of_padded = edited(
    groups,
    ("\n    optimizer.zero_grad()", f"{count}\n    optimizer.zero_grad()"),
    ("labels.to(device))\n", 'labels.to(device), reduction="sum")\n'),
    ("loss / len(group)", inline("Gradient accumulation", "With [padding]")[-1].replace("loss_sum", "loss")),
)
LARGE_BATCH = ("batch_size=12 //", "batch_size=48 //")

wrap, weights_of_both, gan = parts("GANs")
gan = gan.replace("torch.randn(len(images), 64, device=device)", "nn.functional.pad(images.flatten(1), (0, 16))")
penalty = f"""mixed = (images + fakes.detach()).requires_grad_()
(gradient,) = {inline("GANs", "**A gradient penalty**")[0]}
loss_d = loss_d + 10 * (gradient.flatten(1).norm(dim=1) - 1).square().mean()
optimizer_d.zero_grad()"""
two_models = """generator = nn.Sequential(nn.Linear(64, 48), nn.Unflatten(1, (3, 4, 4))).double()
discriminator = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 1)).double()
model = nn.Sequential(generator, discriminator).to(device)
optimizer, optimizer_d = (torch.optim.SGD(part.parameters(), 0.1) for part in model)
"""
OF_GAN = [at(SGD, two_models), at(WEIGHTS, weights_of_both), NO_ACCURACY]
OF_GAN.append(at(LOSS + STEP, edited(gan, ("optimizer_d.zero_grad()", penalty))))
forward, value, call = inline("GANs", "**Methods other than forward**")[1:4]
methods = f"""class Model(nn.Sequential):
    def {forward}:
        return {value}

    def training_loss(self, images):
        return super().forward(images).square().mean()
"""
OF_METHODS = [define(methods), (NET, NET.replace("nn.Sequential", "Model")), NO_ACCURACY]

codes = indent(code("Buffers of your own"), " " * 8)


def codebook(forward):
    """Return edits of minimal/ddp.py: a layer of the model is a codebook with this code in `forward`."""
    layer = f"""class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 8))
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())
        self.codes[4], self.counts[4], self.sums[4] = 100, 0, 0  # this code is never chosen

    def forward(self, vectors):
{forward}        return outputs
"""
    return [define(layer), (NET, NET.replace("nn.Tanh()", "Codebook()"))]


recurrent = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(9, 8), nn.GRU(8, 8), nn.Linear(8, 9)

    def forward(self, tokens, hidden):
        outputs, hidden = self.rnn(self.embedding(tokens), hidden)
        return self.head(outputs), hidden

torch.manual_seed(1)
device, model, tokens = "cpu", Model().double(), torch.randint(9, (60 * 80 + 7,))
ddp_model, optimizer = DDP(model), torch.optim.SGD(model.parameters(), 0.1, 0.9)
{code("Recurrent models").replace("range(10)", "range(2)")}
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
"""
ordinary_recurrent = edited(  # of one process
    recurrent,
    (line("columns = tok", 2, recurrent), "columns = torch.stack(tokens[:4800].split(80), 1).to(device)\n"),
    at(line("targets = ", 1, recurrent), "inputs, targets = columns[start:][:35], columns[start + 1 :][:35]\n"),
    at(line("scores, hidden", 1, recurrent), "scores, hidden = model(inputs, hidden)\n"),
)

normalise, seeds, stop = parts("Reinforcement learning")
reinforce = f"""{normalise}{seeds}
rewards = [torch.rand(50, generator=torch.Generator().manual_seed(seed)).double() for seed in seeds]
advantages = normalise(torch.stack(rewards))
approx_kl, target_kl = advantages[:, 0].mean(), 1
for _ in range(1):
{indent(stop, "    ")}
advantages_of_all = [None] * world_size
dist.all_gather_object(advantages_of_all, advantages.cpu())
if rank == 0:
    torch.save(dict(advantages=torch.cat(advantages_of_all), approx_kl=approx_kl), "model.pt")
"""
normalise_alone = "def normalise(values):\n    return (values - values.mean()) / (values.std() + 1e-8)\n"

# Name: script, edits of the ordinary code for one process (None: there is none), edits of the recipe.
SAME = {
    "padding": ("minimal", [SOME_LABELLED], [SOME_LABELLED, define(mean_over_all), at(LOSS, mean_of_labels)]),
    "class weights": ("minimal", [*OF_CLASSES, ordinary_weights], [*OF_CLASSES, at(LOSS, mean_of_weights)]),
    "padding in our scripts": (
        "ddp_launch_train",
        [OURS_LABELLED],
        [OURS_LABELLED, functions(mean_over_all), *edits_of(code("Padding", 1))],
    ),
    "SimCLR": ("minimal", [SCALE, at(LOSS, ordinary_simclr)], [SCALE, define(gather), at(LOSS, simclr)]),
    "weighted sampling": ("minimal", None, [define(sampler), at(SAMPLER, use_of_sampler)]),
    "in our scripts": ("ddp_launch_train", None, [functions(sampler), at(OUR_SAMPLER, use_of_sampler)]),
    "IterableDataset": ("minimal", None, OF_STREAM),
    "shorter epochs": ("minimal", None, [define(two_parts), (SAMPLER, SAMPLER.replace("Distributed", "Part"))]),
    "parts in our scripts": (
        "ddp_launch_train",
        [functions(two_parts), OUR_PARTS, ("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch - 1)")],
        [functions(two_parts), OUR_PARTS, COUNT_FROM_0],
    ),
    "recurrent model": ("program", ordinary_recurrent, recurrent),
    "reinforcement learning": ("program", edited(reinforce, (normalise, normalise_alone)), reinforce),
    "GAN": ("minimal", [*OF_GAN, at(WRAPPED, wrap.replace("DDP(", "("))], [*OF_GAN, at(WRAPPED, wrap)]),
    "methods": (
        "minimal",
        [*OF_METHODS, at(LOSS, "loss = model.training_loss(images)\n")],
        [*OF_METHODS, at(LOSS, f"loss = {call}\n")],
    ),
    "codebook": ("minimal", codebook(re.sub(".*all_reduce.*\n", "", codes)), codebook(codes)),
    "groups of batches": ("minimal", [LARGE_BATCH], [at(LOOP + LOSS + STEP, groups)]),
    "groups of padded batches": (
        "minimal",
        [LARGE_BATCH, SOME_LABELLED],
        [SOME_LABELLED, at(LOOP + LOSS + STEP, of_padded)],
    ),
    "parts of a batch": ("ddp_launch_train", [], edits_of(code("Gradient accumulation", 1))),
}
# The ordinary code, too:
RIGHT_ON_TWO = ["parts in our scripts", "recurrent model", "groups of batches", "parts of a batch"]


def train_on(nproc, folder, script, edits):
    """Train an edited script from new. Return how the run ended, and its weights (None if it failed)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if script == "ddp_launch_train":
        copy_script(folder, script, *edits, *FLOAT64)
        finished = train(folder, nproc, "--batch-size", "18")
        return finished, None if finished.returncode else torch.load(folder / "run.pt")["model"]
    if script == "program":
        return in_group(nproc, folder, edits), torch.load(folder / "model.pt")
    (folder / "ddp.py").write_text(edited(MINIMAL, *SMALL_MINIMAL, *edits))
    finished = in_processes(nproc, folder, "ddp.py")
    return finished, None if finished.returncode else torch.load(folder / "model.pt")


def equal(weights, expected):
    """Return whether weights are the same but for rounding, in float64."""
    return all(torch.allclose(weights[name], expected[name], rtol=1e-12, atol=1e-12) for name in expected)


@pytest.mark.parametrize("name", SAME)
def test_1_2_and_3_processes_end_with_the_same_weights(name, tmp_path):
    script, ordinary, recipe = SAME[name]
    _, expected = train_on(1, tmp_path / "run", script, recipe if ordinary is None else ordinary)
    for nproc in (2, 3) if ordinary is None else (1, 2, 3):
        assert equal(train_on(nproc, tmp_path / "run", script, recipe)[1], expected), nproc
    if ordinary is not None and name not in RIGHT_ON_TWO:
        _, weights = train_on(2, tmp_path / "run", script, ordinary)
        assert weights is None or not equal(weights, expected)  # so the recipe is needed


# ------------------------------------------------------------ Detectors

DETECTORS = """
import torchvision.models.detection as detection

torch.manual_seed(1)
backbone = nn.Conv2d(3, 32, 3, stride=8, padding=1)
backbone.out_channels = 32
anchors = detection.anchor_utils.AnchorGenerator(((8,),), ((1.0,),))

def fcos_model():
    return fcos.FCOS(backbone, 3, anchor_generator=anchors, head=Head(32, 1, 3))

def mask_rcnn():  # that takes 4 and 8 samples of each image
    options = dict(rpn_batch_size_per_image=4, box_batch_size_per_image=8, box_positive_fraction=0.9)
    options["mask_head"] = detection.mask_rcnn.MaskRCNNHeads(32, (256,), 1)
    return detection.MaskRCNN(backbone, 3, rpn_anchor_generator=anchors, **options)

model = MODEL().double()
FIXED_SIZE
images, corners = torch.rand(6, 3, 96, 96).double(), 50 * torch.rand(6, 4, 2).double()
boxes, masks = torch.cat([corners, corners + 30], 2), images[:, :1].repeat(1, 4, 1, 1).round().byte()
targets = [dict(boxes=box[:n], masks=mask[:n], labels=torch.tensor([1, 2, 1, 2])[:n])
           for box, mask, n in zip(boxes, masks, NUMBERS)]
ddp_model = DDP(model)
sum(ddp_model(list(images[rank::world_size]), targets[rank::world_size]).values()).backward()
if rank == 0:
    torch.save(dict(gradient=torch.cat([weight.grad.flatten() for weight in model.parameters()])), "model.pt")
"""


@pytest.mark.parametrize("model, numbers", [("fcos_model", [0, 2, 4, 0, 2, 1]), ("mask_rcnn", [1, 4, 1, 4, 2, 4])])
def test_detectors_have_the_gradient_of_one_process(model, numbers, tmp_path):
    fixed_size, _, same_samples = inline("Padding", "To check the gradient")[-3:]
    program = DETECTORS.replace("FIXED_SIZE", fixed_size).replace("MODEL", model).replace("NUMBERS", str(numbers))
    recipe = f"{mean_over_all}{code('Padding', 2)}torch.randperm = {same_samples}\n{program}"
    mean_alone = "def mean_over_all(loss_sum, count):\n    return loss_sum / count.clamp(min=1)\n"
    ordinary = edited(recipe, (mean_over_all, mean_alone))
    _, expected = train_on(1, tmp_path / "run", "program", ordinary)
    for nproc in 1, 2, 3:
        assert equal(train_on(nproc, tmp_path / "run", "program", recipe)[1], expected), nproc
    assert not equal(train_on(2, tmp_path / "run", "program", ordinary)[1], expected)


# ------------------------------------------------------------ Data, metrics and schedules


def test_the_parts_for_training_and_validation_are_the_same_after_other_random_numbers():
    indices = []
    for _ in range(2):
        scope = dict(torch=torch, data=range(61))
        exec(code("A part for validation"), scope)
        indices.append([scope["train_set"].indices, scope["val_set"].indices])
    assert indices[0] == indices[1] and len(indices[0][1]) == 6
    assert sorted(sum(indices[0], [])) == list(range(61))


def test_all_classes_are_drawn_equally_often_and_each_item_comes_once_in_the_shorter_epochs(tmp_path):
    _, names = launch_with(tmp_path, functions(sampler, code("Shorter epochs")))
    labels = torch.tensor([0] * 900 + [1] * 100 + [2])
    scope = names | dict(train_set=[(None, label) for label in labels])
    exec(use_of_sampler.replace("seed=21", "1, 0, seed=21"), scope)  # of one process
    first = [*scope["sampler"]]
    scope["sampler"].set_epoch(1)
    assert all(270 < count < 400 for count in labels[first].bincount()) and first != [*scope["sampler"]]
    drawn = []
    for epoch in range(8):
        ranks = [names["PartSampler"](range(64), 2, rank, drop_last=True) for rank in (0, 1)]
        for rank in ranks:
            rank.set_epoch(epoch)
        drawn.append([*ranks[0], *ranks[1]])
    assert sorted(sum(drawn[:4], [])) == sorted(sum(drawn[4:], [])) == [*range(64)] and drawn[0] != drawn[4]


def test_a_stream_with_workers_trains_on_no_item_twice(tmp_path):
    own = f"{read}\ndef load_data(args):\n    return Stream(read, 71), common.load_cifar10('', 71)[1]\n"
    own = own.replace("data(60)[i]", "(torch.full((4, 4, 3), i, dtype=torch.uint8), 0)").replace("(60,", "(71,")
    say = before(ours("optimizer.zero_grad"), "print('EPOCH', epoch, batch[0][:, 0, 0, 0].tolist(), force=True)\n")
    stream = functions(code("IterableDataset"), own)
    copy_script(tmp_path, "ddp_launch_train", *edits_of(code("IterableDataset", 1)), stream, say, *FLOAT64)
    finished = train(tmp_path, 2, "--workers", "2")
    for epoch in "12":
        batches = [ast.literal_eval(batch) for batch in re.findall(f"EPOCH {epoch} (.*)", finished.stdout)]
        assert len(batches) == 2 * torch.load(tmp_path / "run.pt")["flags"]["steps"]
        assert len(set(sum(batches, []))) == 48  # of 71: each of four workers has two batches of six items
    epochs = [re.findall(f"EPOCH {epoch} (.*)", finished.stdout) for epoch in "12"]
    assert not set(epochs[0]) & set(epochs[1])


def test_a_model_learns_padded_texts(tmp_path):
    own = """
def load_data(args):
    tokens = torch.tensor(list(b"abcdefgh" * 400)).view(-1, 20)
    labels = tokens[:, 1:].clone()
    labels[torch.arange(19) > torch.arange(len(tokens))[:, None] % 19] = IGNORED  # from none to all but one
    return [torch.utils.data.TensorDataset(tokens[i : i + 80, :-1], labels[i : i + 80]) for i in (0, 80)]

def build_model(args):
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
"""
    edits = *edits_of(code("Texts"), code("Padding", 1)), functions(mean_over_all, own)
    folder, _ = launch_with(tmp_path, *edits)
    metrics = result(train(folder, 2, "--lr", "0.1"))
    assert metrics["val_accuracy"] > 0.95 and metrics["val_loss"] < 1  # of the half of the labels that counts


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a folder: train/ and val/ have images in images/ and their masks in masks/, of any size."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(1)
    for number, split in itertools.product(range(30), ("train", "val")):
        image = random.integers(256, size=(*random.integers(5, 13, 2), 3), dtype=np.uint8)
        mask = image[..., 0] // 86  # the class of a pixel is its red
        mask[: number % 7] = 255  # none in mask 0
        for path, pixels in {f"images/{number:02}": image, f"masks/{number:02}": mask}.items():
            (folder / split / path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / split / f"{path}.png")
    return folder


def test_masks_have_the_crop_of_their_image(images, tmp_path):
    added = functions("IGNORED = 255", code("Images with masks"))
    _, names = launch_with(tmp_path, *edits_of(code("Images with masks", 1), code("Padding", 1)), added)
    for dataset, size in zip(names["load_data"](Namespace(data_dir=images, image_size=8)), (8, 512)):
        for image, mask in dataset:
            known = mask != 255
            assert image.dtype == torch.uint8 and image.shape == (size, size, 3) and mask.shape == (size, size)
            assert torch.equal(mask[known], image[..., 0][known] // 86)
    assert known.sum() == (np.asarray(Image.open(images / "val/masks/29.png")) != 255).sum()  # none is cut off
    args = Namespace(image_size=8, pretrained=None, precision="fp32")
    batch = image[None], mask[None]  # the outputs of this "model" are its inputs: scores of three classes
    loss, outputs, _ = names["compute_loss"](args, torch.nn.Identity(), batch, torch.device("cpu"), training=False)
    assert torch.equal(outputs, common.prepare(image[None], None)) and loss.isfinite()


def test_gathered_rows_are_those_of_the_dataset_in_its_order(tmp_path):
    gather_rows, use = parts("AUC")
    share = "scores, labels = torch.arange(14).view(7, 2)[rank::3], torch.arange(7)[rank::3]\n"
    say = "\nprint(f'{scores.flatten().tolist()}{labels.tolist()}\\n', end='')"
    printed = in_group(3, tmp_path / "own", f"{gather_rows}{share}{use}{say}")
    assert printed.splitlines() == [f"{[*range(14)]}{[*range(7)]}"] * 3
    own = """
@torch.no_grad()
def validate(args, model, loader, device):
    return torch.cat([compute_loss(args, model.eval(), batch, device, False)[1] for batch in loader])

def metrics_from(rows):
    torch.save(rows, f"rows{dist.get_rank()}.pt")
    return dict(val_accuracy=0.0)
"""
    edits = *edits_of(code("AUC", 1)), functions(gather_rows, own), *FLOAT64
    folder, names = launch_with(tmp_path / "ours", *edits)
    assert result(train(folder, 3, "--epochs", "1"))
    model, (images, _) = names["build_model"](None), common.load_cifar10(None, 61)[1].tensors
    model.load_state_dict(torch.load(folder / "run.pt.best"))
    for rank in range(3):
        expected = model(common.prepare(images, 4).double())
        torch.testing.assert_close(torch.load(folder / f"rows{rank}.pt"), expected)


def test_early_stopping_stops_all_ranks_in_one_epoch_and_trains_no_more(tmp_path):
    end = line("    dist.destroy")
    own = [("EPOCHS = 0, 2", "EPOCHS = 0, 20"), before("    for epoch", "best, bad_epochs = 0, 0\n")]
    own += [("0.1, 0.9", "1e-12"), (end, indent(code("Early stopping"), " " * 8) + end)]
    finished, _ = train_on(2, tmp_path / "own", "minimal", own)
    assert finished.returncode == 0 and finished.stdout.count("accuracy") == 6
    say = before(ours("result = dict"), "print('END', epoch, scheduler.get_last_lr(), force=True)\n")
    plateau, step = re.search("# (.*): (.*)", code("Schedules per epoch")).groups()
    own = f"def build_scheduler(args, optimizer, total_steps):\n    return torch.optim.lr_scheduler.{plateau}\n"
    own = own.replace('"max"', '"max", patience=2')
    per_epoch = code("Schedules per epoch").replace("scheduler.step()  #", f"{step}  #")
    diffs = edits_of(per_epoch, code("Early stopping", 1))
    copy_script(tmp_path / "ours", "ddp_launch_train", *diffs, functions(own), say, *FLOAT64)
    flags = ["--lr", "1e-6", "--epochs", "20"]  # so small a rate does not change the accuracy
    finished = train(tmp_path / "ours", 2, *flags)
    assert re.findall(r"END (\d+) \[(\S+)\]", finished.stdout) == [("7", "1e-07")] * 2
    again = train(tmp_path / "ours", 2, *flags)
    assert result(again) == result(finished) and "\nepoch" not in again.stdout


# ------------------------------------------------------------ What resumes


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """Train with five recipes: an uninterrupted run, and one killed while it saves epoch 2, and resumed."""
    cosine = "\ndef build_scheduler(args, optimizer, total_steps):\n    return {}\n"
    cosine = cosine.format(inline("Schedules per epoch", "Our scripts call")[-1])
    say = "print('EMA', [*ema.state_dict().values()], force=True)\n"
    imports, before_step_5, after_step, in_step_8 = [part.replace("0.999", "0.9") for part in parts("EMA")]
    edits = [
        before(ours("stateful = "), before_step_5),
        after(ours("    optimizer.step"), after_step),
        before(ours("val_sums = validate"), in_step_8, say),
        *edits_of(code("EMA", 1), code("Schedules per epoch"), code("TensorBoard")),
        functions(code("Images in folders"), imports, cosine),
        SMALL_MODEL,
    ]
    save = '    torch.save(state, f"{path}.tmp")\n'
    kill = (save, f"    if state.get('epoch') == 2: os.kill(os.getpid(), 9)\n{save}")
    folders = [tmp_path_factory.mktemp(name) for name in ("uninterrupted", "killed")]
    flags = ["--data-dir", str(images), "--workers", "1", "--lr", "0.1", "--epochs", "3"]
    finished = train(copy_script(folders[0], "ddp_launch_train", *edits), 2, *flags)
    assert train(copy_script(folders[1], "ddp_launch_train", *edits, kill), 2, *flags).returncode != 0
    shutil.copytree(folders[1] / "run.pt.tensorboard", folders[1] / "of the killed run")
    shutil.copy(folders[0] / "ddp_launch_train.py", folders[1])
    resumed = train(folders[1], 2, *flags)
    assert ": 1 epochs are done" in resumed.stdout
    return *folders, finished, resumed


def test_ema_and_a_schedule_per_epoch_resume_like_an_uninterrupted_run(runs):
    uninterrupted, killed, finished, resumed = runs
    assert result(resumed) and saved_by(killed) == saved_by(uninterrupted)
    lines = sorted(re.findall(r"EMA \[.*?\)\]", finished.stdout, re.S))
    assert len(lines) == 6 and lines[::2] == lines[1::2] and len(set(lines)) == 3  # of 3 epochs, on 2 ranks
    state, best = (torch.load(uninterrupted / name) for name in ("run.pt", "run.pt.best"))
    assert state["ema"]["n_averaged"] == state["flags"]["steps"] * 3 and state["scheduler"]["T_max"] == 3
    assert not torch.equal(state["ema"]["module.1.running_mean"], state["model"]["1.running_mean"])
    assert not torch.equal(best["0.weight"], state["model"]["0.weight"])


def test_the_best_weights_give_the_best_metrics_of_the_run(runs):
    folder, _, finished, _ = runs
    images = "images = torch.stack([torch.from_numpy(image) for image, _ in val_set])\n"
    evaluate, infer = parts("Best weights: evaluation and inference")
    accuracy = "print((classes == torch.tensor(val_set.targets)).sum() / len(val_set))"
    (folder / "evaluate.py").write_text(f"{evaluate}{images}{infer}{accuracy}")
    evaluated, accuracy = in_processes(0, folder, "evaluate.py").stdout.splitlines()
    best = result(finished)["best"]
    assert ast.literal_eval(evaluated)["val_accuracy"] == pytest.approx(best)
    assert best > 0.6 and f"tensor({best:.4f})" == accuracy  # of two classes


def test_tensorboard_shows_each_epoch_once_after_a_kill_and_a_resume(runs):
    _, killed, _, resumed = runs

    def points(folder):
        events = EventAccumulator(str(folder)).Reload()
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars("val_loss")]

    assert [step for step, _ in points(killed / "of the killed run")] == [1, 2]  # epoch 2 was written, not saved
    steps, losses = zip(*points(killed / "run.pt.tensorboard"))
    assert steps == (1, 2, 3) and losses[-1] == result(resumed)["val_loss"]


def test_a_program_starts_processes_that_find_each_other(tmp_path):
    gpus = {'torch.device("cuda", rank)': '"cpu"', "    torch.cuda.set_device(device)\n": ""}
    gpus |= {", device_id=device": "", '"nccl"': '"gloo"', "torch.cuda.device_count()": "2"}
    say = "    dist.barrier()\n    print(rank, dist.get_world_size(), flush=True)\n\nif __name__"
    program = edited(code("Start from Python"), *gpus.items(), ("\nif __name__", say))
    (tmp_path / "program.py").write_text(f"import torch\nimport torch.distributed as dist\n{program}")
    finished = run([sys.executable, "program.py"], cwd=tmp_path, PYTHONUNBUFFERED="")
    assert sorted(finished.stdout.splitlines()) == ["0 2", "1 2"], finished.stderr


def test_torchrun_writes_a_log_for_each_rank_and_restarts_a_run_that_was_killed(tmp_path):
    uninterrupted = copy_script(tmp_path / "uninterrupted", "ddp_launch_train", SMALL_MODEL)
    assert result(train(uninterrupted, 2))
    once = "if rank == 1 and epoch == step == 2 and not os.path.exists('killed'):\n"
    kill = "    open('killed', 'w').close(), os.kill(os.getpid(), 9)\n"
    kill = after(ours("    scheduler.step"), once, kill)
    folder = copy_script(tmp_path / "killed", "ddp_launch_train", SMALL_MODEL, kill)
    command = " ".join([block("restarts").strip().replace("per-node=gpu", "per-node=2"), *SMALL])
    finished = run(["bash", "-c", command], cwd=folder, PATH=f"{sys.prefix}/bin:{os.environ['PATH']}")
    assert ": 0 epochs are done" in finished.stdout and ": 1 epochs are done" in finished.stdout
    for attempt, rank in itertools.product((0, 1), (0, 1)):
        [log] = folder.glob(f"logs/*/attempt_{attempt}/{rank}/stdout.log")
        assert f"rank {rank}: process" in log.read_text()
    assert finished.returncode == 0 and saved_by(folder) == saved_by(uninterrupted)
