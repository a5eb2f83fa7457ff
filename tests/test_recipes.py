"""RECIPES.md: each block runs in one of our scripts, in minimal/ddp.py or in a small program."""

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
from conftest import SMALL, in_group, in_processes, result, run, saved_by, train, train_minimal
from editing import FLOAT64, KILLED_IN_EPOCH_2, ROOT, SCRIPTS, SMALL_MODEL, copy_script, edited
from pages import LAUNCH, after, at, before, block, edits_of, line, parts
from PIL import Image
from torchmetrics.functional.classification import multiclass_f1_score

import common

PAGE = (ROOT / "RECIPES.md").read_text()


def functions(*codes):
    """Return an edit that adds functions at the end of a script, where they replace those of the same name."""
    return "\nif __name__", "\n".join(["", *codes, "\nif __name__"])


# The scripts that a diff fits. Other diffs fit all scripts with DDP.
FITS = dict.fromkeys(["F1 in our scripts", "schedule per epoch", "our early stopping"], SCRIPTS)
FITS["apex ddp"] = SCRIPTS[3:]


def test_each_block_is_tested_each_diff_fits_its_scripts_and_the_index_links_to_each_recipe(tmp_path):
    blocks = re.findall(r"<!-- test: (.*?) -->\n```(\w+)\n", PAGE)
    tests = "".join(file.read_text() for file in (ROOT / "tests").glob("*.py"))
    assert len(blocks) == len(dict(blocks)) == PAGE.count("\n```") / 2
    assert all(f'"{name}"' in tests for name, _ in blocks)
    for name in [name for name, language in blocks if language == "diff"]:
        for script in FITS.get(name, SCRIPTS[1:]):
            folder = copy_script(tmp_path, script, *edits_of(block(name)))
            compile((folder / f"{script}.py").read_text(), script, "exec")
    titles = re.findall("(?m)^## (.*)", PAGE)
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    assert re.findall(r"\(#(.*?)\)", PAGE.split("\n## ")[0]) == anchors
    assert set(re.findall(r"\(#(.*?)\)", PAGE)) <= set(anchors)


