"""Training: what is saved and printed, several processes against one, settings, and runs that were killed."""

import argparse
import ast
import importlib
import os
import re
import sys

import pytest
import torch
from conftest import (
    FLOAT64,
    ROOT,
    SCRIPTS,
    SMALL_MODEL,
    command,
    copy_script,
    process_ids,
    result,
    run,
    saved_by,
    train,
)
from torch import nn

import ddp_spawn_train
import dp_train

EVERY_5_STEPS = ("step % 20 == 0", "step % 5 == 0")


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory):
    """Run each script once, copied with common.py alone. Return the folders, and what the runs printed."""
    runs = {}
    for script in SCRIPTS:
        edits = [EVERY_5_STEPS] + [SMALL_MODEL] * (script == "apex_amp_train")
        folder = copy_script(tmp_path_factory.mktemp("a project") / script, script, *edits)
        arguments = command(script, "--checkpoint", "new/run.pt", folder=folder)
        if script == "ddp_spawn_train":  # as in a notebook: no other process can import what stands after -c
            code = "import ddp_spawn_train, os; before = dict(os.environ)\n"
            code += "ddp_spawn_train.load_data = None\n"  # does not reach the processes: they import the file
            code += f"print('RETURNED', ddp_spawn_train.launch({arguments[2:]}), 'CHANGED', os.environ != before)"
            arguments = [sys.executable, "-c", code]
        runs[script] = folder / "new", run(arguments, cwd=folder)
    return runs


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copied_script_learns_and_prints_on_rank_0_only(script, first_runs):
    folder, finished = first_runs[script]
    found, processes = result(finished), 1 if script == "dp_train" else 2
    assert found["world_size"] == processes == len(set(process_ids(finished.stdout)))
    assert {"train_loss", "val_loss", "val_accuracy", "best", "images_per_second"} < found.keys()
    assert len(re.findall(r"^epoch \d step 5/5 loss [\d.]+ (?:\(rank 0\) )?[\d.]+ s$", finished.stdout, re.M)) == 2
    losses = [float(loss) for loss in re.findall(r"train_loss (\S+)", finished.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.1
    assert {path.name for path in folder.iterdir()} == {"run.pt", "run.pt.best", "run.pt.lock"}
    state = torch.load(folder / "run.pt", weights_only=True)
    assert not any(name.startswith("module.") for name in state["model"])
    assert state["scheduler"]["total_steps"] == 10  # those of two epochs


def test_spawn_trains_like_launch_bit_for_bit_and_returns_the_metrics_to_a_notebook(first_runs):
    (launch, _), (spawn, finished) = first_runs["ddp_launch_train"], first_runs["ddp_spawn_train"]
    assert saved_by(launch) == saved_by(spawn)
    returned, changed = re.search(r"RETURNED (.*) CHANGED (.*)", finished.stdout).groups()
    metrics, found = ast.literal_eval(returned), result(finished)
    assert metrics == {name: found[name] for name in metrics} and "val_accuracy" in metrics and changed == "False"


def test_launch_without_arguments_ignores_the_flags_of_a_notebooks_kernel(monkeypatch):
    def spawn(function, arguments, nprocs):
        _, folder, args = arguments
        assert function is ddp_spawn_train.main and nprocs == 2 and args.epochs == 30
        torch.save(dict(best=1), f"{folder}/metrics")

    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    assert ddp_spawn_train.launch() == dict(best=1)


def test_each_flag_has_its_default_and_only_some_may_change_when_a_run_resumes(tmp_path):
    defaults = dict(data_dir="data", synthetic=None, arch="resnet50", image_size=32, pretrained=None, epochs=30)
    defaults |= dict(batch_size=None, lr=None, precision="fp32", compile=False, workers=0, seed=21)
    defaults |= dict(checkpoint=None)
    args = dp_train.parse_args([])
    assert vars(args) == defaults
    assert dp_train.parse_args(["--pretrained", "all"]).image_size == 224
    home = dp_train.parse_args(["--data-dir=~/cifar", "--checkpoint=~/run.pt"])
    assert [home.data_dir, home.checkpoint] == [os.path.expanduser(path) for path in ("~/cifar", "~/run.pt")]
    args.checkpoint, args.steps = f"{tmp_path}/run.pt", 5
    assert dp_train.load_checkpoint(args, {}) == (0, dict(best=-float("inf")))
    dp_train.save_checkpoint(args, {}, 3, {"val_accuracy": 0.5, "best": 0.6})
    assert not (tmp_path / "run.pt.best").exists()  # this epoch is not the best
    os.link(tmp_path / "run.pt", tmp_path / "other.pt")
    new_values = dict.fromkeys(vars(args), "other") | dict(checkpoint=f"{tmp_path}/other.pt", new_flag=1)
    may_change = set()
    for name, value in new_values.items():
        try:
            changed = argparse.Namespace(**vars(args) | {name: value})
            assert dp_train.load_checkpoint(changed, {}) == (3, {"val_accuracy": 0.5, "best": 0.6})
            may_change.add(name)
        except SystemExit as refused:
            assert f"run.pt has {name}={vars(args)[name]}: use its flags and data, or a new file" in str(refused)
    assert may_change == {"data_dir", "precision", "compile", "workers", "checkpoint", "new_flag"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_optimizer_and_its_schedule(script):
    module, model = importlib.import_module(script), nn.Linear(2, 2)
    for batch_size, lr, peak in (512, None, 0.4), (1024, None, 0.8), (8192, None, 1.6), (8192, 0.1, 0.1):
        optimizer = module.build_optimizer(argparse.Namespace(batch_size=batch_size, lr=lr), model)
        [group] = optimizer.param_groups
        settings = dict(lr=peak, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True, dampening=0)
        assert type(optimizer) is torch.optim.SGD and settings.items() <= group.items()
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert len(buffers) == 2 * (script == "apex_amp_train") and not any(buffer.any() for buffer in buffers)
    scheduler, rates = module.build_scheduler(None, optimizer, 100), []
    for _ in range(100):
        rates.append(group["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(0.1) and rates[0] < 0.01 and group["lr"] < 1e-4
    assert group["momentum"] == 0.9 and 25 < rates.index(max(rates)) < 35  # OneCycleLR could change the momentum


RANDOM_ITEMS = '''
class RandomItems(torch.utils.data.Dataset):
    """Items whose first pixels are the epoch and random numbers from Python, NumPy and PyTorch."""

    def __init__(self, items):
        self.items, self.epoch = items, 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        import random
        image, label = self.items[index]
        numbers = [random.random(), common.np.random.rand(), torch.rand(1).item()]
        return torch.cat([torch.tensor([self.epoch, *numbers]), image.flatten()[4:]]).view(image.shape), label


if __name__'''
SAVE = '    torch.save(state, f"{path}.tmp")\n'
# The fourth file that is saved is the second of epoch 2. Half of it is written.
KILL = "    save_atomically.calls = getattr(save_atomically, 'calls', 0) + 1\n"
KILL += "    if save_atomically.calls == 4: os.truncate(f'{path}.tmp', 1000), os.kill(os.getpid(), 9)\n"


def test_a_run_that_is_killed_while_it_saves_resumes_exactly_with_random_items_and_workers(tmp_path):
    load, shuffle = "    train_set, val_set = ", "        sampler.set_epoch(epoch)\n"
    step = "            optimizer.zero_grad()\n"
    say = "            print('ITEMS', epoch, rank, batch[0].flatten(1)[:, :4].tolist(), force=True)\n"
    edits = [
        SMALL_MODEL,
        ("\nif __name__", RANDOM_ITEMS),
        (f"{load}load_data(args)", f"{load}map(RandomItems, load_data(args))"),
        (shuffle, f"{shuffle}        train_set.epoch = epoch\n"),
        (step, say + step),
        ('MAIN_METRIC = "val_accuracy"', 'MAIN_METRIC = "val_minus_loss"'),
        ("val_accuracy=correct / count)", "val_minus_loss=-loss / count)"),  # larger in the second epoch
    ]
    uninterrupted = copy_script(tmp_path / "uninterrupted", "ddp_launch_train", *edits)
    killed = copy_script(tmp_path / "killed", "ddp_launch_train", *edits, (SAVE, SAVE + KILL))
    first = train(uninterrupted, 2, "--workers", "2")
    assert result(first)["best"] == result(first)["val_minus_loss"]
    assert train(killed, 2, "--workers", "2").returncode != 0
    os.link(killed / "run.pt", tmp_path / "old.pt")  # a second name; it keeps this content if run.pt is replaced
    copy_script(killed, "ddp_launch_train", *edits)
    second = train(killed, 2, "--workers", "2")
    assert ": 1 epochs are done" in second.stdout and result(second)
    assert saved_by(killed) == saved_by(uninterrupted)
    assert torch.load(tmp_path / "old.pt", weights_only=True)["epoch"] == 1
    items = {run.stdout: sorted(re.findall("ITEMS (.*)", run.stdout)) for run in (first, second)}
    assert items[second.stdout] == [line for line in items[first.stdout] if line.startswith("2")] != []
    rows = [row for line in items[first.stdout] for row in ast.literal_eval(line[4:])]
    epochs, *numbers = zip(*rows)
    assert set(epochs) == {1, 2}  # a changed attribute of the dataset reaches the next epoch's workers
    assert all(len(set(column)) == len(rows) == 120 for column in numbers)  # no random number is used twice


def test_the_main_metric_decides_which_weights_are_the_best(tmp_path):
    edits = [
        SMALL_MODEL,
        ('MAIN_METRIC = "val_accuracy"', 'MAIN_METRIC = "val_other"'),
        ("    loss, correct, count =", "    metrics_from.calls += 1\n    loss, correct, count ="),
        ("val_accuracy=correct / count)", "val_accuracy=correct / count, val_other=-metrics_from.calls)"),
        ("\ndef save_checkpoint", "\nmetrics_from.calls = 0\n\n\ndef save_checkpoint"),
    ]
    keep = "            save_checkpoint(args, stateful, epoch, metrics)\n"
    edits.append((keep, f"{keep}            torch.save(model.state_dict(), f'epoch{{epoch}}.pt')\n"))
    folder = copy_script(tmp_path, "dp_train", *edits)
    assert result(train(folder, 0, script="dp_train"))["best"] == -1
    names = "run.pt.best", "epoch1.pt", "epoch2.pt"
    best, first, second = (torch.load(folder / name)["4.weight"] for name in names)
    assert torch.equal(best, first) and not torch.equal(best, second)


def test_on_three_machines_without_a_shared_disk_rank_0_alone_reads_and_saves_the_checkpoint(first_runs, tmp_path):
    state = torch.load(first_runs["ddp_launch_train"][0] / "run.pt", weights_only=True)  # of two processes
    one_epoch = dict(epoch=1, scheduler=state["scheduler"] | dict(last_epoch=5, _step_count=6))
    for rank in range(3):
        (tmp_path / f"machine {rank}").mkdir()
    torch.save(state | one_epoch, tmp_path / "machine 0" / "run.pt")
    own_folder = ("    # [DDP 2/9]", "    os.chdir(f'machine {rank}')\n    # [DDP 2/9]")
    finished = train(copy_script(tmp_path, "ddp_launch_train", own_folder), 3, LOCAL_RANK="0")
    assert finished.stdout.count(": 1 epochs are done") == result(finished)["world_size"] == 3
    assert torch.load(tmp_path / "machine 0" / "run.pt", weights_only=True)["epoch"] == 2
    assert not any([*(tmp_path / "machine 1").iterdir(), *(tmp_path / "machine 2").iterdir()])


def test_1_2_and_3_processes_train_and_validate_alike_on_the_same_global_batch(tmp_path):
    clock = ("import time\n", "import time; time.perf_counter = iter(range(9)).__next__\n")  # one second an epoch
    folder = copy_script(tmp_path, "ddp_launch_train", *FLOAT64, clock)
    results, weights = [], []
    for nproc in 1, 2, 3:
        # 59 images are no equal shares for 2 and 3 processes: each must be validated once, none twice.
        results.append(result(train(folder, nproc, "--synthetic", "59", "--checkpoint", f"{nproc}.pt")))
        weights.append(torch.load(tmp_path / f"{nproc}.pt", weights_only=True)["model"])
        torch.testing.assert_close(weights[-1], weights[0], rtol=1e-12, atol=1e-12)
        for name in "val_loss", "val_accuracy":
            assert results[-1][name] == pytest.approx(results[0][name], rel=1e-12)
        assert results[-1]["train_loss"] == pytest.approx(results[0]["train_loss"], rel=1e-6)  # a float32 sum
        assert results[-1]["images_per_second"] == 48  # of all processes: four steps of twelve images


def test_ranks_have_their_own_images_and_random_numbers_and_validate_the_same_model(tmp_path):
    epoch = "        ddp_model.train()\n"
    order = "        print('ORDER', epoch, rank, torch.rand(1).item(), *sampler, force=True)\n"
    state = "        val_sums = validate("
    total = "sum(value.double().sum().item() for value in model.state_dict().values())"
    say = f"        print('STATE', epoch, {total}, len(val_loader.dataset), force=True)\n"
    folder = copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL, (epoch, epoch + order), (state, say + state))
    finished = train(folder, 2)
    assert result(finished)
    lines = [line.split() for line in sorted(re.findall(r"ORDER (.*)", finished.stdout))]  # by epoch, then by rank
    assert [line[:2] for line in lines] == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
    assert len({line[2] for line in lines}) == 4
    images = [line[3:] for line in lines]
    assert not set(images[0]) & set(images[1]) and not set(images[2]) & set(images[3])
    assert images[0] != images[2] and len(images[0]) == 30
    states = re.findall(r"STATE (.*) \d+", finished.stdout)
    assert len(states) == 4 and len(set(states)) == 2  # one in each epoch
    assert sum(map(int, re.findall(r"STATE .* (\d+)", finished.stdout))) == 2 * 61  # each image once an epoch


@pytest.mark.parametrize(
    ("one", "other", "lines"),
    [
        ("dp_train", "ddp_launch_train", 145),
        ("ddp_launch_train", "ddp_spawn_train", 45),
        ("ddp_launch_train", "apex_amp_train", 99),
    ],
)
def test_the_scripts_share_all_lines_that_are_not_their_technique(one, other, lines):
    diff = run(["diff", ROOT / f"{one}.py", ROOT / f"{other}.py"]).stdout
    assert len(re.findall("(?m)^[<>]", diff)) <= lines  # so who changes a line changes it in all scripts
