"""run_all.sh: one run of all scripts, and runs with stubs that show which commands it starts, on which GPUs."""

import inspect
import os
import re
import shutil
import signal
import sys

import pytest
from conftest import LIMIT, await_end, processes_of, run
from editing import ROOT, SCRIPTS, SMALL_MODEL, copy_script

import dp_train

# In place of PyTorch: without CUDA_VISIBLE_DEVICES, there are two GPUs.
TORCH = """
import os
print("a library prints something")
__version__ = "9.9"
class cuda:
    device_count = lambda: len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(","))
    get_device_name = lambda: "Stub"
    is_available = is_bf16_supported = lambda *_: True
"""
# In place of each script and of torchrun. The first run has 100 images/s, the second one 200, and so on.
STUB = f"""
import json, os, sys, torch
from argparse import ArgumentParser, RawDescriptionHelpFormatter
amp = os.environ.get("STUB_APEX")
{inspect.getsource(dp_train.parse_args)}
if __name__ == "__main__":
    with open("runs", "a") as file:
        print(os.environ.get("CUDA_VISIBLE_DEVICES", "all"), *sys.orig_argv[1:], file=file)
    runs = len(open("runs").readlines())
    result = dict(gpus=torch.cuda.device_count(), world_size=2 if "torch.distributed.run" in sys.orig_argv else 1)
    for epoch, factor in enumerate((1, 150, 90, 100), 1):  # the median from the second epoch on: 100
        print("epoch", epoch, "train_loss 2.3 best 0.1 images_per_second", factor * runs)
    result |= dict(batch_size=10, peak_mib=10 * runs, val_accuracy=runs / 100)
    print("RESULT", json.dumps(result))
"""
COMMON = "def load_cifar10(data_dir):\n    if data_dir != 'here': raise SystemExit('no data')"


@pytest.fixture
def start_stubs(tmp_path, monkeypatch):
    """Make a folder with run_all.sh and stubs. Return the command that starts it."""
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "torch/distributed").mkdir(parents=True)
    stubs = {"torch/__init__": TORCH, "common": COMMON} | dict.fromkeys([*SCRIPTS, "torch/distributed/run"], STUB)
    for name, text in stubs.items():
        (tmp_path / f"{name}.py").write_text(text)
    return ["bash", shutil.copy(ROOT / "run_all.sh", tmp_path)]


def rows_of(finished):
    """Return the rows of the table that was printed, without its head and spaces."""
    return re.findall(r"(?m)^\|.*\|$", re.sub(" +", "", finished.stdout))[2:]


def test_all_scripts_train_without_a_gpu(tmp_path):
    for script in SCRIPTS:
        copy_script(tmp_path, script, SMALL_MODEL)
    finished = run(["bash", shutil.copy(ROOT / "run_all.sh", tmp_path), "--epochs", "1"], PYTHON=sys.executable)
    assert finished.returncode == 0, finished.stderr
    rows = [re.sub(r"\d+\.\d\d%", "ACCURACY", row) for row in rows_of(finished)]
    processes = dict(one_process=1, ddp_launch=2, ddp_spawn=2, torch_O1=2)
    assert rows == [f"|{name}|ran|{number}|ACCURACY|" for name, number in processes.items()]
    assert "Speeds on a CPU mean nothing." in finished.stdout and "images/s" not in finished.stdout
    assert not [*tmp_path.glob("*.pt*"), *tmp_path.glob("*.lock")]  # without --checkpoint, nothing is saved


def test_the_rows_on_two_gpus_with_apex(start_stubs, tmp_path):
    finished = run([*start_stubs, "--data-dir", "here"], CUDA_VISIBLE_DEVICES="3,1", STUB_APEX="yes")
    assert finished.returncode == 0, finished.stderr
    runs = (tmp_path / "runs").read_text().replace(" --epochs 5 --data-dir here", "")
    runs = runs.replace("-m torch.distributed.run --standalone --nproc-per-node=2", "torchrun").splitlines()
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
    [table] = (tmp_path / "logs").glob("*/table.md")
    assert table.read_text() == finished.stdout and "\n\nCIFAR-10\n\n" in finished.stdout


def test_scripts_that_fail_without_data_and_apex(start_stubs, tmp_path):
    fails = "import os; os.system('sleep 6000 & echo LEFT $!'); print('RESULT {}'); raise SystemExit(3)"
    (tmp_path / "ddp_spawn_train.py").write_text(fails)
    finished = run([*start_stubs, "--seed", "7"])
    os.kill(int(re.search(r"LEFT (\d+)", finished.stderr)[1]), signal.SIGKILL)  # run_all.sh did not wait for it
    assert finished.returncode == 1 and "\n\nSynthetic images: no data\n\n" in finished.stdout
    assert len(rows_of(finished)) == 7  # none with Apex
    assert rows_of(finished)[3].startswith("|ddp_spawn|failed,exitcode3:seelogs/")
    assert (tmp_path / "runs").read_text().count(" --epochs 5 --synthetic 50000 --seed 7") == 6  # the other rows


def test_ctrl_c_ends_it(start_stubs, start, tmp_path):
    (tmp_path / "ddp_spawn_train.py").write_text("import time; print('waiting', flush=True); time.sleep(600)")
    process, log = start(start_stubs, "waiting")
    pids = processes_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LIMIT) == 130 and "\nStopped. The logs are in" in log.read_text()
    assert re.findall(r"(?m)^\w+", (tmp_path / "runs").read_text()) == ["0", "all", "all"]  # no other run began
    await_end(pids)


@pytest.mark.parametrize("flags", ["--epoks 3", "--checkpoint=run.pt", "--precision bf16"])
def test_a_wrong_flag_ends_it_before_the_first_script(flags, start_stubs, tmp_path):
    finished = run([*start_stubs, *flags.split()])
    assert finished.returncode == 2 and "run_all.sh: error: " in finished.stderr
    assert not (tmp_path / "runs").exists()
