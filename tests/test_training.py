"""What every script does, and that a run which is killed goes on and ends like one that was not."""

import ast
import os
import re
import signal
import sys

import pytest
import torch
from conftest import SCRIPTS, command, copy_script, process_ids, result, run, wait_until_gone
from torch.utils._pytree import tree_map_only

METRICS = "train_loss val_loss val_accuracy best_accuracy images_per_second".split()


def saved_by(folder):
    """Return what a run has saved, but for its flags and speed, with bytes in place of tensors."""
    states = [torch.load(folder / name, weights_only=True) for name in ("run.pt", "run.pt.best")]
    del states[0]["flags"], states[0]["metrics"]["images_per_second"]
    return tree_map_only(torch.Tensor, lambda tensor: tensor.numpy().tobytes(), states)


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory):
    """Run each script once, copied with common.py alone. Return the folders, and what the runs printed."""
    runs = {}
    for script in SCRIPTS:
        folder = copy_script(tmp_path_factory.mktemp("a project") / script, script)
        arguments = command(script, "--checkpoint", "run.pt", folder=folder)
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
    assert found["gpus"] == 0 and found["seconds"] > 0 and set(METRICS) < set(found)
    assert len(re.findall(r"^epoch \d step \d/5 loss", finished.stdout, re.M)) == 10
    losses = [float(loss) for loss in re.findall(r"train_loss (\S+)", finished.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.1
    assert {path.name for path in folder.glob("run.*")} == {"run.pt", "run.pt.best"}


def test_spawn_trains_like_launch_bit_for_bit_and_returns_the_metrics_to_a_notebook(first_runs):
    (launch, _), (spawn, finished) = first_runs["ddp_launch_train"], first_runs["ddp_spawn_train"]
    assert saved_by(launch) == saved_by(spawn)
    returned, changed = re.search(r"RETURNED (.*) CHANGED (.*)", finished.stdout).groups()
    assert ast.literal_eval(returned).items() <= result(finished).items() and changed == "False"


def test_without_the_broadcasts_that_compile_drops_training_is_the_same(first_runs, tmp_path):
    no_compile = ('model = torch.compile(model, mode="reduce-overhead")', "assert not model.broadcast_buffers")
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", no_compile)
    result(run(command("ddp_launch_train", "--compile", "--checkpoint", "run.pt", folder=folder), cwd=tmp_path))
    assert saved_by(tmp_path) == saved_by(first_runs["ddp_launch_train"][0])


def test_killed_in_the_middle_of_an_epoch_a_run_resumes_like_an_unbroken_one(first_runs, start, tmp_path):
    # With data-loading processes, which the unbroken run did not have.
    arguments = command("ddp_launch_train", "--workers", "1", "--checkpoint", "run.pt")
    process, log = start(arguments, "epoch 2 step 2", cwd=tmp_path)
    pids = process_ids(log.read_text())
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait(timeout=60) != 0
    wait_until_gone(pids)
    finished = run(arguments, cwd=tmp_path)
    assert "1 of 2 epochs are done" in finished.stdout and result(finished)
    assert saved_by(tmp_path) == saved_by(first_runs["ddp_launch_train"][0])


@pytest.mark.parametrize("script", ["dp_train", "ddp_spawn_train"])
def test_killed_while_it_saves_a_run_resumes_like_an_unbroken_one(script, first_runs, tmp_path):
    save = '    torch.save(state, f"{path}.tmp")\n'
    fault = "    if state.get('epoch') == 2: os.truncate(f'{path}.tmp', 1000), os.kill(os.getpid(), 9)\n"
    folder = copy_script(tmp_path / "copy", script, (save, save + fault))
    flags = ["--workers", "1", "--checkpoint", "run.pt"]
    killed = run(command(script, *flags, folder=folder), cwd=tmp_path)
    assert killed.returncode != 0 and (tmp_path / "run.pt.tmp").stat().st_size == 1000
    wait_until_gone(process_ids(killed.stdout))
    os.link(tmp_path / "run.pt", tmp_path / "old.pt")  # the same file, unless it is replaced
    finished = run(command(script, *flags), cwd=tmp_path)
    assert "1 of 2 epochs are done" in finished.stdout and result(finished)
    assert saved_by(tmp_path) == saved_by(first_runs[script][0])
    assert torch.load(tmp_path / "old.pt", weights_only=True)["epoch"] == 1
    if script == "dp_train":  # a finished run, started again, prints its result again
        again = result(run(command(script, *flags), cwd=tmp_path))
        assert again | dict(seconds=0) == result(finished) | dict(seconds=0)


def test_rank_0_alone_reads_the_checkpoint_and_more_processes_may_resume(first_runs, tmp_path):
    state = torch.load(first_runs["ddp_launch_train"][0] / "run.pt", weights_only=True)
    before = dict(epoch=1, scheduler=state["scheduler"] | dict(last_epoch=5, _step_count=6))
    torch.save(state | before, tmp_path / "run.pt")
    step = "    # [DDP 2/8]"
    no_shared_disk = (step, f"    if rank > 0: args.checkpoint = '/not/there'\n{step}")
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", no_shared_disk)
    flags = ["--checkpoint", "run.pt", "--precision", "bf16"]
    finished = run(command("ddp_launch_train", *flags, nproc=3, folder=folder), cwd=tmp_path)
    assert "1 of 2 epochs are done" in finished.stdout and result(finished)["world_size"] == 3
