"""RECIPES.md: each recipe is copied into a script and run, on the CPU."""

import os
import re
import shutil
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from conftest import FLOAT64, ROOT, SCRIPTS, SMALL, block, changes, command, copy_script, result, run, saved_by
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import common

WITH_DDP = SCRIPTS[1:]
LAST_LINES = "\nif __name__"
VALIDATION = "        val_sums = validate("


def replace_functions(*codes):
    """Return a change that adds functions at the end of a script, so that they are used."""
    return LAST_LINES, "\n".join(["", *codes, LAST_LINES])


def run_shown(name, folder, nproc=2):
    """Run a command of RECIPES.md on the CPU, with the flags of all tests."""
    line = " ".join([block(name).strip().replace("per-node=gpu", f"per-node={nproc}"), *SMALL])
    return run(["bash", "-c", line], cwd=folder, PATH=f"{sys.prefix}/bin:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("name", "scripts"),
    [
        ("seeded epochs", WITH_DDP),
        ("metric", SCRIPTS),
        ("class weights", SCRIPTS),
        ("weighted sampling", WITH_DDP),
        ("accumulation", WITH_DDP[:2]),
        ("tensorboard", WITH_DDP),
        ("apex ddp", WITH_DDP[2:]),
    ],
)
def test_a_diff_fits_each_script_that_it_is_for(name, scripts, tmp_path):
    for script in scripts:
        folder = copy_script(tmp_path, script, *changes(block(name)))
        text = (folder / f"{script}.py").read_text()
        compile(text, script, "exec")
        added = re.findall(r"(?m)^\+(.*)", block(name))
        assert added and all(line in text for line in added)


# ------------------------------------------------------------ Images in folders


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
    """Train with six recipes: an unbroken run, and one that is killed in epoch 2, while it saves, and resumed.

    Return their folders, and what the unbroken and the resumed run printed.
    """
    functions = replace_functions(block("folders"), block("adamw"), block("seeded items"))
    diffs = changes(block("seeded epochs"), block("metric"), block("tensorboard"))
    item = (VALIDATION, f"        print('ITEM', epoch, train_set[0][0].tolist())\n{VALIDATION}")
    edits = [functions, *diffs, item]
    save = '    torch.save(state, f"{path}.tmp")\n'
    kill = (save, f"    if state.get('epoch') == 2: os.kill(os.getpid(), 9)\n{save}")
    unbroken = copy_script(tmp_path_factory.mktemp("unbroken"), "ddp_launch_train", *edits)
    broken = copy_script(tmp_path_factory.mktemp("broken"), "ddp_launch_train", *edits, kill)
    flags = ["--data-dir", str(images), "--batch-size", "24", "--checkpoint", "run.pt"]
    first = run(command("ddp_launch_train", *flags, "--workers", "2", folder=unbroken), cwd=unbroken)
    killed = run(command("ddp_launch_train", *flags, "--workers", "1", folder=broken), cwd=broken)
    assert killed.returncode != 0 and "\nepoch 2 train_loss" in killed.stdout
    shutil.copytree(broken / "run.pt.tensorboard", broken / "of the killed run")
    resumed = run(command("ddp_launch_train", *flags, "--workers", "1", folder=unbroken), cwd=broken)
    assert "1 of 2 epochs are done" in resumed.stdout
    return unbroken, broken, first, resumed


def test_images_in_folders_train_a_network_with_a_class_for_each_folder(runs):
    unbroken, _, finished, _ = runs
    assert result(finished)["val_accuracy"] > 2 / 12
    assert torch.load(unbroken / "run.pt.best", weights_only=True)["fc.weight"].shape[0] == 12