LOSS_PROGRAM = """
torch.set_default_dtype(torch.float64)
device, mine, class_weights = "cpu", slice(rank, None, world_size), torch.tensor([1.0, 5.0, 0.2, 3.0])
results = {}
for name, case in CASES.items():
    torch.manual_seed(1)
    scope = dict(globals())
    exec(case, scope)
    weights, losses = list(scope["model"].parameters()), [None] * world_size
    if all(weight.grad is None for weight in weights):
        scope["loss"].backward()
    dist.all_gather_object(losses, scope["loss"].item())
    results[name] = torch.cat([weight.grad.flatten() for weight in weights]), losses
if rank == 0:
    torch.save(results, "results.pt")
"""
ROWS = """
model, images, labels = nn.Linear(6, 4), torch.randn(12, 6)[mine], torch.randint(4, (12,))[mine]
ddp_model = DDP(model)
"""
PIXELS = """
model, images, labels = nn.Conv2d(5, 4, 1), torch.randn(12, 5, 2, 3), torch.randint(4, (12, 2, 3))
labels[:2] = labels[torch.rand(labels.shape) < 0.3] = -100
images, labels, ddp_model = images[mine], labels[mine], DDP(model)
"""
weighted = "loss = nn.functional.cross_entropy(ddp_model(images), labels, class_weights)\n"
sums_of_weights, sums_of_dice = parts("by sums")
SHARES = f"""{PIXELS}
probabilities = ddp_model(images).softmax(1)
targets = nn.functional.one_hot(labels.clamp(min=0), 4).permute(0, 3, 1, 2)
"""
dice = """overlap, area = (x.sum((0, 2, 3)) for x in (probabilities * targets, probabilities + targets))
loss = 1 - (2 * overlap / area).mean()
"""
VIEWS = f"{ROWS}view_1, view_2 = images, images.flip(1)\n"
views = """first, second = nn.functional.normalize(ddp_model(torch.cat([view_1, view_2]))).chunk(2)
scores = 10 * first @ second.T
loss = -(scores.log_softmax(0) + scores.log_softmax(1)).diagonal().mean()
"""
ADVANTAGES = f"{ROWS}advantages = images.square().sum(1)\n"
normalise = "advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)\n"
POLICY = "loss = -(advantages * ddp_model(images)[:, 0]).mean()\n"
CODEBOOK = f"{ROWS}vectors, chosen = images, nn.functional.one_hot(labels, 4).double()\n"
codebook = "counts, sums = chosen.sum(0), chosen.T @ vectors\n"
NEAREST = "loss = (ddp_model(images) - (chosen @ (sums / counts.clamp(min=1)[:, None]))[:, :4]).square().mean()\n"
GROUPS = f"""{PIXELS}
train_loader, optimizer = list(zip(images.chunk(2), labels.chunk(2))), torch.optim.SGD(model.parameters(), 0.0)
"""
groups = f"for images, labels in train_loader:\n    {weighted}    (loss / 2).backward()"
of_groups = line("loss = ", 1, block("accumulation"))
forward, call = block("methods").split("\n\n")
METHODS = f"""
class Model(nn.Linear):
{indent(forward, "    ")}

    def training_loss(self, images):
        return super().forward(images).square().mean()
{ROWS.replace("nn.Linear", "Model")}
"""
BOXES = f"{ROWS}matched = torch.arange(12)[mine] % 2 == 1\ncount = matched.sum()\n"  # rank 0 of 2: none
boxes = "loss = ddp_model(images)[matched].square().sum() / count.clamp(min=1)\n"
# Name: what stands before both, the ordinary code for one process, the recipe.
LOSSES = {
    "class weights, gathered": (PIXELS, weighted, block("gathered")),
    "class weights, by sums": (PIXELS, weighted, sums_of_weights),
    "Dice": (SHARES, dice, sums_of_dice),
    "two views": (VIEWS, views, block("views")),
    "advantages": (ADVANTAGES, normalise + POLICY, block("reinforcement learning") + POLICY),
    "codebook": (CODEBOOK, codebook + NEAREST, block("codebook") + NEAREST),
    "accumulated class weights": (GROUPS, groups, edited(block("accumulation"), at(of_groups, block("gathered")))),
    "methods": (METHODS, "loss = model.training_loss(images)", call),
    "boxes": (BOXES, boxes, boxes + block("detectors")),
}
# The losses of the ranks differ: each is that of its own images, or of the last batch of a group.
LOCAL = ["advantages", "codebook", "accumulated class weights", "methods"]


def test_the_gradient_of_each_loss_is_that_of_one_process(tmp_path):
    runs = {}  # (1 for the ordinary code or 2 for the recipe, number of processes): name: gradient and losses
    for number, nproc in (1, 1), (1, 2), (2, 1), (2, 2), (2, 3):
        cases = {name: case[0] + case[number] for name, case in LOSSES.items()}
        in_group(nproc, tmp_path, f"{block('sum over all')}\nCASES = {cases!r}\n{LOSS_PROGRAM}")
        runs[number, nproc] = torch.load(tmp_path / "results.pt")
    for name in LOSSES:
        expected, [loss] = runs[1, 1][name]
        for nproc in 1, 2, 3:
            gradient, losses = runs[2, nproc][name]
            assert (gradient - expected).norm() < 1e-12 * expected.norm(), (name, nproc)
            assert name in LOCAL or losses == pytest.approx([loss] * nproc, rel=1e-12), (name, nproc)
        wrong, _ = runs[1, 2][name]
        assert (wrong - expected).norm() > 1e-3 * expected.norm(), name  # so the recipe is needed


