"""run_all.sh: one run of all scripts, and runs with stubs that show which commands it starts, on which GPUs."""

import inspect
import os
import re
import shutil
import signal
import sys
from importlib import import_module

import pytest
from conftest import LIMIT, ROOT, SCRIPTS, SMALL_MODEL, copy_script, processes_of, run, wait_until_gone

# In place of PyTorch: without CUDA_VISIBLE_DEVICES, there are two GPUs.
TORCH = """
import os
print("a library prints something")
__version__ = "9.9"
names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
class cuda:
    device_count = lambda: len(names.split(","))
    get_device_name = lambda: "Stub"
    is_available = is_bf16_supported = lambda *_: True
"""
# In place of torchrun: it runs the script in its own process.
TORCHRUN = """
import os, runpy, sys
_, _, processes, *sys.argv = sys.argv
os.environ |= dict(LOCAL_RANK="0", WORLD_SIZE=processes.removeprefix("--nproc-per-node="))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# In place of each script, with its own parser. The first run has 100 images/s, the second one 200, and so on.
SCRIPT = """
import json, os, sys, time, torch
from argparse import ArgumentParser, RawDescriptionHelpFormatter
amp = os.environ.get("STUB_APEX")
{parser}
if __name__ == "__main__":
    parse_args()
    with open("runs", "a") as file:
        print(os.environ.get("CUDA_VISIBLE_DEVICES", "all"), *sys.orig_argv[1:], file=file)
    runs = len(open("runs").readlines())
    if os.environ.get("STUB_WAITS") == str(runs):
        print("waiting", flush=True)
        time.sleep(600)
    result = dict(gpus=torch.cuda.device_count(), world_size=int(os.environ.get("WORLD_SIZE", 1)))
    result |= dict(batch_size=10, images_per_second=100 * runs, peak_mib=10 * runs, val_accuracy=runs / 100)
    print("RESULT", json.dumps(result))
