"""How the tests run the scripts: as a user does, with a small network on small synthetic images, on the CPU."""

import faulthandler
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401 - optimizers import it: here once, not in each process
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

ROOT = Path(__file__).resolve().parent.parent
# On the CPU, unless a test passes ALL_GPUS to run(). The processes of pytest-xdist inherit both variables.
names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
names = os.environ.setdefault("GPUS_OF_TESTS", names if torch.cuda.is_available() else "")
ALL_GPUS, GPUS = dict(CUDA_VISIBLE_DEVICES=names), len(names.split(",")) if names else 0
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; another number of threads rounds differently
torch.set_num_threads(1)  # for in_processes: forks have no other threads (TCPStore's thread is not used in them)
os.environ |= dict.fromkeys(["http_proxy", "https_proxy"], "http://127.0.0.1:9")  # quick tests download nothing

SCRIPTS = ["dp_train", "ddp_launch_train", "ddp_spawn_train", "apex_amp_train"]
SMALL = "--synthetic 61 --arch resnet18 --image-size 4 --batch-size 12 --lr 0.02 --epochs 2".split()
# 5 steps in an epoch: a smaller last batch is dropped.

# Changes for copy_script. To print the loss of each step:
EACH_STEP = ("if step % 20 == 0:", "if True:")
# A network in float64 without BatchNorm, and no augmentation: then the number of processes changes rounding only.
RESNET = "common.build_resnet(args.arch, args.image_size, args.pretrained)"
FLOAT64 = [
    (RESNET, "nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 10)).double()"),
    ("args.pretrained, augment=training)", "args.pretrained).double()"),
    ("outputs.float()", "outputs"),
]
# For float16, in which a step of the ResNet takes seconds on the CPU.
SMALL_NET = (
    RESNET,
    "nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))",
)


def copy_script(folder, script, *changes):
    """Copy a script and common.py, nothing else, into a folder. A change is (old text, new text)."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "common.py", folder)
    text = (ROOT / f"{script}.py").read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{text.count(old)} times in {script}: {old}"
        text = text.replace(old, new)
    (folder / f"{script}.py").write_text(text)
    return folder


def changes(*diffs):
    """Return diffs of RECIPES.md as changes for copy_script. Lines with "..." part the changes."""
    hunks = [hunk for diff in diffs for hunk in re.split(r"(?m)^\.\.\.\n", diff)]
    return [["\n".join(re.findall(rf"(?m)^[ {sign}](.*)", hunk)) for sign in "-+"] for hunk in hunks]


def block(name):
    """Return the code after the comment `<!-- test: NAME -->` in README.md or RECIPES.md."""
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "RECIPES.md"))
    [code] = re.findall(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", pages, re.S)
    return code


def command(script, *flags, nproc=2, folder=ROOT):
    """Return the command that starts a script, with torchrun for `nproc` processes where it needs that."""
    launcher = [sys.executable]
    if script not in ("dp_train", "ddp_spawn_train"):
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [*launcher, str(folder / f"{script}.py"), *SMALL, *flags]  # the last of equal flags counts


def run(arguments, cwd=None, **env):
    """Run a command to its end; return its output and its exit code."""
    return subprocess.run(arguments, cwd=cwd, timeout=200, env=os.environ | env, capture_output=True, text=True)


def in_processes(nproc, function, folder):
    """Call a function in `nproc` processes with torchrun's environment (0: in one, without it), in a folder.

    They are forks of this process, which has imported PyTorch: a training takes one second, with torchrun seven.
    If one fails, the others are ended, and the error is raised. What they print is in `log`, and returned.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where they find each other
    environment = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{store.port}", WORLD_SIZE=f"{nproc}")
    environment |= dict(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")

    def start(rank):
        os.chdir(folder)
        sys.stdout = sys.stderr = Path("log").open("a", buffering=1)  # noqa: SIM115 - until the end
        faulthandler.dump_traceback_later(100, exit=True)  # a process that hangs shows where, and ends
        sys.path.insert(0, str(folder))
        for name in [*SCRIPTS, "common"]:
            sys.modules.pop(name, None)  # import those of the folder
        if nproc:
            os.environ |= environment | dict(RANK=f"{rank}", LOCAL_RANK=f"{rank}")
        function()

    (folder / "log").unlink(missing_ok=True)
    try:
        torch.multiprocessing.start_processes(start, nprocs=nproc or 1, start_method="fork")
    finally:
        output = (folder / "log").read_text()
        print(output)  # pytest shows it if the test fails
    return subprocess.CompletedProcess(function, 0, output, "")


def train(folder, nproc, *flags, script="ddp_launch_train"):
    """Run a copied script, with the checkpoint run.pt; return what it printed."""

    def main():
        sys.argv = [script, *SMALL, "--checkpoint", "run.pt", *flags]
        runpy.run_path(f"{script}.py", run_name="__main__")

    return in_processes(nproc, main, folder)


def result(finished):
    """Return the RESULT of a run, which must have ended well and printed it once."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [line] = re.findall(r"^RESULT (.*)", finished.stdout, re.M)
    return json.loads(line)


def saved_by(folder):
    """Return what a run has saved, but for its flags and speed, with bytes in place of tensors."""
    states = [torch.load(folder / name, "cpu", weights_only=True) for name in ("run.pt", "run.pt.best")]
    del states[0]["flags"], states[0]["metrics"]["images_per_second"]
    return tree_map_only(torch.Tensor, lambda tensor: tensor.numpy().tobytes(), states)


def process_ids(output):
    """Return the ids of the training processes, in the order of their ranks."""
    return [int(pid) for _, pid in sorted(re.findall(r"(rank \d+: |)process (\d+) on", output))]


def wait_until_gone(pids, seconds=20):
    """Fail unless every process ends within the time."""
    assert pids
    end = time.monotonic() + seconds
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
