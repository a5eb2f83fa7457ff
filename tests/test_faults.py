"""What breaks a run: Ctrl-C, kills, a NaN loss, a full disk, a broken checkpoint, what a user types wrongly."""

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    ALL_GPUS,
    GPUS,
    LIMIT,
    SCRIPTS,
    SMALL_MODEL,
    command,
    copy_script,
    in_processes,
    process_ids,
    processes_of,
    result,
    run,
    saved_by,
    train,
    wait_until_gone,
)


def addresses_of(pids):
    """Return the addresses, as in /proc/net/tcp, at which some processes listen for connections."""
    sockets = set()
    for pid in pids:
        for file in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                sockets.update(re.findall(r"socket:\[(\d+)\]", os.readlink(file.path)))
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [line.split() for line in lines.splitlines()]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}


def train_until_epoch_2(start, tmp_path, name, script, **env):
    """Start a run that would not end. Return its process, and the ids of this process and of its ranks."""
    folder = copy_script(tmp_path / name, script, SMALL_MODEL)
    flags = ["--epochs", "100000", "--workers", "1", "--checkpoint", f"{tmp_path}/{name}.pt"]
    process, log = start(command(script, *flags, folder=folder), "epoch 2 train_loss", **env)
    return process, [process.pid, *process_ids(log.read_text())]


def has_ended(process, pids, checkpoint):
    """Check that a run has ended with an error and has left no process, and a whole checkpoint."""
    assert process.wait(LIMIT) != 0
    wait_until_gone(pids)
    torch.load(checkpoint, "cpu", weights_only=True)


def test_ctrl_c_ends_torchrun_and_its_processes(start, tmp_path):
    process, pids = train_until_epoch_2(start, tmp_path, "launch", "ddp_launch_train")
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends
    has_ended(process, pids, tmp_path / "launch.pt")


def test_two_spawn_runs_listen_on_loopback_and_end_by_ctrl_c_or_an_ides_stop_button(start, tmp_path):
    one, pids_of_one = train_until_epoch_2(start, tmp_path, "one", "ddp_spawn_train")
    other = dict(GLOO_SOCKET_IFNAME="of another network")  # the script's own setting comes first
    two, pids_of_two = train_until_epoch_2(start, tmp_path, "two", "ddp_spawn_train", **other)
    assert addresses_of(pids_of_one[1:] + pids_of_two[1:]) == {"0100007F"}  # 127.0.0.1
    os.killpg(one.pid, signal.SIGINT)
    has_ended(one, pids_of_one, tmp_path / "one.pt")
    os.kill(two.pid, signal.SIGINT)  # the parent alone
    has_ended(two, pids_of_two, tmp_path / "two.pt")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
@pytest.mark.parametrize("sent", ["SIGINT", "SIGKILL"])
def test_ctrl_c_or_a_killed_process_ends_all_on_gpus(script, sent, start, tmp_path):
    process, pids = train_until_epoch_2(start, tmp_path, "run", script, **ALL_GPUS)
    os.killpg(process.pid, signal.SIGINT) if sent == "SIGINT" else os.kill(pids[2], signal.SIGKILL)  # rank 1
    has_ended(process, pids, tmp_path / "run.pt")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_processes_whose_parent_is_killed_while_they_import_pytorch_end(sent, start, tmp_path):
    wait = "import json\nimport os, time\nprint('IMPORTS', os.getpid(), flush=True)\n"
    wait += "while __name__ != '__main__' and not os.path.exists('go on'):\n    time.sleep(0.01)\n"
    folder = copy_script(tmp_path / "copy", "ddp_spawn_train", SMALL_MODEL, ("import json\n", wait))
    process, log = start(command("ddp_spawn_train", folder=folder), r"(IMPORTS[^I]*){3}", cwd=folder)
    pids = [int(pid) for pid in re.findall(r"IMPORTS (\d+)", log.read_text())]
    os.kill(process.pid, sent)
    process.wait()
    (folder / "go on").touch()
    wait_until_gone(pids)
    assert "epochs are done" not in log.read_text()


def test_an_error_while_one_rank_loads_its_data_ends_all(tmp_path):
    load = "    train_set, val_set = load_data(args)\n"
    error = f"    if rank == 1: raise OSError('no such disk')\n{load}"
    finished = train(copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL, (load, error)), 3)
    assert finished.returncode != 0 and "no such disk" in finished.stdout and "RESULT" not in finished.stdout


def test_a_second_run_on_a_checkpoint_is_refused_until_the_first_has_ended(start, tmp_path):
    short = ("timeout=30", "timeout=3")  # seconds
    folder = copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL, short)
    flags = ["--workers", "1", "--epochs", "100000", "--checkpoint", "run.pt"]
    process, log = start(command("ddp_launch_train", *flags, nproc=1, folder=folder), "epoch 1 train", cwd=folder)
    [rank_0] = process_ids(log.read_text())
    os.kill(process.pid, signal.SIGKILL)  # torchrun; its process trains on
    second = train(folder, 1)
    assert second.returncode != 0 and "run.pt.lock' could not be acquired" in second.stdout
    epochs = log.read_text().count("train_loss")
    while log.read_text().count("train_loss") == epochs:  # the first run trains on, unharmed
        assert os.path.exists(f"/proc/{rank_0}/exe"), log.read_text()
        time.sleep(0.05)
    os.kill(rank_0, signal.SIGKILL)  # its workers may live on for seconds
    wait_until_gone([rank_0])
    done = torch.load(folder / "run.pt", weights_only=True)["epoch"]
    third = train(folder, 1, *flags, "--epochs", str(done), "--workers", "1")
    assert "has epochs=100000: use its flags" in third.stdout  # it has the lock, and reads the checkpoint


