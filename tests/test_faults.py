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
import torch.distributed as dist
from conftest import (
    ALL_GPUS,
    GPUS,
    SCRIPTS,
    SMALL,
    command,
    copy_script,
    process_ids,
    result,
    run,
    saved_by,
    train,
    wait_until_gone,
)


def processes_of(pid):
    """Return the ids of a process and of all that it and they have started."""
    children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return [pid, *(one for child in children for one in processes_of(int(child)))]


@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
@pytest.mark.parametrize(("device", "sent"), [("cpu", "SIGINT"), ("cuda", "SIGINT"), ("cuda", "SIGKILL")])
def test_ctrl_c_or_a_killed_process_ends_all_and_spawn_listens_on_loopback(script, device, sent, start, tmp_path):
    if device == "cuda" and GPUS < 2:
        pytest.skip("needs two GPUs")
    flags = ["--epochs", "1000", "--workers", "1", "--checkpoint", f"{tmp_path}/run.pt"]
    process, log = start(command(script, *flags), "epoch 2 train_loss", **ALL_GPUS if device == "cuda" else {})
    pids = processes_of(process.pid)
    assert len(pids) >= 3  # the launcher and two processes, and now and then those that load data
    if script == "ddp_spawn_train" and shutil.which("ss"):
        lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
        own = [line.split()[3] for line in lines if any(f"pid={pid}," in line for pid in pids)]
        assert {address.rpartition(":")[0] for address in own} == {"127.0.0.1"}
    if sent == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)  # what a terminal sends
    else:
        pids = [process.pid, *process_ids(log.read_text())]  # a data-loading process may live longer
        os.kill(pids[2], signal.SIGKILL)  # rank 1
    assert process.wait(timeout=60) != 0
    wait_until_gone(pids)
    torch.load(tmp_path / "run.pt", "cpu", weights_only=True)


