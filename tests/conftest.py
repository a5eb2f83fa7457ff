"""Real runs of the scripts as a user starts them: real processes, small networks, small synthetic images."""

import contextlib
import functools
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; another number of threads rounds differently
os.environ |= dict.fromkeys(["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"], str(2**32))  # 10% faster

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell, it was ignored

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
    """Return the command line that starts a script, with torchrun for `nproc` processes."""
    words = [sys.executable, str(folder / f"{script}.py"), *flags]
    if script not in ("dp_train", "ddp_spawn_train"):
        words[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return words


fork = multiprocessing.get_context("forkserver")  # forked from a Python with PyTorch, a process starts in no time
fork.set_forkserver_preload(["torch", "torchvision", "torch.distributed.run", "numpy", "conftest"])


def be_python(path, flags, nproc, env, cwd, out, err):
    """Be a fresh Python that runs a script; with `nproc`, be torchrun with as many of them."""
    os.setsid()
    os.chdir(cwd)
    multiprocessing.set_start_method(None, force=True)  # the default one
    for number, name in (1, out), (2, err):
        os.dup2(os.open(name, os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(env)
    if nproc:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(10000 + os.getpid() % 20000))  # nobody else's
        os.environ.update(WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
        for rank in range(nproc):
            if not os.fork():
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                break
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            code = next(filter(None, (abs(os.waitstatus_to_exitcode(os.wait()[1])) for _ in range(nproc))), 0)
            os.killpg(0, signal.SIGTERM)  # the first that fails ends the others
            sys.exit(code)
    torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    sys.argv = [str(path), *flags]
    sys.path[:0] = [str(Path(path).parent), *filter(None, env.get("PYTHONPATH", "").split(":"))]
    runpy.run_path(str(path), run_name="__main__")


def run(arguments, cwd=None, timeout=300, real=False, **env):
    """Run a command without a network (every download ends at a closed port) and return what it printed.

    Scripts are forked from a Python that has loaded PyTorch, which saves most of the time, unless `real`."""
    env = {**os.environ, "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", **env}
    nproc, words = 0, arguments[1:]
    if words[:3] == ["-m", "torch.distributed.run", "--standalone"]:
        nproc, words = int(words[3].removeprefix("--nproc-per-node=")), words[4:]
    spawns = words[0].endswith("ddp_spawn_train.py") and torch.cuda.is_available()  # then no fork may follow
    if real or arguments[0] != sys.executable or words[0] == "-m" or spawns:
        return subprocess.run(arguments, cwd=cwd, timeout=timeout, env=env, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder, "out"), Path(folder, "err")
        process = fork.Process(target=be_python, args=(words[0], words[1:], nproc, env, cwd or os.getcwd(), *logs))
        process.start()
        process.join(timeout)
        done = subprocess.CompletedProcess(arguments, process.exitcode, *(log.read_text() for log in logs))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        assert done.returncode is not None, f"not done within {timeout} seconds: {done}"
        return done


def result(finished):
    """Return the RESULT of a run that must have ended well and printed it once."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [line] = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def process_ids(log):
    """Return the process ids that a run printed last, by rank."""
    return [int(pid) for _, pid in sorted(dict(re.findall(r"(rank \d+: |)process (\d+) on", log)).items())]


def wait_until_gone(pids, seconds=10):
    """Fail unless every process ends within the time."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]:  # a zombie has none
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.05)


class Running:
    """A run in a process group of its own, to be stopped in its middle; wait_for() waits for a line of its log."""

    def __init__(self, arguments, log, cwd=None):
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(arguments, cwd=cwd, stdout=file, stderr=file, start_new_session=True)

    def wait_for(self, pattern, seconds=120):
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < end, f"no {pattern}: {self.log.read_text()}"
            time.sleep(0.02)
        return found

    def pids(self, count=2):
        self.wait_for(rf"(?s)(process \d+ on.*){{{count}}}")
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

    @functools.cache
    def runner(script):
        top = tmp_path_factory.mktemp(script)
        flags = [*SMALL, "--epochs", "3", "--device", "cpu", "--checkpoint", str(top / "run.pt")]
        flags += ["--image-size", "4"] * (script == "apex_amp_train")  # most CPUs compute float16 very slowly
        arguments = command(script, *flags, folder=copy_recipe(top / "project with a space", script))
        return run(arguments, cwd=top, real=script == "ddp_launch_train"), top

    return runner