NET = "nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 10))"
SGD = "    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)\n"
# Edits of minimal/ddp.py: float64, and no BatchNorm.
EXACT = [
    functions("torch.set_default_dtype(torch.float64)\n"),
    ("batch_size=512, sampler", "batch_size=12 // world_size, sampler"),
    at(line("model = models"), f"model = {NET}\n"),
    (line("optimizer = "), SGD),  # AdamW would not see a wrong factor
]
LOOP, LOSS, STEP = line("in train_loader", 2), line("loss = nn"), line("optimizer.zero_grad", 3)
SAMPLER, OUR_SAMPLER, WRAPPED = line("= DistributedS"), line("= DistributedS", text=LAUNCH), line("= DDP")
ONE_EPOCH, NO_ACCURACY = ("range(10)", "range(1)"), at(line(r"correct \+="), "pass\n")

# The labels 0 to 3 are ignored, and the others have different weights.
OURS_LABELLED = after(line(r"tensor.to\(device", text=LAUNCH), "labels = labels.where(labels > 3, -100)\n")
weights = "torch.arange(1, 11).double()"
DIFF_OF_WEIGHTS = edits_of(block("weights in our scripts").replace("torch.ones(10)", weights))
OUR_WEIGHTS = [OURS_LABELLED, functions(block("sum over all")), *DIFF_OF_WEIGHTS]
ours_ordinary = OURS_LABELLED, ("outputs.float(), labels)", f"outputs.float(), labels, {weights})")

sampler, use_of_sampler = parts("weighted sampler")
READ = "lambda epoch: (items[i] for i in np.random.default_rng(epoch).permutation(60))"
OF_STREAM = [
    functions("import numpy as np\n", block("stream")),
    at(SAMPLER, f"items = train_set\ntrain_set = Stream({READ}, 60)\n"),
    ("world_size, sampler=sampler", "world_size, drop_last=True"),
    ("sampler.set_epoch(epoch)", "train_set.epoch = epoch"),
]

draws, steps = parts("draws")
loss_and_step = LOSS.strip() + "\n" + re.sub("(?m)^ *", "", STEP)
save = "if rank == 0:\n    torch.save((model.state_dict(), optimizer.state_dict(), steps_done), 'run.pt')\n"
LOAD = """steps_done = 0
if os.path.exists("run.pt"):
    model_state, optimizer_state, steps_done = torch.load("run.pt")
    model.load_state_dict(model_state), optimizer.load_state_dict(optimizer_state)
"""


def by_steps(last, workers="num_workers=0"):
    """Return edits to train to the step `last`, from a checkpoint if there is one."""
    loop = edited(
        steps.replace("20_000", f"{last}"),
        (", 512,", ", 12,"),
        ("num_workers=8", workers),
        at(line(r"\.\.\.  # the loss", 1, steps), loss_and_step),
        (" % 1000", " % 3"),
        at(line(r"\.\.\.  # steps 6", 1, steps), save),
    )
    set_epoch = ("sampler.set_epoch(epoch)", "pass")
    return [functions(draws), before(line("# 4. Wrap"), LOAD), set_epoch, ONE_EPOCH, at(LOOP + LOSS + STEP, loop)]


DRAWN = f"""orders = [torch.randperm(60, generator=torch.Generator().manual_seed(21 + epoch)) for epoch in (0, 1)]
for step in range(7):
    drawn = torch.cat(orders)[12 * step : 12 * (step + 1)]
    images, labels = (torch.stack(part) for part in zip(*(train_set[i] for i in drawn)))
    torch.manual_seed(21 + step)
{indent(loss_and_step, "    ")}"""

LARGE_BATCH = ("batch_size=12 //", "batch_size=48 //")

scaler, scaled_step = (part.replace('"cuda"', '"cpu"').replace("1.0", "0.01") for part in parts("GradScaler"))
scaled_step = scaled_step.replace("outputs.float()", "outputs")
CLIP = after(line("loss.backward"), "nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n")

