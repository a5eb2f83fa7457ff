"""What README and RECIPES.md show: the diff, lines for spawn, commands for several machines, and run_all.sh."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, SMALL, SMALL_NET, block, command, copy_script, in_processes, result, run

PAIR, SLURM_JOB = (
    block(name).replace("per-node=gpu", "per-node=1").replace("_train.py", f"_train.py {' '.join(SMALL)}")
    for name in ("two machines", "slurm")
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


# For the programs of README's diff on the CPU: other data, a small network with BatchNorm, no GPU.
CIFAR10 = """
def small_cifar10(*_, train, **options):
    generator = torch.Generator().manual_seed(21 + train)
    labels = torch.randint(10, (400 if train else 61,), generator=generator)
    colours = 0.5 * nn.functional.one_hot(labels, 32)[:, None, None]
    images = torch.rand(len(labels), 3, 32, 32, generator=generator) + colours
    return torch.utils.data.TensorDataset(images, labels)

datasets.CIFAR10 = small_cifar10
"""
NET = "nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.BatchNorm1d(10))"
ON_THE_CPU = {
    "import datasets, models, transforms\n": f"import datasets, models, transforms\n{CIFAR10}",
    'torch.device("cuda")': 'torch.device("cpu")',
    'torch.device("cuda", local_rank)': 'torch.device("cpu")',
    'torch.device("cuda", rank)': 'torch.device("cpu")',
    "torch.cuda.set_device(device)": "pass",
    '"nccl"': '"gloo"',
    ", device_id=device": "",
    "torch.cuda.device_count()": "2",
    "models.resnet50(num_classes=10)": NET,
    "    net.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)  # for small images\n": "",
    "    net.maxpool = nn.Identity()\n": "",
    "lr=1e-3": "lr=1e-2",
    "num_workers=8": "num_workers=0",
    "batch_size=512": "batch_size=40",
    "range(10)": "range(4)",
}


def write(program, path):
    """Write a program of README, changed for the CPU."""
    for old, new in ON_THE_CPU.items():
        program = program.replace(old, new)
    path.write_text(program)


def program_of_the_diff(sign, *edits):
    """Return README's program before the diff ("-") or after it ("+"), with some edits (old text, new text)."""
    program = "".join(re.findall(rf"(?m)^[ {sign}](.*\n)", block("from one GPU")))
    for old, new in edits:
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    return program


def after(line, name):
    """Return an edit that inserts a block of README after a line."""
    return line, line + textwrap.indent(block(name), re.match(" *", line)[0])


@pytest.mark.parametrize("nproc", [0, 1, 3])
def test_the_diff_turns_a_script_for_one_gpu_into_one_for_all(nproc, tmp_path):
    if nproc:
        launcher = command("ddp_launch_train", nproc=nproc)[:5]
        edit = after("        dist.all_reduce(correct)  # the sum over all ranks\n", "check")
        write(program_of_the_diff("+", edit), tmp_path / "train.py")
    else:
        launcher = [sys.executable]
        write(program_of_the_diff("-"), tmp_path / "train.py")
    finished = run([*launcher, "train.py"], cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    printed = [float(accuracy) for accuracy in re.findall(r"epoch \d accuracy (\S+)", finished.stdout)]
    assert len(printed) == 4 and printed[-1] > 0.3  # four epochs, each printed once
    scope = {}
    exec(f"import torch\nfrom torch import nn\nclass datasets: pass\n{CIFAR10}\nnet = {NET}.eval()", scope)
    images, labels = scope["small_cifar10"](train=False).tensors
    scope["net"].load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    accuracy = (scope["net"](images).argmax(1) == labels).double().mean().item()
    assert printed[-1] == pytest.approx(accuracy, abs=5e-5)  # of the saved weights, each image counted once
    check = r"rank (\d): weights (\S+) labels (.*) indices (.*) validates (\d+)"
    lines = re.findall(check, finished.stdout)
    assert len(lines) == 4 * nproc
    if nproc > 1:
        assert len({indices for *_, indices, _ in lines}) == len(lines)  # others in each epoch and rank
    for epoch in range(4 * bool(nproc)):
        of_ranks = [[line for line in lines if line[0] == str(rank)][epoch] for rank in range(nproc)]
        assert len({weights for _, weights, *_ in of_ranks}) == len({labels for _, _, labels, *_ in of_ranks}) == 1
        assert sum(int(validates) for *_, validates in of_ranks) == 61


@pytest.mark.parametrize("edit", [("sampler=sampler", "shuffle=True"), ("sampler.set_epoch(epoch)", "pass")])
def test_the_check_shows_equal_indices_without_the_sampler_or_set_epoch(edit, tmp_path):
    check = after("        dist.all_reduce(correct)  # the sum over all ranks\n", "check")
    write(program_of_the_diff("+", check, edit), tmp_path / "train.py")
    finished = in_processes(2, lambda: runpy.run_path("train.py", run_name="__main__"), tmp_path)
    indices = re.findall(r"indices (\[.*?\])", finished.stdout)
    different = 1 if "shuffle" in edit[1] else 2  # the ranks, or the epochs, are alike
    assert len(indices) == 8 and len(set(indices)) == different


EVAL = ("        net.train()\n", "        net.eval()\n")
WEIGHTED = ("(ddp_net(images), labels)", "(ddp_net(images), labels, torch.arange(1, 11, device=device).double())")
FACTOR = ("            loss.backward()\n", "            (loss / world_size).backward()\n")


@pytest.mark.parametrize(
    "edits, low, high",
    [([EVAL], 0, 1e-12), ([], 1e-3, 10), ([EVAL, WEIGHTED], 1e-3, 10), ([EVAL, FACTOR], 0.49, 0.51)],
    ids=["right", "BatchNorm", "class weights", "a wrong factor"],
)
def test_the_check_of_the_gradient(edits, low, high, tmp_path):
    program = program_of_the_diff(
        "+",
        after("            loss.backward()\n", "gradient"),
        ("net = net.to(device)", "net = net.double().to(device)"),
        ("images.to(device), labels.to(device)", "images.double().to(device), labels.to(device)"),
        ("batch_size=512, sampler", "batch_size=40 // world_size, sampler"),
        *edits,
    )
    write(program, tmp_path / "train.py")
    for nproc in 1, 2:
        finished = in_processes(nproc, lambda: runpy.run_path("train.py", run_name="__main__"), tmp_path)
    differences = re.findall(r"relative difference (\S+)", finished.stdout)
    assert len(differences) == 2 and all(low <= float(value) < high for value in differences)


def test_the_lines_of_spawn_start_processes_that_find_each_other(tmp_path):
    done = "\nif __name__"
    say = "    dist.barrier()\n    print(rank, dist.get_world_size(), flush=True)\n"
    imports = "import torch\nimport torch.distributed as dist\n"
    write(imports + block("spawn").replace(done, f"{say}{done}"), tmp_path / "spawned.py")
    finished = run([sys.executable, "spawned.py"], cwd=tmp_path, PYTHONUNBUFFERED="")
    assert sorted(finished.stdout.splitlines()) == ["0 2", "1 2"], finished.stderr


def test_run_all_learns_without_a_gpu_and_shows_failures_in_its_table(tmp_path):
    for script in SCRIPTS:
        folder = copy_script(tmp_path / "copy", script, *[SMALL_NET] * (script == "apex_amp_train"))
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
        assert float(accuracy[row].rstrip("%")) > 60 and float(images[row].replace(",", "")) > 0
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
        assert ": 0 epochs are done" in first.stdout and ": 2 epochs are done" in second.stdout
        assert result(first) == result(second)