def test_adamw_has_a_learning_rate_for_the_last_layer_and_a_tenth_of_it_for_all_others(runs):
    state = torch.load(runs[0] / "run.pt", weights_only=True)
    body, last = state["optimizer"]["param_groups"]
    assert (body["max_lr"], last["max_lr"]) == (pytest.approx(0.002), 0.02)
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    assert len(last["params"]) == 2
    assert len(body["params"]) + 2 == sum(not name.endswith(buffers) for name in state["net"])
    assert state["optimizer"]["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


class RandomNumbers:
    """A data set that draws its items from the generators of Python, NumPy and PyTorch."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.rand(1).item(), np.random.rand()


def test_a_random_item_depends_on_seed_epoch_and_index_alone():
    scope = dict(common=common)
    exec(block("seeded items"), scope)
    epochs_of = {}
    for key, seed, workers in ("one", 1, 1), ("two", 1, 2), ("other seed", 2, 1):
        data_set = scope["SeededItems"](RandomNumbers(), seed)
        context = dict(multiprocessing_context="fork", persistent_workers=True)  # as in the scripts
        loader = DataLoader(data_set, batch_size=2, num_workers=workers, **context)
        epochs_of[key] = []
        for epoch in 1, 2:
            data_set.epoch.fill_(epoch)
            epochs_of[key].append([value.item() for batch in loader for values in batch for value in values])
    assert epochs_of["one"] == epochs_of["two"]
    assert len({value for key in ("one", "other seed") for epoch in epochs_of[key] for value in epoch}) == 48


def test_random_transforms_resume_like_an_unbroken_run_and_differ_between_epochs(runs):
    unbroken, broken, finished, resumed = runs
    assert result(resumed) and saved_by(broken) == saved_by(unbroken)
    items = re.findall("ITEM . (.*)", finished.stdout)
    assert len(items) == 2 and items[0] != items[1]


def test_tensorboard_shows_each_epoch_once_after_a_kill_and_a_resume(runs):
    _, broken, _, resumed = runs

    def points(folder):
        events = EventAccumulator(str(folder)).Reload()
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars("val_loss")]

    assert [step for step, _ in points(broken / "of the killed run")] == [1, 2]  # epoch 2 was written, not saved
    assert len(list((broken / "run.pt.tensorboard").glob("events*"))) == 2  # of rank 0, before and after
    assert [step for step, _ in points(broken / "run.pt.tensorboard")] == [1, 2]
    assert points(broken / "run.pt.tensorboard")[1][1] == result(resumed)["val_loss"]


def test_the_best_weights_give_the_metrics_of_the_run_again(runs):
    unbroken, _, finished, _ = runs
    found = result(finished)
    top5 = [float(value) for value in re.findall(r"val_top5 (\S+)", finished.stdout)]
    assert found["best"] == pytest.approx(max(top5), abs=1e-4)
    code = f"""
{block("best weights")}
_, val_set = script.load_data(args)
images = torch.stack([torch.from_numpy(image) for image, _ in val_set])
{block("inference")}
labels = torch.tensor(val_set.targets, device=device)
top5 = (scores.topk(5).indices == labels[:, None]).any(1)
print((classes == labels).double().mean().item(), top5.double().mean().item())
{block("evaluation")}
"""
    (unbroken / "evaluate.py").write_text(code)
    said = run([sys.executable, "evaluate.py"], cwd=unbroken)
    inferred, evaluated = said.stdout.splitlines()
    assert eval(evaluated)["val_top5"] == pytest.approx(found["best"]), said.stderr
    accuracy, of_best = map(float, inferred.split())
    assert of_best == pytest.approx(found["best"]) and accuracy == pytest.approx(eval(evaluated)["val_accuracy"])


# ------------------------------------------------------------ Labels that do not count

SEGMENTATION = "nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)).double()"


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


def segmentation():
    """Return the code of the recipe, for three classes and larger images than those of the fixture `masks`."""
    code = block("unequal weights") + block("masks")
    return code.replace("CLASSES = 21", "CLASSES = 3").replace("VAL_SIZE = 512", "VAL_SIZE = 16")


def train_segmentation(folder, masks, nproc):
    code = segmentation()
    for old, new in (FLOAT64[2], ("args.pretrained)", "args.pretrained).double()")):
        assert old in code
        code = code.replace(old, new)
    network = f"def build_network(args):\n    return {SEGMENTATION}\n"
    functions = replace_functions(code, block("seeded items"), network)
    copy_script(folder, "ddp_launch_train", functions, *changes(block("seeded epochs")))
    flags = ["--data-dir", str(masks), "--image-size", "8", "--workers", f"{nproc}", "--checkpoint", "run.pt"]
    found = result(run(command("ddp_launch_train", *flags, nproc=nproc, folder=folder), cwd=folder))
    return found, torch.load(folder / "run.pt", weights_only=True)["net"]


def test_images_and_masks_of_any_size_get_the_same_random_crop(masks):
    scope = dict(common=common)
    exec(segmentation(), scope)
    train_set, val_set = scope["load_data"](Namespace(data_dir=str(masks), image_size=8))
    for data_set, size in (train_set, 8), (val_set, 16):
        for index in range(len(data_set)):
            image, mask = data_set[index]
            assert image.shape == (size, size, 3) and mask.shape == (size, size) and image.dtype == torch.uint8
            valid = mask != 255
            assert torch.equal(mask[valid], image[..., 0][valid] // 86)
    assert len({train_set[20][1].numpy().tobytes() for _ in range(20)}) > 5  # crops and flips
    height, width = np.asarray(Image.open(masks / "val/masks/09.png")).shape
    assert (val_set[9][1] != 255).sum() == height * width  # mask 9 has no ignored pixel; all are validated, once


def test_labels_weigh_the_same_on_1_and_2_processes_though_ranks_have_unequally_many(masks, tmp_path):
    one, weights = train_segmentation(tmp_path / "one", masks, 1)
    two, weights_of_two = train_segmentation(tmp_path / "two", masks, 2)
    torch.testing.assert_close(weights_of_two, weights, rtol=1e-12, atol=1e-12)
    for name in "val_loss", "val_mean_iou", "best":
        assert two[name] == pytest.approx(one[name], rel=1e-12)
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-6)  # main adds it up in float32
    # The metrics of the saved weights, computed in another way.
    scope = dict(common=common)
    exec(segmentation(), scope)
    net = eval(SEGMENTATION)
    net.load_state_dict(weights)
    _, val_set = scope["load_data"](Namespace(data_dir=str(masks), image_size=8))
    images, masks = (torch.stack(tensors) for tensors in zip(*val_set))
    with torch.no_grad():
        outputs, masks = net(common.prepare(images, None).double()), masks.long()
    loss = nn.functional.cross_entropy(outputs, masks, ignore_index=255).item()
    shares = [nn.functional.cross_entropy(outputs[rank::2], masks[rank::2], ignore_index=255) for rank in (0, 1)]
    assert abs(sum(shares) / 2 - loss) > 1e-4  # so the test would see a mean of means
    predicted, iou = outputs.argmax(1).where(masks != 255, 255), []
    for label in range(3):
        both, either = (predicted == label) & (masks == label), (predicted == label) | (masks == label)
        iou += [both.sum().item() / either.sum().item()] if either.any() else []
    assert [one["val_loss"], one["val_mean_iou"]] == pytest.approx([loss, sum(iou) / len(iou)], rel=1e-9)


def test_the_same_functions_take_padded_texts_and_a_batch_without_any_label_that_counts():
    scope = dict(common=Namespace(prepare=lambda texts, *_: texts.double()))
    exec(block("unequal weights"), scope)
    args = Namespace(image_size=0, pretrained=False, device="cpu", precision="fp32")
    labels = torch.tensor([[1, 2, 255], [3, 255, 255]])
    texts = nn.functional.one_hot(labels.where(labels != 255, 0), 21).mT * 9.0  # predicts each label
    padding = torch.full_like(labels, 255)
    sums = scope["validate"](args, nn.Identity(), [(texts, labels), (texts, padding)], torch.device("cpu"))
    assert sums[1:].sum() == 3 and scope["metrics_from"](sums)["val_mean_iou"] == 1
    expected = nn.functional.cross_entropy(texts, labels, ignore_index=255).item()
    assert scope["metrics_from"](sums)["val_loss"].item() == pytest.approx(expected)


# ------------------------------------------------------------ Unbalanced classes


def test_weighted_classes_train_alike_on_1_and_2_processes(tmp_path):
    recipe = changes(block("class weights"))
    double = ("0.5, 0.5])", "0.5, 0.5]).double()")
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", *recipe, *FLOAT64, double)
    weights, losses = [], []
    for nproc in 1, 2:
        flags = ["--limit", "59", "--checkpoint", f"{tmp_path}/{nproc}.pt"]
        losses.append(result(run(command("ddp_launch_train", *flags, nproc=nproc, folder=folder)))["val_loss"])
        weights.append(torch.load(tmp_path / f"{nproc}.pt", weights_only=True)["net"])
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_processes_share_one_draw_in_which_all_classes_are_equally_frequent(tmp_path):
    scope = dict(torch=torch, DistributedSampler=DistributedSampler)
    exec(block("weighted sampler"), scope)
    labels = torch.tensor([0] * 900 + [1] * 100 + [2])
    weights = 1 / labels.bincount()[labels]
    make, draws = scope["WeightedSampler"], {}
    for epoch, world_size in (1, 1), (1, 3), (2, 3):
        samplers = [make(weights, world_size, rank, drop_last=True) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        draws[epoch, world_size] = [index for indices in zip(*samplers) for index in indices]
        assert {len(sampler) for sampler in samplers} == {len(list(sampler)) for sampler in samplers}
    assert draws[1, 3] == draws[1, 1][:999] and draws[2, 3] != draws[1, 3]
    assert all(270 < count < 400 for count in labels[draws[1, 3]].bincount().tolist())
    recipe = replace_functions(block("weighted sampler")), *changes(block("weighted sampling"))
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", *recipe)
    assert result(run(command("ddp_launch_train", folder=folder)))["world_size"] == 2


# ------------------------------------------------------------ Texts


def test_a_language_model_learns_and_continues_a_prompt_that_is_shorter_than_its_context(tmp_path):
    code = block("language model")
    small = ("CONTEXT = 128", "CONTEXT = 16"), ("ByteTransformer()", "ByteTransformer(32, heads=2, layers=1)")
    for old, new in small:
        assert code.count(old) == 1
        code = code.replace(old, new)
    folder = copy_script(tmp_path, "ddp_launch_train", replace_functions(code))
    (folder / "data").mkdir()
    (folder / "data" / "input.txt").write_bytes(b"abcdefgh" * 400)
    assert result(run_shown("train on a text", folder, nproc=1))["val_accuracy"] > 0.95
    (folder / "generate.py").write_text(block("generate").replace('b"The "', 'b"de"'))
    said = run([sys.executable, "generate.py"], cwd=folder)
    text = said.stdout.strip()
    assert len(text) == 202 and text.startswith("de"), said.stderr
    assert sum(pair in "abcdefgha" for pair in map("".join, zip(text, text[1:]))) > 160
    scope = {}
    exec(code, scope)
    net, tokens = scope["build_network"](None).eval(), torch.randint(256, (1, 16))
    torch.testing.assert_close(net(tokens[:, :5]), net(tokens)[:, :5])  # no byte sees later ones


# ------------------------------------------------------------ The training loop


def test_accumulated_gradients_train_like_one_large_batch(tmp_path):
    weights = []
    for nproc, batch, diff in (1, 48, ""), (2, 12, block("accumulation")):  # two large batches an epoch, or nine
        folder = copy_script(tmp_path / f"{batch}", "ddp_launch_train", *FLOAT64, *changes(diff))
        flags = ["--limit", "110", "--clip-grad", "0.5", "--batch-size", f"{batch}", "--checkpoint", "run.pt"]
        assert result(run(command("ddp_launch_train", *flags, nproc=nproc, folder=folder), cwd=folder))
        weights.append(torch.load(folder / "run.pt", weights_only=True)["net"])
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)


def test_a_profile_of_a_copied_script(tmp_path):
    folder = copy_script(tmp_path / "copy", "ddp_launch_train")
    shutil.copy(ROOT / "results" / "profile_step.py", folder)
    assert result(run_shown("profile", folder, nproc=1))
    trace = (folder / "trace.json").read_text()
    assert "ProfilerStep#" in trace and "gloo:all_reduce" in trace


# ------------------------------------------------------------ Clusters


def test_torchrun_writes_a_log_for_each_rank_and_restarts_a_run_that_was_killed(tmp_path):
    unbroken = copy_script(tmp_path / "unbroken", "ddp_launch_train")
    assert run_shown("logs", unbroken).returncode == 0
    for rank in 0, 1:
        [log] = unbroken.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        assert f"rank {rank}: process" in log.read_text()
    step = "            scheduler.step()\n"
    once = "if rank == 1 and epoch == step == 2 and not os.path.exists('killed'):"
    kill = f"            {once}\n                open('killed', 'w').close(), os.kill(os.getpid(), 9)\n"
    folder = copy_script(tmp_path / "killed", "ddp_launch_train", (step, step + kill))
    finished = run_shown("restarts", folder)
    assert "0 of 2 epochs are done" in finished.stdout and "1 of 2 epochs are done" in finished.stdout
    assert result(finished) and saved_by(folder) == saved_by(unbroken)