wrap, weights_of_both, gan = parts("GAN")
gan = gan.replace("torch.randn(len(images), 64, device=device)", "nn.functional.pad(images.flatten(1), (0, 16))")
two_models = """generator = nn.Sequential(nn.Linear(64, 48), nn.Unflatten(1, (3, 4, 4)))
discriminator = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 1))
model = nn.Sequential(generator, discriminator).to(device)
optimizer, optimizer_d = (torch.optim.SGD(part.parameters(), 0.1) for part in model)
"""
OF_GAN = [at(SGD, two_models), at(line("checks.same_weights"), weights_of_both), at(LOSS + STEP, gan), NO_ACCURACY]
# Name: script, edits for the ordinary code of one process (None: there is none), edits for the recipe.
SAME = {
    "padding": ("ddp_launch_train", ours_ordinary, OUR_WEIGHTS),
    "weighted sampling": ("minimal", None, [functions(sampler), at(SAMPLER, use_of_sampler)]),
    "in our scripts": ("ddp_launch_train", None, [functions(sampler), at(OUR_SAMPLER, use_of_sampler)]),
    "IterableDataset": ("minimal", None, OF_STREAM),
    "loop by steps": ("minimal", [ONE_EPOCH, at(LOOP + LOSS + STEP, DRAWN)], by_steps(7)),
    "groups of batches": ("minimal", [LARGE_BATCH], [at(LOOP + LOSS + STEP, block("accumulation"))]),
    "GradScaler": ("minimal", [CLIP], [before("    for epoch", scaler), at(LOSS + STEP, scaled_step)]),
    "GAN": ("minimal", [*OF_GAN, at(WRAPPED, wrap.replace("DDP(", "("))], [*OF_GAN, at(WRAPPED, wrap)]),
}
# The ordinary code is right on two processes, too:
RIGHT_ON_TWO = ["loop by steps", "groups of batches", "GradScaler"]


def train_on(nproc, folder, script, edits, epochs=2):
    """Train an edited script from new. Return how the run ended, and its weights (None if it failed)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if script == "ddp_launch_train":
        copy_script(folder, script, *edits, *FLOAT64)
        finished = train(folder, nproc, "--batch-size", "18")
        return finished, None if finished.returncode else torch.load(folder / "run.pt")["model"]
    finished = train_minimal(nproc, folder, *EXACT, *edits, epochs=epochs, images=60)
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


def test_a_loop_by_steps_resumes_like_an_uninterrupted_run_also_with_workers(tmp_path):
    def weights_of(folder, nproc, edits):
        dropout = ("nn.Tanh()", "nn.Dropout(0.1)")
        assert train_minimal(nproc, tmp_path / folder, *EXACT, dropout, *edits, images=60).returncode == 0
        return torch.load(tmp_path / folder / "model.pt")

    workers = "num_workers=2, multiprocessing_context='fork'"
    expected = weights_of("two", 2, by_steps(7))
    assert not equal(weights_of("resumed", 2, by_steps(3, workers)), expected)
    for _ in "resumed", "finished":
        assert equal(weights_of("resumed", 2, by_steps(7, workers)), expected)


OUTPUTS = """
from torchmetrics.functional.classification import multiclass_f1_score
random, device, model, confusion = torch.Generator().manual_seed(1), "cpu", lambda scores: scores, 0
scores_of_all, labels_of_all = torch.randn(61, 5, generator=random), torch.randint(4, (61,), generator=random)
scores, labels_of_rank = scores_of_all[rank::world_size], labels_of_all[rank::world_size]
for images, labels in zip(scores.split(7), labels_of_rank.split(7)):
"""
SAME_AS_OF_ALL = """
assert abs(f1 - multiclass_f1_score(scores_of_all, labels_of_all, 5, average="macro")) < 1e-5
assert torch.equal(scores, scores_of_all) and torch.equal(labels, labels_of_all)  # in the order of the dataset
"""


def test_f1_the_accuracy_and_gathered_rows_are_those_of_all_images_on_1_2_and_3_processes(tmp_path):
    definitions, update, reduce = parts("confusion")
    gather_rows, use = parts("gather rows")
    program = f"{gather_rows}{definitions}{OUTPUTS}{indent(update, '    ')}{reduce}labels = labels_of_rank\n"
    in_group(3, tmp_path / "own", f"{program}{use}{SAME_AS_OF_ALL}")
    edits = [*OUR_WEIGHTS, *edits_of(block("F1 in our scripts")), functions(definitions), *FLOAT64]
    folder, model = copy_script(tmp_path / "ours", "ddp_launch_train", *edits), eval(FLOAT64[0][1], vars(torch))
    images, labels = common.load_cifar10(None, 61)[1].tensors
    images, known = common.prepare(images, 4).double(), labels > 3
    for nproc in 1, 2, 3:
        metrics = result(train(folder, nproc, "--epochs", "1"))
        model.load_state_dict(torch.load(folder / "run.pt")["model"])
        scores, targets = model(images)[known], labels[known]
        loss = torch.nn.functional.cross_entropy(scores, targets, torch.arange(1, 11).double())
        f1 = multiclass_f1_score(scores, targets, 10, average="macro")
        expected = [value.item() for value in (loss, (scores.argmax(1) == targets).double().mean(), f1)]
        assert [metrics[f"val_{name}"] for name in ("loss", "accuracy", "f1")] == pytest.approx(expected, rel=1e-6)
        (folder / "run.pt").unlink()


STAND_INS = """
class wandb:
    init = staticmethod(lambda **settings: print("INIT"))
    log = staticmethod(lambda values, step: print("LOG", values, step))