"""
COMMON = "def load_cifar10(data_dir):\n    if data_dir != 'here': raise SystemExit('no data')"


@pytest.fixture
def start_stubs(tmp_path, monkeypatch):
    """Make a folder with run_all.sh and stubs. Return the command that starts it."""
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    stubs = {"torch/__init__": TORCH, "torch/distributed/run": TORCHRUN, "common": COMMON}
    for script in SCRIPTS:
        stubs[script] = SCRIPT.format(parser=inspect.getsource(import_module(script).parse_args))
    (tmp_path / "torch/distributed").mkdir(parents=True)
    for name, text in stubs.items():
        (tmp_path / f"{name}.py").write_text(text)
    return ["bash", shutil.copy(ROOT / "run_all.sh", tmp_path)]


def runs_in(folder):
    """Return the GPUs and the command of each run, in order."""
    runs = (folder / "runs").read_text()
    return runs.replace("-m torch.distributed.run --standalone --nproc-per-node=2", "torchrun").splitlines()


def rows_of(finished):
    """Return the rows of the table that was printed, without its head and spaces."""
    return re.findall(r"(?m)^\|.*\|$", re.sub(" +", "", finished.stdout))[2:]


def test_all_scripts_train_without_a_gpu(tmp_path):
    for script in SCRIPTS:
        copy_script(tmp_path, script, SMALL_MODEL)
    command = ["bash", shutil.copy(ROOT / "run_all.sh", tmp_path), "--epochs", "1"]
    finished = run(command, PYTHON=sys.executable)
    assert finished.returncode == 0, finished.stderr
    beginnings = [re.match(r"\|\w+\|\d\|\d", row)[0] for row in rows_of(finished)]  # name, GPUs, processes
    assert beginnings == ["|one_process|0|1", "|dp|0|1", "|ddp_launch|0|2", "|ddp_spawn|0|2", "|torch_O1|0|2"]
    [table] = (tmp_path / "logs").glob("*/table.md")
    assert table.read_text() == finished.stdout


def test_the_rows_on_two_gpus_with_apex(start_stubs, tmp_path):
    finished = run([*start_stubs, "--data-dir", "here"], CUDA_VISIBLE_DEVICES="3,1", STUB_APEX="yes")
    assert finished.returncode == 0, finished.stderr
    runs = [line.replace(" --epochs 5 --data-dir here", "") for line in runs_in(tmp_path)]
    assert [f"{row} {line}" for row, line in zip(rows_of(finished), runs)] == [
        "|one_process|1|1|2.000|100|1.00|10|1.00%| 3 dp_train.py",
        "|dp|2|1|1.000|200|2.00|20|2.00%| 3,1 dp_train.py",
        "|ddp_launch|2|2|0.667|300|3.00|30|3.00%| 3,1 torchrun ddp_launch_train.py",
        "|ddp_spawn|2|1|0.500|400|4.00|40|4.00%| 3,1 ddp_spawn_train.py",
        "|one_process_compile|1|1|0.400|500|1.00|50|5.00%| 3 dp_train.py --compile",
        "|ddp_launch_compile|2|2|0.333|600|1.20|60|6.00%| 3,1 torchrun ddp_launch_train.py --compile",
        "|apex_O0|2|2|0.286|700||70|7.00%| 3,1 torchrun apex_amp_train.py --backend apex --opt-level O0",
        "|apex_O1|2|2|0.250|800||80|8.00%| 3,1 torchrun apex_amp_train.py --backend apex --opt-level O1",
        "|apex_O2|2|2|0.222|900||90|9.00%| 3,1 torchrun apex_amp_train.py --backend apex --opt-level O2",
        "|apex_O3|2|2|0.200|1,000||100|10.00%| 3,1 torchrun apex_amp_train.py --backend apex --opt-level O3",
        "|torch_O1|2|2|0.182|1,100||110|11.00%| 3,1 torchrun apex_amp_train.py",
    ]
    assert ", 2 x Stub, PyTorch 9.9, Python " in finished.stdout and "\n\nCIFAR-10\n\n" in finished.stdout


def test_without_data_and_apex_and_with_scripts_that_fail(start_stubs, tmp_path):
    fails = "import os; os.system('sleep 600 & echo LEFT $!'); print('RESULT {}'); raise SystemExit(3)"
    (tmp_path / "ddp_spawn_train.py").write_text(fails)
    (tmp_path / "apex_amp_train.py").write_text("amp = None; print('no RESULT')")
    finished = run([*start_stubs, "--seed", "7"])
    os.kill(int(re.search(r"LEFT (\d+)", finished.stderr)[1]), signal.SIGKILL)  # run_all.sh did not wait for it
    assert finished.returncode == 1 and "\n\nSynthetic images: no data\n\n" in finished.stdout
    rows = rows_of(finished)
    assert len(rows) == 7  # none with Apex
    assert re.match(r"\|ddp_spawn\|failed,exitcode3:seelogs/\S+/ddp_spawn.log\|", rows[3])
    assert re.match(r"\|torch_O1\|failed,exitcode0:seelogs/\S+/torch_O1.log\|", rows[6])
    runs = runs_in(tmp_path)  # of the rows without these two
    assert [line.split()[0] for line in runs] == ["0", "all", "all", "0", "all"]
    assert all("--epochs 5 --synthetic 50000 --seed 7" in line for line in runs)


def test_ctrl_c_ends_it(start_stubs, start, tmp_path):
    process, log = start(start_stubs, "waiting", STUB_WAITS="2")
    pids = processes_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LIMIT) == 130
    assert "\nStopped. The logs are in logs/" in log.read_text()
    assert len(runs_in(tmp_path)) == 2  # no other script was started
    wait_until_gone(pids)


@pytest.mark.parametrize(
    "flags, error",
    {
        "--epoks 3": "unrecognized arguments: --epoks 3",
        "--check run.pt": "unrecognized arguments: --check run.pt",  # not short for --checkpoint
        "--epochs 0": "--synthetic, --image-size, --epochs and --batch-size must be at least 1",
        "--checkpoint=run.pt": "to use --checkpoint or --precision, start a script by itself",
        "--precision bf16": "to use --checkpoint or --precision, start a script by itself",
    }.items(),
)
def test_a_wrong_flag_ends_it_before_the_first_script(flags, error, start_stubs, tmp_path):
    finished = run([*start_stubs, *flags.split()])
    assert finished.returncode == 2 and not (tmp_path / "runs").exists()
    assert sorted(finished.stderr.splitlines()) == ["a library prints something", f"run_all.sh: error: {error}"]


def test_it_says_what_to_do_if_it_cannot_write(start_stubs, tmp_path):
    (tmp_path / "logs").touch()
    finished = run(start_stubs)
    assert finished.returncode == 1 and "Copy this folder" in finished.stderr
    (tmp_path / "logs").unlink()
    finished = run(start_stubs, PYTHON="false")  # as a Python without PyTorch that cannot make .venv
    assert finished.returncode == 1 and "PYTHON=/path/to/python bash run_all.sh" in finished.stderr
