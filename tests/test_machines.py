"""Training over two machines, by hand and under Slurm; the machines are two network namespaces of this one."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import METRICS, ROOT, SMALL, command, copy_recipe, result, wait_until_gone

FLAGS = [*SMALL, "--epochs", "3", "--device", "cpu"]

SLURM_CONFIGURATION = """\
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


class Machine:
    """A network namespace and a host name: what runs here sees its own network card, ports and /etc/hosts."""

    def __init__(self, name, address):
        self.name, self.address = name, address
        self.namespace = f"test-{os.getpid()}-{name}"
        self.files = Path("/etc/netns", self.namespace)  # `ip netns exec` puts these files over those in /etc

    def ip(self, arguments):
        subprocess.run(["ip", "-n", self.namespace, *arguments.split()], check=True)

    def command(self, arguments, **env):
        """Return the command line that runs a command on this machine."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return [*enter, *named, "env", *(f"{key}={value}" for key, value in env.items()), *arguments]

    def remove(self):
        inside = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True).stdout
        for pid in inside.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)
        shutil.rmtree(self.files, ignore_errors=True)


@pytest.fixture
def machines():
    """Two machines, `one` and `two`, with a cable between them; each finds the other by name."""
    if os.geteuid() or not all(map(shutil.which, ["ip", "unshare", "hostname"])):
        pytest.skip("needs root, ip, unshare and hostname")
    one, two = both = Machine("one", "10.77.0.1"), Machine("two", "10.77.0.2")
    try:
        for machine in both:
            made = subprocess.run(["ip", "netns", "add", machine.namespace], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"needs network namespaces: {made.stderr.strip()}")
            machine.files.mkdir(parents=True)
            names = "".join(f"{other.address} {other.name}\n" for other in both)
            (machine.files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        one.ip(f"link add eth0 type veth peer name eth0 netns {two.namespace}")
        for machine in both:
            machine.ip(f"address add {machine.address}/24 dev eth0")
            machine.ip("link set lo up")
            machine.ip("link set eth0 up")
        yield both
    finally:
        for machine in both:
            machine.remove()


def torchrun(*options, flags=FLAGS):
    """Return the command line of torchrun with one process for one of two machines."""
    arguments = command("ddp_launch_train", *flags, nproc=1)
    arguments[3:4] = ["--nnodes=2", *options]
    return arguments


def end_as_on_one_machine(runs, first_runs):
    """Wait for the runs. They must print one RESULT over all machines, that of two processes on one machine."""
    assert [run.process.wait(timeout=120) for run in runs] == [0] * len(runs), runs[0].log.read_text()
    lines = [line for run in runs for line in run.log.read_text().splitlines() if "RESULT" in line]
    assert len(lines) == 1
    found, expected = json.loads(lines[0].removeprefix("RESULT ")), result(first_runs("ddp_launch_train")[0])
    assert [found[key] for key in ["world_size", *METRICS]] == [expected[key] for key in ["world_size", *METRICS]]


def test_two_machines_that_know_their_names_need_one_command(machines, start, first_runs):
    arguments = torchrun("--rdzv-backend=c10d", "--rdzv-endpoint=one:29500", "--rdzv-id=test")
    end_as_on_one_machine([start(machine.command(arguments)) for machine in machines], first_runs)


def test_a_cut_cable_ends_both_machines_and_the_same_commands_resume(machines, start, first_runs, tmp_path):
    flags = [*FLAGS, "--checkpoint", str(tmp_path / "run.pt"), "--timeout", "10"]
    first = ["--master-addr=one", "--master-port=29500"]
    arguments = [torchrun(f"--node-rank={rank}", *first, flags=flags) for rank in (0, 1)]
    commands = [machine.command(words) for machine, words in zip(machines, arguments, strict=True)]
    runs = [start(words) for words in commands]
    pids = [run.pids(1)[0] for run in runs]
    runs[0].wait_for("epoch 2 step 1")
    machines[1].ip("link set eth0 down")
    for run in runs:
        assert run.process.wait(timeout=60) != 0
        assert re.search("Timed out waiting|timeout caused pair closure", run.log.read_text())
    wait_until_gone(pids)
    machines[1].ip("link set eth0 up")
    runs = [start(words) for words in commands]
    runs[0].wait_for("1 of 3 epochs are done")
    end_as_on_one_machine(runs, first_runs)


@pytest.fixture
def slurm(machines, start):
    """Slurm with both machines as its nodes; returns the function that runs one of its commands on the first."""
    if not all(map(shutil.which, ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol"])):
        pytest.skip("needs Slurm (slurmctld, slurmd, slurm-client, munge)")
    with tempfile.TemporaryDirectory(prefix="slurm") as name:  # in a short path: there are sockets inside
        folder = Path(name)
        files = dict(socket="munge.socket", key_file="key", log_file="log", pid_file="pid", seed_file="seed")
        options = [f"--{key.replace('_', '-')}={folder / value}" for key, value in files.items()]
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        (folder / "slurm.conf").write_text(SLURM_CONFIGURATION.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used; searching for it fails here
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")  # Slurm counts them, no more
        for gpu in range(8):
            (folder / f"gpu{gpu}").touch()
        for directory in ("state", *(machine.name for machine in machines)):
            (folder / directory).mkdir()

        def on(machine, *arguments):
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            return machine.command(arguments, SLURM_CONF=folder / "slurm.conf", PATH=path)

        start(["munged", "--foreground", "--force", *options]).wait_for("Created socket")
        start(on(machines[0], "slurmctld", "-D", "-i")).wait_for("Running as primary controller")
        for machine in machines:
            start(on(machine, "slurmd", "-D"))
        yield lambda *arguments: on(machines[0], *arguments)
        for machine in machines:
            machine.remove()  # with all processes, which write into the folder


def test_two_slurm_jobs_on_the_same_two_nodes(slurm, start, first_runs, tmp_path):
    [job] = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "README.md").read_text(), re.S)
    for old, new in (("=gpu", "=1"), ("train.py", " ".join(["train.py", *FLAGS]))):  # one process instead of GPUs
        assert job.count(old) == 1
        job = job.replace(old, new)
    (tmp_path / "job.sh").write_text(job)
    # Both jobs run at the same time; each has its own port.
    folders = [copy_recipe(tmp_path / name, "ddp_launch_train") for name in ("first", "second")]
    jobs = [start(slurm("sbatch", "--wait", f"--chdir={folder}", str(tmp_path / "job.sh"))) for folder in folders]
    for job, folder in zip(jobs, folders, strict=True):
        job.process.wait(timeout=180)
        [job.log] = folder.glob("job.sh-*.log")
        end_as_on_one_machine([job], first_runs)
        assert (folder / "run.pt").exists()
