"""README: minimal/ and its diff, the checks of a port, and commands for several machines."""

import os
import re
import socket
import subprocess
import sys
import venv
from textwrap import indent

import pytest
import torch
from conftest import (
    ROOT,
    SCRIPTS,
    SMALL,
    SMALL_MODEL,
    block,
    command,
    copy_script,
    edited,
    edits_of,
    in_processes,
    result,
    run,
)

# For minimal/ on the CPU: other data, a small model with BatchNorm, no GPU.
DATA = """
def small_cifar10(*_, train, **options):
    generator = torch.Generator().manual_seed(21 + train)
    labels = torch.randint(10, (410 if train else 61,), generator=generator)
    colours = 0.5 * nn.functional.one_hot(labels, 32)[:, None, None]
    images = torch.rand(len(labels), 3, 32, 32, generator=generator) + colours
    return torch.utils.data.TensorDataset(images, labels)

datasets.CIFAR10 = small_cifar10
"""
MODEL = "nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.BatchNorm1d(10))"
ON_THE_CPU = {
    "import datasets, models, transforms\n": f"import datasets, models, transforms\n{DATA}",
    'torch.device("cuda")': 'torch.device("cpu")',
    'torch.device("cuda", local_rank)': 'torch.device("cpu")',
    "torch.cuda.set_device(device)": "pass",
    '"nccl"': '"gloo"',
    ", device_id=device": "",
    "models.resnet50(num_classes=10)": MODEL,
    "    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)  # for small images\n": "",
    "    model.maxpool = nn.Identity()\n": "",
    "lr=1e-3": "lr=1e-2",
    "num_workers=8": "num_workers=0",
    "batch_size=512": "batch_size=40",
}


def train_minimal(nproc, folder, *edits, epochs=4):
    """Start minimal/ddp.py on the CPU after some edits, or minimal/one_gpu.py if `nproc` is 0."""
    folder.mkdir(exist_ok=True)
    program = edited((ROOT / "minimal" / ("ddp.py" if nproc else "one_gpu.py")).read_text(), *edits)
    lengths = {"range(10)": f"range({epochs})", "range(epochs_done, 10)": f"range(epochs_done, {epochs})"}
    for old, new in (ON_THE_CPU | lengths).items():
        program = program.replace(old, new)
    (folder / "program.py").write_text(program)
    return in_processes(nproc, folder, "program.py")


def after(line, code):
    """Return an edit that adds code after a line, as far indented as the line."""
    return line, line + indent(code, re.match(" *", line)[0])


def test_readme_shows_the_diff_of_the_two_programs():
    files = ROOT / "minimal" / "one_gpu.py", ROOT / "minimal" / "ddp.py"
    diff = run(["diff", "-U", "999", *files]).stdout.split("\n", 3)[3]
    assert f"```diff\n{diff}```\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("nproc", [0, 1, 2, 3])
def test_the_programs_learn_and_print_the_accuracy_of_the_model_that_they_save(nproc, tmp_path):
    finished = train_minimal(nproc, tmp_path)
    assert finished.returncode == 0
    printed = [float(accuracy) for accuracy in re.findall(r"epoch \d accuracy (\S+)", finished.stdout)]
    assert len(printed) == 4 and printed[-1] > 0.3  # four epochs, each printed once
    scope = {}
    exec(f"import torch\nfrom torch import nn\nclass datasets: pass\n{DATA}\nmodel = {MODEL}.eval()", scope)
    images, labels = scope["small_cifar10"](train=False).tensors
    scope["model"].load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    accuracy = (scope["model"](images).argmax(1) == labels).double().mean().item()
    assert printed[-1] == pytest.approx(accuracy, abs=5e-5)  # of the saved weights, each image counted once


def test_training_with_model_ends_with_an_error_and_saves_nothing(tmp_path):
    finished = train_minimal(2, tmp_path, ("(ddp_model(images)", "(model(images)"))
    assert finished.returncode != 0 and "the weights of the ranks differ" in finished.stdout
    assert "accuracy" not in finished.stdout and not (tmp_path / "model.pt").exists()


# ------------------------------------------------------------ The five checks of a port; step 7 is the second

LOSS = after("            optimizer.step()\n", "print('LOSS', loss.item())\n")
IN_ORDER = ("seed=21, drop_last", "shuffle=False, drop_last")


OTHER_RATE = ("lr=1e-3", "lr=2e-2")


@pytest.mark.parametrize(("mistake", "equal"), [([], True), ([OTHER_RATE], False)])
def test_check_1_the_old_script_and_the_port_with_one_process_print_the_same_losses(mistake, equal, tmp_path):
    old = train_minimal(0, tmp_path, LOSS, ("shuffle=True", "shuffle=False"))
    port = train_minimal(1, tmp_path, LOSS, IN_ORDER, *mistake)
    losses = [re.findall("LOSS (.*)", finished.stdout) for finished in (old, port)]
    assert len(losses[0]) == 4 * 11 and (losses[0] == losses[1]) == equal