def test_a_second_run_on_a_checkpoint_is_refused_until_the_first_has_ended(start, tmp_path):
    short = ("timeout=30", "timeout=3")  # seconds
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", short)
    flags = ["--workers", "1", "--epochs", "1000", "--checkpoint", f"{tmp_path}/run.pt"]
    arguments = command("ddp_launch_train", *flags, nproc=1, folder=folder)
    process, log = start(arguments, "epoch 1 train_loss")
    pids = processes_of(process.pid)
    os.kill(pids[0], signal.SIGKILL)  # torchrun; its processes train on
    second = run(arguments)
    assert second.returncode != 0 and "run.pt.lock' could not be acquired" in second.stderr
    epochs = log.read_text().count("train_loss")
    while log.read_text().count("train_loss") == epochs:  # the first run trains on, unharmed
        time.sleep(0.05)
    os.kill(process_ids(log.read_text())[0], signal.SIGKILL)  # its data-loading processes may live on for seconds
    third, _ = start(command("ddp_launch_train", *flags, nproc=1), r": [1-9]\d* epochs are done")
    for pid in [*pids[1:], *processes_of(third.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# Each fault strikes in the second epoch; the third in the last step, so that the loss of the epoch is finite.
ERRORS = [
    ("ddp_spawn_train", "loss = loss / 0", "NaN or infinite: use a smaller --lr"),
    ("dp_train", "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (2**20, 2**20))", "too large|iostream error"),
    ("ddp_launch_train", "if step == steps: net.fc.weight.data[0, 0] = math.nan", "NaN or infinite"),
    ("dp_train", "optimizer.param_groups[0]['lr'] = common.np.float64(0.01)", "Weights only load failed"),
]


@pytest.mark.parametrize(("script", "fault", "message"), ERRORS)
def test_after_a_fault_the_last_checkpoint_stays(script, fault, message, tmp_path):
    line, in_epoch_2 = "            scheduler.step()\n", "            if epoch == 2:\n                "
    folder = copy_script(tmp_path / "copy", script, (line, f"{line}{in_epoch_2}{fault}\n"))
    finished = run(command(script, "--checkpoint", "run.pt", folder=folder), cwd=tmp_path)
    assert finished.returncode != 0 and "RESULT" not in finished.stdout
    assert re.search(message, finished.stderr), finished.stderr
    assert torch.load(tmp_path / "run.pt", weights_only=True)["epoch"] == 1
    torch.load(tmp_path / "run.pt.best", weights_only=True)
    wait_until_gone(process_ids(finished.stdout))


def test_another_data_set_is_refused_when_a_run_resumes(tmp_path, monkeypatch):
    images = ("(args.data_dir, args.synthetic)", '("", int(os.environ["IMAGES"]))')
    folder = copy_script(tmp_path, "dp_train", images)

    def train_on(number):
        monkeypatch.setenv("IMAGES", number)
        return train(folder, 0, script="dp_train")

    assert result(train_on("61"))
    with pytest.raises(Exception, match="exit code 1"):
        train_on("73")
    assert "run.pt was saved with steps=5: use its flags and data" in (folder / "log").read_text()
    assert ": 2 epochs are done" in train_on("62").stdout


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Return a function that runs a script's main() with flags, as rank 0 of two, and returns what it says."""
    monkeypatch.setattr("builtins.print", print)  # setup_for_distributed replaces it
    monkeypatch.chdir(tmp_path)

    def main(script, *flags, launcher=True, small=SMALL, code=1):
        for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2).items():
            monkeypatch.setenv(name, str(value)) if launcher else monkeypatch.delenv(name, raising=False)
        module = importlib.import_module(script)
        with pytest.raises(SystemExit) as error:
            args = module.parse_args([*small, *flags])
            module.main(*([0, 2, "folder"] if script == "ddp_spawn_train" else []), args)
        assert bool(error.value.code) == bool(code)
        return f"{error.value} {' '.join(capsys.readouterr())}"

    return main


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_user_gets_wrong_is_said_in_one_sentence(script, refused):
    torchrun = script in ("ddp_launch_train", "apex_amp_train")
    start = "with torchrun: torchrun --standalone" if torchrun else "without torchrun: python"
    assert f"start this script {start}" in refused(script, launcher=not torchrun)
    assert "peak learning rate" in refused(script, "--help", launcher=not torchrun, code=0)
    sentences = {
        "--epochs many": "argument --epochs: invalid int value: 'many'",
        "--color red": "unrecognized arguments: --color",
        "--batch-size 62": "--batch-size must be at most 61",
    }
    if script != "dp_train":
        sentences |= {"--batch-size 13": "divisible by 2 processes"}
    if script == "apex_amp_train":
        sentences |= {"--backend apex": "needs a GPU, NVIDIA Apex", "--opt-level O2": "is for --backend apex"}
    for flags, sentence in sentences.items():
        assert sentence in refused(script, *flags.split(), launcher=torchrun)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_default_batch_is_512_images_for_each_process(script, refused):
    torchrun = script in ("ddp_launch_train", "apex_amp_train")
    number = SMALL.index("--batch-size")
    without = SMALL[:number] + SMALL[number + 2 :]
    too_few = str(511 if script == "dp_train" else 2 * 512 - 1)
    said = refused(script, "--synthetic", too_few, launcher=torchrun, small=without)
    assert f"--batch-size must be at most {too_few}" in said


@pytest.fixture
def one_process():
    """Make a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Part(dict):
    """Something with a state, like a network."""

    state_dict, load_state_dict = dict.copy, dict.update


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_that_does_not_fit_is_refused_and_stays(script, tmp_path, one_process):
    module, part = importlib.import_module(script), Part(weight=torch.ones(1000))
    args = argparse.Namespace(checkpoint=str(tmp_path / "run.pt"), lr=0.5, workers=9, steps=5)
    assert module.load_checkpoint(args, dict(net=part)) == (0, dict(best=-float("inf")))
    module.save_checkpoint(args, dict(net=part), 3, {"val_accuracy": 0.5, "best": 0.6})
    assert not (tmp_path / "run.pt.best").exists()  # this epoch is not the best
    new = argparse.Namespace(**vars(args) | dict(workers=1, new_flag=1))  # --workers may change; so may the flags
    loaded = Part()
    assert module.load_checkpoint(new, dict(net=loaded)) == (3, {"val_accuracy": 0.5, "best": 0.6})
    assert torch.equal(loaded["weight"], part["weight"])
    for name, value in dict(lr=0.1, steps=6).items():
        changed = argparse.Namespace(**vars(args) | {name: value})
        with pytest.raises(SystemExit, match=f"run.pt was saved with {name}="):
            module.load_checkpoint(changed, dict(net=loaded))
    with pytest.raises(Exception, match="Weights only load failed"):
        module.save_checkpoint(args, dict(net=Part(path=Path())), 4, {"val_accuracy": 0.5, "best": 0.6})
    assert module.load_checkpoint(args, dict(net=loaded))[0] == 3
    (tmp_path / "run.pt").write_bytes(b"cos\nmkdir\n(S'owned'\ntR.")  # a pickle that calls os.mkdir("owned")
    with pytest.raises(Exception, match="Weights only load failed"):
        module.load_checkpoint(args, dict(net=loaded))
    assert not os.path.exists("owned")


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
