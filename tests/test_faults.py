"""What breaks a run: killed processes, signals, a process that hangs, a full disk, a loss that is no number."""

import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    DEVICE,
    METRICS,
    ROOT,
    SCRIPTS,
    SMALL,
    alive,
    be_python,
    command,
    copy_recipe,
    edited,
    fork,
    result,
    run,
    wait_until_gone,
)

FEW = [*SMALL, "--limit", "24", "--device", "cpu"]  # two steps an epoch


def processes(path, flags, log, nproc=2):
    """Start a script with as many processes as torchrun would (one for spawn, which starts its own)."""
    if "spawn" in path.name:
        envs = [{}]
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        same = dict(WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        envs = [dict(same, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(nproc)]
    envs = [{**os.environ, **env} for env in envs]
    started = [fork.Process(target=be_python, args=(path, flags, 0, env, path.parent, log, log)) for env in envs]
    for process in started:
        process.start()
    return started


def children(pid):
    """Return the ids of the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def family(pid):
    """Return the ids of a process and of all that it and they have started."""
    return [pid, *(one for child in children(pid) for one in family(child))]


def end(started):
    """Kill what is left of a run, as torchrun does when one of its processes ends."""
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()


@pytest.mark.parametrize(("script", "kills"), [("ddp_launch_train", 22), ("ddp_spawn_train", 8)])
def test_killed_at_any_moment_it_goes_on_and_ends_like_an_unbroken_run(script, kills, tmp_path):
    folder = copy_recipe(tmp_path / "project", script)
    path, log = folder / f"{script}.py", tmp_path / "log"
    flags = [*FEW, "--epochs", str(kills), "--checkpoint"]
    unbroken, broken = tmp_path / "unbroken" / "run.pt", tmp_path / "broken" / "run.pt"
    started = processes(path, [*flags, str(unbroken)], log)
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * len(started), log.read_text()
    chance = random.Random(21)
    during_save = 0
    temporary = Path(f"{broken}.tmp")
    for kill in range(kills):
        old = set(temporary.glob("*"))  # what a killed run may have left
        started = processes(path, [*flags, str(broken)], log)
        ready = log.read_text().count("technique ")
        until = time.monotonic() + 60
        if kill % 3:  # a third of them while the file is being written, the others at any moment from the start
            time.sleep(chance.uniform(0.1, 3))
        else:
            while log.read_text().count("technique ") == ready and time.monotonic() < until:
                time.sleep(0.01)
            while not set(temporary.glob("*")) - old and any(alive(process.pid) for process in started):
                time.sleep(0.0005)
            time.sleep(chance.uniform(0, 0.02))
        victims = [process.pid for process in started]
        if script == "ddp_spawn_train" and alive(victims[0]) and (own := children(victims[0])):
            victims = chance.choice([victims, own, own[:1], own[1:]])
        else:
            victims = chance.choice([victims, victims[:1], victims[1:] or victims])
        for pid in victims:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        during_save += bool(set(temporary.glob("*")) - old)
        end(started)
        if broken.exists():
            torch.load(broken, weights_only=True)
    started = processes(path, [*flags, str(broken)], log)
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * len(started), log.read_text()[-3000:]
    assert during_save >= kills // 7
    a, b = (torch.load(file, weights_only=True) for file in (unbroken, broken))
    assert {key: a["metrics"][key] for key in METRICS} == {key: b["metrics"][key] for key in METRICS}
    assert a["best"] == b["best"] and a["epoch"] == b["epoch"] == kills
    assert all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"])
    assert sorted(file.name for file in broken.parent.iterdir()) == ["run.best.pt", "run.pt"]
    best = [torch.load(file.with_name("run.best.pt"), weights_only=True) for file in (unbroken, broken)]
    assert all(torch.equal(best[0][key], best[1][key]) for key in best[0])


# Else torchrun keeps its store, and restarted processes may read the addresses of the killed: README's failure 22.
FRESH_STORE = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]


def test_torchrun_restarts_a_run_whose_process_is_killed(tmp_path, start):
    flags = [*FEW, "--epochs", "6", "--checkpoint", str(tmp_path / "run.pt"), "--timeout", "30"]
    arguments = command("ddp_launch_train", *flags)
    arguments.insert(3, "--max-restarts=3")
    running = start([*FRESH_STORE, *arguments])
    pids = running.pids()
    running.wait_for("epoch 3 step")
    os.kill(pids[1], signal.SIGKILL)
    assert running.process.wait(timeout=150) == 0, running.log.read_text()
    done = [int(done) for done in re.findall(r"epochs      (\d) done", running.log.read_text())]
    assert done[0] == 0 and all(epochs in (2, 3) for epochs in done[1:]) and len(done) > 1
    assert running.log.read_text().count("RESULT ") == 1


def test_a_machine_that_is_lost_leaves_the_other_training(tmp_path, start):
    # Two launchers on one machine; torchrun's own "one or two machines". The first has the store and has to stay.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = [*FEW, "--epochs", "8", "--checkpoint", str(tmp_path / "run.pt"), "--timeout", "30"]
    arguments = command("ddp_launch_train", *flags, nproc=1)
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    settings = "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    arguments[3:4] = ["--nnodes=1:2", "--max-restarts=3", *rendezvous, settings]
    stays = start([*FRESH_STORE, *arguments])
    until = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
        time.sleep(0.1)  # the first to listen has the store
    leaves = start([*FRESH_STORE, *arguments])
    while "epoch 3 step" not in stays.log.read_text() + leaves.log.read_text():  # rank 0 may be on either
        assert stays.process.poll() is leaves.process.poll() is None, stays.log.read_text()
        time.sleep(0.02)
    leaves.process.kill()  # and its worker with it
    assert stays.process.wait(timeout=120) == 0, stays.log.read_text()
    log = stays.log.read_text()
    assert re.search(r"epochs      [23] done, [56] to come of 2 steps; world_size was 2, is 1", log), log
    [line] = [line for line in log.splitlines() if line.startswith("RESULT ")]
    assert '"world_size": 1' in line and '"batch_size": 12' in line


@pytest.mark.parametrize(
    ("script", "number", "code"),
    [
        ("dp_train", signal.SIGTERM, 143),
        ("ddp_spawn_train", signal.SIGTERM, 143),
        ("ddp_launch_train", signal.SIGTERM, 1),  # torchrun's own exit code
        ("alone", signal.SIGTERM, 143),
        ("alone", signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_every_process_within_ten_seconds(script, number, code, start, tmp_path):
    flags = [*SMALL, "--epochs", "1000", "--device", "cpu", "--workers", "2", "--checkpoint", str(tmp_path / "run.pt")]
    if script == "alone":
        running = start([sys.executable, str(ROOT / "ddp_launch_train.py"), *flags])
    else:
        running = start(command(script, *flags))
    pids = running.pids()
    running.wait_for("epoch 2 step")
    started = family(running.process.pid)
    assert len(started) >= 1 + 3 * len(pids) - (running.process.pid in pids)  # with two data-loading processes each
    running.process.send_signal(number)  # to the main process alone, as kill does
    assert running.process.wait(timeout=10) == code, running.log.read_text()
    wait_until_gone(started, seconds=10)
    said = [line for line in running.log.read_text().splitlines() if "with --checkpoint FILE" in line]
    assert len(said) == (0 if script == "ddp_launch_train" else 1), running.log.read_text()
    torch.load(tmp_path / "run.pt", weights_only=True)


def test_a_signal_to_the_data_loading_processes_too_is_one_sentence(tmp_path, start):
    # As timeout sends it; the main process hears of its own and of their end at once.
    line = "            scheduler.step()\n"
    busy = "            if epoch == 2 and step == 1: print('busy', flush=True), sum(range(10**8))\n"
    folder = edited(tmp_path / "edited", "dp_train", (line, line + busy))
    running = start(command("dp_train", *FEW, "--epochs", "9", "--workers", "2", folder=folder))
    running.wait_for("busy")
    os.killpg(running.process.pid, signal.SIGTERM)
    assert running.process.wait(timeout=10) == 143, running.log.read_text()
    log = running.log.read_text()
    assert log.count("with --checkpoint FILE") == 1 and "Traceback" not in log and "Error" not in log, log


@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
def test_a_process_that_hangs_ends_the_run(script, tmp_path):
    line = "            scheduler.step()\n"
    hang = "            if rank == 1 and step == 2: time.sleep(1000)\n"
    folder = edited(tmp_path / "edited", script, (line, line + hang))
    begin = time.monotonic()
    finished = run(command(script, *FEW, "--epochs", "9", "--timeout", "4", folder=folder), timeout=90, real=True)
    assert finished.returncode not in (0, 2)
    assert time.monotonic() - begin < 60
    # The one that hangs is the one that did not report: torchrun and spawn name the other, which waited for it.
    assert re.search("imed out|timeout", finished.stderr), finished.stderr
    assert re.search(r"rank +: 0|Process 0 terminated", finished.stderr), finished.stderr
    pids = finished.stdout.partition("process ids [")[2].partition("]")[0].split(", ")
    assert len(pids) == 2
    wait_until_gone(pids)


def limit_file_size():
    """Let no file of this process grow beyond 1 MB, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


def test_a_full_disk_leaves_the_old_checkpoint_and_training_goes_on(tmp_path):
    path = tmp_path / "run.pt"
    arguments = [sys.executable, str(ROOT / "dp_train.py"), *FEW, "--checkpoint", str(path), "--epochs"]
    result(run([*arguments, "1"]))
    before = path.read_bytes()
    finished = subprocess.run([*arguments, "3"], capture_output=True, text=True, preexec_fn=limit_file_size)
    assert result(finished)["steps"] == 6
    said = [line for line in finished.stdout.splitlines() if "is not saved" in line]
    assert said and all("training goes on; make room" in line for line in said)
    assert sum(line.startswith(f"{path} ") for line in said) == 2
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.best.pt", "run.pt"]


def test_a_checkpoint_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "run.pt.tmp").write_text("no folder")  # where the temporary file's would be
    for path in tmp_path / "file" / "run.pt", tmp_path / "run.pt":
        finished = run([sys.executable, str(ROOT / "dp_train.py"), *FEW, "--epochs", "1", "--checkpoint", str(path)])
        result(finished)
        assert f"{path} is not saved" in finished.stdout
        assert all((tmp_path / name).read_text() == "no folder" for name in ("file", "run.pt.tmp"))


def test_two_runs_with_the_same_checkpoint_leave_a_whole_one(tmp_path):
    (tmp_path / "real").mkdir()
    path = tmp_path / "run.pt"
    path.symlink_to("real/net.pt")  # stays a link
    (tmp_path / "real" / "net.pt.tmp").mkdir()  # as is what somebody else has put here
    (tmp_path / "real" / "net.pt.tmp" / "keep.part").write_text("mine")
    flags, log = [*FEW, "--epochs", "9", "--checkpoint", str(path)], tmp_path / "log"
    runs = [process for _ in range(3) for process in processes(ROOT / "dp_train.py", flags, log, nproc=1)]
    while any(process.is_alive() for process in runs):
        if path.exists():
            assert torch.load(path, weights_only=True)["epoch"] <= 9
    assert [process.exitcode for process in runs] == [0, 0, 0], log.read_text()
    assert torch.load(path, weights_only=True)["epoch"] == 9
    assert path.is_symlink() and not list(tmp_path.glob("*.tmp"))
    assert sorted(file.name for file in (tmp_path / "real").iterdir()) == ["net.best.pt", "net.pt", "net.pt.tmp"]
    assert [file.name for file in (tmp_path / "real" / "net.pt.tmp").iterdir()] == ["keep.part"]


@pytest.mark.parametrize("script", ["dp_train", "ddp_spawn_train"])
def test_too_few_open_files_are_one_sentence(script):
    arguments = command(script, *FEW, "--epochs", "1", "--workers", "64")
    finished = run(["bash", "-c", 'ulimit -n 100 && exec "$@"', "bash", *arguments], timeout=90)
    assert finished.returncode == 2, finished.stderr
    said = [line for line in finished.stderr.splitlines() if line.startswith(f"{script}.py: ")]
    assert len(said) == 1 and "Too many open files" in said[0] and "give fewer --workers" in said[0], finished.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_too_little_gpu_memory_is_one_sentence(script, tmp_path):
    line = "            scheduler.step()\n"
    full = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 1.00 GiB free.\\n More."
    full = f"            if step == 2: raise torch.OutOfMemoryError('{full}')\n"
    folder = edited(tmp_path / "edited", script, (line, line + full))
    level = ["--opt-level", "O0"] if script == "apex_amp_train" else []
    finished = run(command(script, *FEW, *level, "--epochs", "2", folder=folder))
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    said = [line for line in finished.stderr.splitlines() if line.startswith(f"{script}.py: ")]
    assert len(said) == 1 and "GPU 1 has 1.00 GiB free" in said[0] and "smaller --batch-size" in said[0]


@pytest.mark.parametrize("script", ["ddp_spawn_train", "dp_train"])
def test_a_loss_that_is_no_number_ends_the_run_and_spares_the_checkpoint(script, tmp_path):
    line = "            loss = F.cross_entropy(model(transform(inputs, train=True)), targets, label_smoothing=0.1)\n"
    worse = "            loss = loss / (epoch < 2)\n"
    folder = edited(tmp_path / "edited", script, (line, line + worse))
    path = tmp_path / "run.pt"
    flags = [*FEW, "--epochs", "3", "--device", DEVICE, "--checkpoint", str(path)]
    finished = run(command(script, *flags, folder=folder))
    assert finished.returncode == 2 and "RESULT" not in finished.stdout
    said = [line for line in finished.stderr.splitlines() if line.startswith(f"{script}.py: ")]
    assert said == [f"{script}.py: the loss of epoch 2 is no number and not saved; try a smaller --lr or --clip-grad 1"]
    assert "Traceback" not in finished.stderr
    assert torch.load(path, weights_only=True)["epoch"] == 1


def listening(pids):
    """Return the addresses on which these processes listen."""
    table = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    owned = [line for line in table.splitlines() if any(f"pid={pid}," in line for pid in pids)]
    return [line.split()[3].rpartition(":")[0] for line in owned]


@pytest.mark.skipif(not shutil.which("ss"), reason="needs ss, of iproute2")
@pytest.mark.parametrize("script", ["dp_train", "ddp_launch_train", "ddp_spawn_train", "without torchrun"])
def test_a_run_on_one_machine_listens_on_loopback_alone(script, start):
    arguments = command(script, *FEW, "--epochs", "1000")
    if script == "without torchrun":
        arguments = [sys.executable, str(ROOT / "ddp_launch_train.py"), *FEW, "--epochs", "1000"]
    running = start(arguments)
    pids = running.pids()
    running.wait_for("epoch 2 step")
    addresses = listening(pids)
    assert set(addresses) == ({"127.0.0.1"} if script != "dp_train" else set())
    if script == "ddp_spawn_train":  # and there is no store either; torchrun's own listens everywhere
        assert set(listening(family(running.process.pid))) == {"127.0.0.1"}


def test_a_resumed_run_may_have_another_number_of_processes_and_says_so(tmp_path):
    flags = [*FEW, "--checkpoint", str(tmp_path / "run.pt"), "--epochs"]
    result(run(command("ddp_launch_train", *flags, "1")))
    flags[-2] += "/"  # the same file
    finished = run(command("ddp_launch_train", *flags, "2", "--precision", "bf16", "--seed", "7", nproc=3))
    assert result(finished)["world_size"] == 3
    changes = "world_size was 2, is 3; precision was fp32, is bf16; epochs was 1, is 2; seed was 21, is 7"
    assert f"1 done, 1 to come of 2 steps; {changes}\n" in finished.stdout
