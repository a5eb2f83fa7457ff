"""Training: what is saved and printed, several processes against one, and runs that were killed."""

import ast
import os
import re
import sys

import pytest
import torch
from conftest import (
    FLOAT64,
    ROOT,
    SCRIPTS,
    SMALL_NET,
    command,
    copy_script,
    process_ids,
    result,
    run,
    saved_by,
    train,
)

import ddp_spawn_train

EVERY_5_STEPS = ("step % 20 == 0", "step % 5 == 0")
SAVE = '    torch.save(state, f"{path}.tmp")\n'
KILL = "    if state.get('epoch') == 2: os.truncate(f'{path}.tmp', 1000), os.kill(os.getpid(), 9)\n"


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory):
    """Run each script once, copied with common.py alone. Return the folders, and what the runs printed."""
    runs = {}
    for script in SCRIPTS:
        edits = [EVERY_5_STEPS] + [SMALL_NET] * (script == "apex_amp_train")
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
    assert not any(name.startswith("module.") for name in state["net"])
    assert state["optimizer"]["param_groups"][0]["momentum"] == 0.9  # OneCycleLR would change it


def test_spawn_trains_like_launch_bit_for_bit_and_returns_the_metrics_to_a_notebook(first_runs):
    (launch, _), (spawn, finished) = first_runs["ddp_launch_train"], first_runs["ddp_spawn_train"]
    assert saved_by(launch) == saved_by(spawn)
    returned, changed = re.search(r"RETURNED (.*) CHANGED (.*)", finished.stdout).groups()
    assert ast.literal_eval(returned).items() <= result(finished).items() and changed == "False"


def test_launch_without_arguments_ignores_the_flags_of_a_notebooks_kernel(monkeypatch):
    def spawn(function, arguments, nprocs):
        _, folder, args = arguments
        assert function is ddp_spawn_train.main and nprocs == 2 and args.epochs == 30
        torch.save(dict(best=1), f"{folder}/metrics")

    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    assert ddp_spawn_train.launch() == dict(best=1)


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


def test_a_run_killed_while_it_saves_resumes_exactly_with_random_items_and_data_loading_processes(tmp_path):
    load, shuffle = "    train_set, val_set = ", "        sampler.set_epoch(epoch)\n"
    step = "            optimizer.zero_grad()\n"
    say = "            print('ITEMS', epoch, rank, batch[0].flatten(1)[:, :4].tolist(), force=True)\n"
    edits = [
        ("\nif __name__", RANDOM_ITEMS),
        (f"{load}load_data(args)", f"{load}map(RandomItems, load_data(args))"),
        (shuffle, f"{shuffle}        train_set.epoch = epoch\n"),
        (step, say + step),
    ]
    unbroken = copy_script(tmp_path / "unbroken", "ddp_spawn_train", *edits)
    killed = copy_script(tmp_path / "killed", "ddp_spawn_train", *edits, (SAVE, SAVE + KILL))
    flags = ["--workers", "2", "--checkpoint", "run.pt"]
    first = run(command("ddp_spawn_train", *flags, folder=unbroken), cwd=unbroken)
    assert run(command("ddp_spawn_train", *flags, folder=killed), cwd=killed).returncode != 0
    os.link(killed / "run.pt", tmp_path / "old.pt")  # a second name; it keeps this content if run.pt is replaced
    second = run(command("ddp_spawn_train", *flags, folder=unbroken), cwd=killed)
    assert ": 1 epochs are done" in second.stdout and result(second)
    assert saved_by(killed) == saved_by(unbroken)
    assert torch.load(tmp_path / "old.pt", weights_only=True)["epoch"] == 1
    items = {output: sorted(re.findall("ITEMS (.*)", output)) for output in (first.stdout, second.stdout)}
    assert items[second.stdout] == [line for line in items[first.stdout] if line.startswith("2")] != []
    rows = [row for line in items[first.stdout] for row in ast.literal_eval(line[4:])]
    epochs, *numbers = zip(*rows)
    assert set(epochs) == {1, 2}  # a changed attribute of the data set reaches the next epoch's processes
    assert all(len(set(column)) == len(rows) == 120 for column in numbers)  # no random number is used twice


