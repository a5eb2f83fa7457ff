"""RECIPES.md: each recipe is copied into a script and run, on the CPU."""

import argparse
import ast
import contextlib
import itertools
import os
import re
import runpy
import shutil
import sys
from argparse import Namespace

import conftest
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import (
    FLOAT64,
    ROOT,
    SCRIPTS,
    SMALL,
    block,
    changes,
    command,
    copy_script,
    in_processes,
    result,
    run,
    saved_by,
    train,
)
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torchmetrics import SumMetric
from torchmetrics.functional import jaccard_index
from torchvision.models.detection import anchor_utils, fcos

import common

ALIKE = dict(rtol=1e-12, atol=1e-12)  # but for rounding, in float64


def functions(*codes):
    """Return a change that adds functions at the end of a script, so that they are used."""
    return "\nif __name__", "\n".join(["", *codes, "\nif __name__"])


def names_of(folder, script="ddp_launch_train"):
    """Return the names that a copied script defines."""
    scope = {}
    exec((folder / f"{script}.py").read_text(), scope)
    return scope


def in_group(nproc, function, folder):
    """Call function(rank, world_size) in `nproc` processes that gloo connects."""

    def connected():
        dist.init_process_group("gloo")
        function(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()

    in_processes(nproc, connected, folder)


def train_on(nprocs, folder, *edits, flags=()):
    """Train a changed script from new on each number of processes, to equal weights. Return results, weights."""
    copy_script(folder, "ddp_launch_train", *edits)
    results, weights = [], []
    for nproc in nprocs:
        (folder / "run.pt").unlink(missing_ok=True)
        results.append(result(train(folder, nproc, *flags)))
        weights.append(torch.load(folder / "run.pt", weights_only=True)["net"])
        torch.testing.assert_close(weights[-1], weights[0], **ALIKE)
        assert results[-1]["train_loss"] == pytest.approx(results[0]["train_loss"], rel=1e-6)  # main uses float32
    return results, weights[0]


def run_shown(name, folder, nproc=2):
    """Run a command of RECIPES.md on the CPU, with the flags of all tests."""
    line = " ".join([block(name).strip().replace("per-node=gpu", f"per-node={nproc}"), *SMALL])
    return run(["bash", "-c", line], cwd=folder, PATH=f"{sys.prefix}/bin:{os.environ['PATH']}")


def test_recipes_fit_the_scripts_that_they_name(tmp_path):
    page, fitted = (ROOT / "RECIPES.md").read_text(), 0
    for names, recipe in re.findall(r"Fits\s(.*?)\.\s(.*?)(?=Fits|\Z)", page, re.S):
        scripts = SCRIPTS if names.startswith("all") else SCRIPTS[1:]
        for diff in re.findall(r"```diff\n(.*?)```", recipe, re.S):
            for script in re.findall(r"`(\w+).py`", names) or scripts:
                folder = copy_script(tmp_path, script, *changes(diff))
                compile((folder / f"{script}.py").read_text(), script, "exec")
            fitted += 1
    assert fitted == page.count("```diff")
    arguments = {}
    for code in [(ROOT / "ddp_launch_train.py").read_text(), *re.findall(r"```python\n(.*?)```", page, re.S)]:
        for part in ast.parse(code).body:
            if isinstance(part, ast.FunctionDef) and part.name != "main":
                count = len(part.args.args)
                assert arguments.setdefault(part.name, count) == count, part.name


def test_the_index_links_to_each_recipe():
    index, *recipes = (ROOT / "RECIPES.md").read_text().split("\n## ")
    titles = [recipe.splitlines()[0] for recipe in recipes]
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    assert sorted(re.findall(r"\(#(.*?)\)", index)) == sorted(anchors)
    assert set(re.findall(r"\(#(.*?)\)", "".join(recipes))) <= set(anchors)


def test_a_part_for_validation_is_the_same_after_other_random_numbers(tmp_path):
    folder = copy_script(tmp_path, "dp_train", functions(block("validation")))
    load_data = names_of(folder, "dp_train")["load_data"]
    args = argparse.Namespace(data_dir="", synthetic=61, seed=21)
    (train_set, val_set), _, (_, again) = load_data(args), torch.rand(1), load_data(args)
    assert again.indices == val_set.indices and len(val_set) == 6 and args.items == 61
    assert sorted(train_set.indices + val_set.indices) == list(range(61))


# ------------------------------------------------------------ Images in folders, and what resumes


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a folder with images of twelve classes, each of its own colour."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(1)
    for number in range(180):
        label = number % 12
        path = folder / ("val" if number % 5 == 0 else "train") / f"class {label:02}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        colour = [200 * (label % 2), 200 * (label // 2 % 2), 60 * (label // 4)]
        Image.fromarray((colour + random.integers(0, 50, (12, 11, 3))).astype(np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """Train with five recipes: an unbroken run, and one that is killed in epoch 2, while it saves, and resumed.

    Return their folders, and what the unbroken and the resumed run printed.
    """
    edits = [functions(block("folders"), block("adamw")), *changes(block("metric"), block("tensorboard"))]
    edits += changes(block("averages").replace("(0.999)", "(0.9)"))
    line = "        val_sums = validate("
    total = "sum(tensor.double().sum().item() for tensor in ema.state_dict().values())"
    edits.append((line, f"        print('AVERAGE', epoch, {total}, force=True)\n{line}"))
    save = '    torch.save(state, f"{path}.tmp")\n'
    kill = (save, f"    if state.get('epoch') == 2: os.kill(os.getpid(), 9)\n{save}")
    unbroken = copy_script(tmp_path_factory.mktemp("unbroken"), "ddp_launch_train", *edits)
    broken = copy_script(tmp_path_factory.mktemp("broken"), "ddp_launch_train", *edits, kill)
    flags = ["--data-dir", str(images), "--batch-size", "24", "--workers", "1", "--lr", "0.004"]
    finished = train(unbroken, 2, *flags)
    with pytest.raises(Exception, match="terminated"):
        train(broken, 2, *flags)
    assert "\nepoch 2 train_loss" in (broken / "log").read_text()
    shutil.copytree(broken / "run.pt.tensorboard", broken / "of the killed run")
    shutil.copy(unbroken / "ddp_launch_train.py", broken)
    resumed = train(broken, 2, *flags)
    assert ": 1 epochs are done" in resumed.stdout
    return unbroken, broken, finished, resumed


def test_images_in_folders_train_a_network_with_a_class_for_each_folder(runs):
    unbroken, _, finished, _ = runs
    assert result(finished)["val_accuracy"] > 2 / 12
    assert torch.load(unbroken / "run.pt.best", weights_only=True)["fc.weight"].shape[0] == 12


def test_adamw_has_a_learning_rate_for_the_last_layer_and_a_tenth_of_it_for_all_others(runs):
    state = torch.load(runs[0] / "run.pt", weights_only=True)
    body, last = state["optimizer"]["param_groups"]
    assert (body["max_lr"], last["max_lr"]) == (pytest.approx(0.0004), 0.004)
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    weights = [name for name in state["net"] if not name.endswith(buffers)]
    assert len(last["params"]) == 2 and len(body["params"]) == len(weights) - 2
    assert state["optimizer"]["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_averages_resume_like_an_unbroken_run_are_equal_on_all_ranks_and_are_the_best_weights(runs):
    unbroken, broken, finished, resumed = runs
    assert result(resumed) and saved_by(broken) == saved_by(unbroken)
    lines = sorted(re.findall("AVERAGE .*", finished.stdout))
    assert len(lines) == 4 and lines[::2] == lines[1::2] and len(set(lines)) == 2  # two epochs, two ranks
    state = torch.load(unbroken / "run.pt", weights_only=True)
    average = {name[7:]: value for name, value in state["ema"].items() if name.startswith("module.")}
    assert state["ema"]["n_averaged"] == 144 // 24 * 2 and average.keys() == state["net"].keys()
    best = torch.load(unbroken / "run.pt.best", weights_only=True)
    if result(finished)["val_top5"] == result(finished)["best"]:
        torch.testing.assert_close(best, average, rtol=0, atol=0)
    assert not torch.equal(best["fc.weight"], state["net"]["fc.weight"])


def test_tensorboard_shows_each_epoch_once_after_a_kill_and_a_resume(runs):
    _, broken, _, resumed = runs

    def points(folder):
        events = EventAccumulator(str(folder)).Reload()
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars("val_loss")]

    assert [step for step, _ in points(broken / "of the killed run")] == [1, 2]  # epoch 2 was written, not saved
    assert len(list((broken / "run.pt.tensorboard").glob("events*"))) == 2  # of rank 0, before and after
    assert [step for step, _ in points(broken / "run.pt.tensorboard")] == [1, 2]
    assert points(broken / "run.pt.tensorboard")[1][1] == result(resumed)["val_loss"]


def test_all_ranks_stop_in_the_same_epoch_with_the_same_learning_rate_and_do_not_train_on(tmp_path):
    edits = [*FLOAT64, *changes(block("early stopping")), functions(block("plateau"))]
    line = "    result = dict("
    edits.append(
        (line, f"    print('AT THE END', epochs_done, epoch, scheduler.get_last_lr(), force=True)\n{line}")
    )
    copy_script(tmp_path, "ddp_launch_train", *edits)
    flags = ["--lr", "1e-6", "--epochs", "20"]  # so small a rate does not change the accuracy
    finished = train(tmp_path, 2, *flags)
    assert result(finished)["bad_epochs"] == 5
    assert re.findall(r"AT THE END (\d+) (\d+) \[(\S+)\]", finished.stdout) == [("0", "7", "1e-07")] * 2
    again = train(tmp_path, 2, *flags)
    assert finished.stdout.count("\nepoch") == 6 and "\nepoch" not in again.stdout
    assert result(again) == result(finished) and again.stdout.count(": 6 epochs are done") == 2


def evaluate(folder, *codes):
    """Run the recipe for the best weights, and more code, in one process; return the lines that they print."""
    (folder / "evaluate.py").write_text("\n".join([block("best weights"), *codes]))
    return in_processes(0, lambda: runpy.run_path("evaluate.py"), folder).stdout.splitlines()


def test_the_best_weights_give_the_metrics_of_the_run_again(runs):
    unbroken, _, finished, _ = runs
    found = result(finished)
    epochs = re.findall(r"val_loss (\S+) .*val_top5 (\S+)", finished.stdout)
    best_loss, best = max(reversed(epochs), key=lambda epoch: float(epoch[1]))  # of equal ones, the last
    assert float(best) == pytest.approx(found["best"], abs=1e-4)
    items = "images = torch.stack([torch.from_numpy(image) for image, _ in val_set])"
    count = """
labels = torch.tensor(val_set.targets, device=device)
top5 = (scores.topk(5).indices == labels[:, None]).any(1)
print((classes == labels).double().mean().item(), top5.double().mean().item())
"""
    evaluated, inferred = evaluate(unbroken, items, block("inference"), count)
    metrics = ast.literal_eval(evaluated)
    assert metrics["val_loss"] == pytest.approx(float(best_loss), rel=1e-4)
    assert metrics["val_top5"] == pytest.approx(found["best"])
    assert [*map(float, inferred.split())] == pytest.approx([metrics["val_accuracy"], metrics["val_top5"]])


# ------------------------------------------------------------ Losses, data and metrics

SEGMENTATION = "nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)).double()"
SMALL_MASKS = ("CLASSES = 21", "CLASSES = 3"), ("VAL_SIZE = 512", "VAL_SIZE = 16")


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    """Return a folder with images of different sizes and their masks: three classes, by the red of a pixel."""
    folder, random = tmp_path_factory.mktemp("masks"), np.random.default_rng(1)
    for number in range(61):
        height, width = random.integers(5, 13, 2)
        image = random.integers(256, size=(height, width, 3), dtype=np.uint8)
        mask = image[..., 0] // 86
        mask[: number % 9] = 255  # none in mask 0, most in mask 8
        for kind, pixels in ("images", image), ("masks", mask):
            for split in ("train", "val") if number < 21 else ("train",):
                path = folder / split / kind / f"{number:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture(scope="module")
def segmentation(tmp_path_factory):
    """Return the names of a script for segmentation, with three classes and small images."""
    edits = *changes(block("unequal weights")), functions(block("masks")), *SMALL_MASKS
    return names_of(copy_script(tmp_path_factory.mktemp("segmentation"), "ddp_launch_train", *edits))


def test_images_and_masks_of_any_size_get_the_same_random_crop(masks, segmentation, tmp_path):
    train_set, val_set = segmentation["load_data"](Namespace(data_dir=str(masks), image_size=8))
    for data_set, size in (train_set, 8), (val_set, 16):
        for index in range(len(data_set)):
            image, mask = data_set[index]
            assert image.shape == (size, size, 3) and mask.shape == (size, size) and image.dtype == torch.uint8
            valid = mask != 255
            assert torch.equal(mask[valid], image[..., 0][valid] // 86)
    assert len({train_set[20][1].numpy().tobytes() for _ in range(20)}) > 5  # crops and flips
    height, width = np.asarray(Image.open(masks / "val/masks/09.png")).shape
    assert (val_set[9][1] != 255).sum() == height * width  # mask 9 has no ignored pixel; all are validated, once
    shutil.copytree(masks / "val", tmp_path / "val")
    (tmp_path / "val" / "masks" / "07.png").unlink()
    with pytest.raises(KeyError, match="07"):
        segmentation["ImagesAndMasks"](tmp_path / "val", None)


def test_labels_weigh_the_same_on_1_and_2_processes_with_unequally_many_of_them(masks, segmentation, tmp_path):
    network = f"def build_network(args):\n    return {SEGMENTATION}\n"
    edits = [*changes(block("unequal weights")), functions(block("masks"), network), *SMALL_MASKS, FLOAT64[2]]
    edits.append(("args.pretrained)  # neither", "args.pretrained).double()  # neither"))
    # Random crops depend on the process. Seeded with the index, they are the same on 1 and 2 processes.
    item = "        image, mask = self.transform("
    edits.append((item, f"        torch.manual_seed(index)\n{item}"))
    flags = ["--data-dir", str(masks), "--image-size", "8"]
    (one, two), weights = train_on((1, 2), tmp_path, *edits, flags=flags)
    for name in "val_loss", "val_mean_iou", "best":
        assert two[name] == pytest.approx(one[name], rel=1e-12)
    # The metrics of the saved weights, computed in another way.
    net = eval(SEGMENTATION)
    net.load_state_dict(weights)
    _, val_set = segmentation["load_data"](Namespace(data_dir=str(masks), image_size=8))
    images, labels = (torch.stack(tensors) for tensors in zip(*val_set))
    with torch.no_grad():
        outputs, labels = net(common.prepare(images, None).double()), labels.long()
    loss = nn.functional.cross_entropy(outputs, labels, ignore_index=255).item()
    shares = [nn.functional.cross_entropy(outputs[rank::2], labels[rank::2], ignore_index=255) for rank in (0, 1)]
    assert abs(sum(shares) / 2 - loss) > 1e-4  # so the test would see a mean of means
    iou = jaccard_index(outputs.argmax(1), labels, "multiclass", num_classes=3, ignore_index=255).item()
    assert [one["val_loss"], one["val_mean_iou"]] == pytest.approx([loss, iou], rel=1e-6)


def test_the_same_functions_take_padded_texts_and_a_batch_without_any_label_that_counts(segmentation, monkeypatch):
    monkeypatch.setattr(segmentation["common"], "prepare", lambda texts, *_: texts.double())
    args = Namespace(pretrained=None, precision="fp32")
    labels = torch.tensor([[1, 2, 255], [0, 255, 255]])
    texts = nn.functional.one_hot(labels.where(labels != 255, 0), 3).mT * 9.0  # predicts each label
    padding = torch.full_like(labels, 255)
    sums = segmentation["validate"](args, nn.Identity(), [(texts, labels), (texts, padding)], torch.device("cpu"))
    found, loss = segmentation["metrics_from"](sums), nn.functional.cross_entropy(texts, labels, ignore_index=255)
    assert sums[1:].sum() == 3 and found == dict(val_loss=pytest.approx(loss.item()), val_mean_iou=1)


def test_weighted_classes_and_weighted_draws_train_alike_on_1_and_3_processes(tmp_path):
    double = ("0.5, 0.5])", "0.5, 0.5]).double()")
    recipes = *changes(block("class weights"), block("weighted sampling")), functions(block("weighted sampler"))
    results, _ = train_on((1, 3), tmp_path, *recipes, *FLOAT64, double)
    assert results[1]["val_loss"] == pytest.approx(results[0]["val_loss"], rel=1e-12)


def test_processes_share_one_draw_in_which_all_classes_are_equally_frequent(tmp_path):
    folder = copy_script(tmp_path, "ddp_launch_train", functions(block("weighted sampler")))
    make, draws = names_of(folder)["WeightedSampler"], {}
    labels = torch.tensor([0] * 900 + [1] * 100 + [2])
    weights = 1 / labels.bincount()[labels]
    for epoch, world_size in (1, 1), (1, 3), (2, 3):
        samplers = [make(weights, world_size, rank, drop_last=True) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        draws[epoch, world_size] = [index for indices in zip(*samplers) for index in indices]
        assert {len(sampler) for sampler in samplers} == {len(list(sampler)) for sampler in samplers}
    assert draws[1, 3] == draws[1, 1][:999] and draws[2, 3] != draws[1, 3]
    assert all(270 < count < 400 for count in labels[draws[1, 3]].bincount().tolist())


def test_a_network_learns_padded_texts_with_the_loss_for_unequal_weights(tmp_path):
    own = """
IGNORED = -100

def load_data(args):
    tokens = torch.tensor(list(b"abcdefgh" * 400)).view(-1, 20)
    labels = tokens[:, 1:].clone()
    labels[torch.arange(19) > torch.arange(len(tokens))[:, None] % 19] = IGNORED  # from none to all but one
    return [torch.utils.data.TensorDataset(tokens[i : i + 80, :-1], labels[i : i + 80]) for i in (0, 80)]

def build_network(args):
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
"""
    loss = changes(block("unequal weights"))[2]
    valid = "(labels != IGNORED).sum()"
    sums = ("loss.double() * len(labels)", f"loss.double() * {valid}"), ("+= len(labels)", f"+= {valid}")
    edits = functions(own), *changes(block("texts")), loss, *sums
    copy_script(tmp_path, "ddp_launch_train", *edits)
    assert result(train(tmp_path, 2, "--lr", "0.5", "--epochs", "6"))["val_accuracy"] > 0.95


def test_a_network_learns_a_text_and_tensorboard_needs_no_checkpoint(tmp_path):
    own = """
def load_data(args):
    tokens = torch.tensor(list(b"abcdefgh" * 400)).view(-1, 20)
    return [torch.utils.data.TensorDataset(part[:, :-1], part[:, 1:]) for part in (tokens[:120], tokens[120:])]

def build_network(args):
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
"""
    edits = functions(own), *changes(block("texts"), block("tensorboard"))
    folder = copy_script(tmp_path, "ddp_launch_train", *edits)
    assert result(train(folder, 2, "--lr", "0.5", "--epochs", "6", "--checkpoint", ""))["val_accuracy"] > 0.95
    count_up, args = lambda tokens: nn.functional.one_hot(tokens + 1, 256) * 99.0, Namespace(precision="fp32")
    tokens, device = torch.arange(12).view(2, 6), torch.device("cpu")
    loss, _, labels = names_of(folder)["compute_loss"](args, count_up, [tokens, tokens + 1], device, True)
    assert loss == 0 and labels.tolist() == [*range(1, 13)]
    assert [path.name for path in folder.glob("*tensorboard")] == ["run.tensorboard"]


@pytest.mark.parametrize(("nproc", "workers"), [(1, 2), (2, 0), (3, 2)])
def test_no_item_of_a_stream_comes_twice_in_an_epoch(nproc, workers, tmp_path):
    own = """
def read(epoch):
    order = random.Random(epoch).sample(range(71), 71)
    yield from (train_set[number] for number in order)

train_set, val_set = common.load_cifar10("", 71)

def load_data(args):
    return Stream(read, 71), val_set
"""
    say = "            optimizer.zero_grad()\n"
    items = f"{say}            print('STEP', epoch, batch[0].flatten(1).tolist(), force=True)\n"
    edits = *changes(block("stream in main")), functions("import random", block("stream"), own), (say, items)
    copy_script(tmp_path, "ddp_launch_train", *FLOAT64, *edits)
    finished = train(tmp_path, nproc, "--workers", str(workers))
    assert result(finished)
    epochs = []
    for epoch in "12":
        batches = [ast.literal_eval(batch) for batch in re.findall(f"STEP {epoch} (.*)", finished.stdout)]
        items = [tuple(item) for batch in batches for item in batch]
        assert len(items) == len(set(items)) == (48 if workers else 60)  # of 71: one process has an item more
        epochs.append(set(items))
    assert epochs[0] != epochs[1]


def test_a_loss_over_the_whole_batch_trains_alike_on_1_2_and_3_processes(tmp_path):
    one_view = "common.prepare(images, args.image_size, args.pretrained, augment=True) for _ in range(2)"
    view = "common.prepare(view, args.image_size, args.pretrained).double() for view in (images, images.flip(1))"
    edits = *changes(block("whole batch")), (one_view, view), FLOAT64[0], FLOAT64[2]
    _, weights = train_on((1, 2, 3), tmp_path / "recipe", *edits)
    no_factor = ("len(parts) * (part - part.detach())", "(part - part.detach())")
    _, without = train_on((2,), tmp_path / "mistake", *edits, no_factor)
    assert (without["1.weight"] - weights["1.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("head", ["Head", "FCOSHead"])  # with the second, torchvision's own, they differ
def test_a_detector_has_the_same_gradients_on_1_2_and_3_processes(head, tmp_path):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(6, 3, 32, 32, generator=generator).double()
    corners = 20 * torch.rand(6, 4, 2, generator=generator).double()
    boxes = torch.cat([corners, corners + 10], 2)
    numbers = [0, 2, 4, 0, 2, 4]  # of boxes. On three processes, those of rank 0 have none.
    targets = [dict(boxes=some[:n], labels=torch.tensor([1, 2, 1, 2])[:n]) for some, n in zip(boxes, numbers)]

    def gradients(rank, world_size):
        exec(block("detector"), globals())
        torch.manual_seed(1)
        backbone = nn.Conv2d(3, 32, 3, stride=8, padding=1)
        backbone.out_channels = 32
        anchors = anchor_utils.AnchorGenerator(((8,),), ((1.0,),))
        net = fcos.FCOS(backbone, 3, 32, 32, anchor_generator=anchors, head=globals()[head](32, 1, 3)).double()
        ddp_net = DDP(net)  # in a variable: DDP(net)(...) would not average the gradients
        sum(ddp_net(list(images[rank::world_size]), targets[rank::world_size]).values()).backward()
        if rank == 0:
            torch.save(torch.cat([weight.grad.flatten() for weight in net.parameters()]), "gradient.pt")

    found = []
    for nproc in 1, 2, 3:
        in_group(nproc, gradients, tmp_path)
        found.append(torch.load(tmp_path / "gradient.pt"))
    errors = [((other - found[0]).norm() / found[0].norm()).item() for other in found[1:]]
    assert max(errors) < 1e-12 if head == "Head" else min(errors) > 1e-2


def test_metrics_of_all_outputs_of_an_average_are_equal_on_1_2_and_3_processes_and_in_an_evaluation(tmp_path):
    new = "        new = dict(train_loss"
    same = "dist.all_gather_object(shares, metrics_from(val_sums)); assert shares == shares[:1] * world_size"
    edits = *changes(block("gather rows")), *FLOAT64, functions(block("auc")), (new, f"        {same}\n{new}")
    edits += *changes(block("averages"), block("early stopping")), functions(block("plateau"))
    results, _ = train_on((1, 2, 3), tmp_path, *edits, flags=["--epochs", "1"])
    [evaluated] = evaluate(tmp_path)
    for name in "val_auc", "val_loss":
        found = [metrics[name] for metrics in (*results, ast.literal_eval(evaluated))]
        assert found == pytest.approx(found[:1] * 4, rel=1e-7)
    # The mean AUC of these weights by its definition, over all pairs of a positive and a negative image.
    net = names_of(tmp_path)["build_network"](None)
    net.load_state_dict(torch.load(tmp_path / "run.pt.best", weights_only=True))  # the average
    images, labels = common.load_cifar10(None, 61)[1].tensors
    with torch.no_grad():
        scores, aucs = net(common.prepare(images, 4).double()).softmax(1), []
    for label in labels.unique():
        difference = scores[labels == label, label][:, None] - scores[labels != label, label]
        aucs.append(((difference > 0) + (difference == 0) / 2).double().mean().item())
    assert results[0]["val_auc"] == pytest.approx(np.mean(aucs))
    copy_script(tmp_path, "dp_train", *FLOAT64, functions(block("auc")))
    assert result(train(tmp_path, 0, "--checkpoint", "", "--epochs", "1", script="dp_train"))["val_auc"] > 0


def test_a_class_of_torchmetrics_counts_gathered_rows_once_per_process_unless_it_does_not_sync(tmp_path):
    def count(rank, world_size):
        alone, synced = SumMetric(sync_on_compute=False), SumMetric()
        alone.update(3.0), synced.update(3.0)
        assert alone.compute() == 3 and synced.compute() == 3 * world_size

    in_group(2, count, tmp_path)


# ------------------------------------------------------------ Networks and training loops


def test_two_networks_of_a_gan_train_alike_on_1_and_2_processes(tmp_path):
    own = """
def build_network(args):
    generator = nn.Sequential(nn.Linear(64, 48), nn.Unflatten(1, (3, 4, 4)))
    discriminator = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 1))
    return nn.ModuleDict(dict(generator=generator, discriminator=discriminator)).double()

def validate(args, net, loader, device):
    return torch.zeros(1)

def metrics_from(val_sums):
    return dict(val_accuracy=val_sums.item())
"""
    noise = ("torch.randn(len(images), 64, device=device)", "nn.functional.pad(images.flatten(1), (0, 16))")
    double = ("args.image_size, augment=True)", "args.image_size).double()")
    step = "            scheduler_d.step()\n"
    check = (step, f"{step}            assert not any(part.broadcast_buffers for part in ddp_net.values())\n")
    train_on((1, 2), tmp_path, *changes(block("gan")), functions(own), noise, double, check)
    assert {"optimizer", "optimizer_d", "scheduler_d"} < torch.load(tmp_path / "run.pt", weights_only=True).keys()


def test_centres_of_a_loss_train_alike_on_1_and_2_processes(tmp_path):
    own = block("centres"), "def build_network(args):\n    return WithCentres(BACKBONE, 8, 10).double()\n"
    backbone = ("BACKBONE", "nn.Sequential(nn.Flatten(), nn.Linear(48, 8))")
    _, weights = train_on((1, 2), tmp_path, functions(*own), backbone, *FLOAT64[1:])
    assert weights["centres"].shape == (10, 8)


def test_ddp_refuses_a_network_that_is_not_trained(tmp_path):
    def wrap(rank, world_size):
        with pytest.raises(RuntimeError, match="any parameter that requires a gradient"):
            DDP(nn.Linear(2, 2).requires_grad_(False))

    in_group(1, wrap, tmp_path)


def test_replicas_are_called_in_a_loop_each_with_its_part(tmp_path):
    names = names_of(copy_script(tmp_path, "dp_train", *changes(block("loop"))), "dp_train")
    loop = names["LoopDataParallel"](nn.Identity())
    loop.device_ids = [-1, -1]  # in place of GPUs: the CPU
    replicas = [lambda part, factor, i=i: part * factor + i for i in range(2)]
    assert loop.parallel_apply(replicas, [(5,), (7,)], [dict(factor=10), dict(factor=100)]) == [50, 701]


@pytest.mark.skipif(conftest.GPUS < 2, reason="needs two GPUs")
def test_the_loop_trains_like_pytorchs_data_parallel(tmp_path):
    copy_script(tmp_path, "dp_train", *changes(block("loop")))
    flags = ["--precision", "fp32", "--synthetic", "512", "--batch-size", "64"]
    commands = [command("dp_train", *flags, folder=folder) for folder in (ROOT, tmp_path)]
    pytorchs, loops = (result(run(arguments, **conftest.ALL_GPUS)) for arguments in commands)
    assert loops["gpus"] >= 2 and loops["train_loss"] == pytest.approx(pytorchs["train_loss"], rel=1e-2)


def test_a_batch_split_in_parts_trains_like_the_whole_batch(tmp_path):
    flags = ["--batch-size", "20"]  # on two processes, parts of 3, 3, 3 and 1 images
    [whole], expected = train_on((1,), tmp_path / "whole", *FLOAT64, flags=flags)
    edits = *FLOAT64, *changes(block("accumulation"))
    [parts, _], weights = train_on((1, 2), tmp_path / "parts", *edits, flags=flags)
    torch.testing.assert_close(weights, expected, **ALIKE)
    assert parts["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-6)


def test_groups_of_batches_train_like_large_batches_though_the_last_group_is_incomplete(tmp_path):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(36, 5, generator=generator).double()  # in groups of 24 and 12
    labels = torch.randint(3, (36,), generator=generator)

    def start():
        torch.manual_seed(1)
        net = nn.Linear(5, 3).double()
        return net, torch.optim.SGD(net.parameters(), 1.0, momentum=0.9)

    def accumulate(rank, world_size):
        device, (net, optimizer) = "cpu", start()
        shares = torch.arange(36)[rank::world_size].split(6 // world_size)
        ddp_net, train_loader = DDP(net), [(images[share], labels[share]) for share in shares]
        exec(block("groups"), locals() | dict(nn=nn, itertools=itertools, contextlib=contextlib))
        torch.save(net.state_dict(), f"{world_size}-{rank}.pt")

    net, optimizer = start()
    for group in torch.arange(36).split(24):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[group]), labels[group]).backward()
        optimizer.step()
    for nproc in 1, 2, 3:
        in_group(nproc, accumulate, tmp_path)
        for rank in range(nproc):
            torch.testing.assert_close(torch.load(tmp_path / f"{nproc}-{rank}.pt"), net.state_dict(), **ALIKE)


def test_a_profile_of_a_copied_script(tmp_path):
    folder = copy_script(tmp_path / "copy", "ddp_launch_train")
    shutil.copy(ROOT / "results" / "profile_step.py", folder)
    assert result(run_shown("profile", folder, nproc=1))
    trace = (folder / "trace.json").read_text()
    assert "ProfilerStep#" in trace and "gloo:all_reduce" in trace


def test_torchrun_writes_a_log_for_each_rank_and_restarts_a_run_that_was_killed(tmp_path):
    unbroken = copy_script(tmp_path / "unbroken", "ddp_launch_train")
    assert result(train(unbroken, 2))
    step = "            scheduler.step()\n"
    once = "if rank == 1 and epoch == step == 2 and not os.path.exists('killed'):"
    kill = f"            {once}\n                open('killed', 'w').close(), os.kill(os.getpid(), 9)\n"
    folder = copy_script(tmp_path / "killed", "ddp_launch_train", (step, step + kill))
    finished = run_shown("restarts", folder)
    assert ": 0 epochs are done" in finished.stdout and ": 1 epochs are done" in finished.stdout
    for attempt, rank in itertools.product((0, 1), (0, 1)):
        [log] = folder.glob(f"logs/*/attempt_{attempt}/{rank}/stdout.log")
        assert f"rank {rank}: process" in log.read_text()
    assert finished.returncode == 0 and saved_by(folder) == saved_by(unbroken)