def tqdm(items, disable):
    print("" if disable else "BAR")
    return items
"""


def test_rank_0_alone_logs_the_loss_of_all_ranks_and_all_ranks_stop_in_one_epoch(tmp_path):
    _, init, loop, add, log = parts("logging")
    end = line("    dist.destroy")
    edits = [functions(STAND_INS), before("    for epoch", "best, bad_epochs = 0, 0\n", init)]
    edits += [before(line("# 7"), log), ("0.1, 0.9", "1e-12")]
    edits += [at(line("in train_loader"), loop), at(line("    optimizer.step"), "optimizer.step()\n", add)]
    edits += [(end, indent(block("early stopping"), " " * 8) + end)]
    losses = []
    for nproc in 1, 2, 3:
        finished, _ = train_on(nproc, tmp_path / "run", "minimal", edits, epochs=9)
        counts = [len(re.findall(f"(?m)^{word}", finished.stdout)) for word in ("INIT", "BAR", "LOG", "epoch")]
        assert finished.returncode == 0 and counts == [1, 6, 6, 6]
        losses += [ast.literal_eval(values)["loss"] for values in re.findall("LOG ({.*}) 5", finished.stdout)]
    assert len(losses) == 3 and losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    copy_script(tmp_path / "ours", "ddp_launch_train", *edits_of(block("our early stopping")), *FLOAT64)
    first, again = (train(tmp_path / "ours", 2, "--lr", "1e-9", "--epochs", "9") for _ in range(2))
    assert first.stdout.count(" train_loss ") == 6 and " train_loss " not in again.stdout
    assert result(first) == result(again)


def test_a_warm_up_rises_and_ends_near_0_and_a_plateau_lowers_the_rate():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    plateau, warm_up = parts("schedules")
    for steps in 1, 100:  # in an epoch
        scope, rates = dict(torch=torch, optimizer=optimizer, train_loader=range(steps)), []
        exec(warm_up, scope)
        for _ in range(10 * steps):
            rates += [optimizer.param_groups[0]["lr"]]
            optimizer.step(), scope["scheduler"].step()
        assert max(rates) == 1 and 0 < rates[-1] < rates[-2] < 3 / steps
    assert rates[0] == 1 / 50 and rates[49:51] == [1, 1]
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    for _ in range(4):
        exec(plateau, dict(scheduler=scheduler, correct=torch.tensor(5), val_set=range(10)))
    assert scheduler.best == 0.5 and scheduler.get_last_lr()[0] < rates[-1] / 10


def test_each_item_is_in_one_part_classes_are_drawn_equally_often_and_each_rank_has_its_columns():
    split, columns = [], []
    for _ in range(2):
        scope = dict(torch=torch, data=range(61))
        exec(block("split"), scope)
        split.append([scope["train_set"].indices, scope["val_set"].indices])
    assert split[0] == split[1] and len(split[0][1]) == 6 and sorted(sum(split[0], [])) == list(range(61))

    labels = torch.tensor([0] * 900 + [1] * 100 + [2])
    scope = vars(torch.utils.data) | dict(torch=torch, train_set=[(None, label) for label in labels])
    exec(edited(block("weighted sampler"), ("seed=21", "1, 0, seed=21")), scope)  # of one process
    first = [*scope["sampler"]]
    scope["sampler"].set_epoch(1)
    assert all(270 < count < 400 for count in labels[first].bincount()) and first != [*scope["sampler"]]

    for rank in range(3):  # of a text
        scope = dict(tokens=torch.arange(487), batch_size=60, rank=rank, world_size=3, device="cpu")
        exec(block("recurrent"), scope)
        columns.append(scope["columns"])
    assert torch.equal(torch.cat(columns, 1).sort(1)[0], torch.arange(480).view(60, 8).T)


def test_a_stream_with_workers_yields_no_item_twice_and_equally_many_on_all_ranks(tmp_path):
    program = f"from torch.utils.data import DataLoader\n{block('stream')}" + """