WEIGHTS = "torch.arange(1, 11, device=device).double()"
CHECK_3 = {
    "right": ([], 0, 1e-12),
    "class weights": ([("(ddp_model(images), labels)", f"(ddp_model(images), labels, {WEIGHTS})")], 1e-3, 1),
    "a wrong factor": ([("loss.backward()", "(loss / world_size).backward()")], 0.49, 0.71),
    "batch statistics": ([("        model.eval()  # without", "        model.train()  # without")], 1e-3, 10),
}


@pytest.mark.parametrize("case", CHECK_3)
def test_check_3_shows_whether_the_gradient_is_that_of_one_process(case, tmp_path):
    edits, low, high = CHECK_3[case]
    old = (ROOT / "minimal" / "ddp.py").read_text()
    new = edited(edited(old, *edits_of(block("gradient"))), *edits)
    differences = []
    for nproc in 1, 2, 3:
        finished = train_minimal(nproc, tmp_path, (old, new))
        assert finished.returncode == 0
        differences += map(float, re.findall(r"rank \d: difference (\S+)", finished.stdout))
    assert len(differences) == 5 and all(low <= difference < high for difference in differences)


NO_OPTIMIZER = '+        optimizer.load_state_dict(state["optimizer"])\n'
NO_SEED = "+        torch.manual_seed(21 + rank + world_size * epoch)\n"


@pytest.mark.parametrize(("missing", "equal"), [("nothing", True), (NO_OPTIMIZER, False), (NO_SEED, False)])
def test_check_4_two_epochs_equal_one_epoch_a_new_start_and_the_second(missing, equal, tmp_path):
    dropout = ("    model = model.to(device)", "    model = nn.Sequential(nn.Dropout(0.1), model).to(device)")
    edits = [dropout, *edits_of(block("resume").replace(missing, ""))]
    for folder, epochs in ("uninterrupted", 2), ("resumed", 1), ("resumed", 2):
        assert train_minimal(2, tmp_path / folder, *edits, epochs=epochs).returncode == 0
    states = [torch.load(tmp_path / folder / "run.pt")["model"] for folder in ("uninterrupted", "resumed")]
    assert all(map(torch.equal, *(state.values() for state in states))) == equal


ALL_REDUCE = "        dist.all_reduce(correct)  # the sum over all ranks\n"
CHECK_5 = [("", 8), ("sampler=sampler", 1), ("sampler.set_epoch(epoch)", 2)]  # how many indices differ


@pytest.mark.parametrize(("missing", "different"), CHECK_5)
def test_check_5_shows_labels_indices_and_the_numbers_to_validate(missing, different, tmp_path):
    edits = [(missing, "shuffle=True" if "=" in missing else "pass")] if missing else []
    finished = train_minimal(2, tmp_path, after(ALL_REDUCE, block("data")), *edits)
    lines = re.findall(r"rank (\d): labels (\[.*\]) indices (\[.*\]) validates (\d+)", finished.stdout)
    ranks, labels, indices, numbers = zip(*lines)
    assert len(lines) == 8 and len(set(labels)) == 1 and len(set(indices)) == different
    assert sum(map(int, numbers)) == 4 * 61


# ------------------------------------------------------------ Several machines, and an old PyTorch

# Two processes of this machine stand for two machines.
HERE = {"per-node=gpu": "per-node=1", "_train.py": f"_train.py {' '.join(SMALL)}", "10.0.0.1": "127.0.0.1"}
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done  # its options
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@" && wait $!
"""


@pytest.mark.parametrize("name", ["two machines", pytest.param("slurm", marks=pytest.mark.slow)])
def test_the_commands_for_several_machines_train_on_two(name, start, tmp_path):
    copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL)
    for program, text in ("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n"):
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    commands = block(name).replace("eth0", "lo").replace("29500", str(port))
    for old, new in HERE.items():
        commands = commands.replace(old, new)
    settings = dict(SLURM_JOB_ID=str(port), SLURM_JOB_NODELIST="", SLURM_CPUS_PER_TASK="1", SLURM_NNODES="2")
    settings |= dict(PATH=f"{tmp_path}:{sys.prefix}/bin:{os.environ['PATH']}")
    if name == "two machines":
        start(["bash", "-c", commands.replace("node-rank=0", "node-rank=1")], "", cwd=tmp_path, **settings)
    assert result(run(["bash", "-c", commands], cwd=tmp_path, **settings))["world_size"] == 2


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
