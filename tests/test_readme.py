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


def test_of_two_machines_rank_0_alone_prints_and_saves(tmp_path):
    line = '    world_size = int(os.environ["WORLD_SIZE"])  # number of processes\n'
    own_folder = after(line, "os.mkdir(f'machine {rank}')\nos.chdir(f'machine {rank}')\n")
    finished = train_minimal(2, tmp_path, ('int(os.environ["LOCAL_RANK"])', "0"), own_folder)
    assert finished.returncode == 0 and finished.stdout.count("accuracy") == 4
    assert [path.parent.name for path in tmp_path.glob("machine */model.pt")] == ["machine 0"]


def test_training_with_model_ends_with_an_error_and_saves_nothing(tmp_path):
    finished = train_minimal(2, tmp_path, ("(ddp_model(images)", "(model(images)"))
    assert finished.returncode != 0 and "the weights of the ranks differ" in finished.stdout
    assert "accuracy" not in finished.stdout and not (tmp_path / "model.pt").exists()


# ------------------------------------------------------------ The checks of a port; step 7 is the second


def mistakes_end(check, mistakes, nprocs, folder, *edits):
    """Run an edited port; then run it with each mistake, which must end it with the message of the check."""
    old = (ROOT / "minimal" / "ddp.py").read_text()
    port = edited(old, *edits)
    assert [train_minimal(nproc, folder, (old, port)).returncode for nproc in nprocs] == [0] * len(nprocs)
    for name, edit in mistakes.items():
        finished = train_minimal(nprocs[-1], folder, (old, edited(port, edit)))
        assert finished.returncode != 0 and re.search(check, finished.stdout), name


def test_check_1_ends_a_port_whose_first_losses_are_not_those_of_the_old_script(tmp_path):
    before = ("    for epoch in", "    losses = []\n    for epoch in")
    loss = "            loss = nn.functional.cross_entropy(model(images), labels)\n"
    old = train_minimal(0, tmp_path, before, after(loss, block("old losses")), ("shuffle=True", "shuffle=False"))
    assert old.returncode == 0 and len(torch.load(tmp_path / "losses.pt")) == 3
    mistakes = {"another rate": ("lr=1e-3", "lr=2e-2"), "another seed": ("seed(21)", "seed(22)")}
    in_order = ("seed=21, drop_last", "shuffle=False, drop_last")
    check = after(loss.replace("(model", "(ddp_model"), block("losses"))
    mistakes_end("not close", mistakes, [1], tmp_path, before, check, in_order)


LOSS, WEIGHTS = "(ddp_model(images), labels)", "torch.arange(1.0, 11, device=device)"
CHECK_3 = {
    "class weights": (LOSS, f"(ddp_model(images), labels, {WEIGHTS})"),
    "a wrong factor": ("loss.backward()", "(loss / world_size).backward()"),
    "batch statistics": ("        model.eval()  # without", "        model.train()  # without"),
    "unequal shares": ("batch_size=60 // world_size", "batch_size=20 - (rank == 2)"),
    "zeros in a new layer": ("ddp_model = DDP(model)", "model[2].weight.data.zero_(); ddp_model = DDP(model)"),
}


def test_check_3_ends_a_port_whose_gradient_is_not_that_of_one_process(tmp_path):
    message = "the gradient differs by|gradient of zero"
    mistakes_end(message, CHECK_3, [1, 2, 3], tmp_path, *edits_of(block("gradient")))


ALL_REDUCE = "        dist.all_reduce(correct)  # the sum over all ranks\n"
NOT_LOADED = {
    "the optimizer": '+        optimizer.load_state_dict(state["optimizer"])\n',
    "the seed": "+        torch.manual_seed(21 + rank + world_size * epoch)\n",
    "a schedule": '+        scheduler.load_state_dict(state["scheduler"])\n',
}


