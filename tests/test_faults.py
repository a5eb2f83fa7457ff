"""What breaks a run: Ctrl-C, a NaN loss, a full disk, a broken checkpoint, what a user types wrongly."""

import argparse
import builtins
import importlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, SMALL, command, copy_script, process_ids, run, wait_until_gone

STEP = "            scheduler.step()\n"


def processes_of(pid):
    """Return the ids of a process and of all that it and they have started."""
    children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return [pid, *(one for child in children for one in processes_of(int(child)))]


@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
def test_ctrl_c_ends_all_processes_and_spawn_listens_on_loopback_only(script, start, tmp_path):
    flags = ["--epochs", "1000", "--workers", "1", "--checkpoint", f"{tmp_path}/run.pt"]
    process, _ = start(command(script, *flags), "epoch 2 step")
    pids = processes_of(process.pid)
    assert len(pids) >= 7  # the launcher, two processes, and for each two that load data
    if script == "ddp_spawn_train" and shutil.which("ss"):
        lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
        own = [line.split()[3] for line in lines if any(f"pid={pid}," in line for pid in pids)]
        assert {address.rpartition(":")[0] for address in own} == {"127.0.0.1"}
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends
    assert process.wait(timeout=20) != 0
    wait_until_gone(pids)
    torch.load(tmp_path / "run.pt", weights_only=True)


def test_a_nan_loss_ends_the_run_and_the_checkpoint_of_the_epoch_before_stays(tmp_path):
    fault = (STEP, f"{STEP}            loss = loss / (epoch < 2)\n")
    folder = copy_script(tmp_path / "copy", "ddp_spawn_train", fault)
    finished = run(command("ddp_spawn_train", "--checkpoint", "run.pt", folder=folder), cwd=tmp_path)
    assert finished.returncode != 0 and "RESULT" not in finished.stdout
    assert "epoch 2: train_loss is inf; use a smaller --lr and a new --checkpoint" in finished.stderr
    assert torch.load(tmp_path / "run.pt", weights_only=True)["epoch"] == 1
    wait_until_gone(process_ids(finished.stdout))


def test_a_full_disk_ends_the_run_and_the_checkpoint_of_the_epoch_before_stays(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))"
    line = "        common.seed_everything(args.seed, epoch)"
    folder = copy_script(tmp_path / "copy", "dp_train", (line, f"        if epoch == 2: {limit}\n{line}"))
    finished = run(command("dp_train", "--checkpoint", "run.pt", folder=folder), cwd=tmp_path)
    assert finished.returncode != 0 and "RESULT" not in finished.stdout
    assert re.search("File too large|iostream error", finished.stderr), finished.stderr
    for name in "run.pt", "run.pt.best":
        assert torch.load(tmp_path / name, weights_only=True)


def test_metrics_may_be_tensors_and_one_that_is_missing_or_nan_is_named():
    script = importlib.import_module("ddp_launch_train")
    metrics = script.check_metrics(1, dict(a=torch.tensor(0.5), b=torch.ones(1).numpy()[0]))
    assert metrics == dict(a=0.5, b=1) and {type(value) for value in metrics.values()} == {float}
    with pytest.raises(SystemExit, match="epoch 3: f1 is nan"):
        script.check_metrics(3, dict(loss=1, f1=torch.tensor(torch.nan)))


# ------------------------------------------------------------ What is refused, in this process


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Return a function that runs a script's main() with flags, as rank 0 of two, and returns what it says."""
    monkeypatch.setattr(builtins, "print", print)  # setup_for_distributed replaces it
    monkeypatch.chdir(tmp_path)

    def main(script, *flags, launcher=True):
        for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2).items():
            monkeypatch.setenv(name, str(value)) if launcher else monkeypatch.delenv(name, raising=False)
        module = importlib.import_module(script)
        with pytest.raises(SystemExit) as error:
            args = module.parse_args([*SMALL, *flags])
            module.main(*([0, 2, "folder"] if script == "ddp_spawn_train" else []), args)
        assert error.value.code != 0
        return f"{error.value} {capsys.readouterr().err}"

    return main


def test_a_script_says_how_it_is_started(refused):
    for script in "ddp_launch_train", "apex_amp_train":
        assert "start this script with torchrun: torchrun --standalone" in refused(script, launcher=False)
    for script in "dp_train", "ddp_spawn_train":
        assert "start this script without torchrun: python" in refused(script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_cannot_be_is_refused_in_one_sentence(script, refused):
    def says(*flags):
        return refused(script, *flags, launcher=script in ("ddp_launch_train", "apex_amp_train"))

    for flag in "--epochs", "--batch-size", "--limit", "--image-size", "--log-every":
        assert f"argument {flag}: 0 is less than 1" in says(flag, "0")
    assert "argument --workers: -1 is less than 0" in says("--workers", "-1")
    assert "argument --epochs: invalid whole_number value: 'many'" in says("--epochs", "many")
    assert "unrecognized arguments: --color" in says("--color", "red")
    assert "--clip-grad must be greater than 0" in says("--clip-grad", "nan")
    assert "--batch-size must be at most 61" in says("--batch-size", "62")
    assert "cannot write into" in says("--checkpoint", "no/run.pt")
    assert "--pretrained needs --image-size 65 or more" in says("--pretrained")
    if not torch.cuda.is_available():
        assert "argument --device: invalid choice: 'cuda'" in says("--device", "cuda")
    if script != "dp_train":
        assert "divisible by 2 processes" in says("--batch-size", "13")
        assert "--sync-bn needs GPUs" in says("--sync-bn")
    if script == "apex_amp_train":
        assert "--backend apex needs a GPU, NVIDIA Apex 25.04" in says("--backend", "apex")
        assert "--backend torch has only O1" in says("--opt-level", "O2")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_that_does_not_fit_is_refused_and_stays(script, refused, tmp_path):
    module = importlib.import_module(script)
    parts = dict.fromkeys(["net", "optimizer", "scheduler", "epoch", "metrics"], {})
    parts |= dict(amp={}) if script == "apex_amp_train" else {}
    torch.save(dict(parts, flags=dict(lr=0.5, workers=9, compile=True)), "lr")
    torch.save(dict(weight=torch.ones(1000)), "weights")
    torch.save(torch.ones(2), "tensor")
    Path("cut").write_bytes(Path("weights").read_bytes()[:3000])
    Path("code").write_bytes(b"cos\nmkdir\n(S'owned'\ntR.")  # a pickle that calls os.mkdir("owned")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    messages = dict(lr="saved with lr=0.5, not 0.02; use its flags", weights="not a checkpoint of this script")
    messages |= dict(cut="zip archive", code="Weights only load failed", tensor="no attribute 'keys'")
    for name, message in messages.items():
        args = argparse.Namespace(checkpoint=str(tmp_path / name), lr=0.02, workers=0, compile=False, new_flag=1)
        with pytest.raises(SystemExit, match=name) as error:
            module.load_checkpoint(args)
        assert message in str(error.value)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    args.checkpoint, args.lr = str(tmp_path / "lr"), 0.5  # --workers may change; the file may lack a new flag
    assert module.load_checkpoint(args)["flags"]["workers"] == 9


def test_under_torchrun_a_broken_checkpoint_gives_one_sentence_and_no_traceback(tmp_path):
    (tmp_path / "run.pt").write_bytes(b"no checkpoint")
    finished = run(command("ddp_launch_train", "--checkpoint", "run.pt"), cwd=tmp_path)
    assert finished.returncode != 0 and finished.stderr.count("cannot read") == 1
    assert 'ddp_launch_train.py", line' not in finished.stderr and "terminate called" not in finished.stderr
