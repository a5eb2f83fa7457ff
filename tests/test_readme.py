"""What README shows: its blocks of code, each applied to a copy of ddp_launch_train.py and run, and run_all.sh."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from conftest import FLOAT64, ROOT, SCRIPTS, SMALL, changes, command, copy_script, result, run
from PIL import Image

from results import draw

README = (ROOT / "README.md").read_text()
EIGHT_STEPS, OWN_DATA, INFERENCE = (
    README.partition(words)[2].split("```")[1].removeprefix("python\n")
    for words in ("eight additions", "AdamW with two", "the best weights")
)
APEX_DDP, ACCUMULATION, METRIC, TENSORBOARD = re.findall(r"```diff\n(.*?)```", README, re.S)
PAIR, SLURM_JOB = (
    block.replace("per-node=gpu", "per-node=1").replace("_train.py", f"_train.py {' '.join(SMALL)}")
    for block in re.findall(r"```bash\n((?:NCCL_|#!/bin/bash).*?)```", README, re.S)
)
# Two network namespaces stand for two machines. They need root, iproute2, slurmctld, slurmd and slurm-client.
NETWORK = """
for name in one two; do ip netns add $name; ip -n $name link set lo up; done
ip -n one link add eth0 type veth peer name eth0 netns two
ip -n one address add 10.0.0.1/24 dev eth0
ip -n two address add 10.0.0.2/24 dev eth0
for name in one two; do ip -n $name link set eth0 up; done
"""
SLURM = """
ClusterName=test
SlurmctldHost=localhost(10.0.0.1)
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n/pid
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
NodeName=10.0.0.[1-2] CPUs=32
PartitionName=main Nodes=ALL Default=YES
"""


@pytest.mark.parametrize("script", ["ddp_launch_train", "apex_amp_train"])
def test_the_eight_steps_are_lines_of_the_scripts(script, tmp_path):
    lines = {line.partition("  # ")[0].strip() for line in (ROOT / f"{script}.py").read_text().splitlines()}
    steps = {line.strip() for line in EIGHT_STEPS.splitlines() if line and not line.startswith("# ")}
    assert len(steps) >= 15 and not steps - lines
    copy_script(tmp_path, "apex_amp_train", *changes(APEX_DDP))  # fails if a line that it replaces is missing


def test_the_speeds_in_readme_and_results_are_medians_of_runs_csv():
    medians = {kind[:3]: median(found) for kind, found in draw.speeds().items() if "Python only" not in kind[3]}
    rows = re.findall(r"(?m)^\| `(\w+\.py)(.*)` \|(.*)\|(.*)\|(.*)\|$", README.partition("## Results")[2])
    assert len(rows) == 6
    for script, flags, *cells in rows:
        for gpus, cell in zip((1, 2, 4), cells):
            run_of = dict(command=f"{script} --batch-size {512 * gpus}{flags}", gpus=str(gpus), versions="")
            speed = medians.get(draw.kind_of(run_of)[:3])
            assert cell.strip() == (f"{round(speed, -2):,.0f}" if speed else "")
    page = (ROOT / "results" / "README.md").read_text()
    for number in "8,838", "23,925", "24,341":  # nn.DataParallel, Lightning, a ceiling
        assert number in page and number in [f"{speed:,.0f}" for speed in medians.values()]


def test_own_images_two_learning_rates_another_metric_tensorboard_and_inference(tmp_path):
    images, random = tmp_path / "images", np.random.default_rng(1)
    for number in range(90):  # three classes, each of its own brightness
        file = images / ("val" if number % 3 == 0 else "train") / "abc"[number % 9 // 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(number % 9 // 3 * 80, 255, (12, 11, 3), np.uint8)).save(file)
    own = ("\nif __name__", f"\n{OWN_DATA}\n\nif __name__")  # these functions come last, and so are used
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", *changes(METRIC, TENSORBOARD), own)
    flags = ["--data-dir", str(images), *"--workers 1 --epochs 5 --checkpoint run.pt".split()]
    found = result(run(command("ddp_launch_train", *flags, folder=folder), cwd=folder))
    assert found["best"] > 0.4 and found["val_top5"] == 1
    assert len(list(folder.glob("runs/*/events*"))) == 1  # of rank 0 alone
    code = f"""