@pytest.mark.parametrize("missing", ["nothing", *NOT_LOADED])
def test_check_4_compares_all_that_a_resumed_and_an_uninterrupted_run_have_saved(missing, tmp_path):
    load, save = NOT_LOADED["the optimizer"], "state = dict("
    diff = edited(
        block("resume"),
        (load, load + NOT_LOADED["a schedule"]),
        (save, f"{save}scheduler=scheduler.state_dict(), "),
        (
            "+    epochs_done = 0\n",
            "+    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9)\n+    epochs_done = 0\n",
        ),
    )
    dropout = ("    model = model.to(device)", "    model = nn.Sequential(nn.Dropout(0.1), model).to(device)")
    edits = [
        dropout,
        *edits_of(diff.replace(NOT_LOADED.get(missing, "nothing"), "")),
        after(ALL_REDUCE, "scheduler.step()"),
    ]
    for file, epochs in ("uninterrupted.pt", 2), ("of_epoch_1.pt", 1), ("resumed.pt", 2):
        finished = train_minimal(2, tmp_path, *edits, epochs=epochs)
        assert finished.returncode == 0
        if file == "uninterrupted.pt":
            (tmp_path / "run.pt").rename(tmp_path / file)
    assert "rank 0: run.pt has 1 epochs" in finished.stdout
    (tmp_path / "compare.py").write_text(block("compare"))
    assert (in_processes(0, tmp_path, "compare.py").returncode == 0) == (missing == "nothing")


TRAIN_SET = "train=True, download=True, transform=transforms.ToTensor())\n"
WEIGHTED = "torch.utils.data.WeightedRandomSampler([1.0] * len(train_set), len(train_set)))"
CHECK_5 = {
    "no sampler": ("sampler=sampler)", "shuffle=True)"),
    "a WeightedRandomSampler": ("sampler=sampler)", f"sampler={WEIGHTED}"),
    "a seed of each rank": ("seed=21, drop", "seed=21 + rank, drop"),
    "no set_epoch": ("sampler.set_epoch(epoch)", "pass"),
    "another order of the files": (
        TRAIN_SET,
        f"{TRAIN_SET}    train_set = Subset(train_set, range(rank, len(train_set)))\n",
    ),
    "random_split without a generator": (
        TRAIN_SET,
        f"{TRAIN_SET}    torch.rand(rank); train_set = torch.utils.data.random_split(train_set, [400, 10])[0]\n",
    ),
    "other numbers of the classes": (
        TRAIN_SET,
        f"{TRAIN_SET}    train_set = [(image, (label + rank) % 10) for image, label in train_set]\n",
    ),
}


def test_check_5_ends_a_port_whose_ranks_do_not_share_the_images(tmp_path):
    check = after(
        "        sampler.set_epoch(epoch)  # 6. Otherwise, all epochs have the same order.\n", block("data")
    )
    before = ("    for epoch in", "    last_indices = None\n    for epoch in")
    message = "come twice|other images|that of the last epoch"
    mistakes_end(
        message, CHECK_5, [2, 3], tmp_path, check, before, ("sampler=sampler, num_workers=8", "sampler=sampler")
    )


AVERAGE = "correct = correct * len(val_set) / len(val_share) / world_size"
CHECK_6 = {
    "a DistributedSampler": (
        "Subset(val_set, range(rank, len(val_set), world_size))",
        "Subset(val_set, [*DistributedSampler(val_set, shuffle=False)])",
    ),
    "drop_last": ("DataLoader(val_share, batch_size=512)", "DataLoader(val_share, batch_size=2, drop_last=True)"),
    "an average over the ranks": ("dist.all_reduce(correct)", f"{AVERAGE}; dist.all_reduce(correct)"),
    "random numbers": ("(model(images.to", "(model(torch.randn_like(images) + images.to"),
    "the share of a rank": ("dist.all_reduce(correct)", "correct *= world_size"),
}


def test_check_6_ends_a_port_whose_metrics_are_not_those_of_one_process(tmp_path):
    assert train_minimal(1, tmp_path, ("lr=1e-3", "lr=2e-3"), epochs=1).returncode == 0  # saves model.pt
    mistakes_end("not close", CHECK_6, [1, 2, 3], tmp_path, *edits_of(block("metrics")))


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
