"""Training: what is saved and printed, several processes against one, and runs that were killed."""

import ast
import os
import re
import sys

import pytest
import torch
from conftest import (
    FLOAT64,
    SCRIPTS,
    SMALL_NET,
    command,
    copy_script,
    process_ids,
    result,
    run,
    saved_by,
    wait_until_gone,
)


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory):
    """Run each script once, copied with common.py alone. Return the folders, and what the runs printed."""
    runs = {}
    for script in SCRIPTS:
        edits = [SMALL_NET] if script == "apex_amp_train" else []
        folder = copy_script(tmp_path_factory.mktemp("a project") / script, script, *edits)
        (folder / "link.pt").symlink_to("run.pt")  # what it leads to is written, and it stays a link
        arguments = command(script, "--checkpoint", "link.pt", folder=folder)
        if script == "ddp_spawn_train":  # as in a notebook: no other process can import what stands after -c
            code = "import ddp_spawn_train, os; before = dict(os.environ)\n"
            code += f"print('RETURNED', ddp_spawn_train.launch({arguments[2:]}), 'CHANGED', os.environ != before)"
            arguments = [sys.executable, "-c", code]
        runs[script] = folder, run(arguments, cwd=folder)
    return runs


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copied_script_learns_and_prints_on_rank_0_only(script, first_runs):
    folder, finished = first_runs[script]
    found, processes = result(finished), 1 if script == "dp_train" else 2
    assert found["world_size"] == processes == len(set(process_ids(finished.stdout)))
    assert {"train_loss", "val_loss", "val_accuracy", "best", "images_per_second"} < found.keys()
    assert len(re.findall(r"^epoch \d step \d/5 loss", finished.stdout, re.M)) == 10
    losses = [float(loss) for loss in re.findall(r"train_loss (\S+)", finished.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.1
    assert "GPU memory" not in finished.stdout and (folder / "link.pt").is_symlink()
    assert {path.name for path in folder.glob("run.*")} == {"run.pt", "run.pt.best", "run.pt.lock"}


def test_spawn_trains_like_launch_bit_for_bit_and_returns_the_metrics_to_a_notebook(first_runs):
    (launch, _), (spawn, finished) = first_runs["ddp_launch_train"], first_runs["ddp_spawn_train"]
    assert saved_by(launch) == saved_by(spawn)
    returned, changed = re.search(r"RETURNED (.*) CHANGED (.*)", finished.stdout).groups()
    assert ast.literal_eval(returned).items() <= result(finished).items() and changed == "False"


def test_a_run_that_was_killed_while_it_saved_resumes_like_an_unbroken_one(first_runs, tmp_path):
    script, save = "ddp_spawn_train", '    torch.save(state, f"{path}.tmp")\n'
    kill = "    if state.get('epoch') == 2: os.truncate(f'{path}.tmp', 1000), os.kill(os.getpid(), 9)\n"
    folder = copy_script(tmp_path / "copy", script, (save, save + kill))
    flags = ["--workers", "1", "--checkpoint", "run.pt"]  # the unbroken run had no data-loading processes
    killed = run(command(script, *flags, folder=folder), cwd=tmp_path)
    assert killed.returncode != 0
    wait_until_gone(process_ids(killed.stdout))
    os.link(tmp_path / "run.pt", tmp_path / "old.pt")  # a second name; it keeps this content if run.pt is replaced
    finished = run(command(script, *flags), cwd=tmp_path)
    assert "1 of 2 epochs are done" in finished.stdout and result(finished)
    assert saved_by(tmp_path) == saved_by(first_runs[script][0])
    assert torch.load(tmp_path / "old.pt", weights_only=True)["epoch"] == 1


def test_the_main_metric_decides_which_weights_are_the_best(tmp_path):
    first_is_best = "val_other=torch.tensor(-metrics_from.calls), val_numpy=np.float32(0.5))"
    edits = [
        ('MAIN_METRIC = "val_accuracy"', 'import numpy as np\nMAIN_METRIC = "val_other"'),
        ("    loss_sum, correct, count =", "    metrics_from.calls += 1\n    loss_sum, correct, count ="),
        ("val_accuracy=correct / count)", f"val_accuracy=correct / count, {first_is_best}"),
        ("\ndef check_metrics", "\nmetrics_from.calls = 0\n\n\ndef check_metrics"),
    ]
    keep = "            save_checkpoint(args, stateful, epoch, metrics)\n"
    edits.append((keep, f"{keep}            torch.save(net.state_dict(), f'epoch{{epoch}}.pt')\n"))
    folder = copy_script(tmp_path / "copy", "dp_train", *edits)
    assert result(run(command("dp_train", "--checkpoint", "run.pt", folder=folder), cwd=folder))["best"] == -1
    names = "run.pt.best", "epoch1.pt", "epoch2.pt"
    best, first, second = (torch.load(folder / name)["fc.weight"] for name in names)
    assert torch.equal(best, first) and not torch.equal(best, second)
    metrics = torch.load(folder / "run.pt", weights_only=True)["metrics"]  # fails with NumPy numbers
    assert {type(value) for value in metrics.values()} == {float}


def test_rank_0_alone_reads_the_checkpoint_and_more_processes_may_resume(first_runs, tmp_path):
    state = torch.load(first_runs["ddp_launch_train"][0] / "run.pt", weights_only=True)
    one_epoch = dict(epoch=1, scheduler=state["scheduler"] | dict(last_epoch=5, _step_count=6))
    torch.save(state | one_epoch, tmp_path / "run.pt")
    no_shared_disk = ("    # [DDP 2/8]", "    if rank > 0: args.checkpoint = '/not/there'\n    # [DDP 2/8]")
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", no_shared_disk)
    finished = run(command("ddp_launch_train", "--checkpoint", "run.pt", nproc=3, folder=folder), cwd=tmp_path)
    assert "1 of 2 epochs are done" in finished.stdout and result(finished)["world_size"] == 3


def test_1_and_3_processes_train_and_validate_alike_on_the_same_global_batch(tmp_path):
    # 59 images are no equal shares for 3 processes: each must be validated once, none twice.
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", *FLOAT64)
    weights, metrics, train_losses = [], [], []
    for nproc in 1, 3:
        flags = ["--limit", "59", "--clip-grad", "0.5", "--checkpoint", f"{tmp_path}/{nproc}.pt"]
        found = result(run(command("ddp_launch_train", *flags, nproc=nproc, folder=folder)))
        metrics.append([found[name] for name in ("val_loss", "val_accuracy")])
        train_losses.append(found["train_loss"])
        weights.append(torch.load(tmp_path / f"{nproc}.pt", weights_only=True)["net"])
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-12)
    assert train_losses[1] == pytest.approx(train_losses[0], rel=1e-6)  # main adds it up in float32


def test_ranks_have_their_own_images_and_random_numbers_and_validate_the_same_network(tmp_path):
    epoch = "        model.train()\n"
    order = "        print('ORDER', epoch, rank, torch.rand(1).item(), *sampler, force=True)\n"
    network = "        val_sums = validate("
    total = "sum(value.double().sum().item() for value in net.state_dict().values())"
    state = f"        print('STATE', epoch, {total}, force=True)\n"
    folder = copy_script(tmp_path / "copy", "ddp_spawn_train", (epoch, epoch + order), (network, state + network))
    finished = run(command("ddp_spawn_train", folder=folder))
    assert result(finished)
    lines = [line.split() for line in sorted(re.findall(r"ORDER (.*)", finished.stdout))]  # by epoch, then by rank
    assert [line[:2] for line in lines] == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
    assert len({line[2] for line in lines}) == 4
    images = [line[3:] for line in lines]
    assert not set(images[0]) & set(images[1]) and not set(images[2]) & set(images[3])
    assert images[0] != images[2] and len(images[0]) == 30
    states = re.findall(r"STATE (.*)", finished.stdout)
    assert len(states) == 4 and len(set(states)) == 2  # one in each epoch
