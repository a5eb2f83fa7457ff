"""How the tests run the scripts: as a user does, with a small model on small synthetic images, on the CPU."""

import faulthandler
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
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from editing import IMAGES, ROOT, SMALL_MINIMAL, edited
from torch.utils._pytree import tree_map_only

LIMIT = 600  # seconds that a run may take. Only a run that hangs takes as long, also on a busy machine.
# On the CPU, or with ON_GPUS on the first two GPUs. device_count() does not initialise CUDA in this process.
names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
names = os.environ.setdefault("GPUS_OF_TESTS", ",".join(names.split(",")[:2]) if torch.cuda.device_count() else "")
ON_GPUS, GPUS = dict(CUDA_VISIBLE_DEVICES=names), len(names.split(",")) if names else 0
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; another number of threads rounds differently
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
os.environ |= dict.fromkeys(["http_proxy", "https_proxy"], "http://127.0.0.1:9")  # quick tests download nothing
# in_processes() starts processes by fork from a server that has no threads and has imported these.
multiprocessing.set_forkserver_preload(["pytest", "torch._dynamo", "torchvision", "torchmetrics"])

SMALL = "--synthetic 61 --arch resnet18 --image-size 4 --batch-size 12 --lr 0.02 --epochs 2".split()  # 5 steps


def command(script, *flags, nproc=2, folder=ROOT):
    """Return the command that starts a script, with torchrun for `nproc` processes where it needs that."""
    launcher = [sys.executable]
    if script not in ("dp_train", "ddp_spawn_train"):
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [*launcher, str(folder / f"{script}.py"), *SMALL, *flags]  # the last of equal flags counts


def run(arguments, cwd=None, **env):
    """Run a command to its end; return its output and its exit code."""
    return subprocess.run(arguments, cwd=cwd, timeout=LIMIT, env=os.environ | env, capture_output=True, text=True)


def in_processes(nproc, folder, program, *argv, **env):
    """Run a Python file in `nproc` processes like torchrun (0: without it), but quicker. Return as run() does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log").unlink(missing_ok=True)
    if nproc:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where they find each other
        env |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{store.port}", WORLD_SIZE=f"{nproc}")
        env |= dict(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    failure, arguments = "", (bool(nproc), folder, program, argv, env)
    try:
        torch.multiprocessing.start_processes(run_program, arguments, nproc or 1, start_method="forkserver")
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        failure = str(error)
    output = (folder / "log").read_text() + failure
    print(output)  # pytest shows it if the test fails
    return subprocess.CompletedProcess(program, bool(failure), output, output)


def run_program(rank, has_ranks, folder, program, argv, env):
    """Run a Python file as a process of in_processes()."""
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(log, output)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.dump_traceback_later(LIMIT, exit=True)  # a process that hangs shows where, and ends
    os.environ |= (dict(RANK=f"{rank}", LOCAL_RANK=f"{rank}") if has_ranks else {}) | env
    fork = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    torch.multiprocessing.spawn = fork  # imports nothing again
    sys.argv, sys.path[0:0] = [str(program), *argv], [str(folder)]
    for file in Path(folder).glob("*.py"):
        sys.modules.pop(file.stem, None)  # a stand-in for a library that is installed and already imported
    try:
        runpy.run_path(str(program), run_name="__main__")
    except Exception:
        traceback.print_exc()  # of each process: start_processes() shows that of one alone
        raise


GROUP = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""


def in_group(nproc, folder, code):
    """Run code in `nproc` processes that gloo connects; return what it printed. It must not fail."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "minimal" / "helpers.py", folder)
    (folder / "program.py").write_text(f"{GROUP}{code}\ndist.destroy_process_group()\n")
    finished = in_processes(nproc, folder, "program.py")
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def train(folder, nproc, *flags, script="ddp_launch_train", **env):
    """Run a copied script in processes, with the checkpoint run.pt. Two scripts start their own processes."""
    nproc = 0 if script in ("dp_train", "ddp_spawn_train") else nproc
    return in_processes(nproc, folder, f"{script}.py", *SMALL, "--checkpoint", "run.pt", *flags, **env)


def train_minimal(nproc, folder, *edits, epochs=4, images=410, name=None, **env):
    """Start a program of minimal/ on the CPU after some edits: by default, one_gpu.py if `nproc` is 0."""
    folder.mkdir(exist_ok=True)
    program = edited((ROOT / "minimal" / f"{name or ('ddp' if nproc else 'one_gpu')}.py").read_text(), *edits)
    lengths = {"range(10)": f"range({epochs})", "range(done, 10)": f"range(done, {epochs})"}
    for old, new in (SMALL_MINIMAL | lengths).items():
        program = program.replace(old, new)
    data = f"{IMAGES}\ndatasets.CIFAR10 = lambda *_, train, **__: small_images({images} if train else 61)\n"
    (folder / "program.py").write_text(program.replace("\ndef main", f"{data}\ndef main"))
    shutil.copy(ROOT / "minimal" / "checks.py", folder)
    return in_processes(nproc, folder, "program.py", **env)


def result(finished):
    """Return the RESULT of a run, which must have ended well and printed it once."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [line] = re.findall(r"^RESULT (.*)", finished.stdout, re.M)
    return json.loads(line)


def saved_by(folder):
    """Return what a run has saved, but for its flags, with bytes in place of tensors."""
    states = [torch.load(folder / name, "cpu", weights_only=True) for name in ("run.pt", "run.pt.best")]
    del states[0]["flags"]
    return tree_map_only(torch.Tensor, lambda tensor: tensor.numpy().tobytes(), states)


def processes_of(pid):
    """Return the ids of a process and of all that it and they have started."""
    children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return [pid, *(one for child in children for one in processes_of(int(child)))]


def await_end(pids):
    """Fail unless every process ends."""
    assert pids
    end = time.monotonic() + LIMIT
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]:  # a process that has ended has none
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a command, waits for a line of its output, and returns process and log."""
    started = []

    def start_and_wait(arguments, pattern, cwd=None, **env):
        log = tmp_path / f"run{len(started)}.log"
        output = dict(stdout=log.open("w"), stderr=subprocess.STDOUT)
        process = subprocess.Popen(arguments, cwd=cwd, env=os.environ | env, **output, start_new_session=True)
        started.append(process)
        while not re.search(pattern, log.read_text()):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        return process, log

    yield start_and_wait
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
