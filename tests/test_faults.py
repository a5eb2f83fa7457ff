"""What breaks a run: Ctrl-C, a NaN loss, a full disk, a broken checkpoint, what a user types wrongly."""

import argparse
import contextlib
import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, SMALL, command, copy_script, process_ids, result, run, saved_by, wait_until_gone


def processes_of(pid):
    """Return the ids of a process and of all that it and they have started."""
    children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return [pid, *(one for child in children for one in processes_of(int(child)))]


@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
@pytest.mark.parametrize(("device", "sent"), [("cpu", "SIGINT"), ("cuda", "SIGINT"), ("cuda", "SIGKILL")])
def test_ctrl_c_or_a_killed_process_ends_all_and_spawn_listens_on_loopback(script, device, sent, start, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    flags = ["--device", device, "--epochs", "1000", "--workers", "1", "--checkpoint", f"{tmp_path}/run.pt"]
    process, log = start(command(script, *flags), "epoch 2 step")
    pids = processes_of(process.pid)
    assert len(pids) >= 7  # the launcher, two processes, and for each two that load data
    if script == "ddp_spawn_train" and shutil.which("ss"):
        lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
        own = [line.split()[3] for line in lines if any(f"pid={pid}," in line for pid in pids)]
        assert {address.rpartition(":")[0] for address in own} == {"127.0.0.1"}
    if sent == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)  # what a terminal sends
    else:
        os.kill(process_ids(log.read_text())[1], signal.SIGKILL)
    assert process.wait(timeout=60) != 0
    wait_until_gone(pids)
    torch.load(tmp_path / "run.pt", weights_only=True)