import argparse, torch, ddp_launch_train
val = ddp_launch_train.load_data(argparse.Namespace(data_dir={str(images)!r}, image_size=4))[1]
images = torch.stack([torch.from_numpy(image) for image, _ in val])
{INFERENCE}
print((scores.argmax(1) == torch.tensor(val.targets)).double().mean().item())
"""
    said = run([sys.executable, "-c", code], cwd=folder)
    assert float(said.stdout) == pytest.approx(found["best"]), said.stderr


def test_accumulated_gradients_train_like_one_large_batch(tmp_path):
    weights = []
    for batch, diffs in ("48", ()), ("12", (ACCUMULATION,)):
        folder = copy_script(tmp_path / batch, "ddp_launch_train", *FLOAT64, *changes(*diffs))
        flags = ["--limit", "98", "--batch-size", batch, "--checkpoint", "run.pt"]
        result(run(command("ddp_launch_train", *flags, folder=folder), cwd=folder))
        weights.append(torch.load(folder / "run.pt", weights_only=True)["net"])
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)


def test_a_profile_of_a_copied_script(tmp_path):
    folder = copy_script(tmp_path / "copy", "ddp_launch_train")
    (folder / "profile_step.py").write_text((ROOT / "results" / "profile_step.py").read_text())
    arguments = command("ddp_launch_train", folder=folder)
    arguments[5:6] = [str(folder / "profile_step.py"), *re.search("gpu profile_step.py (.*)`", README)[1].split()]
    assert result(run(arguments, cwd=folder))
    trace = (folder / "trace.json").read_text()
    assert "ProfilerStep#" in trace and "gloo:all_reduce" in trace


def test_run_all_learns_without_a_gpu_and_shows_failures_in_its_table(tmp_path):
    for script in SCRIPTS:
        folder = copy_script(tmp_path / "copy", script)
    start = ["bash", shutil.copy(ROOT / "run_all.sh", folder)]
    settings = dict(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    refused = run([*start, "--epoks", "3"], **settings)
    assert refused.returncode == 2 and "unrecognized arguments: --epoks" in refused.stderr.splitlines()[-1]
    # One script leaves a process behind that keeps its output open; run_all.sh must not wait for it.
    leave = "import os; os.system('sleep 100 & echo LEFT $!'); raise SystemExit(3)"
    (folder / "ddp_spawn_train.py").write_text(leave)
    (folder / "ddp_launch_train.py").write_text("print('no result')")
    finished = run(start, **settings)
    os.kill(int(re.search(r"LEFT (\d+)", finished.stderr)[1]), signal.SIGKILL)
    assert finished.returncode == 1, finished.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in finished.stdout.splitlines() if "|" in line]
    names, gpus, processes, _, images, speed_up, _, accuracy = zip(*(row[1:9] for row in rows[2:]))
    assert names == ("one_process", "dp", "ddp_launch", "ddp_spawn", "torch_O1")
    assert gpus[2].startswith("failed, exit code 0: see logs/") and gpus[3].startswith("failed, exit code 3: see")
    assert processes == ("1", "1", "", "", "2") and speed_up[0] == "1.00"
    for row in 0, 1, 4:
        assert float(accuracy[row].rstrip("%")) > 60 and float(images[row]) > 0
    logs = folder / re.search(r"The logs and table.md are in (\S+)", finished.stderr)[1]
    assert (logs / "table.md").read_text() == finished.stdout


@pytest.fixture
def machines(monkeypatch):
    """Make two machines. Return the beginnings of commands that run on one or the other."""
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # not by name: both machines have the name of this one
    subprocess.run(["bash", "-ec", NETWORK], check=True)
    yield ["ip", "netns", "exec", "one"], ["ip", "netns", "exec", "two"]
    subprocess.run(["bash", "-ec", "ip netns delete one; ip netns delete two"], check=True)


@pytest.mark.slow
def test_the_pair_of_commands_trains_on_two_machines(machines, start, tmp_path):
    copy_script(tmp_path, "ddp_launch_train")
    one, two = machines
    other, _ = start([*two, "bash", "-c", PAIR.replace("node-rank=0", "node-rank=1")], "", cwd=tmp_path)
    assert result(run([*one, "bash", "-c", PAIR], cwd=tmp_path))["world_size"] == 2
    assert other.wait(timeout=60) == 0


@pytest.mark.slow
def test_the_slurm_job_trains_on_two_nodes(machines, start, tmp_path, monkeypatch):
    copy_script(tmp_path, "ddp_launch_train")
    (tmp_path / "job").write_text(SLURM_JOB.replace(" --gpus-per-node=4", ""))
    folder = Path(tempfile.mkdtemp())  # a short path: Slurm makes sockets in it
    (folder / "slurm.conf").write_text(SLURM.format(folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
    start([*machines[0], "slurmctld", "-D", "-i"], "Running as primary controller")
    for name, machine in zip(["10.0.0.1", "10.0.0.2"], machines):
        (folder / name).mkdir()
        start([*machine, "slurmd", "-D", "-N", name], "slurmd started")
    finished = run([*machines[0], "sbatch", "--wait", "job"], cwd=tmp_path)
    [log] = tmp_path.glob("job-*.log")
    assert finished.returncode == 0 and '"world_size": 2' in log.read_text(), log.read_text()


@pytest.mark.slow
def test_each_script_trains_and_reads_its_checkpoint_with_pytorch_2_6(tmp_path):
    venv.create(tmp_path, with_pip=True)
    install = "bin/python -m pip install --quiet torch==2.6.0 torchvision==0.21.0".split()
    subprocess.run(install, cwd=tmp_path, env=os.environ | dict(http_proxy="", https_proxy=""), check=True)
    for script in SCRIPTS:
        arguments = [f"{tmp_path}/bin/python", *command(script, "--checkpoint", f"{script}.pt")[1:]]
        first, second = run(arguments, cwd=tmp_path), run(arguments, cwd=tmp_path)
        assert "\n0 of 2 epochs" in first.stdout and "\n2 of 2 epochs" in second.stdout
        assert result(first) | dict(seconds=0) == result(second) | dict(seconds=0)
