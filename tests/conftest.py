"""Real runs of the scripts as a user starts them: real processes, small networks, small synthetic images."""

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to the other processes
os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; another number of threads rounds differently

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell: no test could interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The runs use the GPUs where there are two; what has to be equal bit for bit asks for the CPU itself.
DEVICE = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
SMALL = ["--synthetic", "--arch", "resnet18", "--image-size", "8", "--workers", "0", "--log-every", "1"]
SMALL += ["--limit", "61", "--batch-size", "12", "--lr", "0.02"]
SCRIPTS = ["dp_train", "ddp_launch_train", "ddp_spawn_train", "apex_amp_train"]
METRICS = ["train_loss", "val_loss", "val_accuracy"]


def copy_recipe(folder, *scripts):
    """Copy scripts and common.py, nothing else, into a new folder: what a user of the cookbook does."""
    folder.mkdir(parents=True)
    for name in (*scripts, "common"):
        shutil.copy(ROOT / f"{name}.py", folder)
    return folder


def edited(folder, script, *changes):
    """Copy a recipe with lines changed, each given as (old, new)."""
    path = copy_recipe(folder, script) / f"{script}.py"
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return folder


def command(script, *flags, nproc=2, folder=ROOT):
    """Return the command line that starts a script with `nproc` processes."""
    path = str(folder / f"{script}.py")
    if script == "ddp_spawn_train":
        return [sys.executable, path, *flags, "--nproc", str(nproc)]
    if script == "dp_train":
        return [sys.executable, path, *flags]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [sys.executable, *launcher, path, *flags]


# A process forked from one that has imported PyTorch starts in no time.
fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(["torch", "torchvision", "torch.distributed.run", "numpy", "conftest"])


def spawn_by_fork(function, args, nprocs):
    """Do what torch.multiprocessing.spawn() does, with processes that start in no time."""
    torch.multiprocessing.start_processes(function, args, nprocs, start_method="fork")


def be_python(path, flags, nproc, env, cwd, out, err):
    """Be a fresh Python that runs a script; with `nproc`, be torchrun with as many of them."""
    os.setsid()
    os.chdir(cwd)
    for number, name in (1, out), (2, err):
        with open(name, "ab", 0) as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(env)
    if nproc:
        with socket.create_server(("127.0.0.1", 0)) as server:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.getsockname()[1]))
        os.environ.update(WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
        pids, worst = set(), 0
        for rank in range(nproc):
            if pid := os.fork():
                pids.add(pid)
            else:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                break
        else:
            while pids:
                pid, status = os.wait()
                pids.discard(pid)
                if status and not worst:  # the first that fails ends the others
                    worst = abs(os.waitstatus_to_exitcode(status))
                    for other in pids:
                        os.kill(other, signal.SIGTERM)
            sys.exit(worst)
    torch.multiprocessing.spawn = spawn_by_fork
    sys.argv = [str(path), *flags]
    sys.path[:0] = [str(Path(path).parent), *filter(None, env.get("PYTHONPATH", "").split(":"))]
    runpy.run_path(str(path), run_name="__main__")


def run(arguments, cwd=None, timeout=300, real=False, **env):
    """Run a command without a network (every download ends at a closed port) and return what it printed.

    Scripts start from a Python that has PyTorch loaded, and several processes without torchrun and by "fork", not
    "spawn", which saves most of a test's time. `real` starts the command as it is.
    """
    env = {**os.environ, "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", **env}
    nproc, words = 0, arguments[1:]
    if words[:3] == ["-m", "torch.distributed.run", "--standalone"]:
        nproc, words = int(words[3].removeprefix("--nproc-per-node=")), words[4:]
    spawns = words[0].endswith("ddp_spawn_train.py") and DEVICE == "cuda"  # no process with a GPU may fork
    if real or arguments[0] != sys.executable or words[0] == "-m" or spawns:
        return subprocess.run(arguments, cwd=cwd, timeout=timeout, env=env, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = fork.Process(
            target=be_python, args=(words[0], words[1:], nproc, env, cwd or os.getcwd(), out, err)
        )
        process.start()
        process.join(timeout)
        late = process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        assert not late, out.read_text() + err.read_text()
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def result(finished):
    """Return the RESULT of a run that must have ended well and printed it once."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, finished.stdout
    return json.loads(lines[0].removeprefix("RESULT "))


def process_ids(log):
    """Return the process ids that a run printed last, by rank."""
    found = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+): process (\d+)", log)}
    return [found[rank] for rank in sorted(found)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=10):
    """Fail unless every process ends within the time."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.05)


class Running:
    """A run in a process group of its own, to be stopped in its middle."""

    def __init__(self, arguments, log, cwd=None):
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(arguments, cwd=cwd, stdout=file, stderr=file, start_new_session=True)

    def wait_for(self, pattern, seconds=120):
        """Wait until the log matches; return the match."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := re.search(pattern, self.log.read_text()):
                return found
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"no {pattern} in {self.log.read_text()}")

    def pids(self, count=2):
        """Wait until each of the processes has said its process id; return them by rank."""
        self.wait_for(rf"(?s)(rank \d+: process \d+.*){{{count}}}")
        return process_ids(self.log.read_text())

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    """Start runs that the end of the test stops, whatever happened."""
    running = []

    def starter(arguments, **kwargs):
        running.append(Running(arguments, tmp_path / f"run{len(running)}.log", **kwargs))
        return running[-1]

    yield starter
    for one in running:
        one.kill()


@pytest.fixture(scope="session")
def first_runs(tmp_path_factory):
    """Run a script as users do, copied into their own folder and started from elsewhere; once per session."""
    done = {}

    def runner(script):
        if script not in done:
            top = tmp_path_factory.mktemp(script)
            folder = copy_recipe(top / "project with a space", script)
            flags = [*SMALL, "--epochs", "3", "--device", "cpu", "--checkpoint", str(top / "run.pt")]
            if script == "apex_amp_train":  # most CPUs compute float16 very slowly
                flags += ["--image-size", "4"]
            done[script] = run(command(script, *flags, folder=folder), cwd=top, real=True), top
        return done[script]

    return runner