# Each fault strikes in the second epoch; the third in the last step, so that the loss of the epoch is finite.
ERRORS = [
    ("ddp_launch_train", "loss = loss / 0", "NaN or infinite: use a smaller --lr"),
    ("dp_train", "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (8192,) * 2)", "large|failed|iostream"),
    ("ddp_launch_train", "if step == steps: model[4].weight.data[0, 0] = math.nan", "NaN or infinite"),
    ("dp_train", "optimizer.param_groups[0]['lr'] = common.np.float64(0.01)", "Weights only load failed"),
]


@pytest.mark.parametrize(("script", "fault", "message"), ERRORS)
def test_after_a_fault_the_last_checkpoint_stays(script, fault, message, tmp_path):
    line, in_epoch_2 = "            scheduler.step()\n", "            if epoch == 2:\n                "
    folder = copy_script(tmp_path, script, SMALL_MODEL, (line, f"{line}{in_epoch_2}{fault}\n"))
    finished = train(folder, 0 if script == "dp_train" else 2, script=script)
    assert finished.returncode != 0 and "RESULT" not in finished.stdout
    assert re.search(message, finished.stdout)
    assert torch.load(tmp_path / "run.pt", weights_only=True)["epoch"] == 1
    torch.load(tmp_path / "run.pt.best", weights_only=True)


def test_another_dataset_is_refused_when_a_run_resumes(tmp_path):
    images = ("(args.data_dir, args.synthetic)", '("", int(os.environ["IMAGES"]))')
    folder = copy_script(tmp_path, "dp_train", SMALL_MODEL, images)
    assert result(train(folder, 0, script="dp_train", IMAGES="61"))
    refused = train(folder, 0, script="dp_train", IMAGES="73")
    assert "run.pt has steps=5: use its flags and data" in refused.stdout and refused.returncode != 0
    assert ": 2 epochs are done" in train(folder, 0, script="dp_train", IMAGES="62").stdout


def test_a_checkpoint_is_not_unpickled(tmp_path):
    copy_script(tmp_path, "dp_train", SMALL_MODEL)
    (tmp_path / "run.pt").write_bytes(b"cos\nmkdir\n(S'owned'\ntR.")  # a pickle that calls os.mkdir("owned")
    finished = train(tmp_path, 0, script="dp_train")
    assert "Weights only load failed" in finished.stdout and not (tmp_path / "owned").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_user_types_wrongly_is_said_in_one_sentence(script, monkeypatch, capsys):
    module = __import__(script)
    torchrun = script in ("ddp_launch_train", "apex_amp_train")

    def said(*flags, launcher=torchrun):
        monkeypatch.setenv("LOCAL_RANK", "0") if launcher else monkeypatch.delenv("LOCAL_RANK", raising=False)
        with pytest.raises(SystemExit):
            module.parse_args(flags)
        return "".join(capsys.readouterr())

    start = "with torchrun: torchrun --standalone" if torchrun else "without torchrun: python"
    assert f"start this script {start}" in said(launcher=not torchrun)
    assert "peak learning rate" in said("--help")
    sentences = {
        "--epochs many": "argument --epochs: invalid int value: 'many'",
        "--color red": "unrecognized arguments: --color",
        "--check run.pt": "unrecognized arguments: --check",  # no abbreviations
    }
    for flags in "--synthetic 0", "--image-size 0", "--epochs 0", "--batch-size 0", "--epochs=-1":
        sentences[flags] = "must be at least 1"
    if script == "apex_amp_train":
        sentences |= {"--backend apex": "needs a GPU, NVIDIA Apex", "--opt-level O2": "is for --backend apex"}
    for flags, sentence in sentences.items():
        assert sentence in said(*flags.split())


@pytest.mark.parametrize(
    ("nproc", "flags", "sentence"),
    [
        (2, "--batch-size 62", "--batch-size must be at most 61, and divisible by 2 processes"),
        (2, "--batch-size 13", "--batch-size must be at most 61, and divisible by 2 processes"),
        (2, "--synthetic 1023", "--batch-size must be at most 1023"),
        (1, "--synthetic 511", "--batch-size must be at most 511"),
        (0, "--synthetic 511", "--batch-size must be at most 511"),
    ],
)
def test_a_batch_size_that_does_not_fit_is_refused_and_the_default_is_512_for_each_process(
    nproc, flags, sentence, tmp_path
):
    script = "ddp_launch_train" if nproc else "dp_train"
    copy_script(tmp_path, script, SMALL_MODEL)
    finished = in_processes(nproc, tmp_path, f"{script}.py", "--synthetic", "61", *flags.split())
    assert finished.returncode != 0 and sentence in finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
def test_killed_at_15_random_moments_a_run_ends_like_an_uninterrupted_one(script, start, tmp_path):
    arguments = command(script, "--epochs", "12", "--lr", "1", "--checkpoint", "run.pt")
    uninterrupted, killed = (copy_script(tmp_path / name, script) for name in ("uninterrupted", "killed"))
    result(run(arguments, cwd=uninterrupted))
    chance = random.Random(21)
    for _ in range(15):
        process, _ = start(arguments, "epochs are done", cwd=killed)
        time.sleep(chance.uniform(0, 2.5))  # within one or two epochs
        pids = processes_of(process.pid)
        for pid in chance.choice([pids, pids[-1:], pids[1:2]]):  # all processes, or one of them
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids)
    result(run(arguments, cwd=killed))
    assert saved_by(killed) == saved_by(uninterrupted)