def test_a_second_run_on_a_checkpoint_is_refused_until_the_first_has_ended(start, tmp_path):
    flags = ["--workers", "1", "--epochs", "1000", "--checkpoint", f"{tmp_path}/run.pt"]
    arguments = command("ddp_launch_train", *flags, nproc=1)
    process, log = start(arguments, "epoch 1 train_loss")
    pids = processes_of(process.pid)
    os.kill(pids[0], signal.SIGKILL)  # torchrun; its processes train on
    second = run(arguments)
    assert second.returncode != 0 and f"another run uses {tmp_path}/run.pt" in second.stderr
    epochs = log.read_text().count("train_loss")
    while log.read_text().count("train_loss") == epochs:  # the first run trains on, unharmed
        time.sleep(0.05)
    os.kill(process_ids(log.read_text())[0], signal.SIGKILL)  # its data-loading processes live on for seconds
    third, _ = start(arguments, r"[1-9]\d* of 1000 epochs are done")
    for pid in [*pids[1:], *processes_of(third.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


ERRORS = [
    ("ddp_spawn_train", "loss = loss / 0", "epoch 2: train_loss is inf; use a smaller --lr"),
    ("dp_train", "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (2**20, 2**20))", "too large|iostream error"),
]


@pytest.mark.parametrize(("script", "fault", "message"), ERRORS)
def test_after_an_infinite_loss_or_on_a_full_disk_the_last_checkpoint_stays(script, fault, message, tmp_path):
    line = "            scheduler.step()\n"
    folder = copy_script(tmp_path / "copy", script, (line, f"{line}            if epoch == 2: {fault}\n"))
    finished = run(command(script, "--checkpoint", "run.pt", folder=folder), cwd=tmp_path)
    assert finished.returncode != 0 and "RESULT" not in finished.stdout
    assert re.search(message, finished.stderr), finished.stderr
    assert torch.load(tmp_path / "run.pt", weights_only=True)["epoch"] == 1
    torch.load(tmp_path / "run.pt.best", weights_only=True)
    wait_until_gone(process_ids(finished.stdout))


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Return a function that runs a script's main() with flags, as rank 0 of two, and returns what it says."""
    monkeypatch.setattr("builtins.print", print)  # setup_for_distributed replaces it
    monkeypatch.chdir(tmp_path)

    def main(script, *flags, launcher=True, small=SMALL):
        for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2).items():
            monkeypatch.setenv(name, str(value)) if launcher else monkeypatch.delenv(name, raising=False)
        module = importlib.import_module(script)
        with pytest.raises(SystemExit) as error:
            args = module.parse_args([*small, *flags])
            module.main(*([0, 2, "folder"] if script == "ddp_spawn_train" else []), args)
        assert error.value.code != 0
        return f"{error.value} {capsys.readouterr().err}"

    return main


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_user_gets_wrong_is_said_in_one_sentence(script, refused):
    torchrun = script in ("ddp_launch_train", "apex_amp_train")
    start = "with torchrun: torchrun --standalone" if torchrun else "without torchrun: python"
    assert f"start this script {start}" in refused(script, launcher=not torchrun)
    sentences = {
        "--epochs 0": "argument --epochs: 0 is less than 1",
        "--epochs many": "argument --epochs: invalid whole_number value: 'many'",
        "--workers -1": "argument --workers: -1 is less than 0",
        "--color red": "unrecognized arguments: --color",
        "--clip-grad nan": "--clip-grad must be greater than 0",
        "--batch-size 62": "--batch-size must be at most 61",
        "--checkpoint no/run.pt": "--checkpoint: [Errno 2] No such file",
        "--pretrained": "--pretrained needs --image-size 65 or more",
    }
    if script != "dp_train":
        sentences |= {"--batch-size 13": "divisible by 2 processes", "--sync-bn": "--sync-bn needs GPUs"}
    if script == "apex_amp_train":
        sentences |= {"--backend apex": "needs a GPU, NVIDIA Apex 25.04", "--opt-level O2": "torch has only O1"}
    for flags, sentence in sentences.items():
        assert sentence in refused(script, *flags.split(), launcher=torchrun)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_default_batch_is_512_images_for_each_process(script, refused):
    torchrun = script in ("ddp_launch_train", "apex_amp_train")
    number = SMALL.index("--batch-size")
    without = SMALL[:number] + SMALL[number + 2 :]
    too_few = str(511 if script == "dp_train" else 2 * 512 - 1)
    said = refused(script, "--limit", too_few, launcher=torchrun, small=without)
    assert f"--batch-size must be at most {too_few}" in said


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_that_does_not_fit_is_refused_and_stays(script, tmp_path):
    module = importlib.import_module(script)
    parts = dict.fromkeys(["net", "amp", "optimizer", "scheduler", "epoch", "metrics"])
    torch.save(dict(parts, flags=dict(lr=0.5, workers=9)), tmp_path / "lr")
    torch.save(dict(weight=torch.ones(1000)), tmp_path / "weights")
    (tmp_path / "cut").write_bytes((tmp_path / "weights").read_bytes()[:3000])
    (tmp_path / "code").write_bytes(b"cos\nmkdir\n(S'owned'\ntR.")  # a pickle that calls os.mkdir("owned")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    messages = "with lr=0.5, not 0.02", "not a checkpoint of this script", "zip archive", "Weights only"
    for name, message in zip(["lr", "weights", "cut", "code"], messages):
        args = argparse.Namespace(checkpoint=str(tmp_path / name), lr=0.02, workers=0, new_flag=1)
        with pytest.raises(SystemExit, match=f"{name}.*{message}"):
            module.load_checkpoint(args)
    assert before == {path: path.read_bytes() for path in before} and not os.path.exists("owned")
    args.checkpoint, args.lr = str(tmp_path / "lr"), 0.5  # --workers may change; the file may lack a new flag
    assert module.load_checkpoint(args)["flags"]["workers"] == 9
    if script == "ddp_launch_train":  # torchrun shows the sentence and no traceback
        shutil.copy(tmp_path / "cut", tmp_path / "copy")  # this process has locked the others
        finished = run(command(script, "--checkpoint", str(tmp_path / "copy"), nproc=1))
        assert finished.returncode != 0 and finished.stderr.count("cannot read") == 1
        assert 'ddp_launch_train.py", line' not in finished.stderr and "terminate called" not in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
def test_killed_at_15_random_moments_a_run_ends_like_an_unbroken_one(script, start, tmp_path):
    arguments = command(script, "--epochs", "12", "--lr", "1", "--checkpoint", "run.pt")
    unbroken, killed = copy_script(tmp_path / "unbroken", script), copy_script(tmp_path / "killed", script)
    result(run(arguments, cwd=unbroken))
    chance = random.Random(21)
    for _ in range(15):
        process, _ = start(arguments, "epochs are done", cwd=killed)
        time.sleep(chance.uniform(0, 2.5))  # within one or two epochs
        pids = processes_of(process.pid)
        for pid in chance.choice([pids, pids[-1:], pids[1:2]]):  # all processes, or one of them
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids)
    result(run(arguments, cwd=killed))
    assert saved_by(killed) == saved_by(unbroken)