def test_the_main_metric_decides_which_weights_are_the_best(tmp_path):
    edits = [
        ('MAIN_METRIC = "val_accuracy"', 'MAIN_METRIC = "val_other"'),
        ("    loss, correct, count =", "    metrics_from.calls += 1\n    loss, correct, count ="),
        ("val_accuracy=correct / count)", "val_accuracy=correct / count, val_other=-metrics_from.calls)"),
        ("\ndef save_checkpoint", "\nmetrics_from.calls = 0\n\n\ndef save_checkpoint"),
    ]
    keep = "            save_checkpoint(args, stateful, epoch, metrics)\n"
    edits.append((keep, f"{keep}            torch.save(net.state_dict(), f'epoch{{epoch}}.pt')\n"))
    folder = copy_script(tmp_path, "dp_train", *edits)
    assert result(train(folder, 0, script="dp_train"))["best"] == -1
    names = "run.pt.best", "epoch1.pt", "epoch2.pt"
    best, first, second = (torch.load(folder / name)["fc.weight"] for name in names)
    assert torch.equal(best, first) and not torch.equal(best, second)


def test_rank_0_alone_reads_the_checkpoint_and_more_processes_may_resume(first_runs, tmp_path):
    state = torch.load(first_runs["ddp_launch_train"][0] / "run.pt", weights_only=True)
    one_epoch = dict(epoch=1, scheduler=state["scheduler"] | dict(last_epoch=5, _step_count=6))
    state["flags"]["checkpoint"] = "run.pt"
    torch.save(state | one_epoch, tmp_path / "run.pt")
    no_shared_disk = ("    # [DDP 2/8]", "    if rank > 0: args.checkpoint = '/not/there'\n    # [DDP 2/8]")
    finished = train(copy_script(tmp_path, "ddp_launch_train", no_shared_disk), 3)
    assert finished.stdout.count(": 1 epochs are done") == result(finished)["world_size"] == 3


def test_1_and_3_processes_train_and_validate_alike_on_the_same_global_batch(tmp_path):
    # 59 images are no equal shares for 3 processes: each must be validated once, none twice.
    folder = copy_script(tmp_path, "ddp_launch_train", *FLOAT64)
    weights, metrics, train_losses = [], [], []
    for nproc in 1, 3:
        found = result(train(folder, nproc, "--synthetic", "59", "--checkpoint", f"{nproc}.pt"))
        metrics.append([found[name] for name in ("val_loss", "val_accuracy")])
        train_losses.append(found["train_loss"])
        weights.append(torch.load(tmp_path / f"{nproc}.pt", weights_only=True)["net"])
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-12)
    assert train_losses[1] == pytest.approx(train_losses[0], rel=1e-6)  # main adds it up in float32


def test_ranks_have_their_own_images_and_random_numbers_and_validate_the_same_network(tmp_path):
    epoch = "        ddp_net.train()\n"
    order = "        print('ORDER', epoch, rank, torch.rand(1).item(), *sampler, force=True)\n"
    network = "        val_sums = validate("
    total = "sum(value.double().sum().item() for value in net.state_dict().values())"
    state = f"        print('STATE', epoch, {total}, force=True)\n"
    state += "        print('VALIDATES', len(val_loader.dataset), force=True)\n"
    folder = copy_script(tmp_path, "ddp_launch_train", (epoch, epoch + order), (network, state + network))
    finished = train(folder, 2)
    assert result(finished)
    lines = [line.split() for line in sorted(re.findall(r"ORDER (.*)", finished.stdout))]  # by epoch, then by rank
    assert [line[:2] for line in lines] == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
    assert len({line[2] for line in lines}) == 4
    images = [line[3:] for line in lines]
    assert not set(images[0]) & set(images[1]) and not set(images[2]) & set(images[3])
    assert images[0] != images[2] and len(images[0]) == 30
    states = re.findall(r"STATE (.*)", finished.stdout)
    assert len(states) == 4 and len(set(states)) == 2  # one in each epoch
    assert sum(map(int, re.findall(r"VALIDATES (\d+)", finished.stdout))) == 2 * 61  # each image once an epoch


@pytest.mark.parametrize(
    ("one", "other", "most"),
    [
        ("dp_train", "ddp_launch_train", 134),
        ("ddp_launch_train", "ddp_spawn_train", 47),
        ("ddp_launch_train", "apex_amp_train", 98),
    ],
)
def test_the_scripts_share_all_lines_that_are_not_their_technique(one, other, most):
    diff = run(["diff", ROOT / f"{one}.py", ROOT / f"{other}.py"]).stdout
    assert len(re.findall("(?m)^[<>]", diff)) <= most  # so who changes a line changes it in all scripts
