"""README: minimal/ and its diff, the checks of a port, and commands for several machines."""

import os
import re
import socket
import sys

import pytest
import torch
from conftest import SMALL, in_processes, result, run, train_minimal
from editing import IMAGES, ROOT, SMALL_MINIMAL, SMALL_MODEL, copy_script, edited
from pages import MINIMAL, after, block, edits_of, line


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
    scope = dict(torch=torch, nn=torch.nn)
    exec(f"{IMAGES}\nmodel = {SMALL_MINIMAL['models.resnet50(num_classes=10)']}.eval()", scope)
    images, labels = scope["small_images"](61).tensors
    scope["model"].load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    accuracy = (scope["model"](images).argmax(1) == labels).double().mean().item()
    assert printed[-1] == pytest.approx(accuracy, abs=5e-5)  # of the saved weights, each image counted once


def test_of_two_machines_rank_0_alone_prints_and_saves_and_both_validate_its_model(tmp_path):
    own_folder = after(line("world_size = int"), "os.mkdir(f'machine {rank}')\nos.chdir(f'machine {rank}')\n")
    say = "print(f'SEED {torch.initial_seed()} MEAN {model[2].running_mean.sum()}\\n', end='')\n"
    say = after(ALL_REDUCE, say)
    finished = train_minimal(2, tmp_path, ('int(os.environ["LOCAL_RANK"])', "0"), own_folder, say)
    assert finished.returncode == 0 and finished.stdout.count("accuracy") == 4
    seeds, means = zip(*re.findall("SEED (.*) MEAN (.*)", finished.stdout))
    assert len(seeds) == 8 and len(set(seeds)) == 2 and len(set(means)) == 4  # of 2 ranks, and of 4 epochs
    assert [path.parent.name for path in tmp_path.glob("machine */model.pt")] == ["machine 0"]


def test_training_with_model_ends_with_an_error_and_saves_nothing(tmp_path):
    linear = ("models.resnet50(num_classes=10)", "nn.Sequential(nn.Flatten(), nn.Linear(48, 10))")
    finished = train_minimal(2, tmp_path, ("(ddp_model(images)", "(model(images)"), ("lr=1e-3", "lr=1e-5"), linear)
    assert finished.returncode != 0 and "the weights of the ranks differ" in finished.stdout
    assert "accuracy" not in finished.stdout and not (tmp_path / "model.pt").exists()


OLD_LOSS, LOSS = (line("loss = nn").replace("ddp_model", model) for model in ("model", "ddp_model"))
BEFORE_EPOCHS, SET_EPOCH = line(r"manual_seed\(21 \+"), line("set_epoch")
TRAIN_SET, ALL_REDUCE = line("train_set ="), line("all_reduce")
SAMPLER, VAL_SHARE = "sampler=sampler,", "Subset(val_set, range(rank, len(val_set), world_size))"
WEIGHTED = "torch.utils.data.WeightedRandomSampler([1.0] * len(train_set), len(train_set))"
SPLIT = "torch.rand(rank); train_set = torch.utils.data.random_split(train_set, [400, 10])[0]"
AVERAGE = "        correct = correct * len(val_set) / len(val_share) / world_size\n"