train_set = Stream(lambda epoch: iter(range(100 * epoch, 100 * epoch + 71)), 71)
loader = DataLoader(train_set, 6, drop_last=True, num_workers=2, multiprocessing_context="fork")
for epoch in 1, 2:
    train_set.epoch = epoch
    print(f"{[batch.tolist() for batch in loader]}\\n", end="")
"""
    ranks = [ast.literal_eval(batches) for batches in in_group(2, tmp_path, program).splitlines()]
    items = [item for batches in ranks for batch in batches for item in batch]
    assert [len(batches) for batches in ranks] == [4] * 4  # of 71: each of four workers has two batches of six
    assert len(set(items)) == len(items) == 96


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


def test_masks_have_the_crop_of_their_image(images):
    names = dict(torch=torch)
    exec(block("masks").replace("224", "8"), names)
    for transform, size in (names["crop_and_flip"], 8), (names["middle"], 512):
        for file in sorted((images / "val/images").iterdir()):
            image, mask = names["load"](file, images / "val/masks" / file.name, transform)
            known = mask != 255
            assert image.dtype == torch.float32 and image.shape == (3, size, size) and mask.shape == (size, size)
            assert torch.equal(mask[known], (255 * image[0]).round().long()[known] // 86)
    assert known.sum() == (np.asarray(Image.open(images / "val/masks/29.png")) != 255).sum()  # none is cut off


def test_ema_and_a_schedule_per_epoch_resume_exactly_and_the_best_weights_give_the_best_metrics(images, tmp_path):
    plateau, step = re.search("# (.*): (.*)", block("schedule per epoch")).groups()
    plateau = f"def build_scheduler(args, optimizer, steps):\n    return torch.optim.lr_scheduler.{plateau}\n"
    per_epoch = block("schedule per epoch").replace("scheduler.step()  #", f"{step}  #")
    say = "print('EMA', [*ema.state_dict().values()], force=True)\n"
    imports, before_step_5, after_step, in_step_8 = [part.replace("0.999", "0.9") for part in parts("EMA")]
    edits = [
        after(line("    optimizer.step", text=LAUNCH), after_step),
        before(line("for buffer in", text=LAUNCH), in_step_8, say),
        before(line("stateful = ", text=LAUNCH), before_step_5),
        after(line("stateful = ", text=LAUNCH), 'stateful["ema"] = ema\n'),
        ("= validate(args, model, ", "= validate(args, ema.module, "),
        ('save_atomically(states["model"]', 'save_atomically(stateful["ema"].module.state_dict()'),
        *edits_of(per_epoch),
        functions(block("image folders"), imports, plateau),
        SMALL_MODEL,
    ]
    flags = ["--data-dir", str(images), "--workers", "1", "--lr", "0.1", "--epochs", "3"]
    folder, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    finished = train(copy_script(folder, "ddp_launch_train", *edits), 2, *flags)
    copy_script(killed, "ddp_launch_train", *edits, KILLED_IN_EPOCH_2)
    assert train(killed, 2, *flags).returncode != 0
    resumed = train(copy_script(killed, "ddp_launch_train", *edits), 2, *flags)
    assert ": 1 epochs are done" in resumed.stdout
    assert result(resumed) and saved_by(killed) == saved_by(folder)

    lines = sorted(re.findall(r"EMA \[.*?\)\]", finished.stdout, re.S))
    assert len(lines) == 6 and lines[::2] == lines[1::2] and len(set(lines)) == 3  # of 3 epochs, on 2 ranks
    state, best = (torch.load(folder / name) for name in ("run.pt", "run.pt.best"))
    assert state["ema"]["n_averaged"] == state["flags"]["steps"] * 3
    assert state["scheduler"]["best"] == result(finished)["best"]
    assert not torch.equal(state["ema"]["module.1.running_mean"], state["model"]["1.running_mean"])
    assert not torch.equal(best["0.weight"], state["model"]["0.weight"])

    images = "images = torch.stack([torch.from_numpy(image) for image, _ in val_set])\n"
    evaluate, infer = parts("evaluation")
    accuracy = "print((classes == torch.tensor(val_set.targets)).sum() / len(val_set))"
    (folder / "evaluate.py").write_text(f"{evaluate}{images}{infer}{accuracy}")
    evaluated, accuracy = in_processes(0, folder, "evaluate.py").stdout.splitlines()
    best = result(finished)["best"]
    assert ast.literal_eval(evaluated)["val_accuracy"] == pytest.approx(best)
    assert best > 0.6 and f"tensor({best:.4f})" == accuracy  # of two classes


def test_torchrun_writes_a_log_for_each_rank_and_restarts_a_run_that_was_killed(tmp_path):
    uninterrupted = copy_script(tmp_path / "uninterrupted", "ddp_launch_train", SMALL_MODEL)
    assert result(train(uninterrupted, 2))
    once = "if rank == 1 and epoch == step == 2 and not os.path.exists('killed'):\n"
    kill = "    open('killed', 'w').close(), os.kill(os.getpid(), 9)\n"
    kill = after(line("    scheduler.step", text=LAUNCH), once, kill)
    folder = copy_script(tmp_path / "killed", "ddp_launch_train", SMALL_MODEL, kill)
    command = " ".join([block("restarts").strip().replace("per-node=gpu", "per-node=2"), *SMALL])
    finished = run(["bash", "-c", command], cwd=folder, PATH=f"{sys.prefix}/bin:{os.environ['PATH']}")
    assert ": 0 epochs are done" in finished.stdout and ": 1 epochs are done" in finished.stdout
    for attempt, rank in itertools.product((0, 1), (0, 1)):
        [log] = folder.glob(f"logs/*/attempt_{attempt}/{rank}/stdout.log")
        assert f"rank {rank}: process" in log.read_text()
    assert finished.returncode == 0 and saved_by(folder) == saved_by(uninterrupted)
