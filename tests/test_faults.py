"""What breaks a run: a killed, hanging or failing process, Ctrl-C, a NaN loss, a full disk; and how it goes on."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, be_python, command, edited, fork, process_ids, result, run, wait_until_gone

FEW = [*SMALL, "--limit", "24", "--device", "cpu"]  # two steps an epoch
# Else torchrun keeps its store, and restarted processes may read the addresses of the killed ones.
FRESH_STORE = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]


def with_fault(folder, script, fault):
    """Copy a recipe and put a statement after each training step."""
    line = "        scheduler.step()\n"
    return edited(folder, script, (line, f"{line}        {fault}\n"))


def stop_after_one_epoch(tmp_path, script, flags):
    folder = with_fault(tmp_path / "stopped", script, "if epoch == 2: raise SystemExit('stopped')")
    assert "stopped" in run(command(script, *flags, folder=folder)).stderr


def family(pid):
    """Return the ids of a process and of all that it and they have started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def kill(*pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def begin(script, flags, log, folder=ROOT):
    """Start a run as run() does, with two processes; do not wait for its end."""
    words = command(script, *flags, folder=folder)[1:]
    nproc, words = (2, words[4:]) if words[0] == "-m" else (0, words)
    log.touch()
    process = fork.Process(target=be_python, args=(words[0], words[1:], nproc, dict(os.environ), ROOT, log, log))
    process.start()
    return process


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(("script", "kills"), [("ddp_launch_train", 22), ("ddp_spawn_train", 8)])
def test_killed_at_any_moment_the_same_command_goes_on_and_ends_like_an_unbroken_run(script, kills, tmp_path):
    unbroken, broken, log = tmp_path / "unbroken.pt", tmp_path / "broken.pt", tmp_path / "log"
    # Most kills come in the first epoch of a run. With this --lr, the best epoch may be an early one.
    flags = [*FEW, "--epochs", str(kills // 2 + 4), "--lr", "1", "--checkpoint"]
    smaller = "(args)\n    net.layer4, net.fc = nn.Identity(), nn.Linear(256, 10)\n    net = net.to(device)"
    folder = edited(tmp_path / "project", script, ("(args).to(device)", smaller))  # its files are written faster
    result(run(command(script, *flags, str(unbroken), folder=folder)))

    def written():  # when the temporary file was written last; None if there is none
        with contextlib.suppress(FileNotFoundError):
            return os.stat(f"{broken}.tmp").st_mtime_ns

    chance, during_save = random.Random(21), 0
    for number in range(kills):
        old = written()  # a killed run may have left one
        process = begin(script, [*flags, str(broken)], log, folder)
        lines = log.read_text().count("\n") + chance.randrange(8)  # the 7th line is of its second epoch
        # A third of the kills come while the checkpoint is being written, the others at any moment.
        while written() in (old, None) if number % 3 == 0 else log.read_text().count("\n") < lines:
            assert process.is_alive(), log.read_text()
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1 if number % 3 else 0.02))
        pids = family(process.pid)
        kill(*chance.choice([pids, pids[-1:], pids[:2][-1:]]))  # all of them, or one: then the others end, too
        wait_until_gone(pids)
        kill(-process.pid)  # what was just being started
        during_save += written() not in (old, None)
        if broken.exists():
            torch.load(broken, weights_only=True)
    assert during_save >= kills // 7
    result(run(command(script, *flags, str(broken), folder=folder)))
    a, b = (torch.load(path, weights_only=True) for path in (unbroken, broken))
    for saved in a, b:
        del saved["flags"]["checkpoint"], saved["metrics"]["images_per_second"]
    assert equal(a, b)
    assert equal(*(torch.load(f"{path}.best", weights_only=True) for path in (unbroken, broken)))


def test_torchrun_restarts_a_run_whose_process_is_killed(tmp_path, start):
    flags = [*FEW, "--epochs", "6", "--checkpoint", str(tmp_path / "run.pt"), "--timeout", "30"]
    arguments = command("ddp_launch_train", *flags)
    arguments.insert(3, "--max-restarts=3")
    running = start([*FRESH_STORE, *arguments])
    running.wait_for("epoch 2 step")
    kill(running.pids()[1])
    assert running.process.wait(timeout=150) == 0, running.log.read_text()
    done = re.findall(r"(\d) of 6 epochs are done", running.log.read_text())
    assert done[0] == "0" and len(done) > 1 and "0" not in done[1:]
    assert running.log.read_text().count("RESULT ") == 1


def test_when_one_of_two_launchers_is_lost_the_other_goes_on_alone(tmp_path, start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = [*FEW, "--epochs", "8", "--checkpoint", str(tmp_path / "run.pt"), "--timeout", "30"]
    arguments = command("ddp_launch_train", *flags, nproc=1)
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    settings = "--rdzv-conf=is_host=1,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    arguments[3:4] = ["--nnodes=1:2", "--max-restarts=3", *rendezvous, settings]
    stays = start([*FRESH_STORE, *arguments])  # has the store, and so must stay
    leaves = start([*FRESH_STORE, *(word.replace("is_host=1", "is_host=0") for word in arguments)])
    while "epoch 3 step" not in stays.log.read_text() + leaves.log.read_text():  # rank 0 may be on either
        assert stays.process.poll() is leaves.process.poll() is None, stays.log.read_text()
        time.sleep(0.02)
    kill(*family(leaves.process.pid))
    assert stays.process.wait(timeout=120) == 0, stays.log.read_text()
    log = stays.log.read_text()
    assert int(re.findall(r"(\d) of 8 epochs are done", log)[-1]) >= 2
    [line] = [line for line in log.splitlines() if line.startswith("RESULT ")]
    assert '"world_size": 1' in line and '"batch_size": 12' in line


@pytest.mark.parametrize(("script", "real"), [("ddp_launch_train", True), ("ddp_spawn_train", False)])
def test_a_process_that_hangs_ends_the_run_after_the_timeout(script, real, tmp_path):
    folder = with_fault(tmp_path / "edited", script, "if dist.get_rank() and step == 2: time.sleep(1000)")
    finished = run(command(script, *FEW, "--timeout", "4", folder=folder), timeout=60, real=real)
    assert finished.returncode != 0 and re.search("imed out|timeout", finished.stderr), finished.stderr
    assert len(pids := process_ids(finished.stdout)) == 2
    wait_until_gone(pids)


REPORTS = {
    "ddp_launch_train": r"Root Cause .*\n  rank      : 1 .* traceback : Traceback .*\n  ValueError: broken\s+=+\n",
    "ddp_spawn_train": r"-- Process 1 terminated with the following error:\nTraceback .*\nValueError: broken\s+",
}


@pytest.mark.parametrize("script", REPORTS)
def test_a_process_that_raises_shows_its_traceback_last_and_the_others_end(script, tmp_path):
    fault = "if dist.get_rank() and step == 2: raise ValueError('broken')"
    folder = with_fault(tmp_path / "edited", script, fault)
    finished = run(command(script, *FEW, folder=folder), timeout=90, real=script == "ddp_launch_train")
    assert finished.returncode != 0 and re.search(rf"(?s){REPORTS[script]}\Z", finished.stderr), finished.stderr
    assert len(pids := process_ids(finished.stdout)) == 2
    wait_until_gone(pids)


@pytest.mark.parametrize("script", ["dp_train", "ddp_spawn_train"])
def test_a_nan_loss_ends_the_run_and_the_checkpoint_of_the_epoch_before_stays(script, tmp_path):
    path = tmp_path / "run.pt"
    folder = with_fault(tmp_path / "edited", script, "if epoch == 2: loss = loss * math.nan")
    finished = run(command(script, *FEW, "--checkpoint", str(path), folder=folder))
    assert finished.returncode != 0 and "RESULT" not in finished.stdout
    said = set(finished.stderr.splitlines())
    assert "epoch 2: NaN or infinite metrics; use a smaller --lr and a new --checkpoint" in said
    assert "\nepoch 2 train_loss nan val_loss " in finished.stdout
    assert torch.load(path, weights_only=True)["epoch"] == 1


@pytest.mark.parametrize("script", ["dp_train", "ddp_launch_train", "ddp_spawn_train"])
def test_ctrl_c_ends_every_process_within_ten_seconds(script, start, tmp_path):
    path = tmp_path / "run.pt"
    running = start(command(script, *FEW, "--epochs", "1000", "--workers", "2", "--checkpoint", str(path)))
    ranks = running.pids(1 if script == "dp_train" else 2)
    running.wait_for("epoch 3 step")
    pids = family(running.process.pid)
    assert len(pids) >= 5 * len(ranks)  # each has two data-loading processes for each of its data sets
    os.killpg(running.process.pid, signal.SIGINT)
    wait_until_gone(pids, seconds=10)
    assert running.process.wait() != 0
    torch.load(path, weights_only=True)


def test_a_full_disk_ends_the_run_and_the_old_checkpoint_stays(tmp_path):
    path, best = tmp_path / "run.pt", tmp_path / "run.pt.best"
    flags = [*FEW, "--epochs", "3", "--checkpoint", str(path)]
    stop_after_one_epoch(tmp_path, "dp_train", flags)
    before = [file.read_bytes() for file in (path, best)]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))"
    finished = run(command("dp_train", *flags, folder=with_fault(tmp_path / "edited", "dp_train", limit)))
    assert finished.returncode != 0 and "RESULT" not in finished.stdout
    assert re.search("File too large|iostream error", finished.stderr), finished.stderr
    assert all(file.read_bytes() == old for file, old in zip((path, best), before, strict=True))
    assert "1 of 3 epochs are done" in (resumed := run(command("dp_train", *flags))).stdout
    result(resumed)