DATA = after(BEFORE_EPOCHS, "last_indices = None\n"), after(SET_EPOCH, block("data"))
# Check of a port (2 is step 7): the message with which it ends a wrong port, the numbers of processes of the right
# port, the edits of minimal/ddp.py, and the mistakes, which the last of these numbers of processes make.
CHECKS = {
    1: ("not close", [1], [after(BEFORE_EPOCHS, "losses = []\n"), after(LOSS, block("losses"))]),
    3: ("the gradient differs by|a gradient is zero", [1, 2, 3], edits_of(block("gradient"))),
    5: ("come twice|are missing|other images|the same seed|that of the last epoch", [2, 3], DATA),
    6: ("not close|missing, or come twice", [1, 2, 3], edits_of(block("metrics"))),
}
CHECKS[1][2].append(("seed=21, drop_last", "shuffle=False, drop_last"))
MISTAKES = {
    1: {"another rate": ("lr=1e-3", "lr=2e-2"), "another seed": ("seed(21)", "seed(22)")},
    3: {
        "class weights": ("labels)\n", "labels, torch.arange(1.0, 11, device=device))\n"),
        "a wrong factor": ("loss.backward()", "(loss / world_size).backward()"),
        "batch statistics": ("        model.eval()  # without", "        model.train()  # without"),
        "unequal shares": ("batch_size=60 // world_size", "batch_size=20 - (rank == 2)"),
        "zeros in a new layer": ("ddp_model = DDP(model)", "model[2].weight.data.zero_(); ddp_model = DDP(model)"),
    },
    5: {
        "no sampler": (SAMPLER, "shuffle=True,"),
        "a WeightedRandomSampler": (SAMPLER, f"sampler={WEIGHTED},"),
        "a seed of each rank": ("seed=21, drop", "seed=21 + rank, drop"),
        "one seed for all ranks": ("manual_seed(21 + rank)", "manual_seed(21)"),
        "no set_epoch": ("sampler.set_epoch(epoch)", "pass"),
        "images left out": ("DistributedSampler(train_set", "DistributedSampler(range(300)"),
        "another order": after(TRAIN_SET, "train_set = Subset(train_set, range(rank, len(train_set)))\n"),
        "random_split without a generator": after(TRAIN_SET, f"{SPLIT}\n"),
        "other numbers of classes": after(TRAIN_SET, "train_set = [(i, (n + rank) % 10) for i, n in train_set]\n"),
    },
    6: {
        "a DistributedSampler": (VAL_SHARE, "Subset(val_set, [*DistributedSampler(val_set, shuffle=False)])"),
        "drop_last": ("(val_share, batch_size=512)", "(val_share, batch_size=2, drop_last=True)"),
        "an average over the ranks": (ALL_REDUCE, AVERAGE + ALL_REDUCE),
        "random numbers": ("(model(images.to", "(model(torch.randn_like(images) + images.to"),
    },
}


@pytest.mark.parametrize("number", CHECKS)
def test_a_check_ends_a_port_with_a_mistake_and_no_other(number, tmp_path):
    message, nprocs, edits = CHECKS[number]
    if number == 1:
        losses = ("    for epoch in", "    losses = []\n    for epoch in"), after(OLD_LOSS, block("old losses"))
        assert train_minimal(0, tmp_path, *losses, ("shuffle=True", "shuffle=False")).returncode == 0
        assert len(torch.load(tmp_path / "losses.pt")) == 3
    if number == 6:
        assert train_minimal(1, tmp_path, epochs=1).returncode == 0  # saves model.pt
    port = edited(MINIMAL, *edits)
    assert [train_minimal(nproc, tmp_path, (MINIMAL, port)).returncode for nproc in nprocs] == [0] * len(nprocs)
    for name, mistake in MISTAKES[number].items():
        finished = train_minimal(nprocs[-1], tmp_path, (MINIMAL, edited(port, mistake)))
        assert finished.returncode != 0 and re.search(message, finished.stdout), name


# An edit of the recipe for a resume: what it leaves out.
LEFT_OUT = {
    "nothing": [],
    "the optimizer": [('+        optimizer.load_state_dict(state["optimizer"])\n', "")],
    "the seed": [("+        torch.manual_seed(21 + rank + world_size * epoch)\n", "")],
    "a count": [("dict(model", "dict(count=epoch - epochs_done, model")],  # starts again at 0
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_check_4_compares_all_that_a_resumed_and_an_uninterrupted_run_have_saved(left_out, tmp_path):
    dropout = ("    model = model.to(device)", "    model = nn.Sequential(nn.Dropout(0.1), model).to(device)")
    edits = [dropout, *edits_of(edited(block("resume"), *LEFT_OUT[left_out]))]
    assert train_minimal(2, tmp_path, *edits, epochs=2).returncode == 0
    (tmp_path / "run.pt").rename(tmp_path / "uninterrupted.pt")
    stop = ("\n\n    dist.destroy", "\n        break\n\n    dist.destroy")  # after one epoch
    assert train_minimal(2, tmp_path, *edits, stop, epochs=2).returncode == 0
    finished = train_minimal(2, tmp_path, *edits, epochs=2)
    assert "rank 0: run.pt has 1 epochs" in finished.stdout
    (tmp_path / "compare.py").write_text(block("compare"))
    assert (in_processes(0, tmp_path, "compare.py").returncode == 0) == (left_out == "nothing")


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
