"""Slow tests, run before a release with -m slow: random kills; two machines (network namespaces), with Slurm."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, command, copy_script, result, run, wait_until_gone
from test_faults import processes_of
from test_training import saved_by

pytestmark = pytest.mark.slow
NETWORK = """
ip netns add {one}; ip netns add {two}
ip -n {one} link add eth0 type veth peer name eth0 netns {two}
ip -n {one} address add 10.77.0.1/24 dev eth0; ip -n {two} address add 10.77.0.2/24 dev eth0
for name in {one} {two}; do
  ip -n $name link set lo up; ip -n $name link set eth0 up
  mkdir -p /etc/netns/$name; printf '127.0.0.1 localhost\\n10.77.0.1 one\\n10.77.0.2 two\\n' >/etc/netns/$name/hosts
done
"""
REMOVE = "for n in {one} {two}; do kill -9 $(ip netns pids $n); ip netns delete $n; rm -r /etc/netns/$n; done"
SLURM = """
ClusterName=test
SlurmctldHost=one
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=one,two CPUs=64 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES
"""


@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
def test_killed_at_15_random_moments_a_run_ends_like_an_unbroken_one(script, start, tmp_path):
    flags, chance = ["--epochs", "12", "--lr", "1", "--checkpoint", "run.pt"], random.Random(21)
    for name in "unbroken", "killed":
        (tmp_path / name).mkdir()
    result(run(command(script, *flags), cwd=tmp_path / "unbroken"))
    for _ in range(15):
        process, _ = start(command(script, *flags), "epochs are done", cwd=tmp_path / "killed")
        time.sleep(chance.uniform(0, 2.5))  # within one or two epochs
        pids = processes_of(process.pid)
        for pid in chance.choice([pids, pids[-1:], pids[1:2]]):  # all, a training process or the launcher's first
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids)
    result(run(command(script, *flags), cwd=tmp_path / "killed"))
    assert saved_by(tmp_path / "killed") == saved_by(tmp_path / "unbroken")


@pytest.fixture
def on():
    """Make two machines, `one` and `two`, with a cable between them. Return a function: on(machine, command)."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    names = {name: f"test-{os.getpid()}-{name}" for name in ("one", "two")}
    subprocess.run(["bash", "-ec", NETWORK.format(**names)], check=True)
    inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
    yield lambda machine, *words: ["ip", "netns", "exec", names[machine], *inside, machine, *map(str, words)]
    subprocess.run(["bash", "-c", REMOVE.format(**names)])


def test_two_machines_train_and_resume_after_a_cut(on, start, tmp_path):
    words = command("ddp_launch_train", "--epochs", "30", "--checkpoint", "run.pt", nproc=1)
    words[3:4] = ["--nnodes=2", "--node-rank=0", "--master-addr=10.77.0.1", "--master-port=29500"]
    both = [on("one", *words), on("two", *(word.replace("rank=0", "rank=1") for word in words))]
    for name in "one", "two":
        (tmp_path / name).mkdir()  # no shared disk
    other = subprocess.Popen(both[1], cwd=tmp_path / "two")
    first, _ = start(both[0], "epoch 2 step", cwd=tmp_path / "one")
    os.kill(processes_of(other.pid)[-1], signal.SIGKILL)
    assert first.wait(60) != 0 and other.wait(60) != 0
    other = subprocess.Popen(both[1], cwd=tmp_path / "two")
    finished = run(both[0], cwd=tmp_path / "one")
    assert result(finished)["world_size"] == 2 and not re.search("\n0 of 30 epochs", finished.stdout)
    assert other.wait(60) == 0 and not (tmp_path / "two" / "run.pt").exists()


def test_readmes_slurm_job_on_two_nodes(on, start, tmp_path):
    if not all(map(shutil.which, ["munged", "slurmctld", "slurmd"])):
        pytest.skip("needs slurmctld, slurmd, slurm-client and munge")
    folder = Path(f"/tmp/slurm{os.getpid()}")  # a short path: there are sockets inside
    for name in "state", "one", "two":
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(SLURM.format(folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")  # Slurm counts them, no more
    for name in "key", *(f"gpu{number}" for number in range(8)):
        (folder / name).write_bytes(os.urandom(128))
        (folder / name).chmod(0o600)
    files = dict(socket="munge.socket", key_file="key", log_file="log", pid_file="pid", seed_file="seed")
    munge = [f"--{key.replace('_', '-')}={folder / value}" for key, value in files.items()]
    env = "env", f"SLURM_CONF={folder}/slurm.conf", f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    start(["munged", "--foreground", "--force", *munge], "Created socket")
    start(on("one", *env, "slurmctld", "-D", "-i"), "Running as primary controller")
    for name in "one", "two":
        start(on(name, *env, "slurmd", "-D"), "started")
    [job] = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "README.md").read_text(), re.S)
    job = job.replace("per-node=gpu", "per-node=1").replace("_train.py", f"_train.py {' '.join(SMALL)}")
    copy_script(tmp_path / "copy", "ddp_launch_train")
    (tmp_path / "copy" / "job.sh").write_text(job)
    run(on("one", *env, "sbatch", "--wait", f"--chdir={tmp_path}/copy", f"{tmp_path}/copy/job.sh"))
    [log] = (tmp_path / "copy").glob("job.sh-*.log")
    assert '"world_size": 2' in log.read_text() and (tmp_path / "copy" / "run.pt").exists()
    shutil.rmtree(folder)