@pytest.mark.skipif(not shutil.which("ss"), reason="needs ss, of iproute2")
@pytest.mark.parametrize(("script", "expected"), [("dp_train", set()), ("ddp_spawn_train", {"127.0.0.1"})])
def test_a_run_on_one_machine_listens_on_loopback_only(script, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_nameindex()[-1][1])  # another network card, if there is one
    log = tmp_path / "log"
    process = begin(script, [*FEW, "--epochs", "99"], log)
    while "epoch 2 step" not in log.read_text():
        assert process.is_alive(), log.read_text()
        time.sleep(0.02)
    pids = family(process.pid)
    table = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    kill(-process.pid)
    own = [line.split()[3] for line in table if any(f"pid={pid}," in line for pid in pids)]
    assert {address.rpartition(":")[0] for address in own} == expected


def test_a_resumed_run_may_have_another_number_of_processes_and_another_precision(tmp_path):
    flags = [*FEW, "--epochs", "2", "--checkpoint", str(tmp_path / "run.pt")]
    stop_after_one_epoch(tmp_path, "ddp_launch_train", flags)
    finished = run(command("ddp_launch_train", *flags, "--precision", "bf16", nproc=3))
    assert "bf16, 1 of 2 epochs are done" in finished.stdout
    assert result(finished)["world_size"] == 3


def test_a_finished_run_prints_its_result_again_and_another_lr_or_epochs_is_refused(tmp_path):
    flags = [*FEW, "--epochs", "2", "--checkpoint", str(tmp_path / "run.pt")]
    first = result(run(command("dp_train", *flags)))
    again = run(command("dp_train", *flags))
    assert "2 of 2 epochs are done" in again.stdout and "step" not in again.stdout
    assert dict(result(again), seconds=first["seconds"]) == first
    for name, value, saved in ("lr", "0.03", "0.02"), ("epochs", "3", "2"):
        refused = run(command("dp_train", *flags, f"--{name}", value))
        assert refused.stderr == f"{tmp_path}/run.pt has {name}={saved}, not {value}; use its flags\n"
        assert refused.returncode != 0
